"""What one update left behind, and how far it lies from what eager left: per tensor, with tolerances that are stated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDictBase
from torch import Tensor

from onegraph.stepper.static import tensors
from onegraph.stepper.stepper import OptimizationStepper

# In causal order: inside an update the first group that differs is the one to look at.
GROUPS = ("features", "losses", "metrics", "gradients", "parameters", "optimizer", "buffers")

Snapshot = Mapping[str, Mapping[str, Tensor]]
"""Group -> name -> value after an update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far a tensor of one group may lie from eager's.

    The relative difference is max|a - b| / max(max|b|, floor, share * the group's largest |b|).

    Attributes:
        relative: Largest relative difference in the first update.
        floor: Smallest scale, in the tensor's own units.
        share: Smallest scale as a share of the largest entry of the group.
        growth: The tolerance of update i is `relative * (1 + growth * i)`.
        flips: Share of the entries of a discrete feature that may have another class.
        why: The reason for floor, share and growth.
    """

    relative: float
    floor: float = 0.0
    share: float = 0.0
    growth: float = 0.0
    flips: float = 0.0
    why: str = ""

    def at(self, update: int) -> float:
        """Largest relative difference in an update, counted from 0."""
        return self.relative * (1 + self.growth * update)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """One tensor of one update against eager's.

    Attributes:
        group: One of `GROUPS`.
        name: Of the tensor.
        dtype: Of the tensor, such as "float32".
        numel: Entries.
        max_abs: Largest difference of entries that are finite on both sides.
        relative: See `Tolerance`.
        tolerance: Allowed `relative`.
        flips: Discrete features only: entries that differ by more than 0.5.
        fault: What no tolerance allows: another shape, a NaN that eager has not; "" for none.
        is_ok: Within tolerance and without fault.
    """

    group: str
    name: str
    dtype: str
    numel: int
    max_abs: float
    relative: float
    tolerance: float
    flips: int | None = None
    fault: str = ""
    is_ok: bool = True

    @property
    def excess(self) -> float:
        """Sorts errors: the relative difference in tolerances; faults come first."""
        if self.fault:
            return float("inf")
        share = self.relative / self.tolerance if self.tolerance else float(self.relative > 0)
        return share if self.is_ok else max(share, 1.0) * 1e6


FLOAT32 = {group: Tolerance(relative=1e-5) for group in GROUPS}
BFLOAT16 = {group: Tolerance(relative=1e-2) for group in GROUPS}


def take_snapshot(
    stepper: OptimizationStepper, before: TensorDictBase, batch: TensorDictBase, metrics: TensorDictBase
) -> Snapshot:
    """Copies of everything that an update computes or changes.

    Args:
        stepper: After the update.
        before: The batch before it.
        batch: The same batch after it.
        metrics: What the update returned.
    """
    loss = stepper.loss_module
    old = tensors(before)
    features = {k: v for k, v in tensors(batch).items() if k not in old or not torch.equal(v, old[k])}
    scalars = {"/".join(k): v for k, v in tensors(metrics).items()}
    parameters = dict(loss.named_parameters())
    found: dict[str, dict[str, Tensor]] = {
        "features": {"/".join(k): v for k, v in features.items()},
        "losses": {k: v for k, v in scalars.items() if k.startswith("loss/")},
        "metrics": {k: v for k, v in scalars.items() if not k.startswith("loss/")},
        "gradients": {k: p.grad for k, p in parameters.items() if p.grad is not None},
        "parameters": dict(parameters),
        "optimizer": _optimizer_state(stepper.optimizer, {p: name for name, p in parameters.items()}),
        "buffers": dict(loss.named_buffers()),
    }
    return {group: {k: v.detach().clone() for k, v in values.items()} for group, values in found.items()}


def _optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for g, group in enumerate(optimizer.param_groups):
        found |= {f"group {g}: {k}": v for k, v in group.items() if isinstance(v, Tensor)}
        for i, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"group {g}: parameter {i}")
            state = optimizer.state.get(parameter, {})
            found |= {f"{name}: {k}": v for k, v in state.items() if isinstance(v, Tensor)}
    return found


def compare(
    reference: Snapshot, other: Snapshot, tolerances: Mapping[str, Tolerance], update: int
) -> tuple[TensorError, ...]:
    """Every tensor of two snapshots of one update, groups in causal order.

    Args:
        reference: Eager's.
        other: The mode's.
        tolerances: By group.
        update: Which, from 0.
    """
    errors = []
    for group in GROUPS:
        want, got = reference[group], other[group]
        largest = max((_largest(v) for v in want.values()), default=0.0)
        for name in dict.fromkeys([*want, *got]):
            errors.append(_compare_one(group, name, want.get(name), got.get(name), tolerances[group], update, largest))
    return tuple(errors)


def _compare_one(
    group: str, name: str, want: Tensor | None, got: Tensor | None, tolerance: Tolerance, update: int, largest: float
) -> TensorError:
    some = got if want is None else want
    assert some is not None
    error = TensorError(
        group=group,
        name=name,
        dtype=str(some.dtype).removeprefix("torch."),
        numel=some.numel(),
        max_abs=0.0,
        relative=0.0,
        tolerance=tolerance.at(update) if some.is_floating_point() else 0.0,
    )
    fault = ""
    if want is None or got is None:
        fault = "only eager has it" if got is None else "eager has none"
    elif want.shape != got.shape:
        fault = f"shape {list(got.shape)}, eager's is {list(want.shape)}"
    elif want.dtype != got.dtype:
        fault = f"{got.dtype}, eager's is {want.dtype}".replace("torch.", "")
    if want is None or got is None or fault:
        return replace(error, fault=fault, relative=float("inf"), max_abs=float("inf"), is_ok=False)
    a, b = got.to(_wide(got)), want.to(_wide(want))
    finite = a.isfinite() & b.isfinite()
    odd = int((~finite & ~((a == b) | (a.isnan() & b.isnan()))).sum())
    if odd:
        fault = f"{odd} of {a.numel()} entries are NaN or infinite on one side alone"
    difference = torch.where(finite, (a - b).abs(), 0.0)
    flips = None
    allowed = 0
    if group == "features" and bool((b[finite] == b[finite].round()).all()) and bool((b != 0).any()):
        flipped = difference > 0.5
        flips, allowed = int(flipped.sum()), int(tolerance.flips * a.numel())
        if flips <= allowed:
            difference = torch.where(flipped, 0.0, difference)
    max_abs = _largest(difference)
    scale = max(_largest(b), tolerance.floor, tolerance.share * largest)
    relative = max_abs / scale if scale else float("inf") * max_abs if max_abs else 0.0
    return replace(
        error,
        max_abs=max_abs,
        relative=relative,
        flips=flips,
        fault=fault,
        is_ok=not fault and (flips or 0) <= allowed and relative <= error.tolerance,
    )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64


def _largest(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    values = tensor.to(_wide(tensor)).abs()
    return float(torch.where(values.isfinite(), values, 0.0).max())
