"""A step that is captured once and replayed on static memory, and the random states around it. Knows no algorithm.

A replay runs the kernels of the capture on the memory of the capture. So a captured step has slots into which each batch
is copied, gradients that stay where they are, and results that are copied out before the next replay overwrites them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from onegraph.stepper.cuda_graph import CudaGraph, EagerGraph, Graph, check_outputs
from onegraph.stepper.static import (
    BatchSpec,
    Live,
    addresses,
    copy_tensors,
    dense,
    first_difference,
    first_move,
    key_text,
    tensors,
)

__all__ = [
    "CapturedStep",
    "Graph",
    "CudaGraph",
    "EagerGraph",
    "BatchSpec",
    "first_difference",
    "Live",
    "RngState",
    "preserved_rng",
]


@dataclass(frozen=True, slots=True)
class RngState:
    """Snapshot of every global random state: `random`, numpy's legacy one, and torch's on CPU, CUDA and MPS.

    A CUDA that was not initialised when the snapshot was taken has no state yet and is left alone. Generators other than
    the global ones are left alone too.
    """

    python: Any
    numpy: Any
    cpu: Tensor
    cuda: tuple[Tensor, ...]
    mps: Tensor | None

    @classmethod
    def now(cls) -> RngState:
        """The present states; not during a capture."""
        has_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(legacy=False),
            cpu=torch.get_rng_state(),
            cuda=tuple(torch.cuda.get_rng_state_all()) if has_cuda else (),
            mps=torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
        )

    def restore(self) -> None:
        """Sets every state back; not during a capture."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        torch.cuda.set_rng_state_all(self.cuda)
        if self.mps is not None:
            torch.mps.set_rng_state(self.mps)


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restores every global random state bitwise at exit, also after an error."""
    state = RngState.now()
    try:
        yield
    finally:
        state.restore()


class CapturedStep:
    """A forward and backward, captured once and replayed for each batch.

    Args:
        function: Maps a batch to a TensorDict of tensors on the batch's device and leaves gradients in `.grad` of the
            parameters, added to what is there. Its kernels must be the same each time.
        parameters: The parameters by name. A `Live` mapping also notices parameters that the module has replaced.
        graph: What captures.
        warmup_steps: Runs before the capture, at least 1.
        buffers: Buffers by name that the function reads or writes; like parameters they must stay where they are.
        ignore: Top-level keys of batches that the function does not read.

    Attributes:
        gradients: The static gradients by parameter name, of those parameters that get one; filled by `replay`.

    Raises:
        ValueError: Bad `warmup_steps`.
    """

    def __init__(
        self,
        function: Callable[[TensorDict], TensorDict],
        parameters: Mapping[str, nn.Parameter],
        graph: Graph,
        *,
        warmup_steps: int,
        buffers: Mapping[str, Tensor] | None = None,
        ignore: Collection[str] = (),
    ):
        if warmup_steps < 1:
            raise ValueError(f"capture: warmup_steps is {warmup_steps}; it must be at least 1")
        self.function, self.parameters, self.graph, self.warmup_steps = function, parameters, graph, warmup_steps
        self.buffers = {} if buffers is None else buffers
        self.ignore = frozenset(ignore)
        self.gradients: dict[str, Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Frees graph, slots and outputs; gradients stay with their parameters."""
        self.graph.reset()
        self._spec: BatchSpec | None = None
        self._slots = self._outputs = TensorDict()

    def capture(self, sample: TensorDictBase) -> None:
        """Warms up and captures, starting over if called again.

        Existing gradients become the static ones and keep their values; where there is none, zeros are allocated.
        Parameters that get no gradient are left with what they have. The function runs, so buffers and random states
        advance: preserving them is the caller's part, as are parameters and batch if the function changes them.

        Args:
            sample: A batch of the kind to come.

        Raises:
            ValueError: The sample is on several devices or not on the graph's, or the function's outputs, gradients or
                buffers are not as a captured step needs them. Everything is as before then.
            RuntimeError: The function does what a capture does not allow.
        """
        self.reset()
        spec = BatchSpec.of(sample, self.ignore)
        devices = {leaf.device for leaf in spec.leaves.values()}
        if len(devices) != 1 or self.graph.device not in (None, *devices):
            given = ", ".join(sorted(map(str, devices))) or "no device"
            raise ValueError(
                f"capture: the sample's tensors are on {given}; a captured step needs all of a batch on "
                f"{self.graph.device or 'one device'}: move the batch there"
            )
        trained = {name: p for name, p in self.parameters.items() if p.requires_grad}
        before = {name: p.grad for name, p in trained.items()}
        values = {(name,): g.detach().clone() for name, g in before.items() if g is not None}
        gradients: dict[str, Tensor] = {}
        try:
            for name, parameter in trained.items():
                grad = before[name]
                gradients[name] = parameter.grad = torch.zeros_like(parameter) if grad is None else grad
            self._slots = dense(sample, lambda t: t.detach().clone(), self.ignore)
            self._outputs = self._capture(sample, trained, gradients, devices.pop())
        except BaseException:
            gradients.clear()
            self.reset()
            raise
        finally:
            for name, parameter in trained.items():
                parameter.grad = gradients.get(name, before[name])
            for name, gradient in gradients.items():
                if before[name] is None:
                    gradient.zero_()
            copy_tensors({(name,): g for name, g in before.items() if g is not None}, values)
        self.gradients = gradients
        self._addresses = (addresses(self.parameters), addresses(gradients), addresses(self.buffers))
        self._without = [name for name in trained if name not in gradients]
        self._spec = spec

    def _capture(
        self,
        sample: TensorDictBase,
        trained: Mapping[str, nn.Parameter],
        gradients: dict[str, Tensor],
        device: torch.device,
    ) -> TensorDict:
        """Runs `warmup_steps` times, captures, and takes out of `gradients` what gets none; returns the static outputs."""
        reached: set[str] = set()
        run = functools.partial(_run, self.function, self._slots, gradients, reached)
        slots, values, buffers = tensors(self._slots), tensors(sample, self.ignore), addresses(self.buffers)
        kind: BatchSpec | None = None
        outputs = TensorDict()
        for step in range(self.warmup_steps + 1):
            copy_tensors(slots, values)  # the function may write into its batch
            outputs = (self.graph.warm_up if step < self.warmup_steps else self.graph.capture)(run)
            moved = first_move(addresses(gradients), lambda name: trained[name].grad)
            if moved:
                raise ValueError(
                    f"capture: the step replaces gradients ({moved}); a captured step adds to the gradients that it finds: "
                    "leave zero_grad and assignments to .grad out of it"
                )
            moved = first_move(buffers, self.buffers.get)
            if moved:
                raise ValueError(
                    f"capture: the step replaces buffers ({moved}); a replay would not: write into them in place, with "
                    "copy_ or lerp_"
                )
            if kind is None:
                kind = BatchSpec.of(outputs)
                for key, leaf in kind.leaves.items():
                    if leaf.device != device:
                        raise ValueError(
                            f"capture: the output {key_text(key)} is on {leaf.device}, but the sample is on {device}; return "
                            "tensors on the sample's device"
                        )
                for name in gradients.keys() - reached:
                    del gradients[name]
                    trained[name].grad = None
            check_outputs(outputs, kind)
            late = {name for name in trained.keys() - gradients.keys() if trained[name].grad is not None}
            changed = sorted(late | (gradients.keys() ^ reached))
            if changed:
                raise ValueError(
                    f'capture: "{changed[0]}" gets a gradient in some runs and none in others; capture needs a step that '
                    "does the same each time"
                )
        return outputs

    def replay(self, batch: TensorDictBase) -> TensorDict:
        """Runs the captured step on a batch: fills the gradients. Does not synchronise.

        Args:
            batch: Of the sample's kind.

        Returns:
            The function's outputs, detached, in memory of their own.

        Raises:
            ValueError: The batch is of another kind.
            RuntimeError: Nothing is captured, or a parameter, gradient or buffer is not where it was.
        """
        if self._spec is None:
            raise RuntimeError("stepper: nothing is captured; call warmup with a representative batch first")
        self._spec.check(batch, where="stepper")
        self._check_addresses()
        for name in self._without:
            self.parameters[name].grad = None  # as zero_grad leaves it in an eager step
        copy_tensors(tensors(self._slots), tensors(batch, self.ignore))
        self.graph.replay()
        results = dense(self._outputs, torch.empty_like)
        copy_tensors(tensors(results), tensors(self._outputs))
        return results

    def _check_addresses(self) -> None:
        parameters, gradients, buffers = self._addresses
        find_parameter = self.parameters.get
        for kind, known, find, reasons in (
            ("parameter", parameters, find_parameter, "load_state_dict(assign=True) or .to()"),
            (
                "gradient",
                gradients,
                lambda name: getattr(find_parameter(name), "grad", None),
                "zero_grad(set_to_none=True), another backward or .to()",
            ),
            ("buffer", buffers, self.buffers.get, "load_state_dict(assign=True), .to() or an assignment"),
        ):
            moved = first_move(known, find)
            if moved:
                raise RuntimeError(
                    f"stepper: a {kind} has moved: {moved}; a captured step works on the memory that it was captured with "
                    f"({reasons} after warm-up replaces it): write in place, or call warmup again"
                )


def _run(
    function: Callable[[TensorDict], TensorDict], slots: TensorDict, gradients: dict[str, Tensor], reached: set[str]
) -> TensorDict:
    """What is captured: gradients to zero, then the function. `reached` gets the names of gradients it added to."""
    if gradients:
        torch._foreach_zero_(list(gradients.values()))
    versions = {name: g._version for name, g in gradients.items()}
    outputs = function(slots.copy())
    if not isinstance(outputs, TensorDict):
        raise ValueError(f"capture: the step returned a {type(outputs).__name__}; return a TensorDict of tensors")
    tensors(outputs)  # refuses other entries
    reached.clear()
    reached.update(name for name, g in gradients.items() if g._version != versions[name])
    return dense(outputs, lambda t: t.detach())
