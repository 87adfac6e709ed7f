"""Episodes that can be brought back: each starts from a seed of its own and remembers its actions.

Simulators have no common way to save their state, and unpickling one would execute code from a file. But a simulator that is
deterministic in its seed comes back to where it was when its episode is started again and given the same actions.
"""

from __future__ import annotations

from typing import Any, SupportsFloat

import gymnasium
import numpy as np


class RecallableEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Seeds episode k of a stream from `SeedSequence([seed, k])` and can replay it up to the current row.

    Args:
        env: Environment from `make_env`: dict actions.

    Attributes:
        recall: Set to a record to make the next `reset` bring that episode back.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.recall: dict[str, Any] | None = None
        self._seed = 0
        self._episode = -1
        self._actions: list[dict[str, np.ndarray]] = []
        self._row = (0.0, False, False)
        self._has_ended = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts the next episode; with `seed`, episode 0 of that seed; with `recall` set, that episode again."""
        if self.recall is not None:
            record, self.recall = self.recall, None
            return self._replay(record)
        self._seed, self._episode = (self._seed, self._episode + 1) if seed is None else (seed, 0)
        return self._begin()

    def step(self, action: dict[str, np.ndarray]) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Steps. Right after an ended episode was recalled this starts the next one: the caller's own reset, which would
        have come now, was lost with the process that was going to make it."""
        if self._has_ended:
            self._episode += 1
            observation, info = self._begin()
            return observation, 0.0, False, False, info
        self._actions.append({name: np.array(value) for name, value in action.items()})
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._row = (float(reward), bool(terminated), bool(truncated))
        return observation, reward, terminated, truncated, info

    def episode_record(self) -> dict[str, Any]:
        """Seed, episode, actions [T, ...] and the last row's reward and ends: what `recall` takes."""
        names = self._actions[0] if self._actions else ()
        reward, terminated, truncated = self._row
        return {
            "seed": self._seed,
            "episode": self._episode,
            "actions": {name: np.stack([a[name] for a in self._actions]) for name in names},
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
        }

    def _begin(self) -> tuple[Any, dict[str, Any]]:
        self._actions, self._row, self._has_ended = [], (0.0, False, False), False
        word = np.random.SeedSequence([self._seed, self._episode]).generate_state(1)[0]
        return self.env.reset(seed=int(word) & 0x7FFFFFFF)

    def _replay(self, record: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._seed, self._episode = record["seed"], record["episode"]
        observation, info = self._begin()
        length = len(next(iter(record["actions"].values()), ()))
        for t in range(length):
            observation, _, terminated, truncated, info = self.step({k: v[t] for k, v in record["actions"].items()})
            if terminated or truncated:
                break  # at the last action, or the simulator went another way: the caller compares the rows
        self._has_ended = self._row[1] or self._row[2]
        return observation, info
