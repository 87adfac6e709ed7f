"""The optimization step of DreamerV3: the general one, its draws, and posterior features returned to the batch."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.optim import Optimizer

from onegraph.config import to_dict
from onegraph.dreamer.config import DreamerV3OptimizationStepperConfig
from onegraph.dreamer.loss import DreamerV3Loss, Noise
from onegraph.optim import DreamerV3Optimizer, SoftUpdate, TargetNetUpdater
from onegraph.stepper.stepper import Draws, OptimizationStepper

CONTEXT = "replay_context"


class DreamerV3OptimizationStepper(OptimizationStepper):
    """Steps a `DreamerV3Loss` and writes its detached posterior "state" and "belief" under "replay_context" of the
    batch.

    Args:
        loss_module: The objective.
        optimizer: Steps its parameters.
        target_updater: Moves the slow critic after each optimizer step.
        compile_train_step: See `OptimizationStepper`.
        compile_mode: See `OptimizationStepper`.
        cudagraph: See `OptimizationStepper`.
        rssm_scan_unroll: In a compiled step every rollout of the loss without a selected backend switches to the scan,
            unrolled by this many steps; None leaves them.
        warmup_steps: See `OptimizationStepper`.
        mixed_precision: See `OptimizationStepper`.

    Raises:
        ValueError: See `OptimizationStepper`; or `rssm_scan_unroll` is not a whole number of at least 1.

    Compile: the draws of an update are made in `draw`, outside of what is compiled or captured, so that a seed gives the
    same samples in every mode.
    """

    def __init__(
        self,
        loss_module: nn.Module,
        optimizer: Optimizer,
        target_updater: TargetNetUpdater | None = None,
        *,
        compile_train_step: bool | None = None,
        compile_mode: str = "default",
        cudagraph: bool | None = None,
        rssm_scan_unroll: int | None = 8,
        warmup_steps: int = 5,
        mixed_precision: bool = False,
    ):
        unroll = rssm_scan_unroll
        if unroll is not None and (not isinstance(unroll, int) or isinstance(unroll, bool) or unroll < 1):
            raise ValueError(
                f"stepper: rssm_scan_unroll is {unroll!r}; it must be None or a whole number of at least 1"
            )
        self.rssm_scan_unroll = unroll
        super().__init__(
            loss_module,
            optimizer,
            target_updater,
            compile_train_step=compile_train_step,
            compile_mode=compile_mode,
            cudagraph=cudagraph,
            warmup_steps=warmup_steps,
            mixed_precision=mixed_precision,
        )

    def draw(self, batch: TensorDictBase) -> Draws | None:
        """The `Noise` of one update, from the global generator of the batch's device."""
        loss = self.loss_module
        if not isinstance(loss, DreamerV3Loss):
            return None
        loss.check_batch(batch)
        return loss.draw_noise(*batch.batch_size, device=batch["reward"].device)._asdict()

    def as_arguments(self, draws: dict[str, Tensor]) -> dict[str, Any]:
        """`Noise` again."""
        return {"noise": Noise(**draws)}

    def prepare_compile(self) -> None:
        """Switches every rollout without a backend to the scan."""
        if self.rssm_scan_unroll is None:
            return
        for module in self.loss_module.modules():
            compile_rollout = getattr(module, "compile_rollout", None)
            if compile_rollout is not None and getattr(module, "scope", None) is None:
                compile_rollout("scan", unroll=self.rssm_scan_unroll, compile=False)

    def write_features(self, losses: TensorDictBase, sub_batch: TensorDictBase) -> None:
        """Detached posterior features [B, T], for the latent write-back."""
        if CONTEXT in losses.keys():  # noqa: SIM118
            sub_batch[CONTEXT] = losses[CONTEXT]

    def _inputs(self, batch: TensorDictBase) -> TensorDictBase:
        return batch.exclude(CONTEXT)


def make_stepper(
    loss: DreamerV3Loss, config: DreamerV3OptimizationStepperConfig | None = None
) -> DreamerV3OptimizationStepper:
    """Stepper with the optimizer and the slow-critic update that the loss's config names.

    Args:
        loss: The objective.
        config: How the step runs; None for the defaults.
    """
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
    settings = to_dict(config or DreamerV3OptimizationStepperConfig())
    return DreamerV3OptimizationStepper(loss, optimizer, SoftUpdate(loss, tau=c.slow_tau), **settings)
