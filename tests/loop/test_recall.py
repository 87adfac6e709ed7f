"""Environments come back to their row: seeds and actions are replayed, nothing is unpickled."""

from __future__ import annotations

import random

import numpy as np
import pytest

from onegraph.envs.config import EnvConfig
from onegraph.envs.vector import Steps, VectorEnv

from .envs_for_tests import Counter

COUNTER = "tests.loop.envs_for_tests:Counter"


class Drifts(Counter):
    """Not deterministic in its seed."""

    def _obs(self):
        return np.array([self.count, random.random()], np.float32)


def actions_of(envs: VectorEnv, rng: np.random.Generator) -> dict[str, np.ndarray]:
    out = {}
    for name, spec in envs.action_specs.items():
        size = (envs.num_envs, *spec.shape)
        out[name] = rng.integers(0, 2, size, np.int32) if spec.is_discrete else rng.normal(size=size).astype(np.float32)
    return out


def rollout(envs: VectorEnv, rng: np.random.Generator, steps: int) -> list[Steps]:
    rows = []
    for _ in range(steps):
        envs.send(actions_of(envs, rng))
        rows.append(envs.recv())
    return rows


def assert_same(a: Steps, b: Steps) -> None:
    for name in a.obs:
        np.testing.assert_array_equal(a.obs[name], b.obs[name])
    for name in ("reward", "is_first", "is_last", "is_terminal"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@pytest.mark.parametrize(
    ("task", "workers"),
    [
        ("CartPole-v1", "inline"),
        ("CartPole-v1", "process"),
        ("Pendulum-v1", "inline"),
        ("MountainCarContinuous-v0", "inline"),
        (COUNTER, "inline"),
    ],
)
def test_every_row_comes_back(task: str, workers: str) -> None:
    kwargs = {"lengths": (3, 5, 4), "noise": True} if task == COUNTER else {}
    config = EnvConfig(task=task, num_envs=3, workers=workers, kwargs=kwargs)
    cuts = range(1, 14) if workers == "inline" else (7,)
    for cut in cuts:  # a few of them are the last row of some episode
        rng, again_rng = np.random.default_rng(cut), np.random.default_rng(cut)
        with VectorEnv(config, seed=7) as envs:
            envs.reset()
            rollout(envs, rng, cut)
            state = envs.state_dict()
            after = rollout(envs, rng, 12)
        with VectorEnv(config, seed=7) as envs:
            envs.reset()
            rows, is_same = envs.load_state_dict(state)
            assert is_same
            for _ in range(cut):
                actions_of(envs, again_rng)
            np.testing.assert_array_equal(rows.reward, state["flags"]["reward"])
            for a, b in zip(after, rollout(envs, again_rng, 12)):
                assert_same(a, b)


def test_the_first_row_comes_back() -> None:
    with VectorEnv(EnvConfig(task="CartPole-v1", num_envs=2), seed=1) as envs:
        first = envs.reset()
        state = envs.state_dict()
        rollout(envs, np.random.default_rng(0), 3)
        rows, is_same = envs.load_state_dict(state)
        assert is_same
        assert_same(first, rows)


def test_a_simulator_that_goes_another_way_starts_new_episodes() -> None:
    with VectorEnv(EnvConfig(task="tests.loop.test_recall:Drifts", num_envs=2, kwargs={"lengths": (9,)})) as envs:
        envs.reset()
        rollout(envs, np.random.default_rng(0), 4)
        rows, is_same = envs.load_state_dict(envs.state_dict())
        assert not is_same
        assert rows.is_first.all()
        rollout(envs, np.random.default_rng(0), 12)


def test_episodes_have_seeds_of_their_own() -> None:
    with VectorEnv(EnvConfig(task=COUNTER, num_envs=2, kwargs={"lengths": (2,), "noise": True})) as envs:
        envs.reset()
        rows = rollout(envs, np.random.default_rng(0), 30)
        noise = [row.obs["observation"][:, 1] for row in rows if row.is_first.any()]
        assert len({float(x) for pair in noise for x in pair}) == 2 * len(noise)


def test_state_needs_a_started_and_idle_vector() -> None:
    with VectorEnv(EnvConfig(task="CartPole-v1", num_envs=1)) as envs:
        with pytest.raises(RuntimeError, match="call recv or reset first"):
            envs.state_dict()
        envs.reset()
        state = envs.state_dict()
        envs.send({"action": np.zeros(1, np.int32)})
        with pytest.raises(RuntimeError, match="call recv or reset first"):
            envs.state_dict()
        envs.recv()
        with pytest.raises(ValueError, match="the state has 2 streams, this one 1"):
            envs.load_state_dict({**state, "streams": state["streams"] * 2})
