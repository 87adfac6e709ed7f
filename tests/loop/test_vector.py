"""Rows of many streams: where episodes begin and end, that processes change nothing, and how failures come back."""

from __future__ import annotations

import multiprocessing
import os
import time

import numpy as np
import pytest

from onegraph.envs.config import EnvConfig
from onegraph.envs.vector import EnvError, VectorEnv

COUNTER = "tests.loop.envs_for_tests:Counter"
BREAKS = "tests.loop.envs_for_tests:Breaks"


def rollout(envs, num_steps, actions=None):
    rows = [envs.reset()]
    for step in range(num_steps):
        envs.send({"action": np.full((envs.num_envs, 1), 0.1 * (step % 7), np.float32) if actions is None else actions})
        rows.append(envs.recv())
    return rows


def seeds_of(seed, num_envs, counter=0):
    """What each stream's environment is seeded with in its first episode."""
    words = [np.random.SeedSequence([seed, counter, i]).generate_state(1)[0] for i in range(num_envs)]
    first = [np.random.SeedSequence([int(w) & 0x7FFFFFFF, 0]).generate_state(1)[0] for w in words]
    return [int(w) & 0x7FFFFFFF for w in first]


def seed_with_both_lengths():
    return next(s for s in range(100) if [x % 2 for x in seeds_of(s, 2)] == [0, 1])


@pytest.mark.parametrize("workers", ["inline", "process"])
def test_episodes_of_3_and_5_steps_never_share_a_row(workers):
    config = EnvConfig(task=COUNTER, num_envs=2, workers=workers, kwargs={"lengths": (3, 5)})
    with VectorEnv(config, seed=seed_with_both_lengths()) as envs:
        assert envs.is_parallel == (workers == "process")
        rows = rollout(envs, 20)
    for stream, length in enumerate((3, 5)):
        counts = [int(row.obs["observation"][stream, 0]) for row in rows]
        assert counts == [i % (length + 1) for i in range(21)]
        assert [bool(row.is_first[stream]) for row in rows] == [count == 0 for count in counts]
        assert [bool(row.is_last[stream]) for row in rows] == [count == length for count in counts]
        assert [bool(row.is_terminal[stream]) for row in rows] == [count == length for count in counts]
        assert [float(row.reward[stream]) for row in rows] == [float(count > 0) for count in counts]
    assert rows[0].obs["observation"].dtype == rows[0].reward.dtype == np.float32
    assert rows[3].is_last.tolist() == [True, False]
    assert rows[3].obs["observation"][0, 0] == 3


@pytest.mark.parametrize(
    ("end", "terminal"), [("truncated", False), ("terminated", True), ("terminated truncated", True)]
)
def test_only_termination_is_terminal(end, terminal):
    with VectorEnv(EnvConfig(task=COUNTER, num_envs=1, kwargs={"end": end})) as envs:
        row = rollout(envs, 5)[-1]
    assert row.is_last.tolist() == [True]
    assert row.is_terminal.tolist() == [terminal]


def test_time_limit_truncates():
    with VectorEnv(EnvConfig(task="Pendulum-v1", num_envs=1, max_episode_steps=5)) as envs:
        rows = rollout(envs, 6)
    assert [row.is_last[0] for row in rows] == [False] * 5 + [True, False]
    assert not any(row.is_terminal[0] for row in rows)
    assert rows[6].is_first[0]


@pytest.mark.parametrize("workers", ["inline", "process"])
def test_success_of_the_last_step_is_reported(workers):
    config = EnvConfig(task=COUNTER, num_envs=3, workers=workers, kwargs={"lengths": (4,), "success": True})
    with VectorEnv(config) as envs:
        rows = rollout(envs, 25)
    ends = [row for row in rows if row.is_last.any()]
    assert len(ends) == 5
    for row in ends:
        assert row.info["success"].tolist() == [1.0, 1.0, 1.0]
        assert row.info["success"].dtype == np.float32
        assert row.info["nested/count"].tolist() == [4.0, 4.0, 4.0]
        assert sorted(row.info) == ["nested/count", "success"]
    assert all(row.info == {} for row in rows if not row.is_last.any())


def test_success_is_nan_where_a_stream_did_not_end_and_absent_where_nothing_reports_it():
    config = EnvConfig(task=COUNTER, num_envs=2, kwargs={"lengths": (3, 5), "success": True})
    with VectorEnv(config, seed=seed_with_both_lengths()) as envs:
        row = rollout(envs, 3)[-1]
    np.testing.assert_array_equal(row.info["success"], [1.0, np.nan])
    with VectorEnv(EnvConfig(task=COUNTER, num_envs=2)) as envs:
        assert rollout(envs, 5)[-1].info == {}


def test_processes_give_the_same_rows_as_this_process():
    histories = []
    for workers in ("inline", "process"):
        config = EnvConfig(task=COUNTER, num_envs=3, workers=workers, kwargs={"lengths": (3, 4, 7), "noise": True})
        with VectorEnv(config, seed=5) as envs:
            histories.append([*rollout(envs, 15), envs.restart(3), *rollout(envs, 4)])
    for left, right in zip(*histories, strict=True):
        for name in ("reward", "is_first", "is_last", "is_terminal"):
            np.testing.assert_array_equal(getattr(left, name), getattr(right, name))
        np.testing.assert_array_equal(left.obs["observation"], right.obs["observation"])


def test_restart_repeats_and_differs_by_counter_and_stream():
    def history(envs, counter):
        first = envs.restart(counter)
        assert first.is_first.all()
        rows = [first]
        for _ in range(12):
            envs.send({"action": np.zeros((3, 1), np.float32)})
            rows.append(envs.recv())
        return np.stack([row.obs["observation"] for row in rows])

    config = EnvConfig(task=COUNTER, num_envs=3, kwargs={"noise": True})
    with VectorEnv(config, seed=1) as envs, VectorEnv(config, seed=1) as again, VectorEnv(config, seed=2) as other:
        one = history(envs, 1)
        two = history(envs, 2)
        np.testing.assert_array_equal(history(again, 2), two)
        np.testing.assert_array_equal(history(envs, 1), one)
        assert not np.array_equal(one, two)
        assert not np.array_equal(history(other, 1), one)
        assert len(np.unique(one[:, :, 1])) == one[:, :, 1].size
        np.testing.assert_array_equal(envs.reset().obs["observation"], envs.restart(0).obs["observation"])


def test_restart_in_the_middle_of_an_episode_begins_a_new_one():
    with VectorEnv(EnvConfig(task=COUNTER, num_envs=2)) as envs:
        rollout(envs, 5)
        row = envs.restart(1)
        assert row.is_first.all()
        assert not row.is_last.any()
        envs.send({"action": np.zeros((2, 1), np.float32)})
        row = envs.recv()
        assert row.obs["observation"][:, 0].tolist() == [1, 1]
        assert not row.is_first.any()
        assert row.reward.tolist() == [1, 1]


@pytest.mark.parametrize("kwargs", [{}, {"unpicklable": True}])
def test_worker_that_raises_stops_the_parent_with_its_traceback(kwargs):
    envs = VectorEnv(EnvConfig(task=BREAKS, num_envs=4, workers="process", kwargs=kwargs))
    processes = list(envs._envs.processes)
    try:
        start = time.monotonic()
        with pytest.raises(
            EnvError, match=r"env: stream 2 of 4 \(tests.*:Breaks\) raised \w*Error: .*joint limit"
        ) as caught:
            rollout(envs, 60, np.array([[0], [0], [1], [0]], np.float32))
        assert time.monotonic() - start < 30
        assert "envs_for_tests.py" in str(caught.value)
        assert "Traceback (most recent call last)" in str(caught.value)
    finally:
        envs.close()
    assert not any(process.is_alive() for process in processes)


def test_worker_that_dies_is_named():
    envs = VectorEnv(EnvConfig(task=BREAKS, num_envs=2, workers="process", kwargs={"kill": True}))
    processes = list(envs._envs.processes)
    with envs, pytest.raises(EnvError, match=r"the process of stream 1 of 2 \(.*\) died with exit code 17"):
        rollout(envs, 60, np.array([[0], [1]], np.float32))
    assert not any(process.is_alive() for process in processes)


def test_stream_in_this_process_that_raises_is_named_too():
    with VectorEnv(EnvConfig(task=BREAKS, num_envs=2, workers="inline")) as envs:
        with pytest.raises(EnvError, match="env: stream 1 of 2") as caught:
            rollout(envs, 60, np.array([[0], [1]], np.float32))
        assert isinstance(caught.value.__cause__, ValueError)


def test_constructor_that_fails_in_a_worker_tells_why_and_leaves_no_process():
    config = EnvConfig(task=BREAKS, num_envs=2, workers="process", kwargs={"in_constructor": os.getpid()})
    with VectorEnv(config) as envs, pytest.raises(EnvError, match=r"OSError: no licence in this process"):
        envs.reset()
    assert multiprocessing.active_children() == []


def test_constructor_that_fails_here_leaves_no_process():
    with pytest.raises(ValueError, match="unknown task"):
        VectorEnv(EnvConfig(task="Pendulums-v1", num_envs=2, workers="process"))
    assert multiprocessing.active_children() == []


def test_close_with_actions_under_way_and_twice():
    envs = VectorEnv(EnvConfig(task=COUNTER, num_envs=2, workers="process"))
    processes = list(envs._envs.processes)
    envs.reset()
    envs.send({"action": np.zeros((2, 1), np.float32)})
    envs.close()
    envs.close()
    assert not any(process.is_alive() for process in processes)


def test_order_of_calls_and_actions_are_checked():
    zeros = np.zeros((2, 1), np.float32)
    with VectorEnv(EnvConfig(task=COUNTER, num_envs=2, kwargs={"lengths": (2,)})) as envs:
        with pytest.raises(RuntimeError, match="env: send before reset; call reset first"):
            envs.send({"action": zeros})
        envs.reset()
        with pytest.raises(RuntimeError, match="env: recv without send"):
            envs.recv()
        with pytest.raises(ValueError, match=r"actions have the keys \['act'\]; the environment takes \['action'\]"):
            envs.send({"act": zeros})
        with pytest.raises(ValueError, match=r"action 'action' has shape \(2,\); 2 streams take \(2, 1\)"):
            envs.send({"action": zeros[:, 0]})
        with pytest.raises(ValueError, match=r"action 'action' of stream 1 is \[nan\]; actions must be finite"):
            envs.send({"action": np.array([[0], [np.nan]])})
        envs.send({"action": zeros})
        with pytest.raises(RuntimeError, match="env: send twice"):
            envs.send({"action": zeros})
        with pytest.raises(RuntimeError, match="restart while actions are under way"):
            envs.restart(1)
        envs.recv()
        envs.send({"action": zeros})
        assert envs.recv().is_last.all()
        envs.send({"action": np.full((2, 1), np.nan)})
        assert envs.recv().is_first.all()


def test_sent_actions_may_be_overwritten_by_the_caller():
    with VectorEnv(EnvConfig(task="Pendulum-v1", num_envs=1), seed=3) as envs:
        results = []
        for overwrite in (False, True):
            envs.reset()
            action = np.full((1, 1), 0.5, np.float32)
            envs.send({"action": action})
            if overwrite:
                action[:] = -1
            results.append(envs.recv().obs["observation"])
    np.testing.assert_array_equal(*results)


def test_render_returns_frames_only_when_asked():
    pytest.importorskip("pygame")
    with VectorEnv(EnvConfig(task="CartPole-v1", num_envs=1), render=True) as envs:
        envs.reset()
        frame = envs.render()
    assert frame is not None
    assert frame.dtype == np.uint8
    assert frame.shape[2] == 3


def test_render_is_refused_for_processes_and_silent_without():
    with pytest.raises(ValueError, match="frames are rendered in this process only; use workers='inline'"):
        VectorEnv(EnvConfig(task=COUNTER, num_envs=2, workers="process"), render=True)
    with VectorEnv(EnvConfig(task=COUNTER, num_envs=1)) as envs:
        envs.reset()
        assert envs.render() is None


def test_negative_seed_is_refused():
    with pytest.raises(ValueError, match="env: seed is -1; it must not be negative"):
        VectorEnv(EnvConfig(task=COUNTER, num_envs=1), seed=-1)
