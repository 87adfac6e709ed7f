"""The DreamerV3 learner of a run as an audit's subject: its modes, and random batches of the task's own kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F

from onegraph.dreamer.config import DreamerConfig
from onegraph.envs.config import EnvConfig
from onegraph.envs.make import action_specs, make_env, observation_specs
from onegraph.specs import ArraySpec
from onegraph.stepper.audit import Mode, Subject
from onegraph.stepper.stepper import OptimizationStepper
from onegraph.train.config import OptimizationConfig, TrainConfig
from onegraph.train.learner import make_learner

MODES = ("step", "scan", "losses", "all")

Specs = Mapping[str, ArraySpec]


def task_specs(env: EnvConfig) -> tuple[dict[str, ArraySpec], dict[str, ArraySpec]]:
    """Observation and action entries of a task, from one environment that is made and closed."""
    made = make_env(env)
    try:
        return observation_specs(made), action_specs(made)
    finally:
        made.close()


def dreamer_subject(config: TrainConfig, specs: tuple[Specs, Specs], device: torch.device) -> Subject:
    """The learner of a run, eager, with the modes of `onegraph train dreamer`.

    The learning rate's warm-up is off, so that every update moves the parameters.

    Args:
        config: Of the run; its optimization mode is left out but for mixed precision and the compile mode.
        specs: Observation and action entries, see `task_specs`.
        device: Where it runs.
    """
    c = config.optimization
    plain = OptimizationConfig(mixed_precision=c.mixed_precision, compile_mode=c.compile_mode)
    agent = replace(config.agent, warmup_steps=0)
    loss, stepper = make_learner(replace(config, agent=agent, optimization=plain), *specs, device)
    size = (config.batch_size, config.batch_length)
    return Subject(
        stepper=stepper,
        batch=lambda update: random_batch(agent, *specs, size).to(device),
        modes={name: _mode(name, c.compile_mode) for name in MODES},
        about={
            "learner": "DreamerV3",
            "task": config.env.task,
            "parameters": f"{sum(p.numel() for p in loss.trained_parameters()):,}",
            "batch": f"{size[0]} x {size[1]}",
            "learning rate": f"{agent.lr:g} without warm-up",
        },
    )


def _mode(name: str, compile_mode: str) -> Mode:
    def apply(stepper: OptimizationStepper) -> None:
        loss: Any = stepper.loss_module
        if name in ("step", "scan"):
            loss.world_model.compile_rollout(name, mode=compile_mode)
        else:
            loss.compile_learner(name, mode=compile_mode)

    return apply


def random_batch(agent: DreamerConfig, observations: Specs, actions: Specs, size: tuple[int, int]) -> TensorDict:
    """A batch of noise as `train.collect.make_batch` makes it of replayed steps, from the global CPU generator.

    Rewards are normal; about one step in ten starts an episode, and half of the episodes before them are terminal.

    Args:
        agent: Sizes of the latents.
        observations: Entries.
        actions: Entries.
        size: (B, T).
    """
    is_first = torch.rand(size) < 0.1
    is_last = is_first.roll(-1, 1)
    classes = torch.randint(agent.num_classes, (*size, agent.num_categoricals))
    return TensorDict(
        {
            "observation": TensorDict({k: random_entry(s, size) for k, s in observations.items()}, size),
            "action": TensorDict({k: random_entry(s, size) for k, s in actions.items()}, size),
            "reward": torch.randn(size),
            "is_first": is_first,
            "is_last": is_last,
            "is_terminal": is_last & (torch.rand(size) < 0.5),
            "belief": torch.randn(*size, agent.belief_dim).tanh(),
            "state": F.one_hot(classes, agent.num_classes).flatten(-2).to(torch.uint8),
        },
        size,
    )


def random_entry(spec: ArraySpec, size: tuple[int, int]) -> Tensor:
    """Noise of one entry, [B, T, *shape]: classes and bytes uniform, floats normal."""
    if spec.num_classes is not None:
        counts = torch.tensor(spec.num_classes)
        value = (torch.rand(*size, len(counts)) * counts).int().reshape(*size, *spec.shape)
    elif spec.dtype == "uint8":
        value = torch.randint(256, (*size, *spec.shape), dtype=torch.uint8)
    else:
        value = torch.randn(*size, *spec.shape)
    return value.to(getattr(torch, spec.dtype))
