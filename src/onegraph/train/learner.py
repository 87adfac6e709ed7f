"""From a run's config to its learner: loss module and stepper in the mode that was asked for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from onegraph.config import to_dict
from onegraph.dreamer.config import DreamerV3OptimizationStepperConfig
from onegraph.dreamer.loss import DreamerV3Loss
from onegraph.dreamer.stepper import DreamerV3OptimizationStepper, make_stepper
from onegraph.specs import ArraySpec
from onegraph.train.config import OptimizationConfig, TrainConfig


def make_learner(
    config: TrainConfig,
    observation_specs: Mapping[str, ArraySpec],
    action_specs: Mapping[str, ArraySpec],
    device: torch.device,
) -> tuple[DreamerV3Loss, DreamerV3OptimizationStepper]:
    """Builds the learner of a run; its parameters are drawn from the global CPU generator.

    Raises:
        ValueError: A mode that the device cannot run.
    """
    mode = config.optimization.resolved(device.type)
    if mode.cudagraph and device.type != "cuda":
        raise ValueError(f"train: optimization.cudagraph is on and the device is {device}; leave it out or use CUDA")
    loss = DreamerV3Loss(config.agent, observation_specs, action_specs).to(device)
    if mode.compile_learner:
        loss.compile_learner(mode.compile_learner, mode=mode.compile_mode)
    if mode.compile_rollout:
        loss.world_model.compile_rollout(mode.compile_rollout, mode=mode.compile_mode)
    names = DreamerV3OptimizationStepperConfig.__dataclass_fields__
    settings = {k: v for k, v in to_dict(mode).items() if k in names}
    return loss, make_stepper(loss, DreamerV3OptimizationStepperConfig(**settings))


def is_compiled(mode: OptimizationConfig) -> bool:
    """True if the first update compiles or captures something."""
    return bool(mode.compile_learner or mode.compile_rollout or mode.compile_train_step or mode.cudagraph)


def describe(mode: OptimizationConfig) -> str:
    """The mode in a few words, for the first lines of a run."""
    parts = []
    if mode.compile_train_step:
        parts.append("compiled train step")
    if mode.compile_learner:
        parts.append(f"compiled learner ({mode.compile_learner})")
    if mode.compile_rollout:
        parts.append(f"compiled rollout ({mode.compile_rollout})")
    if mode.cudagraph:
        parts.append("CUDA graph")
    if mode.compile_policy:
        parts.append("compiled policy")
    precision = "bfloat16 autocast" if mode.mixed_precision else "float32"
    return f"{precision}, {', '.join(parts) or 'eager'}"
