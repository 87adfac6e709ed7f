"""Where policy, environments and replay meet: one step of collection, and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from onegraph.data.replay import Replay, Sample
from onegraph.dreamer.policy import Carry, DreamerPolicy
from onegraph.envs.config import EnvConfig
from onegraph.envs.vector import Steps, VectorEnv
from onegraph.specs import ArraySpec

# Added to a run's seed, so that evaluation meets other episodes than training, and the final one others than those along
# the way, which may have decided when to stop.
EVAL_SEED = 1_000_003
PERIODIC_EVAL_SEED = 2_000_003
CONFIRM_EVAL_SEED = 3_000_003
MAX_EVAL_STEPS = 30_000  # an episode longer than that counts as it stands


def replay_fields(
    observations: Mapping[str, ArraySpec], actions: Mapping[str, ArraySpec], belief_dim: int, state_dim: int
) -> dict[str, tuple[tuple[int, ...], str]]:
    """What one stored step holds: name -> (shape, numpy dtype). States are one-hot, so a byte an entry is exact."""
    fields: dict[str, tuple[tuple[int, ...], str]] = {}
    fields |= {f"observation/{k}": (s.shape, s.dtype) for k, s in observations.items()}
    fields |= {f"action/{k}": (s.shape, s.dtype) for k, s in actions.items()}
    fields |= {name: ((), "bool") for name in ("is_first", "is_last", "is_terminal")}
    fields["reward"] = ((), "float32")
    fields["belief"] = ((belief_dim,), "float32")
    fields["state"] = ((state_dim,), "uint8")
    return fields


def make_batch(sample: Sample, device: torch.device) -> TensorDict:
    """A replayed window [B, T + 1] as the learner's batch [B, T].

    Index 0 of the window is context: its latents seed the recurrence and its action leads to the first trained step.
    """
    data = {k: v.to(device, non_blocking=True) for k, v in sample.data.items()}
    size = (data["reward"].shape[0], data["reward"].shape[1] - 1)

    def group(prefix: str, window: slice) -> TensorDict:
        entries = {k.removeprefix(prefix): v[:, window] for k, v in data.items() if k.startswith(prefix)}
        return TensorDict(dict(entries), size)

    now, before = slice(1, None), slice(None, -1)
    return TensorDict(
        {
            "observation": group("observation/", now),
            "action": group("action/", before),
            **{k: data[k][:, now] for k in ("reward", "is_first", "is_last", "is_terminal")},
            "belief": data["belief"][:, before],
            "state": data["state"][:, before],
        },
        size,
    )


class EpisodeTracker:
    """Adds up the rewards of each stream's current episode.

    Args:
        num_streams: Streams.
    """

    def __init__(self, num_streams: int):
        self.returns = np.zeros(num_streams, np.float64)
        self.lengths = np.zeros(num_streams, np.int64)

    def update(self, rows: Steps) -> list[dict[str, float]]:
        """Takes one row a stream; returns `episode/return`, `episode/length` (actions) and, where the environment
        tells,
        `episode/success` of each episode that ended."""
        self.returns[rows.is_first] = 0
        self.lengths[rows.is_first] = 0
        self.returns += rows.reward
        self.lengths += ~rows.is_first
        ended = []
        for i in np.flatnonzero(rows.is_last):
            episode = {"episode/return": float(self.returns[i]), "episode/length": float(self.lengths[i])}
            success = rows.info.get("success")
            if success is not None and np.isfinite(success[i]):
                episode["episode/success"] = float(success[i])
            ended.append(episode)
        return ended

    def state_dict(self) -> dict[str, Any]:
        """Running sums."""
        return {"returns": torch.from_numpy(self.returns.copy()), "lengths": torch.from_numpy(self.lengths.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict()`."""
        self.returns = state["returns"].numpy().copy()
        self.lengths = state["lengths"].numpy().copy()


class Collector:
    """Acts in N streams and stores what happened.

    Args:
        policy: Shares the learner's parameters.
        envs: N streams.
        replay: Takes every step, or None while evaluating.
    """

    def __init__(self, policy: DreamerPolicy, envs: VectorEnv, replay: Replay | None):
        self.policy = policy
        self.envs = envs
        self.replay = replay
        self.carry: Carry = policy.initial(envs.num_envs)
        self.rows: Steps = envs.reset()

    def act(self, *, mode: bool = False) -> None:
        """Chooses actions for the current rows, stores rows, actions and latents, and sends the actions off."""
        rows, device = self.rows, self.policy.device
        observation = {k: torch.from_numpy(v).to(device) for k, v in rows.obs.items()}
        actions, self.carry = self.policy.act(
            observation, torch.from_numpy(rows.is_first).to(device), self.carry, mode=mode
        )
        arrays = {k: v.cpu().numpy() for k, v in actions.items()}
        if self.replay is not None:
            self._store(rows, arrays)
        self.envs.send(arrays)

    def receive(self) -> None:
        """Waits for the next rows."""
        self.rows = self.envs.recv()

    def _store(self, rows: Steps, actions: Mapping[str, np.ndarray]) -> None:
        assert self.replay is not None
        step = {f"observation/{k}": v for k, v in rows.obs.items()}
        for key, value in actions.items():
            # Nothing follows from an action after the last observation of an episode: it is stored as zero.
            keep = (~rows.is_last).reshape(-1, *[1] * (value.ndim - 1))
            step[f"action/{key}"] = value * keep.astype(value.dtype)
        step["reward"] = rows.reward
        step |= {"is_first": rows.is_first, "is_last": rows.is_last, "is_terminal": rows.is_terminal}
        step["belief"] = self.carry.belief.float().cpu().numpy()
        step["state"] = self.carry.state.to(torch.uint8).cpu().numpy()
        self.replay.add(step)

    def state_dict(self) -> dict[str, Any]:
        """Carry and environments, as tensors and plain values."""
        return {
            "carry": {k: v.cpu() for k, v in self.carry._asdict().items()},
            "envs": to_tensor_tree(self.envs.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Restores `state_dict()`; returns whether the environments came back to the rows that were saved."""
        device = self.policy.device
        self.carry = Carry(**{k: v.to(device) for k, v in state["carry"].items()})
        self.rows, is_same = self.envs.load_state_dict(to_array_tree(state["envs"]))
        return is_same


class EpisodeResults(NamedTuple):
    """Finished evaluation episodes.

    Attributes:
        returns: [E].
        lengths: [E].
        successes: [E], or None where the environment reports no success.
        frames: Rendered frames of the first episode, uint8 [T, H, W, 3], or None.
    """

    returns: np.ndarray
    lengths: np.ndarray
    successes: np.ndarray | None
    frames: np.ndarray | None

    def metrics(self) -> dict[str, float]:
        """Mean, spread and extremes, named `eval/...`."""
        out = {
            "eval/return": float(self.returns.mean()),
            "eval/return_std": float(self.returns.std()),
            "eval/return_min": float(self.returns.min()),
            "eval/return_max": float(self.returns.max()),
            "eval/length": float(self.lengths.mean()),
            "eval/episodes": float(len(self.returns)),
        }
        if self.successes is not None:
            out["eval/success"] = float(self.successes.mean())
        return out


def evaluate(
    policy: DreamerPolicy,
    env: EnvConfig,
    *,
    episodes: int,
    seed: int,
    video: bool = False,
    mode: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> EpisodeResults | None:
    """Runs whole episodes in environments of their own. No generator of the caller advances.

    Each stream contributes its first episodes in equal number, so that short episodes are not over-represented; the
    same seed and parameters give the same result.

    Args:
        policy: What acts.
        env: Task; as many in-line streams as there are episodes, at most 10.
        episodes: Episodes to count.
        seed: Of environments and draws.
        video: Keep the frames of stream 0's first episode.
        mode: Take the most likely actions instead of samples.
        should_stop: Asked before each step; a true answer ends the evaluation.

    Returns:
        The episodes, or None if the evaluation was stopped.
    """
    num_envs = 1 if video and episodes == 1 else min(episodes, 10)
    quota = np.full(num_envs, episodes // num_envs)
    quota[: episodes % num_envs] += 1
    config = replace(env, num_envs=num_envs, workers="inline")
    devices = [policy.device] if policy.device.type == "cuda" else []
    returns, lengths, successes, frames = [], [], [], []
    with torch.random.fork_rng(devices), VectorEnv(config, seed=seed, render=video) as envs:
        torch.manual_seed(seed)
        collector, tracker = Collector(policy, envs, None), EpisodeTracker(num_envs)
        steps = np.zeros(num_envs, np.int64)
        first_done = False
        while quota.any():
            if should_stop():
                return None
            rows = collector.rows
            ended = iter(tracker.update(rows))
            if video and not first_done:
                frame = _frame(envs, rows)
                if frame is not None:
                    frames.append(frame)
                first_done = bool(rows.is_last[0])
            steps = np.where(rows.is_first, 0, steps + 1)
            for i in np.flatnonzero(rows.is_last):
                episode = next(ended)
                if quota[i]:
                    quota[i] -= 1
                    returns.append(episode["episode/return"])
                    lengths.append(episode["episode/length"])
                    successes.append(episode.get("episode/success", np.nan))
            for i in np.flatnonzero((steps >= MAX_EVAL_STEPS) & (quota > 0)):
                quota[i] = 0
                returns.append(float(tracker.returns[i]))
                lengths.append(float(tracker.lengths[i]))
                successes.append(np.nan)
            if quota.any():
                collector.act(mode=mode)
                collector.receive()
    success = np.array(successes)
    return EpisodeResults(
        np.array(returns),
        np.array(lengths),
        None if np.isnan(success).all() else np.nan_to_num(success),
        np.stack(frames) if frames else None,
    )


def check_rendering(env: EnvConfig) -> None:
    """Draws one frame, so that a run that will need frames fails before it starts.

    Raises:
        ImportError: A drawing package is missing; names the extra.
        ValueError: The environment draws nothing and shows no image.
    """
    with VectorEnv(replace(env, num_envs=1, workers="inline"), render=True) as envs:
        if _frame(envs, envs.reset()) is None:
            raise ValueError(
                f"train: video is on but {env.task} has no render() and no image observation; give it a render method that "
                "returns [height, width, 3] bytes, or turn video off"
            )


def _frame(envs: VectorEnv, rows: Steps) -> np.ndarray | None:
    """What stream 0 looks like: drawn, or else its first image observation of one or three channels; uint8 [H, W, C]."""
    frame = envs.render()
    if frame is not None:
        return frame
    for name, spec in envs.observation_specs.items():
        if spec.is_image and spec.shape[2] in (1, 3):
            return rows.obs[name][0].copy()
    return None


def to_tensor_tree(value: Any) -> Any:
    """Arrays inside dicts and lists to tensors, for a checkpoint."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping):
        return {k: to_tensor_tree(v) for k, v in value.items()}
    return [to_tensor_tree(v) for v in value] if isinstance(value, list) else value


def to_array_tree(value: Any) -> Any:
    """Inverse of `to_tensor_tree`."""
    if isinstance(value, Tensor):
        return value.numpy().copy()
    if isinstance(value, Mapping):
        return {k: to_array_tree(v) for k, v in value.items()}
    return [to_array_tree(v) for v in value] if isinstance(value, list) else value
