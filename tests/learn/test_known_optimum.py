"""It learns: an environment whose best and random returns are known, in under a minute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from onegraph.config import replace as override
from onegraph.train.config import preset
from onegraph.train.online import OnlineTrainer

LENGTH = 8


class Match(gymnasium.Env):
    """Shows one of two signs; the action that names it earns 1. Best return 8, random 4 on average."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,))
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None):
        super().reset(seed=seed)
        self.count = 0
        return self._show(), {}

    def step(self, action: int):
        reward = float(action == self.sign)
        self.count += 1
        return self._show(), reward, False, self.count >= LENGTH, {}

    def _show(self) -> np.ndarray:
        self.sign = int(self.np_random.integers(2))
        return np.array([1, -1] if self.sign else [-1, 1], np.float32)


def test_reaches_the_known_optimum(tmp_path: Path) -> None:
    config = override(
        preset("tiny"),
        {
            "env.task": "tests.learn.test_known_optimum:Match",
            "agent.lr": 2e-3,
            "agent.warmup_steps": 50,
            "agent.imagination_length": 5,
            "agent.horizon": 20,
        },
    )
    config = replace(
        config, steps=1200, batch_size=8, batch_length=8, train_ratio=32.0, learning_starts=64, eval_episodes=20
    )
    result = OnlineTrainer(config, tmp_path, progress=False).run()
    assert result["eval/return"] > 7.5, result
