"""`N` streams of one task, stepped together; every row says whether it opens or closes an episode."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from onegraph.envs.config import EnvConfig
from onegraph.envs.make import action_specs, make_env, observation_specs
from onegraph.envs.workers import EnvError, ProcessVectorEnv, Stream
from onegraph.specs import ArraySpec


class Steps(NamedTuple):
    """One row of each stream.

    Attributes:
        obs: Observations, each `[N, *shape]` of the spec's dtype.
        reward: float32 `[N]`: what the previous action earned; 0 where `is_first`.
        is_first: bool `[N]`: the row opens an episode; the action sent before it was ignored.
        is_last: bool `[N]`: the row closes an episode, by termination or by truncation; the next row of the stream is
            first.
        is_terminal: bool `[N]`: the environment terminated, so nothing follows in value either.
        info: Scalar numeric entries of `info` of the closing rows, float32 `[N]`, nested names joined by `/`; NaN where
            a stream did not close or did not report the entry. Empty where nothing was reported.
    """

    obs: dict[str, np.ndarray]
    reward: np.ndarray
    is_first: np.ndarray
    is_last: np.ndarray
    is_terminal: np.ndarray
    info: dict[str, np.ndarray]


class VectorEnv:
    """Steps `num_envs` copies of a task, in this process or in one process each.

    Usage: `reset()` once, then alternate `send(actions)` and `recv()`. After a row with `is_last` the next row of that
    stream is the first of a new episode, and the action sent in between is ignored: no row joins two episodes. Rows are
    the same with and without processes.

    Args:
        config: The task, number of streams and way of running them.
        seed: Not negative. Every episode has a seed of its own, made from `seed`, the stream and the episode's number.
        render: Whether `render()` returns frames. Needs streams in this process.

    Attributes:
        observation_specs: Specs of one row's observations, keys sorted.
        action_specs: Specs of one row's actions, keys sorted.
        num_envs: Number of streams.
        is_parallel: Whether streams run in processes of their own. Those are spawned with one thread each, so a
            script that starts them must keep its entry behind `if __name__ == "__main__":`.

    Raises:
        EnvError: A stream raised while it was reset or stepped, or its process died; the text names the stream
            and the task and has the original traceback. The other methods raise it too.
        ValueError: `seed` is negative, or `render` is asked of streams in processes. See also `make_env`.
    """

    def __init__(self, config: EnvConfig, *, seed: int = 0, render: bool = False) -> None:
        if seed < 0:
            raise ValueError(f"env: seed is {seed}; it must not be negative")
        self.num_envs = config.num_envs
        self.is_parallel = config.use_processes
        if render and self.is_parallel:
            if config.workers == "process":
                raise ValueError("env: frames are rendered in this process only; use workers='inline'")
            self.is_parallel = False
        self.observation_specs: dict[str, ArraySpec]
        self.action_specs: dict[str, ArraySpec]
        self._task = config.task
        self._seed = seed
        self._render = render
        self._pending: dict[str, np.ndarray] | None = None
        self._was_last: np.ndarray | None = None
        self._rows: Steps | None = None
        streams = [Stream(config, i, render) for i in range(config.num_envs)]
        if self.is_parallel:
            probe = make_env(config)
            self.observation_specs, self.action_specs = observation_specs(probe), action_specs(probe)
            spaces = probe.observation_space, probe.action_space
            probe.close()
            self._envs: SyncVectorEnv | ProcessVectorEnv = ProcessVectorEnv([s.with_spaces(spaces) for s in streams])
        else:
            self._envs = SyncVectorEnv(streams, autoreset_mode=AutoresetMode.NEXT_STEP)
            first = self._envs.envs[0]
            self.observation_specs, self.action_specs = observation_specs(first), action_specs(first)

    def reset(self) -> Steps:
        """Starts every stream; the same as `restart(0)`."""
        return self.restart(0)

    def restart(self, counter: int) -> Steps:
        """Abandons the current episodes and starts every stream from `SeedSequence([seed, counter, stream])`.

        Args:
            counter: Not negative; equal counters give equal episodes.

        Returns:
            First rows.

        Raises:
            RuntimeError: Actions were sent and their rows not received.
            ValueError: `counter` is negative.
        """
        if self._pending is not None:
            raise RuntimeError("env: restart while actions are under way; call recv first")
        if counter < 0:
            raise ValueError(f"env: counter is {counter}; it must not be negative")
        words = [np.random.SeedSequence([self._seed, counter, i]).generate_state(1)[0] for i in range(self.num_envs)]
        obs, _ = self._envs.reset(seed=[int(word) & 0x7FFFFFFF for word in words])
        self._was_last = np.zeros(self.num_envs, bool)
        none = np.zeros(self.num_envs, bool)
        reward = np.zeros(self.num_envs, np.float32)
        self._rows = Steps(_arrays(obs), reward, np.ones(self.num_envs, bool), none, none.copy(), {})
        return self._rows

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to bring every stream back to its current row: seeds, actions and the row itself.

        Raises:
            RuntimeError: Not started yet, or actions are under way.
        """
        if self._rows is None or self._pending is not None:
            raise RuntimeError("env: state_dict between send and recv, or before reset; call recv or reset first")
        rows = self._rows
        flags = {name: getattr(rows, name) for name in ("reward", "is_first", "is_last", "is_terminal")}
        return {"streams": list(self._envs.call("episode_record")), "obs": rows.obs, "flags": flags}

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[Steps, bool]:
        """Brings every stream back by starting its episode again and repeating its actions.

        Args:
            state: From `state_dict` of the same task and number of streams.

        Returns:
            The rows, and whether they are those that were saved. A simulator that is not deterministic in its seed shows
            others; then all streams start new episodes.

        Raises:
            ValueError: Another number of streams.
        """
        streams = list(state["streams"])
        if len(streams) != self.num_envs:
            raise ValueError(
                f"env: the state has {len(streams)} streams, this one {self.num_envs}; use the same number"
            )
        self._envs.set_attr("recall", streams)
        obs, _ = self._envs.reset()
        shown = self._envs.call("episode_record")
        same = all(np.array_equal(obs[k], v, equal_nan=v.dtype.kind == "f") for k, v in state["obs"].items())
        for record, again in zip(streams, shown):
            same &= all(record[k] == again[k] for k in ("episode", "reward", "terminated", "truncated"))
        if not same:
            episodes = max(record["episode"] for record in streams)
            return self.restart(episodes + 1), False
        flags = state["flags"]
        self._rows = Steps(_arrays(obs), info={}, **{name: flag.copy() for name, flag in flags.items()})
        self._was_last = self._rows.is_last.copy()
        return self._rows, True

    def send(self, actions: Mapping[str, np.ndarray]) -> None:
        """Hands out one action for each stream and returns at once.

        Streams in processes begin to step; streams in this process step in `recv`.

        Args:
            actions: For each action spec an array `[N, *shape]`. Rows of streams whose last row was `is_last` are
                ignored.

        Raises:
            RuntimeError: Not preceded by `reset`, or called twice without `recv`.
            ValueError: A key is missing or unknown, a shape is wrong, or a value that counts is not finite.
        """
        if self._was_last is None:
            raise RuntimeError("env: send before reset; call reset first")
        if self._pending is not None:
            raise RuntimeError("env: send twice; call recv between")
        checked = self._checked(actions, ~self._was_last)
        self._pending = checked
        if isinstance(self._envs, ProcessVectorEnv):
            self._envs.step_async(checked)

    def recv(self) -> Steps:
        """Waits for the rows that follow the actions sent.

        Raises:
            RuntimeError: Not preceded by `send`.
        """
        if self._pending is None or self._was_last is None:
            raise RuntimeError("env: recv without send; call send first")
        actions, self._pending = self._pending, None
        waited = self._envs.step_wait() if isinstance(self._envs, ProcessVectorEnv) else self._envs.step(actions)
        obs, reward, terminated, truncated, info = waited
        is_first, is_last = self._was_last, terminated | truncated
        self._was_last = is_last.copy()
        reward = np.where(is_first, 0.0, reward).astype(np.float32)
        self._rows = Steps(_arrays(obs), reward, is_first, is_last, terminated, self._closing_info(info, is_last))
        return self._rows

    def render(self) -> np.ndarray | None:
        """Frame of stream 0, uint8 `[H, W, 3]`; None without `render=True` or where the environment draws none.

        Raises:
            ImportError: The environment's drawing package is missing.
        """
        if not self._render or not isinstance(self._envs, SyncVectorEnv):
            return None
        try:
            frame: Any = self._envs.envs[0].render()
        except gymnasium.error.DependencyNotInstalled as error:
            raise ImportError(
                f"env: {self._task} cannot be drawn, a package is missing ({error}); pip install 'onegraph[video]'"
            ) from error
        except NotImplementedError:
            return None
        return None if frame is None else np.asarray(frame, np.uint8)

    def close(self) -> None:
        """Closes every stream and ends every process; calling it again does nothing."""
        self._envs.close()

    def __enter__(self) -> VectorEnv:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _checked(self, actions: Mapping[str, np.ndarray], is_used: np.ndarray) -> dict[str, np.ndarray]:
        if actions.keys() != self.action_specs.keys():
            raise ValueError(
                f"env: {self._task}: actions have the keys {sorted(actions)}; the environment takes "
                f"{sorted(self.action_specs)}"
            )
        checked = {}
        for name, spec in self.action_specs.items():
            array = np.asarray(actions[name])
            if array.shape != (self.num_envs, *spec.shape):
                raise ValueError(
                    f"env: {self._task}: action {name!r} has shape {array.shape}; {self.num_envs} streams take "
                    f"{(self.num_envs, *spec.shape)}"
                )
            finite = np.isfinite(array).reshape(self.num_envs, -1).all(axis=1)
            if bad := np.flatnonzero(is_used & ~finite).tolist():
                raise ValueError(
                    f"env: {self._task}: action {name!r} of stream {bad[0]} is {array[bad[0]]}; actions must be "
                    "finite; the policy has diverged"
                )
            used = is_used.reshape(-1, *[1] * len(spec.shape))
            checked[name] = np.where(used, array, 0).astype(spec.dtype)
        return checked

    def _closing_info(self, info: dict[str, Any], is_last: np.ndarray) -> dict[str, np.ndarray]:
        result = {}
        for name in sorted(info):
            if not name.startswith("_") and f"_{name}" in info:
                result[name] = np.where(info[f"_{name}"] & is_last, info[name], np.nan).astype(np.float32)
        return result


def _arrays(obs: Any) -> dict[str, np.ndarray]:
    return {name: obs[name] for name in sorted(obs)}


__all__ = ["EnvError", "Steps", "VectorEnv"]
