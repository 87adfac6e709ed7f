"""500 steps in every kind of environment, with updates, an evaluation and a checkpoint (slow; `make smoke`)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from onegraph.config import replace as override
from onegraph.train.config import preset
from onegraph.train.online import OnlineTrainer

pytestmark = pytest.mark.slow


class Robot(gymnasium.Env):
    """Dict observations of every kind, dict actions of two kinds; the reward is for moving and gripping alike."""

    def __init__(self, length: int = 40):
        self.length = length
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (64, 64, 3), np.uint8),
                "arm": spaces.Dict({"joints": spaces.Box(-np.inf, np.inf, (3,)), "touch": spaces.Discrete(2)}),
                "mode": spaces.MultiDiscrete([3, 2]),
            }
        )
        self.action_space = spaces.Dict({"move": spaces.Box(-2, 6, (2,)), "grip": spaces.Discrete(2)})

    def reset(self, *, seed: int | None = None, options: Any = None):
        super().reset(seed=seed)
        self.count = 0
        return self._observe(), {}

    def step(self, action: Any):
        assert self.action_space.contains(action), action
        self.count += 1
        reward = float(action["move"][0] > 2) + float(action["grip"])
        return self._observe(), reward, False, self.count >= self.length, {"success": reward == 2}

    def _observe(self) -> dict[str, Any]:
        joints = self.np_random.normal(size=3).astype(np.float32)
        camera = np.full((64, 64, 3), self.count % 256, np.uint8)
        return {"camera": camera, "arm": {"joints": joints, "touch": 1}, "mode": np.array([self.count % 3, 0])}


def make_robot(length: int = 30) -> gymnasium.Env:
    return Robot(length)


TASKS: dict[str, dict[str, Any]] = {
    "Pendulum-v1": {},
    "dmc/walker_walk": {"env.observations": "proprio"},
    "dmc/walker_walk pixels": {"env.observations": "pixels", "env.action_repeat": 2},
    "dmc/cartpole_balance both": {"env.observations": "both"},
    "atari/pong": {},
    "atari100k/pong": {},
    "crafter/reward": {},
    "tests.smoke.test_environments:Robot": {},
    "tests.smoke.test_environments:make_robot": {"env.kwargs": {"length": 25}},
}
NEEDS = {"dmc": "dm_control", "atari": "ale_py", "atari100k": "ale_py", "crafter": "crafter"}


CASES = [(task, "inline") for task in TASKS] + [
    (task, "process") for task in ("Pendulum-v1", "atari/pong", "tests.smoke.test_environments:Robot")
]


@pytest.mark.parametrize(("task", "workers"), CASES)
def test_500_steps(task: str, workers: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(task.split("/")[0], "numpy"))
    config = override(
        preset("tiny"),
        {"env.task": task.split(" ")[0], "env.num_envs": 2, "env.workers": workers, "env.max_episode_steps": 60}
        | TASKS[task],
    )
    config = replace(
        config,
        steps=500,
        batch_size=4,
        batch_length=16,
        train_ratio=8.0,
        learning_starts=32,
        log_every=100,
        eval_episodes=1,
        video=True,
    )
    trainer = OnlineTrainer(config, tmp_path, progress=False)
    result = trainer.run()
    assert trainer.step == 500
    assert trainer.updates > 40
    assert np.isfinite(result["eval/return"])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(np.isfinite(r["loss/total"]) for r in rows if "loss/total" in r)
    assert (tmp_path / "checkpoints" / "step_000000500" / "state.pt").exists()
    if trainer.loss_module.world_model.encoder.image_keys:
        assert list((tmp_path / "videos").glob("open_loop_*.mp4"))
