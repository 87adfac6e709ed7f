"""One optimization step of any learner: forward, backward, optimizer, targets; eager, compiled or captured.

Knows no algorithm. The maths is the loss module's in every mode; this file decides how it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from onegraph.optim import TargetNetUpdater
from onegraph.stepper.compile import Region, compiled_scope
from onegraph.stepper.graph import BatchSpec, CapturedStep, CudaGraph, Graph, Live, preserved_rng
from onegraph.stepper.modes import check_mode

Draws = Mapping[str, Tensor]


class OwnsLoss(Protocol):
    """A trainer that owns a loss module."""

    @property
    def loss_module(self) -> nn.Module:
        """The module whose parameters the trainer trains."""
        ...


class OptimizationStepper:
    """Steps a loss module.

    The loss module maps a batch to a TensorDict; the sum of its entries named `loss_*` is minimised, its entry
    "metrics" (if any) is passed on.

    Args:
        loss_module: Maps a TensorDict batch to a TensorDict of losses.
        optimizer: Steps the loss module's parameters.
        target_updater: Moves target networks after each optimizer step.
        compile_train_step: Compile the forward and, through it, the backward, each as one graph. None: on CUDA.
        compile_mode: A torch.compile mode. Where the step is captured as well, inductor's own CUDA graphs stay off.
        cudagraph: Capture forward and backward in a CUDA graph; optimizer and targets run after it, so that their
            schedules advance. None: on CUDA.
        warmup_steps: Forward and backward passes of `warmup` before capture, at least 1.
        mixed_precision: bfloat16 autocast in the forward, on CUDA and on CPU. On CPUs without native bfloat16 it is
            many times slower.

    Raises:
        ValueError: Unknown `compile_mode`, bad `warmup_steps`, or a module of the loss has a compile scope of its own
            while the step is to be compiled.

    Compile: `step` synchronises nothing. Random numbers come from `draw` before the compiled region; what the loss
    module draws itself comes from the global generators inside.
    """

    def __init__(
        self,
        loss_module: nn.Module,
        optimizer: torch.optim.Optimizer,
        target_updater: TargetNetUpdater | None = None,
        *,
        compile_train_step: bool | None = None,
        compile_mode: str = "default",
        cudagraph: bool | None = None,
        warmup_steps: int = 5,
        mixed_precision: bool = False,
    ):
        check_mode(compile_mode, "stepper")
        if not isinstance(warmup_steps, int) or isinstance(warmup_steps, bool) or warmup_steps < 1:
            raise ValueError(f"stepper: warmup_steps is {warmup_steps!r}; it must be a whole number of at least 1")
        self.loss_module = loss_module
        self.optimizer = optimizer
        self.target_updater = target_updater
        self.compile_train_step = compile_train_step
        self.compile_mode = compile_mode
        self.cudagraph = cudagraph
        self.warmup_steps = warmup_steps
        self.mixed_precision = mixed_precision
        self._spec: BatchSpec | None = None
        self._region: Region | None = None
        self._captured: CapturedStep | None = None
        if compile_train_step:
            self.check_scopes()

    def resolve(self, device: torch.device | str) -> tuple[bool, bool]:
        """(compile_train_step, cudagraph) for a device: None means True on CUDA and False elsewhere."""
        is_cuda = torch.device(device).type == "cuda"
        compiled = is_cuda if self.compile_train_step is None else self.compile_train_step
        return compiled, is_cuda if self.cudagraph is None else self.cudagraph

    def warmup(self, sample: TensorDictBase) -> None:
        """Compiles and captures with a representative batch, whose kind later batches must share.

        Model buffers and every global generator are as before afterwards; parameters, optimizer and targets are not
        touched. Gradients are as before too; where the step is captured, those that were None are zeros, and stay where
        they are from then on. Calling it again starts over.

        Args:
            sample: A batch as `step` gets it.

        Raises:
            ValueError: Capture on a device without CUDA graphs, or a module with a compile scope of its own.
        """
        device = device_of(sample)
        compiled, captured = self.resolve(device)
        if captured and not self._can_capture(device):
            raise ValueError(
                f"stepper: cudagraph is on and the batch is on {device}; CUDA graphs need a CUDA device: move loss and "
                "batch there, or set cudagraph=False"
            )
        if compiled:
            self.check_scopes()
            self.prepare_compile()
        if self._captured is not None:
            self._captured.reset()
        self._region = self._captured = None
        if compiled:
            self._region = Region(self._compute, "train step", mode=self._inductor_mode(captured))
        inputs = self._inputs(sample)
        with preserved_rng(), self._preserved(keep_gradients=not captured):
            if captured:
                step = CapturedStep(
                    self._forward_backward,
                    Live(self.loss_module),
                    self._make_graph(device),
                    warmup_steps=self.warmup_steps,
                    buffers=Live(self.loss_module, "buffers"),
                )
                step.capture(self._with_draws(inputs))
                self._captured = step
            else:
                for _ in range(self.warmup_steps):
                    self.optimizer.zero_grad(set_to_none=True)
                    self._forward_backward(self._with_draws(inputs))
        self._spec = BatchSpec.of(inputs)

    def step(self, trainer: OwnsLoss | None, sub_batch: TensorDictBase) -> TensorDict:
        """One update on one batch.

        Args:
            trainer: The trainer that owns the loss module, or None.
            sub_batch: Batch on the loss module's device, of the kind that warm-up saw; `write_features` may add to it.

        Returns:
            Detached scalar metrics: those of the loss module, `loss/total` and `optimizer/grad_norm`. They keep their
            values after later updates, and so do features written into the batch.

        Raises:
            ValueError: The trainer owns another loss module, the batch differs from warm-up's, or the loss module
                returned no loss.
            RuntimeError: The step is compiled or captured and `warmup` has not been called.
        """
        if trainer is not None and trainer.loss_module is not self.loss_module:
            raise ValueError(
                f"stepper: the trainer owns another loss module ({type(trainer.loss_module).__name__}); build the stepper "
                "with the trainer's own"
            )
        inputs = self._inputs(sub_batch)
        if self._spec is not None:
            self._spec.check(inputs, where="stepper")
        elif any(self.resolve(device_of(sub_batch))):
            raise RuntimeError(
                "stepper: this step is compiled or captured and has not been warmed up; call warmup(sample) with a "
                "representative batch before the first update"
            )
        batch = self._with_draws(inputs)
        if self._captured is not None:
            out = self._captured.replay(batch)
        else:
            self.optimizer.zero_grad(set_to_none=True)
            out = self._forward_backward(batch)
            if self._region is not None and batch.device is not None and batch.device.type == "cuda":
                out = out.clone()  # inductor's own graphs overwrite their outputs at the next call
        self.write_features(out, sub_batch)
        average_gradients(self.loss_module)
        metrics: TensorDict = out["metrics"]
        metrics["optimizer/grad_norm"] = self._grad_norm()
        self.optimizer.step()
        if self.target_updater is not None:
            self.target_updater.step()
        return metrics

    def draw(self, batch: TensorDictBase) -> Draws | None:
        """Hook: random numbers of one update, drawn from the global generators before the compiled region.

        They are passed to the loss module as keyword arguments. None: the loss module draws for itself.
        """
        return None

    def write_features(self, losses: TensorDictBase, sub_batch: TensorDictBase) -> None:
        """Hook for learners that return features to the batch; the base class does nothing."""

    def prepare_compile(self) -> None:
        """Hook: called before the step is compiled as a whole."""

    def check_scopes(self) -> None:
        """Refuses modules with a compile scope of their own: the compiled step owns all of them.

        Raises:
            ValueError: There is one; names it.
        """
        taken = compiled_scope(self.loss_module)
        for path, module in self.loss_module.named_modules():
            if getattr(module, "is_compiled", False) is True:
                taken = taken or f"the rollout of {path or type(module).__name__}"
            if getattr(module, "learner_scope", None) is not None:
                taken = taken or f"the learner ({path or type(module).__name__}.compile_learner)"
        if taken:
            raise ValueError(
                f"stepper: {taken} has been compiled on its own and compile_train_step is on; one compile scope owns all "
                "shared modules: leave out one of the two (a rollout can be selected with compile=False)"
            )

    def state_dict(self) -> dict[str, Any]:
        """Progress of optimizer and targets; the loss module saves itself."""
        targets = {} if self.target_updater is None else self.target_updater.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "targets": targets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`; gradient buffers stay where they are."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.target_updater is not None:
            self.target_updater.load_state_dict(state["targets"])

    def _inputs(self, batch: TensorDictBase) -> TensorDictBase:
        """What of a batch the loss reads."""
        return batch

    def _with_draws(self, inputs: TensorDictBase) -> TensorDict:
        draws = self.draw(inputs)
        parts: dict[str, Any] = {"batch": inputs}
        if draws is not None:
            parts["draws"] = TensorDict(dict(draws), [])
        return TensorDict(parts, [], device=device_of(inputs))

    def _compute(self, batch: TensorDictBase, draws: dict[str, Tensor] | None) -> tuple[Tensor, TensorDictBase]:
        """Forward: the total with gradient, and what the loss returned without. What a compiled step traces."""
        device = device_of(batch)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.mixed_precision):
            losses = self.loss_module(batch) if draws is None else self.loss_module(batch, **self.as_arguments(draws))
        # Detached here, so that the graph has one differentiable output and its backward one incoming gradient.
        return total_loss(losses), losses.detach()

    def as_arguments(self, draws: dict[str, Tensor]) -> dict[str, Any]:
        """Hook: keyword arguments of the loss module made of `draw`'s result."""
        return draws

    def _forward_backward(self, batch: TensorDictBase) -> TensorDict:
        """Fills `.grad` and returns metrics and features, detached."""
        draws: dict[str, Tensor] | None = batch["draws"].to_dict() if "draws" in batch else None
        compute = self._compute if self._region is None else self._region
        total, out = compute(batch["batch"], draws)
        total.backward()
        metrics = out.get("metrics", None)
        out["metrics"] = TensorDict({}, []) if metrics is None else metrics
        out["metrics", "loss/total"] = total.detach()
        return out

    def _can_capture(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def _make_graph(self, device: torch.device) -> Graph:
        return CudaGraph(device)

    def _inductor_mode(self, captured: bool) -> str:
        without = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
        return without.get(self.compile_mode, self.compile_mode) if captured else self.compile_mode

    @contextmanager
    def _preserved(self, *, keep_gradients: bool) -> Iterator[None]:
        """Buffers, and gradients, as before once the context ends."""
        buffers = [(b, b.clone()) for b in self.loss_module.buffers()]
        parameters = list(self.loss_module.parameters())
        gradients = [p.grad for p in parameters]
        values = [None if g is None else g.clone() for g in gradients]
        if keep_gradients:
            for p in parameters:
                p.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
                for p, grad, value in zip(parameters, gradients, values):
                    if keep_gradients:
                        p.grad = grad
                    if p.grad is not None:
                        p.grad.zero_() if value is None else p.grad.copy_(value)

    @torch.no_grad()
    def _grad_norm(self) -> Tensor:
        grads = [p.grad for p in self.loss_module.parameters() if p.grad is not None]
        return torch.stack(torch._foreach_norm(grads)).norm()


def device_of(batch: TensorDictBase) -> torch.device:
    """Device of a batch: its own, or its first tensor's."""
    if batch.device is not None:
        return batch.device
    first: Any = next(iter(batch.values(True, True)))
    return first.device


def average_gradients(module: nn.Module) -> None:
    """Averages gradients over the processes of torch.distributed in one flat buffer; nothing without processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    world = torch.distributed.get_world_size()
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    if world == 1 or not grads:
        return
    flat = torch.cat([g.reshape(-1) for g in grads])
    torch.distributed.all_reduce(flat)
    flat /= world
    parts = flat.split([g.numel() for g in grads])
    torch._foreach_copy_(grads, [part.view_as(g) for part, g in zip(parts, grads)])


def total_loss(losses: TensorDictBase) -> Tensor:
    """Sum of the entries named `loss_*`, in sorted order.

    Raises:
        ValueError: There is none.
    """
    names = sorted(k for k in losses.keys() if isinstance(k, str) and k.startswith("loss_"))  # noqa: SIM118
    if not names:
        raise ValueError(
            f"stepper: the loss module returned {sorted(map(str, losses.keys()))}; name its losses loss_<name>"
        )
    return torch.stack([losses[name] for name in names]).sum()
