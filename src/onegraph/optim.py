"""Optimizer and target updaters of DreamerV3.

Source: danijar/dreamerv3 `embodied/jax/opt.py` (`clip_by_agc`, `scale_by_rms`, `scale_by_momentum`) and `utils.py`
(SlowModel).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor


class DreamerV3Optimizer(torch.optim.Optimizer):
    """Adaptive gradient clip per tensor, then RMS scaling, then momentum of the scaled update, then the learning rate.

    For update n = 1, 2, ... and each tensor p with gradient g:
        1. g <- g / max(1, ||g|| / (agc * max(parameter_norm_min, ||p||))), norms over the whole tensor;
        2. nu <- beta2 nu + (1 - beta2) g ** 2; g <- g / (sqrt(nu / (1 - beta2 ** n)) + eps);
        3. mu <- beta1 mu + (1 - beta1) g; g <- mu / (1 - beta1 ** n);
        4. p <- p - lr * min(1, (n - 1) / warmup_steps) * g, so that the first update moves nothing.
    With `decay_steps` the rate also falls linearly to a tenth over so many updates; the reference has no such schedule.
    Tensors without a gradient are left alone; the count n belongs to the group.

    Args:
        params: Tensors or parameter groups.
        lr: Learning rate after warm-up. Kept in each group as a 0-D tensor; assign to it in place.
        warmup_steps: Updates until `lr` is reached; 0 for none.
        decay_steps: Updates until the rate has fallen to a tenth; 0 keeps it.
        agc: Largest gradient norm as a share of the parameter norm.
        parameter_norm_min: Floor of the parameter norm.
        beta1: Decay of the momentum.
        beta2: Decay of the squared gradients.
        eps: Added outside the root.

    Raises:
        ValueError: A coefficient out of its range.

    Compile: mutates parameters and state in place; the step count and the learning rate are tensors, so that neither
    recompiles nor synchronises.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float | Tensor = 4e-5,
        warmup_steps: int = 1000,
        decay_steps: int = 0,
        agc: float = 0.3,
        parameter_norm_min: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-20,
    ):
        for name, value in (("lr", float(lr)), ("warmup_steps", warmup_steps), ("decay_steps", decay_steps)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"DreamerV3Optimizer: {name} is {value}; it must be finite and at least 0")
        for name, value in (("agc", agc), ("parameter_norm_min", parameter_norm_min), ("eps", eps)):
            if not 0 < value < float("inf"):
                raise ValueError(f"DreamerV3Optimizer: {name} is {value}; it must be finite and above 0")
        for name, value in (("beta1", beta1), ("beta2", beta2)):
            if not 0 <= value < 1:
                raise ValueError(f"DreamerV3Optimizer: {name} is {value}; it must lie in [0, 1)")
        defaults = {
            "lr": torch.as_tensor(lr, dtype=torch.float32).clone(),
            "warmup_steps": warmup_steps,
            "decay_steps": decay_steps,
            "agc": agc,
            "parameter_norm_min": parameter_norm_min,
            "beta1": beta1,
            "beta2": beta2,
            "eps": eps,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            device = group["params"][0].device
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(device, copy=True)
            group["step"] = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update from the gradients that lie in `.grad`; returns what `closure` returns, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if not self.state[p]:
                self.state[p] = {
                    "mu": torch.zeros_like(p, dtype=torch.float32),
                    "nu": torch.zeros_like(p, dtype=torch.float32),
                }
        grads = [p.grad.float() for p in params]
        states = [self.state[p] for p in params]
        mus, nus = [s["mu"] for s in states], [s["nu"] for s in states]
        beta1, beta2 = group["beta1"], group["beta2"]
        step = group["step"].add_(1)
        # 1 - beta ** n by expm1: the plain difference loses half of float32's digits while n is small.
        log1, log2 = (math.log(b) if b else 0.0 for b in (beta1, beta2))
        correction1 = -torch.expm1(step * log1) if beta1 else torch.ones_like(step)
        correction2 = -torch.expm1(step * log2) if beta2 else torch.ones_like(step)

        param_norms = torch.stack(torch._foreach_norm(params)).clamp(min=group["parameter_norm_min"])
        grad_norms = torch.stack(torch._foreach_norm(grads))
        shrink = (grad_norms / (group["agc"] * param_norms)).clamp(min=1.0)
        updates = torch._foreach_div(grads, list(shrink.unbind()))

        torch._foreach_mul_(nus, beta2)
        torch._foreach_addcmul_(nus, updates, updates, 1 - beta2)
        roots = torch._foreach_div(nus, correction2)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_div_(updates, roots)

        torch._foreach_mul_(mus, beta1)
        torch._foreach_add_(mus, updates, alpha=1 - beta1)
        lr = group["lr"]
        if group["warmup_steps"]:
            lr = lr * ((step - 1) / group["warmup_steps"]).clamp(max=1.0)
        if group["decay_steps"]:
            lr = lr * (1 - 0.9 * ((step - 1) / group["decay_steps"]).clamp(max=1.0))
        moves = torch._foreach_mul(mus, lr / correction1)
        torch._foreach_sub_(params, moves)


class HasTargets(Protocol):
    """A loss module with target networks."""

    def target_pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(online, target) tensor pairs."""
        ...


class TargetNetUpdater(ABC):
    """Base of the target updaters: holds the pairs and refuses a module that has none.

    Args:
        loss: Module with `target_pairs()`.

    Raises:
        ValueError: The module has no targets.
    """

    def __init__(self, loss: HasTargets):
        pairs = list(loss.target_pairs()) if hasattr(loss, "target_pairs") else []
        if not pairs:
            raise ValueError(
                f"{type(self).__name__}: {type(loss).__name__} has no target networks; give a loss module whose "
                "target_pairs() yields (online, target) tensors"
            )
        self.online = [online for online, _ in pairs]
        self.targets = [target for _, target in pairs]

    @abstractmethod
    def step(self) -> None:
        """Moves the targets; call it once after each optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        """Progress of the updater; the targets themselves belong to the loss module."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restores `state_dict()`."""


class SoftUpdate(TargetNetUpdater):
    """`target <- tau * online + (1 - tau) * target` after every optimizer step.

    Args:
        loss: Module with `target_pairs()`.
        tau: Rate in (0, 1].
    """

    def __init__(self, loss: HasTargets, tau: float = 0.02):
        super().__init__(loss)
        if not 0 < tau <= 1:
            raise ValueError(f"SoftUpdate: tau is {tau}; it must lie in (0, 1]")
        self.tau = tau

    @torch.no_grad()
    def step(self) -> None:
        """Moves the targets; call it once after each optimizer step."""
        torch._foreach_mul_(self.targets, 1 - self.tau)
        torch._foreach_add_(self.targets, self.online, alpha=self.tau)


class HardUpdate(TargetNetUpdater):
    """Copies the online network every `interval` optimizer steps.

    Args:
        loss: Module with `target_pairs()`.
        interval: Optimizer steps between copies, at least 1.
    """

    def __init__(self, loss: HasTargets, interval: int = 1000):
        super().__init__(loss)
        if interval < 1:
            raise ValueError(f"HardUpdate: interval is {interval}; it must be at least 1")
        self.interval = interval
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:
        """Moves the targets; call it once after each optimizer step."""
        self.count += 1
        if self.count % self.interval == 0:
            torch._foreach_copy_(self.targets, self.online)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer steps seen."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`."""
        self.count = int(state["count"])
