"""Environments whose right answers are known by counting."""

from __future__ import annotations

import os

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env):
    """Observes the number of steps in the episode; reward 1 a step; ends after a length chosen by the first seed."""

    def __init__(self, lengths=(5,), end="terminated", success=False, noise=False):
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.lengths, self.end, self.success, self.noise = lengths, end, success, noise
        self.length = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.length is None:
            self.length = self.lengths[seed % len(self.lengths)]
        self.count = 0
        return self._obs(), {"ignored": 3}

    def step(self, action):
        self.count += 1
        over = self.count >= self.length
        info = {"success": over, "nested": {"count": self.count}, "text": "x", "array": np.zeros(self.count)}
        if not self.success:
            info = {"text": "x"}
        ended = over and "terminated" in self.end
        return self._obs(), 1, ended, over and "truncated" in self.end, info

    def _obs(self):
        return np.array([self.count, self.np_random.random() if self.noise else 0.0], np.float32)


class Breaks(Counter):
    """Raises or dies at step 50 where the action is above 0.5, or raises when built outside of one process."""

    def __init__(self, unpicklable=False, kill=False, in_constructor=None):
        super().__init__(lengths=(1000,))
        if in_constructor is not None and os.getpid() != in_constructor:
            raise OSError("no licence in this process")
        self.unpicklable, self.kill = unpicklable, kill

    def step(self, action):
        if self.count == 49 and action[0] > 0.5:
            if self.kill:
                os._exit(17)
            if self.unpicklable:
                raise type("LocalError", (ValueError,), {})("joint limit", lambda: 0)
            raise ValueError("joint limit")
        return super().step(action)
