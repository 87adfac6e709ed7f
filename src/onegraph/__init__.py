"""onegraph: robot-learning policies trained as compiled graphs, with proof that the fast path equals the slow one."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onegraph.dreamer.config import DreamerConfig, sized
    from onegraph.dreamer.loss import DreamerV3Loss
    from onegraph.dreamer.policy import DreamerPolicy
    from onegraph.dreamer.reference import load_reference
    from onegraph.dreamer.rssm import RSSMPosteriorV3, RSSMPriorV3
    from onegraph.dreamer.stepper import DreamerV3OptimizationStepper
    from onegraph.envs.config import EnvConfig
    from onegraph.envs.make import make_env
    from onegraph.envs.vector import VectorEnv
    from onegraph.nn.distributions import two_hot_decode, two_hot_encode, two_hot_loss
    from onegraph.optim import DreamerV3Optimizer, HardUpdate, SoftUpdate
    from onegraph.specs import ArraySpec
    from onegraph.stepper.stepper import OptimizationStepper
    from onegraph.train.config import TrainConfig, preset
    from onegraph.train.load import Agent, load_agent
    from onegraph.train.online import OnlineTrainer

__version__ = "0.1.0.dev0"

# Public name -> module. Imported on first use, so that the command line starts without torch.
_HOMES = {
    "Agent": "train.load",
    "ArraySpec": "specs",
    "DreamerConfig": "dreamer.config",
    "DreamerPolicy": "dreamer.policy",
    "DreamerV3Loss": "dreamer.loss",
    "DreamerV3OptimizationStepper": "dreamer.stepper",
    "DreamerV3Optimizer": "optim",
    "EnvConfig": "envs.config",
    "HardUpdate": "optim",
    "OnlineTrainer": "train.online",
    "OptimizationStepper": "stepper.stepper",
    "RSSMPosteriorV3": "dreamer.rssm",
    "RSSMPriorV3": "dreamer.rssm",
    "SoftUpdate": "optim",
    "TrainConfig": "train.config",
    "VectorEnv": "envs.vector",
    "load_agent": "train.load",
    "load_reference": "dreamer.reference",
    "make_env": "envs.make",
    "preset": "train.config",
    "sized": "dreamer.config",
    "two_hot_decode": "nn.distributions",
    "two_hot_encode": "nn.distributions",
    "two_hot_loss": "nn.distributions",
}

__all__ = [
    "Agent",
    "ArraySpec",
    "DreamerConfig",
    "DreamerPolicy",
    "DreamerV3Loss",
    "DreamerV3OptimizationStepper",
    "DreamerV3Optimizer",
    "EnvConfig",
    "HardUpdate",
    "OnlineTrainer",
    "OptimizationStepper",
    "RSSMPosteriorV3",
    "RSSMPriorV3",
    "SoftUpdate",
    "TrainConfig",
    "VectorEnv",
    "load_agent",
    "load_reference",
    "make_env",
    "preset",
    "sized",
    "two_hot_decode",
    "two_hot_encode",
    "two_hot_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'onegraph' has no attribute {name!r}")
    return getattr(import_module(f"onegraph.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
