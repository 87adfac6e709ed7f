"""Crafter, whose own class predates Gymnasium, as a Gymnasium environment."""

from __future__ import annotations

import collections
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces

from onegraph.envs.packages import import_optional


class _OrderedSet(dict):
    """The part of a set that Crafter's chunks use, iterated in order of insertion."""

    def add(self, item: Any) -> None:
        self[item] = None

    def remove(self, item: Any) -> None:
        del self[item]


class CrafterEnv(gymnasium.Env[np.ndarray, Any]):
    """Crafter with `reset(seed=...)`, separate termination and truncation, and worlds that a seed determines.

    Observations are uint8 `[size, size, 3]`; there are 17 actions. An episode terminates when the player dies and is
    truncated after 10000 steps. `info` has the counts `achievements/<name>` among others.

    Crafter keeps the creatures of a region in sets ordered by memory address, so that the same seed gives different
    episodes in different processes; here they are kept in order of insertion.

    Args:
        task: `crafter/reward`, or `crafter/noreward` for rewards that are all 0.
        size: Height and width of images in pixels.
        render: Whether `render()` must return frames, uint8 `[512, 512, 3]`.
        kwargs: Keyword arguments of `crafter.Env`.

    Raises:
        ImportError: The `crafter` extra is missing.
        ValueError: There is no such task.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012

    def __init__(self, task: str, *, size: int, render: bool, kwargs: dict[str, Any]) -> None:
        if task not in ("crafter/reward", "crafter/noreward"):
            raise ValueError(f"env: unknown task {task!r}; close matches: crafter/reward, crafter/noreward")
        crafter = import_optional("crafter", extra="crafter", task=task)
        self.render_mode = "rgb_array" if render else None
        settings = {"size": (size, size), "reward": task == "crafter/reward", "seed": 0, **kwargs}
        self._game = crafter.Env(**settings)
        base = type(self._game._world)

        class OrderedWorld(base):
            def reset(self, seed: int | None = None) -> None:
                super().reset(seed)
                self._chunks = collections.defaultdict(_OrderedSet)

        self._game._world.__class__ = OrderedWorld
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.action_space = spaces.Discrete(int(self._game.action_space.n))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode in a new world; a seed also restarts the sequence of worlds."""
        super().reset(seed=seed, options=options)
        if seed is not None:
            self._game._seed, self._game._episode = seed, 0
        return self._game.reset(), {}

    def step(self, action: int) -> tuple[np.ndarray, SupportsFloat, bool, bool, dict[str, Any]]:
        """Takes one of 17 actions; terminated where the discount is 0, else truncated where Crafter says done."""
        image, reward, done, info = self._game.step(action)
        terminated = bool(done) and info["discount"] == 0
        return image, float(reward), terminated, bool(done) and not terminated, info

    def render(self) -> np.ndarray | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Frame of the current state, or None when the environment was built without `render`."""
        return self._game.render((512, 512)) if self.render_mode else None
