"""Runs a learner's modes in one process against eager: same weights, batches and draws; and counts breaks and recompiles.

Knows no algorithm: a learner comes as a `Subject`, whose own modes are functions that change its stepper.
"""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from onegraph import __version__
from onegraph.config import suggest
from onegraph.stepper.audit_compare import BFLOAT16, FLOAT32, Snapshot, TensorError, Tolerance, compare, take_snapshot
from onegraph.stepper.audit_watch import Finding, Watch
from onegraph.stepper.compile import num_graphs
from onegraph.stepper.graph import EagerGraph, preserved_rng
from onegraph.stepper.stepper import OptimizationStepper, device_of

Mode = Callable[[OptimizationStepper], None]
BUILT_IN = ("eager", "train_step", "cudagraph")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A learner to audit.

    Attributes:
        stepper: Not warmed up, in no mode; the audit sets its switches.
        batch: Batch of update i, always the same one for the same i; the global generators are seeded before it is
            called.
        modes: The learner's own modes by name: each changes a fresh stepper or its loss module.
        about: What the report's environment block says of the learner.
    """

    stepper: OptimizationStepper
    batch: Callable[[int], TensorDictBase]
    modes: Mapping[str, Mode] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeAudit:
    """One mode against eager.

    Attributes:
        name: Of the mode; parts are joined by "+".
        is_emulated: Capture without CUDA: the code ran again on static memory.
        updates: Errors of each compared update.
        findings: Graph breaks, value reads, recompiles, and what ended the mode.
        num_graphs: Graphs that torch.compile made.
        num_late_graphs: Those of them made after the first pass.
        warmup_s: Seconds of mode and warm-up, compilation included.
        notes: What a reader should know.
    """

    name: str
    is_emulated: bool
    updates: tuple[tuple[TensorError, ...], ...]
    findings: tuple[Finding, ...]
    num_graphs: int
    num_late_graphs: int
    warmup_s: float
    notes: tuple[str, ...]

    @property
    def breaks(self) -> list[Finding]:
        """Graph breaks and value reads."""
        return [f for f in self.findings if f.kind in ("graph break", "value read")]

    @property
    def recompiles(self) -> list[Finding]:
        """Recompiles after the first pass, which may make one graph for each shape."""
        return [f for f in self.findings if f.kind == "recompile" and f.when != "warm-up"]

    @property
    def errors(self) -> list[Finding]:
        """What ended the mode, other than a graph break."""
        return [f for f in self.findings if f.kind == "error"]

    @property
    def first(self) -> tuple[int, TensorError] | None:
        """The earliest update, and in it the first tensor in causal order, beyond tolerance."""
        for update, errors in enumerate(self.updates):
            for error in errors:
                if not error.is_ok:
                    return update, error
        return None

    @property
    def is_ok(self) -> bool:
        """True if nothing diverged, broke or was compiled again."""
        late = self.num_late_graphs or self.recompiles
        return self.first is None and not self.breaks and not self.errors and not late

    def worst(self, group: str) -> tuple[int, TensorError] | None:
        """The tensor of a group that is the worst in terms of its tolerance, and its update."""
        found = [(u, e) for u, errors in enumerate(self.updates) for e in errors if e.group == group]
        return max(found, key=lambda pair: pair[1].excess, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A whole audit.

    Attributes:
        updates: Updates compared with eager.
        further: Updates after those, with new data and another learning rate each, in which nothing may be compiled.
        seed: Of weights, batches and draws.
        tolerances: By group.
        environment: Versions, device, settings.
        notes: What a reader should know.
        modes: One entry a mode.
    """

    updates: int
    further: int
    seed: int
    tolerances: Mapping[str, Tolerance]
    environment: Mapping[str, str]
    notes: tuple[str, ...]
    modes: tuple[ModeAudit, ...]

    @property
    def is_ok(self) -> bool:
        """True if every mode passed."""
        return all(mode.is_ok for mode in self.modes)


def audit(
    factory: Callable[[], Any],
    modes: Sequence[str] | None = None,
    *,
    updates: int = 5,
    further: int = 20,
    seed: int = 0,
    tolerances: Mapping[str, Tolerance] | None = None,
    compile_mode: str = "default",
    mixed_precision: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> Audit:
    """Audits a learner's modes against eager.

    Eager runs first and its tensors of every compared update are kept: about four times the parameters each.
    Functions that this process has compiled before compile anew.

    Args:
        factory: Builds the learner: a `Subject`, or (loss module, optimizer, batch). Called once a mode.
        modes: Names, of `BUILT_IN` or the learner's own, also several joined by "+"; None for all. "eager" runs eager
            again: what differs there is not deterministic.
        updates: Compared updates, at least 1.
        further: Updates in which nothing may be compiled again.
        seed: Of weights, batches and draws.
        tolerances: By group, in place of the stated ones for float32 or bfloat16.
        compile_mode: For "train_step".
        mixed_precision: Sets the stepper's; None leaves it.
        progress: Gets a line at the start of each mode.

    Raises:
        ValueError: An unknown mode, a bad count, or a factory that returns something else or another learner each time.
    """
    if updates < 1 or further < 0:
        raise ValueError(f"audit: updates is {updates} and further {further}; at least 1 and 0 are needed")
    say = progress or (lambda text: None)

    def make() -> Subject:
        _seed_all(seed)
        subject = as_subject(factory())
        subject.stepper.compile_train_step = subject.stepper.cudagraph = False
        subject.stepper.compile_mode = compile_mode
        if mixed_precision is not None:
            subject.stepper.mixed_precision = mixed_precision
        return subject

    notes = []
    with preserved_rng(), ExitStack() as stack:
        subject = make()
        names = check_modes(modes, subject.modes)
        run = _Runner(subject, updates, further, seed)
        if run.draws_inside:
            import torch._inductor.config as inductor

            stack.enter_context(inductor.patch(fallback_random=True))
            notes.append(
                "the learner draws inside its loss: compiled runs use torch's own generators (fallback_random), so that "
                "they draw what eager draws"
            )
        mixed = subject.stepper.mixed_precision
        stated = dict(tolerances) if tolerances is not None else dict(BFLOAT16 if mixed else FLOAT32)
        say("eager: the reference")
        reference = run.reference(subject)
        results = []
        for name in names:
            say(f"mode {name}")
            results.append(run.mode(name, make(), reference, stated))
    return Audit(
        updates=updates,
        further=further,
        seed=seed,
        tolerances=stated,
        environment=describe_environment(run.device, mixed, compile_mode) | dict(subject.about),
        notes=tuple(notes),
        modes=tuple(results),
    )


def as_subject(made: Any) -> Subject:
    """What a factory returned, as a subject.

    Raises:
        ValueError: It is neither a `Subject` nor (loss module, optimizer, batch).
    """
    if isinstance(made, Subject):
        return made
    if isinstance(made, tuple) and len(made) == 3:
        loss, optimizer, batch = made
        if isinstance(loss, nn.Module) and isinstance(optimizer, torch.optim.Optimizer) and callable(batch):
            stepper = OptimizationStepper(loss, optimizer, compile_train_step=False, cudagraph=False)
            return Subject(stepper=stepper, batch=cast(Callable[[int], TensorDictBase], batch))
    kind = f"({', '.join(type(m).__name__ for m in made)})" if isinstance(made, tuple) else type(made).__name__
    raise ValueError(
        f"audit: the factory returned {kind}; return a Subject, or a tuple (loss module, optimizer, batch) where "
        "batch(i) gives the TensorDict of update i"
    )


def check_modes(modes: Sequence[str] | None, own: Mapping[str, Mode]) -> list[str]:
    """The modes to run: those asked for, or all.

    Raises:
        ValueError: None, or an unknown one.
    """
    known = list(dict.fromkeys(["eager", *own, *BUILT_IN]))
    names = list(dict.fromkeys(known if modes is None else modes))
    if not names:
        raise ValueError(f"audit: no mode is given; choose from {', '.join(known)}")
    for name in names:
        for part in name.split("+"):
            if part not in known:
                raise ValueError(f"audit: unknown mode {part!r}; {suggest(part, known)}")
    return names


def describe_environment(device: torch.device, mixed_precision: bool, compile_mode: str) -> dict[str, str]:
    """Versions, device and settings."""
    is_cuda = device.type == "cuda"
    return {
        "onegraph": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if is_cuda else str(device),
        "threads": str(torch.get_num_threads()),
        "precision": "bfloat16 autocast" if mixed_precision else "float32",
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "compile mode": compile_mode,
    }


class _Runner:
    """Runs subjects over the same updates."""

    def __init__(self, subject: Subject, updates: int, further: int, seed: int):
        self.updates, self.further, self.seed = updates, further, seed
        loss = subject.stepper.loss_module
        self.weights = {k: v.detach().clone() for k, v in _named(loss).items()}
        self.batches = [self._batch(subject, i).clone() for i in range(updates)]
        self.device = device_of(self.batches[0])
        self.draws_inside = subject.stepper.draw(self.batches[0].clone()) is None

    def _batch(self, subject: Subject, update: int) -> TensorDictBase:
        _seed_all(self.seed + update)
        batch = subject.batch(update)
        if not isinstance(batch, TensorDictBase):
            raise ValueError(f"audit: batch({update}) returned a {type(batch).__name__}; return a TensorDict")
        return batch

    def _update(self, stepper: OptimizationStepper, update: int) -> Snapshot:
        before = self.batches[update]
        batch = before.clone()
        _seed_all(self.seed + update)
        metrics = stepper.step(None, batch)
        return take_snapshot(stepper, before, batch, metrics)

    def reference(self, subject: Subject) -> list[Snapshot]:
        """Eager's tensors after each update."""
        return [self._update(subject.stepper, i) for i in range(self.updates)]

    def mode(
        self, name: str, subject: Subject, reference: list[Snapshot], tolerances: Mapping[str, Tolerance]
    ) -> ModeAudit:
        """One mode over the same updates, and the further ones."""
        stepper, watch = subject.stepper, Watch()
        notes = self._same_weights(stepper.loss_module)
        compared: list[tuple[TensorError, ...]] = []
        torch._dynamo.reset()
        started, before = time.perf_counter(), num_graphs()
        warm = seconds = None
        is_emulated = False
        with watch.running():
            try:
                is_emulated = self._apply(name, subject)
                is_plain = is_emulated and name == "cudagraph"
                with watch.reads() if is_plain else ExitStack():
                    if name != "eager":
                        stepper.warmup(self.batches[0].clone())
                seconds, warm = time.perf_counter() - started, num_graphs()
                for i in range(self.updates):
                    watch.when = f"update {i}"
                    compared.append(compare(reference[i], self._update(stepper, i), tolerances, i))
                for i in _falling_rates(stepper.optimizer, self.updates, self.further):
                    watch.when = f"update {i}"
                    batch = self._batch(subject, i)
                    _seed_all(self.seed + i)
                    stepper.step(None, batch)
            except Exception as error:
                watch.add_error(error)
        graphs = num_graphs()
        return ModeAudit(
            name=name,
            is_emulated=is_emulated,
            updates=tuple(compared),
            findings=tuple(watch.findings),
            num_graphs=graphs - before,
            num_late_graphs=0 if warm is None else graphs - warm,
            warmup_s=time.perf_counter() - started if seconds is None else seconds,
            notes=tuple(notes),
        )

    def _same_weights(self, loss: nn.Module) -> list[str]:
        """Gives a fresh learner eager's first weights and buffers; says so where they were others."""
        own = _named(loss)
        if own.keys() != self.weights.keys():
            odd = sorted(own.keys() ^ self.weights.keys())[0]
            raise ValueError(f'audit: the factory built another learner the second time ("{odd}"); build the same one')
        changed = [k for k, v in own.items() if not _same(v, self.weights[k])]
        with torch.no_grad():
            for key in changed:
                own[key].copy_(self.weights[key])
        if not changed:
            return []
        return [f"{len(changed)} tensors of the fresh learner differed under the same seed and were overwritten"]

    def _apply(self, name: str, subject: Subject) -> bool:
        """Switches a mode on; returns whether its capture is emulated."""
        stepper, is_emulated = subject.stepper, False
        for part in name.split("+"):
            if part in subject.modes:
                subject.modes[part](stepper)
            elif part == "train_step":
                stepper.compile_train_step = True
            elif part == "cudagraph":
                stepper.cudagraph = True
                is_emulated = self.device.type != "cuda"
        if is_emulated:
            vars(stepper).update(_can_capture=lambda device: True, _make_graph=lambda device: EagerGraph())
        elif not stepper.cudagraph:
            # One pass is enough to compile; what a second one compiles shall count as a recompile.
            stepper.warmup_steps = 1
        return is_emulated


def _falling_rates(optimizer: torch.optim.Optimizer, first: int, count: int) -> Iterator[int]:
    """Indices of the further updates, each with another learning rate, set in place where it is a tensor."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for k in range(count):
        share = 1 - 0.5 * (k + 1) / count
        for group, rate in zip(optimizer.param_groups, rates):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share
        yield first + k


def _named(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
