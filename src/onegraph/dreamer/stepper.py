"""The optimization step of DreamerV3: the general one, and posterior features returned to the batch."""

from __future__ import annotations

from tensordict import TensorDictBase

from onegraph.dreamer.loss import DreamerV3Loss
from onegraph.optim import DreamerV3Optimizer, SoftUpdate
from onegraph.stepper.stepper import OptimizationStepper


class DreamerV3OptimizationStepper(OptimizationStepper):
    """Steps a `DreamerV3Loss` and writes its detached posterior "state" and "belief" under "replay_context" of the
    batch.

    Arguments as in `OptimizationStepper`.
    """

    def write_features(self, losses: TensorDictBase, sub_batch: TensorDictBase) -> None:
        """Detached posterior features [B, T], for the latent write-back."""
        sub_batch["replay_context"] = losses["replay_context"]


def make_stepper(loss: DreamerV3Loss) -> DreamerV3OptimizationStepper:
    """Stepper with the optimizer and the slow-critic update that the loss's config names."""
    c = loss.config
    optimizer = DreamerV3Optimizer(
        loss.trained_parameters(),
        lr=c.lr,
        warmup_steps=c.warmup_steps,
        decay_steps=c.decay_steps,
        agc=c.agc,
        beta1=c.beta1,
        beta2=c.beta2,
        eps=c.eps,
    )
    return DreamerV3OptimizationStepper(loss, optimizer, SoftUpdate(loss, tau=c.slow_tau))
