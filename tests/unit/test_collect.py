"""Windows become batches without a shift by one; episodes are counted once; evaluation is fair and repeatable."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onegraph.data.replay import Replay
from onegraph.dreamer.policy import DreamerPolicy
from onegraph.envs.config import EnvConfig
from onegraph.envs.vector import Steps, VectorEnv
from onegraph.specs import ArraySpec
from onegraph.train import collect
from onegraph.train.collect import Collector, EpisodeTracker, evaluate, make_batch, replay_fields

from ..fakes import MOVE, VECTOR, micro_loss

COUNTER = "tests.loop.envs_for_tests:Counter"
F32 = "float32"


def test_the_action_of_a_step_is_the_one_that_led_to_it() -> None:
    fields = replay_fields({"vector": VECTOR}, {"action": MOVE}, 16, 16)
    replay = Replay(fields, num_streams=1, capacity=50, window=7)
    for t in range(40):
        step = {k: np.zeros((1, *shape), dtype) for k, (shape, dtype) in fields.items()}
        step["observation/vector"][:] = t
        step["action/action"][:] = t + np.array([0, 1000])
        step["belief"][:] = t
        step["reward"][:] = t
        step["is_first"][:] = t % 9 == 0
        replay.add(step)
    for _ in range(20):
        sample = replay.sample(5)
        batch = make_batch(sample, torch.device("cpu"))
        assert batch.batch_size == (5, 6)
        now = torch.from_numpy(sample.starts)[:, None] + torch.arange(1, 7)
        assert torch.equal(batch["observation", "vector"][..., 0], now.float())
        assert torch.equal(batch["reward"], now.float())
        assert torch.equal(batch["action", "action"], torch.stack([now - 1, now + 999], -1).float())
        assert torch.equal(batch["belief"][:, 0, 0], now[:, 0] - 1.0)
        assert torch.equal(batch["is_first"], now % 9 == 0)  # the mark on the context step was cut


def rows(reward, first, last, **info) -> Steps:
    first, last = np.array(first), np.array(last)
    arrays = {k: np.array(v, np.float32) for k, v in info.items()}
    return Steps({}, np.array(reward, np.float32), first, last, last, arrays)


def test_tracker_counts_each_episode_once() -> None:
    tracker = EpisodeTracker(2)
    no = [False, False]
    assert tracker.update(rows([0, 0], [True, True], no)) == []
    assert tracker.update(rows([1, 5], no, no)) == []
    ended = tracker.update(rows([1, 5], no, [True, False], success=[1, np.nan]))
    assert ended == [{"episode/return": 2, "episode/length": 2, "episode/success": 1}]
    ended = tracker.update(rows([0, 5], [True, False], [False, True]))
    assert ended == [{"episode/return": 15, "episode/length": 3}]


class Still(DreamerPolicy):
    """Acts with zeros."""

    def act(self, observation, is_first, carry, *, mode=False):
        return {"action": torch.zeros(len(is_first), 1)}, carry


def still() -> Still:
    return Still(
        micro_loss({"observation": ArraySpec(shape=(2,), dtype=F32)}, {"action": ArraySpec(shape=(1,), dtype=F32)})
    )


def test_evaluation_reports_success_where_there_is_one() -> None:
    config = EnvConfig(task=COUNTER, kwargs={"lengths": (4,), "success": True})
    results = evaluate(still(), config, episodes=13, seed=0)
    assert results is not None
    assert results.returns.tolist() == [4.0] * 13
    assert results.metrics()["eval/success"] == 1
    silent = evaluate(still(), EnvConfig(task=COUNTER, kwargs={"lengths": (4,)}), episodes=2, seed=0)
    assert silent is not None
    assert "eval/success" not in silent.metrics()


def test_short_episodes_are_not_over_represented() -> None:
    config = EnvConfig(task=COUNTER, kwargs={"lengths": (2, 30)})
    results = evaluate(still(), config, episodes=20, seed=3)
    assert results is not None
    lengths = sorted(results.lengths.tolist())
    # Each of the ten streams keeps its own length, so every length occurs twice as often as there are such streams.
    assert len(lengths) == 20
    assert lengths.count(2.0) % 2 == 0
    assert 0 < lengths.count(2.0) < 20


def test_an_endless_episode_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "MAX_EVAL_STEPS", 50)
    results = evaluate(still(), EnvConfig(task=COUNTER, kwargs={"lengths": (10**9,)}), episodes=2, seed=0)
    assert results is not None
    assert results.lengths.tolist() == [50, 50]


def test_evaluation_leaves_the_generator_alone() -> None:
    policy = still()
    before = torch.get_rng_state()
    evaluate(policy, EnvConfig(task=COUNTER, kwargs={"lengths": (4,)}), episodes=3, seed=0)
    assert torch.equal(before, torch.get_rng_state())


def test_the_action_after_the_last_observation_is_stored_as_zero() -> None:
    loss = micro_loss({"observation": ArraySpec(shape=(2,), dtype=F32)}, {"action": ArraySpec(shape=(1,), dtype=F32)})
    with VectorEnv(EnvConfig(task=COUNTER, num_envs=2, kwargs={"lengths": (3,)})) as envs:
        fields = replay_fields(envs.observation_specs, envs.action_specs, 16, 16)
        replay = Replay(fields, num_streams=2, capacity=100, window=13)
        collector = Collector(DreamerPolicy(loss), envs, replay)
        for _ in range(13):
            collector.act()
            collector.receive()
    data = replay.sample(1, online=False).data
    is_last = data["is_last"][0]
    assert is_last.tolist() == [t % 4 == 3 for t in range(13)]
    assert (data["action/action"][0][is_last] == 0).all()
    assert (data["action/action"][0][~is_last] != 0).all()
    assert data["reward"][0].tolist() == [float(t % 4 > 0) for t in range(13)]
    assert data["observation/observation"][0, :, 0].tolist() == [t % 4 for t in range(13)]
