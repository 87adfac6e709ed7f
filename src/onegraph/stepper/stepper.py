"""One optimization step of any learner: forward, backward, optimizer, targets. Knows no algorithm."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from onegraph.optim import TargetNetUpdater


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
    """

    def __init__(
        self, loss_module: nn.Module, optimizer: torch.optim.Optimizer, target_updater: TargetNetUpdater | None = None
    ):
        self.loss_module = loss_module
        self.optimizer = optimizer
        self.target_updater = target_updater

    def step(self, trainer: OwnsLoss | None, sub_batch: TensorDictBase) -> TensorDict:
        """One update on one batch.

        Args:
            trainer: The trainer that owns the loss module, or None.
            sub_batch: Batch on the loss module's device; `write_features` may add to it.

        Returns:
            Detached scalar metrics: those of the loss module, `loss/total` and `optimizer/grad_norm`.

        Raises:
            ValueError: The trainer owns another loss module, or the loss module returned no loss.
        """
        if trainer is not None and trainer.loss_module is not self.loss_module:
            raise ValueError(
                f"stepper: the trainer owns another loss module ({type(trainer.loss_module).__name__}); build the stepper "
                "with the trainer's own"
            )
        self.optimizer.zero_grad(set_to_none=True)
        losses = self.loss_module(sub_batch)
        total = total_loss(losses)
        total.backward()
        self.write_features(losses, sub_batch)
        metrics = losses.get("metrics", TensorDict({}, [])).detach()
        metrics["loss/total"] = total.detach()
        metrics["optimizer/grad_norm"] = self._grad_norm()
        self.optimizer.step()
        if self.target_updater is not None:
            self.target_updater.step()
        return metrics

    def write_features(self, losses: TensorDictBase, sub_batch: TensorDictBase) -> None:
        """Hook for learners that return features to the batch; the base class does nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Progress of optimizer and targets; the loss module saves itself."""
        targets = {} if self.target_updater is None else self.target_updater.state_dict()
        return {"optimizer": self.optimizer.state_dict(), "targets": targets}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`."""
        self.optimizer.load_state_dict(state["optimizer"])
        if self.target_updater is not None:
            self.target_updater.load_state_dict(state["targets"])

    @torch.no_grad()
    def _grad_norm(self) -> Tensor:
        grads = [p.grad for p in self.loss_module.parameters() if p.grad is not None]
        return torch.stack(torch._foreach_norm(grads)).norm()


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
