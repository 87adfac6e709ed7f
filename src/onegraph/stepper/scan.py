"""A loop over time as one operator, so that a compiled graph holds one call and the step is traced once.

`torch.ops.onegraph.scan` runs a step function over the first axis of its inputs. It has a fake implementation and a
registered backward, so it lives inside compiled regions and CUDA-graph captures. Its steps are regions of their own,
compiled at the first call: compile time does not grow with the number of steps.

The backward goes back through time with the gradient of the carries alone, recomputing each step from the stored
carries; the gradients of parameters and inputs then come from one pass over all steps at once. That is exact for
steps that treat every row of the batch on its own, which is required.

torch's own scan is not used: in 2.14 the loops that inductor makes of it return the storage of their initial carries,
which later kernels overwrite; gradients of some parameters came out as those of others.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp

from onegraph.stepper.compile import Region

Tensors = tuple[Tensor, ...]
# Operators are called with autograd's dispatch keys excluded or not, depending on the caller; the compiled steps guard on
# that, so it is made the same for all of them.
_SAME_STATE = torch._C._AutoDispatchBelowADInplaceOrView
_keys = itertools.count(1)
_scans: WeakValueDictionary[int, Scan] = WeakValueDictionary()


class Scan:
    """`outputs = scan(carry, xs)`: a step module run over the first axis of every x.

    Args:
        step: Called as `step(*carry, *(x[t] for x in xs))`; returns a tuple of tensors whose first ones are the next
            carry, of the shapes and dtypes of the carry. Rows (the first axis of carry and x[t]) must not mix, and
            nothing may be drawn or mutated.
        name: For progress lines.
        unroll: Steps in one compiled call. More costs compile time in proportion and saves calls.
        region: Settings of the compiled regions, see `Region`.

    Compile: one operator; synchronises nothing, draws nothing, mutates nothing.
    """

    def __init__(self, step: nn.Module, name: str, *, unroll: int = 1, **region: Any):
        self.step, self.name, self.unroll, self.settings = step, name, unroll, region
        self.names = [n for n, _ in step.named_parameters()]
        self.forward_region = Region(_forward, f"{name} forward", **region)
        self.backward_region = Region(_backward, f"{name} backward", **region)
        self.key = next(_keys)
        _scans[self.key] = self

    def __call__(self, carry: Tensors, xs: Tensors) -> Tensors:
        """Runs all steps.

        Args:
            carry: Initial carry, each [N, ...].
            xs: Inputs of the steps, each [T, N, ...], T at least 1.

        Returns:
            Outputs of all steps, each [T, N, ...].
        """
        device = carry[0].device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        params = [p for _, p in self.step.named_parameters()]
        return tuple(_scan_op(list(carry), list(xs), params, self.key, dtype))

    def __deepcopy__(self, memo: dict[int, Any]) -> Scan:
        """A scan of its own over the copied step."""
        return Scan(copy.deepcopy(self.step, memo), self.name, unroll=self.unroll, **self.settings)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles step and settings, not the graphs."""
        return _restore_scan, (self.step, self.name, self.unroll, self.settings)

    def named(self, params: Sequence[Tensor]) -> dict[str, Tensor]:
        """Parameter values by name."""
        return dict(zip(self.names, params))


def _restore_scan(step: nn.Module, name: str, unroll: int, settings: dict[str, Any]) -> Scan:
    return Scan(step, name, unroll=unroll, **settings)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """The autocast state in which the operator was called: compiled graphs and backward passes run outside of it."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def _forward(step: nn.Module, params: dict[str, Tensor], carry: Tensors, xs: Tensors) -> Tensors:
    """Some steps: xs [u, N, ...] -> outputs [u, N, ...]."""
    outputs = []
    for t in range(xs[0].shape[0]):
        out = functional_call(step, params, (*carry, *(x[t] for x in xs)))
        carry = out[: len(carry)]
        outputs.append(out)
    return tuple(torch.stack(out) for out in zip(*outputs))


def _backward(
    step: nn.Module,
    params: dict[str, Tensor],
    carries: Tensors,
    xs: Tensors,
    grads: Tensors,
    carried: Tensors,
    dtype: torch.dtype | None,
) -> tuple[Tensors, Tensors]:
    """Gradients through the carries of some steps.

    Args:
        step: The step.
        params: Its parameters.
        carries: Carry before each step, [u, N, ...].
        xs: [u, N, ...].
        grads: Gradients of the outputs, [u, N, ...].
        carried: Gradient of the last step's carry from later steps, [N, ...].
        dtype: Of autocast, or None.

    Returns:
        Gradient of the carry before the first step, and what later steps add to the gradient of each step's carry,
        [u, N, ...].
    """
    added: list[Tensors] = []
    for t in range(xs[0].shape[0] - 1, -1, -1):
        added.append(carried)
        inputs = tuple(x[t] for x in xs)

        def run(*carry: Tensor, inputs: Tensors = inputs) -> Tensors:
            with _autocast(carry[0].device, dtype):
                return functional_call(step, params, (*carry, *inputs))

        pull = vjp(run, *(c[t] for c in carries))[1]
        num = len(carries)
        cotangents = tuple(g[t] + carried[i] if i < num else g[t] for i, g in enumerate(grads))
        carried = pull(cotangents)
    return carried, tuple(torch.stack(a) for a in zip(*reversed(added)))


@torch.library.custom_op("onegraph::scan", mutates_args=())
def _scan_op(
    carry: list[Tensor], xs: list[Tensor], params: list[Tensor], key: int, dtype: torch.dtype | None
) -> list[Tensor]:
    scan = _scans[key]
    length = xs[0].shape[0]
    parts = []
    with _SAME_STATE(), torch.no_grad(), _autocast(carry[0].device, dtype):
        state, xs = tuple(c.detach() for c in carry), [x.detach() for x in xs]
        named = scan.named([p.detach() for p in params])
        for start, stop in _chunks(length, scan.unroll):
            part = scan.forward_region(scan.step, named, state, tuple(x[start:stop] for x in xs))
            state = tuple(out[-1] for out in part[: len(carry)])
            parts.append(part)
    return [torch.cat(pieces) for pieces in zip(*parts)]


@_scan_op.register_fake
def _(carry: list[Tensor], xs: list[Tensor], params: list[Tensor], key: int, dtype: torch.dtype | None) -> list[Tensor]:
    scan = _scans[key]
    with _autocast(carry[0].device, dtype):
        outputs = functional_call(scan.step, scan.named(params), (*carry, *(x[0] for x in xs)))
    return [out.new_empty(xs[0].shape[0], *out.shape) for out in outputs]


@torch.library.custom_op("onegraph::scan_backward", mutates_args=())
def _scan_backward_op(
    grads: list[Tensor],
    outputs: list[Tensor],
    carry: list[Tensor],
    xs: list[Tensor],
    params: list[Tensor],
    needs_grad: list[bool],
    key: int,
    dtype: torch.dtype | None,
) -> list[Tensor]:
    scan = _scans[key]
    named = scan.named([p.detach() for p in params])
    outputs, xs, grads = ([t.detach() for t in group] for group in (outputs, xs, grads))
    length = xs[0].shape[0]
    carries = tuple(torch.cat([c.detach().unsqueeze(0), out[:-1]]) for c, out in zip(carry, outputs))
    with _SAME_STATE(), torch.no_grad():
        carried = tuple(torch.zeros_like(c) for c in carry)
        added: list[Tensors] = []
        for start, stop in reversed(list(_chunks(length, scan.unroll))):
            pieces = [tuple(t[start:stop] for t in group) for group in (carries, xs, grads)]
            carried, more = scan.backward_region(scan.step, named, *pieces, carried, dtype)
            added.append(more)
        sums = [torch.cat(pieces) for pieces in zip(*reversed(added))]
        totals = [g + sums[i] if i < len(sums) else g for i, g in enumerate(grads)]

    rows = tuple(c.flatten(0, 1) for c in carries)
    inputs = [x.flatten(0, 1) for x in xs]
    wanted = {i: inputs[i] for i, needed in enumerate(needs_grad) if needed}

    def run(values: dict[str, Tensor], some: dict[int, Tensor]) -> Tensors:
        with _autocast(rows[0].device, dtype):
            return functional_call(scan.step, values, (*rows, *(some.get(i, x) for i, x in enumerate(inputs))))

    pull = vjp(run, named, wanted)[1]
    by_name, by_index = pull(tuple(g.flatten(0, 1) for g in totals))
    x_grads = [by_index[i].reshape(xs[i].shape) for i in wanted]
    return [*(c.clone() for c in carried), *(g.clone() for g in x_grads), *(by_name[n].clone() for n in scan.names)]


@_scan_backward_op.register_fake
def _(
    grads: list[Tensor],
    outputs: list[Tensor],
    carry: list[Tensor],
    xs: list[Tensor],
    params: list[Tensor],
    needs_grad: list[bool],
    key: int,
    dtype: torch.dtype | None,
) -> list[Tensor]:
    wanted = [x for x, needed in zip(xs, needs_grad) if needed]
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*carry, *wanted, *params)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    carry, xs, params, ctx.key, ctx.dtype = inputs
    ctx.sizes = (len(output), len(carry), len(xs))
    ctx.needs_grad = [x.requires_grad for x in xs]
    ctx.save_for_backward(*output, *carry, *xs, *params)


def _pull(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    outputs, carry, xs = (list(itertools.islice(saved, n)) for n in ctx.sizes)
    params = list(saved)
    whole = [torch.zeros_like(o) if g is None else g.contiguous() for g, o in zip(grads, outputs)]
    result = iter(_scan_backward_op(whole, outputs, carry, xs, params, ctx.needs_grad, ctx.key, ctx.dtype))
    carry_grads = list(itertools.islice(result, len(carry)))
    x_grads = [next(result) if needed else None for needed in ctx.needs_grad]
    return carry_grads, x_grads, list(result), None, None


_scan_op.register_autograd(_pull, setup_context=_setup)


def _chunks(length: int, unroll: int) -> list[tuple[int, int]]:
    """Whole chunks of `unroll` steps, then single steps."""
    whole = length // unroll * unroll
    return [(i, i + unroll) for i in range(0, whole, unroll)] + [(i, i + 1) for i in range(whole, length)]
