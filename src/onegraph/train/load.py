"""From a checkpoint to something that acts: no optimizer, no replay, no logger."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from onegraph.config import from_dict
from onegraph.dreamer.loss import DreamerV3Loss
from onegraph.dreamer.policy import Carry, DreamerPolicy
from onegraph.specs import ArraySpec
from onegraph.train.checkpoint import CheckpointStore, resolve
from onegraph.train.config import TrainConfig
from onegraph.train.device import pick_device

if TYPE_CHECKING:
    import gymnasium


class Agent:
    """A trained policy that carries its own memory: one environment, numpy in and out.

    Args:
        policy: The policy.
        config: Config of the run that it comes from.
        step: Environment steps at the checkpoint.
    """

    def __init__(self, policy: DreamerPolicy, config: TrainConfig, step: int):
        self.policy = policy
        self.config = config
        self.step = step
        self.reset()

    def make_env(self, *, render: bool = False) -> gymnasium.Env[Any, Any]:
        """The environment of the run, with the observation and action dicts that `act` takes and returns."""
        from onegraph.envs.make import make_env

        return make_env(self.config.env, render=render)

    def reset(self) -> None:
        """Forgets everything: call it whenever an episode starts."""
        self._carry: Carry = self.policy.initial(1)
        self._is_first = True

    def act(self, observation: dict[str, np.ndarray], *, mode: bool = False) -> dict[str, np.ndarray]:
        """One step.

        Args:
            observation: {key: array of the spec's shape}.
            mode: Take the most likely action instead of a sample.

        Returns:
            {key: action}, continuous ones about -1..1 and not clipped; environments from `make_env` map them.

        Raises:
            ValueError: Observation keys or shapes are not those the policy was trained on.
        """
        specs = self.policy.loss.observation_specs
        got = {k: np.shape(v) for k, v in observation.items()}
        want = {k: s.shape for k, s in specs.items()}
        if got != want:
            raise ValueError(f"Agent.act: observation {got}; the policy was trained on {want}")
        device = self.policy.device
        tensors = {k: torch.as_tensor(np.asarray(v)[None], device=device) for k, v in observation.items()}
        is_first = torch.tensor([self._is_first], device=device)
        actions, self._carry = self.policy.act(tensors, is_first, self._carry, mode=mode)
        self._is_first = False
        return {k: v[0].cpu().numpy() for k, v in actions.items()}


def load_agent(path: Path | str, *, device: str = "auto") -> Agent:
    """Loads the policy of a run.

    Args:
        path: Run directory, its `checkpoints` folder, or one step folder.
        device: "auto" (CUDA where there is one), "cpu", "cuda", ...

    Raises:
        FileNotFoundError: No complete checkpoint there.
        ValueError: A damaged or newer file.
    """
    folder = resolve(path)
    meta, state = CheckpointStore(folder.parent.parent).load(folder)
    config = from_dict(TrainConfig, meta["config"])
    loss = DreamerV3Loss(
        config.agent,
        {k: ArraySpec.from_json(v) for k, v in meta["observation_specs"].items()},
        {k: ArraySpec.from_json(v) for k, v in meta["action_specs"].items()},
    )
    loss.load_state_dict(state["loss_module"])
    loss.to(pick_device(device)).eval()
    return Agent(DreamerPolicy(loss), config, meta["step"])
