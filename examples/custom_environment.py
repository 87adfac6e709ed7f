"""A user's own environment: name the arm that pays. Run from the project's root:

onegraph train dreamer --preset tiny --task examples.custom_environment:make --steps 2000
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Arms(gymnasium.Env):
    """Shows which of `num_arms` pays next; choosing it earns 1. Episodes last 20 steps."""

    def __init__(self, num_arms: int) -> None:
        self.observation_space = spaces.Dict({"hint": spaces.Discrete(num_arms), "clock": spaces.Box(0, 1, ())})
        self.action_space = spaces.Discrete(num_arms)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action: int):
        reward = float(action == self.pays)
        self.count += 1
        return self._observe(), reward, False, self.count >= 20, {}

    def _observe(self) -> dict[str, Any]:
        self.pays = int(self.np_random.integers(self.action_space.n))
        return {"hint": self.pays, "clock": np.float32(self.count / 20)}


def make(num_arms: int = 3) -> gymnasium.Env:
    """The factory that --task names; `--env-kwargs '{"num_arms": 5}'` reaches it."""
    return Arms(num_arms)
