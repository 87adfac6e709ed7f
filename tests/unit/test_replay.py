"""Replay: exact cases, error texts, cost."""

import hashlib
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from onegraph.data.replay import Replay

FLAGS = {name: ((), "bool") for name in ("is_first", "is_last", "is_terminal")}


def make(num_streams=1, capacity=1000, window=5, fields=None, **options) -> Replay:
    fields = {"action": ((4,), "float32"), **FLAGS} if fields is None else fields
    return Replay(fields, num_streams=num_streams, capacity=capacity, window=window, **options)


def step_of(index: int, num_streams: int = 1) -> dict[str, np.ndarray]:
    """Action dimension d of step i is i + 1000 d."""
    step = {name: np.zeros(num_streams, bool) for name in FLAGS}
    action = index + 1000.0 * np.arange(4, dtype=np.float32)
    return {"action": np.tile(action, (num_streams, 1)).astype(np.float32), **step}


def fill(replay: Replay, begin: int, end: int) -> None:
    for index in range(begin, end):
        replay.add(step_of(index, replay.num_streams))


def checksum(replay: Replay) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in replay._storage.arrays.values())).hexdigest()


def test_every_window_is_drawn_equally_often():
    replay = make(window=65, online=False)
    fill(replay, 0, 70)
    starts = np.concatenate([replay.sample(100).starts for _ in range(60)])
    values, counts = np.unique(starts, return_counts=True)
    assert values.tolist() == [0, 1, 2, 3, 4, 5]
    assert (abs(counts - 1000) <= 150).all()


def test_shifting_a_sample_leaves_the_storage_alone():
    replay = make(window=65, capacity=300)
    fill(replay, 0, 400)
    before = checksum(replay)
    kept = replay.sample(16)
    copies = {name: value.clone() for name, value in kept.data.items()}
    for _ in range(200):
        sample = replay.sample(16)
        action = sample.data["action"]
        t = torch.from_numpy(sample.starts)[:, None] + torch.arange(1, 65)
        previous = action[:, :-1].clone()
        assert torch.equal(previous, (t - 1)[..., None] + 1000.0 * torch.arange(4))
        for value in sample.data.values():
            value.zero_()
    assert checksum(replay) == before
    assert all(torch.equal(kept.data[name], value) for name, value in copies.items())


def test_online_windows_come_first_once_and_in_order():
    replay = make(window=5, capacity=26)
    fill(replay, 0, 26)
    assert replay.sample(3, online=False).starts.shape == (3,)
    assert replay.stats()["replay/online_queue"] == 5
    assert replay.sample(2).starts.tolist() == [1, 6]
    sample = replay.sample(5)
    assert sample.starts[:3].tolist() == [11, 16, 21]
    assert sample.data["action"][0, :, 0].tolist() == [11, 12, 13, 14, 15]
    assert replay.stats()["replay/online_queue"] == 0
    assert 0 <= replay.sample(1).starts[0] <= 21


def test_evicted_windows_leave_the_queue():
    replay = make(window=5, capacity=26)
    fill(replay, 0, 26 + 7)  # steps 0 to 6 are gone; 26 and 31 were queued meanwhile
    assert replay.stats()["replay/online_queue"] == 4
    assert replay.sample(4).starts.tolist() == [11, 16, 21, 26]
    assert replay.sample(200).starts.min() >= 7


def test_queue_takes_turns_between_streams():
    replay = make(num_streams=2, window=2)
    fill(replay, 0, 5)
    sample = replay.sample(4)
    assert list(zip(sample.streams.tolist(), sample.starts.tolist())) == [(0, 1), (1, 1), (0, 3), (1, 3)]


def test_flags_of_the_copy():
    replay = make(window=4)
    for index in range(4):
        replay.add({**step_of(index), "is_first": np.array([index == 2])})
    data = replay.sample(1).data
    assert data["is_first"].tolist() == [[True, False, True, False]]
    assert data["is_last"].tolist() == [[False, True, False, False]]


def test_too_few_steps():
    replay = make(num_streams=2, window=65)
    with pytest.raises(ValueError, match=r"replay: 0 steps stored"):
        replay.sample(1)
    fill(replay, 0, 50)
    assert not replay.can_sample(16)
    with pytest.raises(ValueError) as error:
        replay.sample(16)
    assert str(error.value) == (
        "replay: 100 steps stored but a batch needs 16 x 65, that is 65 consecutive steps of one stream, and the "
        "longest of 2 streams holds 50; raise learning_starts or lower batch_length"
    )
    fill(replay, 50, 65)
    assert replay.can_sample(16)
    assert replay.sample(16).data["action"].shape == (16, 65, 4)


def test_stale_write_backs_are_skipped_and_counted():
    replay = make(window=5, capacity=5, online=False)
    fill(replay, 0, 5)
    sample = replay.sample(2)
    assert sample.starts.tolist() == [0, 0]
    fill(replay, 5, 8)  # steps 0, 1 and 2 are overwritten by 5, 6 and 7
    values = torch.full((2, 4, 4), -1.0, dtype=torch.bfloat16)
    assert replay.write_back(sample, {"action": values}, offset=1) == 4
    assert replay.num_stale == 4
    assert replay.sample(1).data["action"][0, :, 0].tolist() == [-1, -1, 5, 6, 7]
    fill(replay, 8, 20)
    before = checksum(replay)
    assert replay.write_back(sample, {"action": values}, offset=0) == 8
    assert checksum(replay) == before
    assert replay.stats()["replay/stale_writes"] == 12


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"action": None}, r"step lacks \['action'\] and has unknown \[\]"),
        ({"reward": np.zeros(1)}, r"step lacks \[\] and has unknown \['reward'\]"),
        ({"action": np.zeros((1, 4))}, r"'action' expects float32\[1, 4\] .* was given float64\[1, 4\]"),
        ({"action": np.zeros((1, 3), "float32")}, r"'action' expects float32\[1, 4\] .* was given float32\[1, 3\]"),
    ],
)
def test_add_names_what_is_wrong(change, text):
    replay = make()
    step = {name: value for name, value in {**step_of(0), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=text):
        replay.add(step)
    assert replay.total_added == 0


def test_add_refuses_a_mask_that_does_not_fit():
    with pytest.raises(ValueError, match=r"mask is int64\[1\]; it must be bool\[1\]"):
        make().add(step_of(0), np.array([1]))


@pytest.mark.parametrize(
    ("values", "offset", "text"),
    [
        ({}, 0, r"write_back was given \[\]"),
        ({"latent": np.zeros((2, 4))}, 1, r"write_back was given \['latent'\]; give one or more of \['action'"),
        ({"action": np.zeros((2, 5, 4), "float32")}, 1, r"\[2, 5\] at offset 1 .* offset \+ T must be at most 5"),
        ({"action": np.zeros((3, 4, 4), "float32")}, 1, r"\[3, 4\] at offset 1 does not fit a sample of 2 x 5"),
        ({"action": np.zeros((2, 4, 3), "float32")}, 1, r"expects shape \[2, 4, 4\] but was given \[2, 4, 3\]"),
        ({"is_last": torch.zeros(2, 4)}, 1, r"'is_last' is float32 but bool is stored"),
    ],
)
def test_write_back_names_what_is_wrong(values, offset, text):
    replay = make()
    fill(replay, 0, 9)
    with pytest.raises(ValueError, match=text):
        replay.write_back(replay.sample(2), values, offset=offset)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_streams": 0}, r"num_streams is 0; it must be at least 1"),
        ({"window": 0}, r"window is 0; it must be at least 1"),
        ({"num_streams": 4, "capacity": 19}, r"4 streams 4 steps but a window needs 5; raise capacity to at least 20"),
        ({"fields": {"is_first": ((), "bool")}}, r"field 'is_last' is None; it must be \(\(\), 'bool'\)"),
        ({"fields": {**FLAGS, "is_last": ((), "float32")}}, r"field 'is_last' is float32\[\]"),
        ({"fields": {**FLAGS, "x": ((2,), "object")}}, r"'x' has dtype 'object'; PyTorch must know"),
        ({"fields": {**FLAGS, "x": ((0,), "float32")}}, r"'x' has shape \(0,\); every dimension must be at least 1"),
    ],
)
def test_construction_names_what_is_wrong(options, text):
    with pytest.raises(ValueError, match=text):
        make(**options)


def test_sample_refuses_an_empty_batch():
    with pytest.raises(ValueError, match="batch_size is 0; it must be at least 1"):
        make().sample(0)


def test_only_the_largest_fields_are_mapped(tmp_path):
    fields = {"image": ((64,), "uint8"), "belief": ((32,), "float32"), **FLAGS}
    replay = make(fields=fields, capacity=1000, memory_budget=70_000, directory=tmp_path / "maps")
    assert replay._storage.mapped == ("belief",)
    assert [path.name for path in (tmp_path / "maps").glob("*/*")] == ["01-belief.bin"]
    replay.close()
    replay.close()
    assert list((tmp_path / "maps").iterdir()) == []
    with pytest.raises(RuntimeError, match="replay: it was closed"):
        replay.sample(1)


def test_a_collected_replay_removes_its_files(tmp_path):
    replay = make(memory_budget=0, directory=tmp_path)
    assert list(tmp_path.iterdir())
    del replay
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_too_small(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(OSError, match=r"replay: action.* GB of mapped files .* lower capacity"):
        make(capacity=free // 8, memory_budget=0, directory=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_large_capacity_costs_nothing_until_used():
    resident = Path("/proc/self/statm")
    if not resident.exists():
        pytest.skip("needs /proc")
    before = int(resident.read_text().split()[1])
    replay = make(num_streams=16, capacity=5_000_000, window=65, fields={"belief": ((64,), "float32"), **FLAGS})
    replay.add({"belief": np.ones((16, 64), "float32"), **{name: np.zeros(16, bool) for name in FLAGS}})
    pages = int(resident.read_text().split()[1]) - before
    assert pages * 4096 < 200e6  # of 1.3 GB


def test_load_replaces_and_never_doubles(tmp_path):
    replay = make(capacity=300)
    fill(replay, 0, 250)
    replay.sample(4)
    replay.save(tmp_path)
    replay.save(tmp_path)
    before, sums = replay.stats(), checksum(replay)
    for _ in range(2):
        replay.load(tmp_path)
        assert replay.stats() == before
        assert replay.total_added == 250
        assert checksum(replay) == sums


def test_an_empty_replay_can_be_saved(tmp_path):
    make(num_streams=2).save(tmp_path)
    replay = make(num_streams=2)
    fill(replay, 0, 9)
    replay.load(tmp_path)
    assert replay.num_steps == replay.total_added == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"fields": {"action": ((3,), "float32"), **FLAGS}},
            r"with field 'action' as \[\[4\], 'float32'\] but .* has \[\[3\], 'float32'\]",
        ),
        ({"fields": FLAGS}, r"with field 'action' as \[\[4\], 'float32'\] but this replay has None"),
        ({"num_streams": 2}, r"with num_streams 1 but this replay has 2"),
        ({"window": 6, "capacity": 9}, r"with window 5 but this replay has 6"),
        ({"capacity": 999}, r"with capacity 1000 but this replay has 999"),
    ],
)
def test_load_refuses_another_layout(tmp_path, options, text):
    make().save(tmp_path)
    with pytest.raises(ValueError, match=text):
        make(**options).load(tmp_path)


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("00-action.npy", lambda path: truncate(path, 200)),
        ("00-action.npy", lambda path: truncate(path, 30)),
        ("00-action.npy", lambda path: truncate(path, 0)),
        ("00-action.npy", Path.unlink),
        ("00-action.npy", lambda path: path.write_bytes(path.read_bytes() + b"x")),
        ("00-action.npy", lambda path: np.save(path, np.zeros((9, 3), "float32"))),
        ("00-action.npy", lambda path: np.save(path, np.array([{}], object), allow_pickle=True)),
        ("02-is_last.npy", lambda path: path.write_bytes(b"\x80\x04 not numpy")),
        ("online_queue.npy", lambda path: np.save(path, np.array([[0, 7]]))),
        ("replay.json", lambda path: truncate(path, 100)),
        ("replay.json", Path.unlink),
        ("replay.json", lambda path: path.write_text("[]")),
        ("replay.json", lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "rng": {}}))),
        ("replay.json", lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "counts": [-1]}))),
        ("replay.json", lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))),
    ],
)
def test_load_names_the_damaged_file_and_keeps_the_contents(tmp_path, name, damage):
    saved = make()
    fill(saved, 0, 9)
    saved.save(tmp_path)
    damage(tmp_path / name)
    replay = make()
    fill(replay, 100, 120)
    before, stats = checksum(replay), replay.stats()
    with pytest.raises(ValueError, match=rf"replay: cannot load .*{name}: .*incomplete or damaged"):
        replay.load(tmp_path)
    assert checksum(replay) == before
    assert replay.stats() == stats


def test_an_interrupted_save_is_not_a_save(tmp_path, monkeypatch):
    replay = make()
    fill(replay, 0, 9)
    replay.save(tmp_path)

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(replay._storage, "save", fail)
    with pytest.raises(OSError, match="disk full"):
        replay.save(tmp_path)
    with pytest.raises(ValueError, match=r"replay\.json"):
        make().load(tmp_path)


def test_sampling_costs_by_batch_and_not_by_buffer():
    medians = []
    for steps in (10_000, 1_000_000):
        replay = make(num_streams=16, capacity=steps, window=65, fields={"belief": ((32,), "float32"), **FLAGS})
        # As if `steps` steps had been added: a minute of adding would say nothing more.
        replay._counts[:] = steps // 16
        for array in replay._storage.arrays.values():
            array.fill(1)
        times = []
        for _ in range(50):
            begin = time.perf_counter()
            replay.sample(16)
            times.append(time.perf_counter() - begin)
        medians.append(float(np.median(times)))
    assert medians[1] < 4 * medians[0]
