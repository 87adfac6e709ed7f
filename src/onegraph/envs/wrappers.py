"""The wrappers that every environment gets: action repeat, checked and flattened observations, mapped actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces

from onegraph.envs.spaces import (
    action_entries,
    decode_action,
    encode_observation,
    normalized_space,
    observation_entries,
    pick,
    rebuild,
)

StepResult = tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]


class RepeatActions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes each action `repeat` times, sums the rewards, and stops early where the episode ends.

    Args:
        env: Native environment.
        repeat: Steps for each action, at least 1.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], repeat: int) -> None:
        super().__init__(env)
        self._repeat = repeat

    def step(self, action: Any) -> StepResult:
        """Steps until `repeat` steps are taken or the episode ends; observation and info are those of the last step."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        total = float(reward)
        for _ in range(self._repeat - 1):
            if terminated or truncated:
                break
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
        return observation, total, terminated, truncated, info


class RenderImages(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Puts a rendered frame under the key `image`, alone or beside a Dict of other observations.

    Args:
        env: Environment with a Dict observation space.
        frame: Renders the current state: uint8 `[size, size, 3]`.
        size: Height and width in pixels.
        keep: Whether the other observations stay.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], frame: Callable[[], np.ndarray], *, size: int, keep: bool) -> None:
        super().__init__(env)
        self._frame = frame
        self._keep = keep
        others = dict(env.observation_space.items()) if keep and isinstance(env.observation_space, spaces.Dict) else {}
        self.observation_space = spaces.Dict({**others, "image": spaces.Box(0, 255, (size, size, 3), np.uint8)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets and renders."""
        observation, info = self.env.reset(seed=seed, options=options)
        return self._add(observation), info

    def step(self, action: Any) -> StepResult:
        """Steps and renders once, whatever the action repeat below."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._add(observation), reward, terminated, truncated, info

    def _add(self, observation: Any) -> dict[str, Any]:
        return {**(observation if self._keep else {}), "image": self._frame()}


class NormalizeObservations(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Flattens observations to named arrays of the spec dtypes, and checks each one against the space.

    Args:
        env: Any environment.
        task: Name for error texts.
        include_keys: Regular expression; entries whose whole name matches are kept.

    Raises:
        ValueError: No entry matches, or a kept one has no array form. `reset` and `step` raise it where an observation
            differs from what the space declares.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], task: str, include_keys: str = ".*") -> None:
        super().__init__(env)
        self._where = f"env: {task}"
        self._steps = 0
        self._entries = observation_entries(env.observation_space, self._where, include_keys)
        self.observation_space = normalized_space(self._entries, actions=False)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets; the observation is a flat dict of arrays."""
        self._steps = 0
        observation, info = self.env.reset(seed=seed, options=options)
        return self._encode(observation), info

    def step(self, action: Any) -> StepResult:
        """Steps; the observation is a flat dict of arrays."""
        self._steps += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._encode(observation), reward, terminated, truncated, info

    def _encode(self, observation: Any) -> dict[str, np.ndarray]:
        where = f"{self._where}: step {self._steps}"
        result = {}
        for entry in self._entries:
            try:
                value = pick(observation, entry.path)
            except (LookupError, TypeError):
                raise ValueError(
                    f"{where}: observation {entry.name!r} is missing from the {type(observation).__name__} that the "
                    f"environment returned; its space declares {entry.space.shape} {entry.space.dtype}; return exactly "
                    "what observation_space declares"
                ) from None
            result[entry.name] = encode_observation(entry, value, where)
        return result


class MapActions(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Maps named policy actions, in `[-1, 1]` or classes from 0, to what the environment declares.

    Args:
        env: Any environment.
        task: Name for error texts.

    Raises:
        ValueError: Some action has infinite bounds or no array form. `step` raises it for actions that are missing, not
            finite, of another shape, or out of range; none of those reaches the environment.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], task: str) -> None:
        super().__init__(env)
        self._where = f"env: {task}"
        self._native_space = env.action_space
        self._entries = action_entries(env.action_space, self._where)
        self.action_space = normalized_space(self._entries, actions=True)

    def step(self, action: Any) -> StepResult:
        """Steps with a dict of policy actions, one array for each entry."""
        if missing := [entry.name for entry in self._entries if entry.name not in action]:
            raise ValueError(f"{self._where}: action {missing[0]!r} is missing; given: {', '.join(sorted(action))}")
        leaves = {entry.path: decode_action(entry, action[entry.name], self._where) for entry in self._entries}
        return self.env.step(rebuild(self._native_space, leaves))
