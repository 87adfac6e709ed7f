"""Whatever is added, overwritten, drawn and written back: windows are true pieces of one stream."""

import tempfile
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onegraph.data.replay import Replay, Sample

FIELDS = {
    "observation/x": ((2,), "int32"),
    "belief": ((3,), "float32"),
    "state": ((2, 2), "uint8"),
    "is_first": ((), "bool"),
    "is_last": ((), "bool"),
    "is_terminal": ((), "bool"),
}


class Twin:
    """Keeps every step ever added, in plain lists, and says what the replay should hold."""

    def __init__(self, num_streams: int, stream_capacity: int, window: int):
        self.streams = [[] for _ in range(num_streams)]
        self.capacity, self.window = stream_capacity, window
        self.queue = []

    def oldest(self, stream: int) -> int:
        return max(0, len(self.streams[stream]) - self.capacity)

    def add(self, stream: int, row: dict[str, np.ndarray]) -> None:
        previous = len(self.streams[stream])
        self.streams[stream].append(row)
        if previous > 0 and previous % self.window == 0:
            self.queue.append((stream, previous + 1 - self.window))
        self.queue = [(s, i) for s, i in self.queue if i >= self.oldest(s)]

    def starts(self) -> list[tuple[int, int]]:
        return [
            (s, i) for s, steps in enumerate(self.streams) for i in range(self.oldest(s), len(steps) - self.window + 1)
        ]

    def check(self, sample: Sample, online: bool) -> None:
        drawn = list(zip(sample.streams.tolist(), sample.starts.tolist()))
        if online:
            popped, self.queue = self.queue[: len(drawn)], self.queue[len(drawn) :]
            assert drawn[: len(popped)] == popped
        legal = set(self.starts())
        for row, (stream, start) in enumerate(drawn):
            assert (stream, start) in legal
            steps = self.streams[stream][start : start + self.window]
            for name in FIELDS:
                expected = np.stack([step[name] for step in steps])
                if name == "is_first":
                    expected[0] = True
                if name == "is_last":
                    expected[:-1] |= np.array([step["is_first"] for step in steps[1:]], bool)
                np.testing.assert_array_equal(sample.data[name][row].numpy(), expected, err_msg=name)


class World:
    """A replay and its twin, fed by one random source."""

    def __init__(self, rng: np.random.Generator, num_streams: int, window: int, spare: int, **options):
        self.rng, self.num_streams, self.window = rng, num_streams, window
        capacity = num_streams * (window + spare) + int(rng.integers(num_streams))
        self.build = lambda **more: Replay(
            FIELDS, num_streams=num_streams, capacity=capacity, window=window, **{**options, **more}
        )
        self.replay = self.build()
        self.twin = Twin(num_streams, window + spare, window)
        self.stale = 0

    def add(self) -> None:
        n = self.num_streams
        ids = np.array([1000 * s + len(steps) for s, steps in enumerate(self.twin.streams)])
        step = {
            "observation/x": np.stack([ids, -ids], -1).astype(np.int32),
            "belief": (ids[:, None] + np.array([0.25, 0.5, 0.75])).astype(np.float32),
            "state": self.rng.integers(0, 256, (n, 2, 2), np.uint8),
            "is_first": self.rng.random(n) < 0.2,
            "is_last": self.rng.random(n) < 0.2,
            "is_terminal": self.rng.random(n) < 0.1,
        }
        mask = self.rng.random(n) < 0.7 if self.rng.random() < 0.5 else None
        self.replay.add(step, mask)
        for s in range(n):
            if mask is None or mask[s]:
                self.twin.add(s, {name: np.array(value[s]) for name, value in step.items()})

    def sample(self) -> Sample | None:
        if not self.twin.starts():
            assert not self.replay.can_sample(1)
            return None
        online = bool(self.rng.random() < 0.7)
        sample = self.replay.sample(int(self.rng.integers(1, 5)), online=online)
        self.twin.check(sample, online)
        return sample

    def write_back(self, sample: Sample) -> None:
        offset = int(self.rng.integers(self.window))
        length = int(self.rng.integers(1, self.window - offset + 1))
        batch = len(sample.starts)
        belief = self.rng.standard_normal((batch, length, 3)).astype(np.float32)
        state = self.rng.integers(0, 256, (batch, length, 2, 2), np.uint8)
        skipped = self.replay.write_back(sample, {"belief": torch.from_numpy(belief), "state": state}, offset=offset)
        expected = 0
        for row, (stream, start) in enumerate(zip(sample.streams.tolist(), sample.starts.tolist())):
            for t in range(length):
                index = start + offset + t
                if index < self.twin.oldest(stream):
                    expected += 1
                else:
                    self.twin.streams[stream][index]["belief"] = belief[row, t]
                    self.twin.streams[stream][index]["state"] = state[row, t]
        self.stale += expected
        assert skipped == expected

    def check_all(self) -> None:
        twin, replay = self.twin, self.replay
        assert replay.num_windows == len(twin.starts())
        assert replay.num_steps == sum(min(len(steps), twin.capacity) for steps in twin.streams)
        assert replay.total_added == sum(map(len, twin.streams))
        assert replay.num_stale == self.stale
        assert replay.stats()["replay/online_queue"] == len(twin.queue)
        if twin.starts():
            twin.check(replay.sample(40, online=False), online=False)

    def play(self, num_actions: int) -> None:
        held = []
        for _ in range(num_actions):
            action = self.rng.random()
            if action < 0.7:
                self.add()
            elif action < 0.85 and (sample := self.sample()) is not None:
                held.append(sample)
            elif held:
                self.write_back(held.pop(int(self.rng.integers(len(held)))))
        self.check_all()


worlds = {
    "seed": st.integers(0, 2**32),
    "num_streams": st.integers(1, 4),
    "window": st.integers(1, 6),
    "spare": st.integers(0, 9),
    "num_actions": st.integers(0, 120),
}


@settings(max_examples=100, deadline=None)
@given(**worlds)
def test_windows_and_write_backs_agree_with_a_list_of_everything(seed, num_streams, window, spare, num_actions):
    World(np.random.default_rng(seed), num_streams, window, spare).play(num_actions)


@settings(max_examples=25, deadline=None)
@given(**worlds)
def test_mapped_files_change_nothing(seed, num_streams, window, spare, num_actions):
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(seed)
        world = World(rng, num_streams, window, spare, memory_budget=0, directory=Path(folder))
        assert list(Path(folder).glob("*/*.bin"))
        world.play(num_actions)
        world.replay.close()
        assert not list(Path(folder).iterdir())


@settings(max_examples=40, deadline=None)
@given(more=st.integers(0, 60), **worlds)
def test_a_loaded_replay_goes_on_identically(seed, num_streams, window, spare, num_actions, more):
    world = World(np.random.default_rng(seed), num_streams, window, spare)
    world.play(num_actions)
    saved = world.replay
    # A replay of another seed, with contents that load must replace.
    world.replay, world.twin, twin = world.build(seed=9), Twin(num_streams, window + spare, window), world.twin
    for _ in range(20):
        world.add()
    loaded, world.twin = world.replay, twin
    with tempfile.TemporaryDirectory() as folder:
        saved.save(Path(folder))
        loaded.load(Path(folder))
    assert loaded.stats() == saved.stats()
    for _ in range(3):
        if saved.can_sample(3):
            a, b = saved.sample(3), loaded.sample(3)
            twin.check(b, online=True)
            assert a.streams.tolist() == b.streams.tolist()
            assert a.starts.tolist() == b.starts.tolist()
            assert all(torch.equal(a.data[name], b.data[name]) for name in FIELDS)
    world.play(more)


def test_uniform_over_all_windows_of_all_streams():
    replay = Replay(FIELDS, num_streams=3, capacity=60, window=5, online=False, seed=3)
    for i in range(50):  # stored 20, 13 and 7 steps: 16, 9 and 3 windows
        step = {name: np.zeros((3, *shape), dtype) for name, (shape, dtype) in FIELDS.items()}
        replay.add(step, np.array([True, i < 13, i < 7]))
    assert replay.num_windows == 28
    draws = 28 * 500
    sample = replay.sample(draws)
    _, counts = np.unique(1000 * sample.streams + sample.starts, return_counts=True)
    assert len(counts) == 28
    statistic = ((counts - 500) ** 2 / 500).sum()
    assert statistic < 55.5  # 99.9% quantile of chi-square with 27 degrees of freedom
