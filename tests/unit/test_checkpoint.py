from __future__ import annotations

import json
import os
import resource
import shutil

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from onegraph.train.checkpoint import CheckpointStore, resolve


def state(value: float = 1.0) -> dict:
    return {
        "model": {"w": torch.full((3, 4), value), "b": torch.arange(5, dtype=torch.bfloat16)},
        "optimizer": [torch.tensor(value), {"count": 3, "name": "rms", 7: (1, None, True, b"raw")}],
        "rng": torch.get_rng_state(),
    }


def names(store: CheckpointStore) -> list[str]:
    return sorted(os.listdir(store.folder))


def test_save_and_load(tmp_path):
    store = CheckpointStore(tmp_path)
    assert store.latest() is None
    assert store.clean() == []

    def replay(path):
        path.mkdir()
        np.save(path / "rewards.npy", np.arange(3.0))

    path = store.save(1000, meta={"counters": {"updates": 5}}, state=state(2.0), extras={"replay": replay})
    assert path == tmp_path / "checkpoints" / "step_000001000"
    assert names(store) == ["latest", "step_000001000"]
    assert (store.folder / "latest").read_text() == "step_000001000\n"
    assert store.latest() == path
    meta, loaded = store.load(path)
    assert meta == {"counters": {"updates": 5}, "step": 1000}
    expected = state(2.0)
    assert torch.equal(loaded["model"]["w"], expected["model"]["w"])
    assert torch.equal(loaded["model"]["b"], expected["model"]["b"])
    assert loaded["model"]["b"].dtype == torch.bfloat16
    assert loaded["optimizer"][1] == expected["optimizer"][1]
    assert torch.equal(loaded["rng"], expected["rng"])
    assert np.load(path / "replay" / "rewards.npy").tolist() == [0, 1, 2]


def test_views_take_no_more_than_their_size_and_ties_stay(tmp_path):
    big = torch.zeros(1_000_000)
    weight = torch.nn.Parameter(torch.ones(4))
    path = CheckpointStore(tmp_path).save(1, meta={}, state={"view": big[:10], "a": weight, "b": weight})
    assert (path / "state.pt").stat().st_size < 10_000
    _, loaded = CheckpointStore(tmp_path).load(path)
    assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
    assert not loaded["a"].requires_grad


def test_retention(tmp_path):
    store = CheckpointStore(tmp_path, keep=2, keep_every=500)
    for step in range(100, 1300, 110):
        store.save(step, meta={}, state={})
    # 540 is the first at or after 500, 1090 the first at or after 1000
    assert names(store) == ["latest", "step_000000540", "step_000001090", "step_000001200"]
    store = CheckpointStore(tmp_path, keep=1)
    store.save(2000, meta={}, state={})
    assert names(store) == ["latest", "step_000002000"]


def test_retention_after_a_rewind_spares_the_newest_and_later_steps(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    store.save(3000, meta={}, state={})
    for step in (1000, 1100):
        path = store.save(step, meta={}, state={})
        assert store.latest() == path
    assert names(store) == ["latest", "step_000001100", "step_000003000"]


def test_the_same_step_twice(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(5, meta={"n": 1}, state=state(1.0))
    meta, mapped = store.load(store.save(5, meta={"n": 2}, state=state(2.0)))
    store.save(5, meta={"n": 3}, state=state(3.0))
    assert meta["n"] == 2
    assert mapped["model"]["w"][0, 0] == 2.0  # a mapped state outlives its file
    assert names(store) == ["latest", "step_000000005"]
    assert store.load(resolve(tmp_path))[0]["n"] == 3


def test_latest_falls_back(tmp_path):
    store = CheckpointStore(tmp_path, keep=9)
    for step in (1, 2, 3):
        store.save(step, meta={}, state={})
    (store.folder / "latest").write_text("step_000000002")
    assert store.latest() == store.folder / "step_000000002"
    for text in ("step_000000099\n", "../../etc", "", "\x00"):
        (store.folder / "latest").write_text(text)
        assert store.latest() == store.folder / "step_000000003"
    (store.folder / "latest").unlink()
    (store.folder / "step_000000003" / "state.pt").write_bytes(b"short")
    (store.folder / "step_x").mkdir()
    assert store.latest() == store.folder / "step_000000002"


def test_clean_mends_what_kills_leave(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(1, meta={"n": 1}, state={})
    shutil.copytree(path, store.folder / ".tmp-step_000000002-77")
    (store.folder / ".tmp-latest-77").write_text("step")
    os.rename(path, store.folder / ".old-step_000000001")  # killed between the two renames of a replacement
    assert store.latest() == store.folder / ".old-step_000000001"
    assert store.load(resolve(tmp_path))[0]["n"] == 1
    assert store.clean() == [".tmp-latest-77", ".tmp-step_000000002-77"]
    assert names(store) == ["latest", "step_000000001"]
    assert store.latest() == path
    shutil.copytree(path, store.folder / ".old-step_000000001")
    assert store.clean() == [".old-step_000000001"]


def test_a_failing_extra_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    good = store.save(1, meta={}, state=state())

    def broken(path):
        path.write_text("half")
        raise RuntimeError("no replay")

    for step in (1, 2):
        with pytest.raises(
            OSError, match=f"saving step {step} under .* failed: no replay; earlier checkpoints are untouched"
        ):
            store.save(step, meta={}, state={}, extras={"replay": broken})
        assert names(store) == ["latest", "step_000000001"]
    assert torch.equal(store.load(good)[1]["model"]["w"], state()["model"]["w"])


def test_a_full_disk_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path)
    good = store.save(1, meta={}, state={})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="free disk space or correct the cause"):
            store.save(2, meta={}, state={"w": torch.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names(store) == ["latest", "step_000000001"]
    assert store.latest() == good


def test_an_interrupt_during_a_save_leaves_nothing(tmp_path):
    store = CheckpointStore(tmp_path)

    def interrupted(path):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(1, meta={}, state={}, extras={"a": interrupted})
    assert names(store) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, {"b": np.zeros(3)}]}, "state['a'][1]['b'] is a numpy.ndarray; store tensors"),
        ({"a": np.float32(1)}, "state['a'] is a numpy.float32"),
        ({"a": TensorDict({"x": torch.zeros(2)}, [2])}, "state['a'] is a tensordict._td.TensorDict"),
        ({"a": {(1, 2): 3}}, "state['a'] has the key (1, 2); use strings or ints"),
        ({"a": object()}, "state['a'] is a builtins.object"),
    ],
)
def test_what_cannot_be_loaded_is_not_saved(tmp_path, value, text):
    with pytest.raises(TypeError) as error:
        CheckpointStore(tmp_path).save(1, meta={}, state=value)
    assert text in str(error.value)
    assert not list(tmp_path.iterdir())


def test_bad_arguments(tmp_path):
    store = CheckpointStore(tmp_path)
    for meta in ({"a": float("nan")}, {"a": torch.zeros(1)}):
        with pytest.raises(TypeError, match="meta has no JSON form"):
            store.save(1, meta=meta, state={})
    for name in ("meta.json", "state.pt", "a/b", "..", ".hidden", ""):
        with pytest.raises(ValueError, match="use a plain file name"):
            store.save(1, meta={}, state={}, extras={name: lambda path: None})
    with pytest.raises(ValueError, match="step -1"):
        store.save(-1, meta={}, state={})
    with pytest.raises(ValueError, match="step 1, meta step 2"):
        store.save(1, meta={"step": 2}, state={})
    with pytest.raises(ValueError, match="keep 0"):
        CheckpointStore(tmp_path, keep=0)
    assert not list(tmp_path.iterdir())


def test_damage_is_named(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(1, meta={}, state=state())
    head = (path / "meta.json").read_text()
    size = (path / "state.pt").stat().st_size
    (path / "state.pt").write_bytes(b"x" * size)
    with pytest.raises(ValueError, match=r"state\.pt: damaged \("):
        store.load(path)
    (path / "state.pt").write_bytes(b"x")
    with pytest.raises(ValueError, match=rf"state\.pt: damaged \(missing or not {size} bytes\)"):
        store.load(path)
    for text in ("{", "[]", "{}", '{"format_version": 1}', '{"format_version": "x"}'):
        (path / "meta.json").write_text(text)
        with pytest.raises(ValueError, match=r"meta\.json: damaged"):
            store.load(path)
    (path / "meta.json").write_text(json.dumps({**json.loads(head), "format_version": 2}))
    with pytest.raises(ValueError, match=r"meta\.json: format version 2, but this release reads up to 1; upgrade"):
        store.load(path)
    with pytest.raises(FileNotFoundError, match=r"meta\.json: no such file"):
        store.load(tmp_path)


def test_pickled_code_is_refused(tmp_path):
    store = CheckpointStore(tmp_path)
    path = store.save(1, meta={}, state={})
    torch.save({"a": print}, path / "state.pt")
    head = json.loads((path / "meta.json").read_text())
    head["files"]["state.pt"] = (path / "state.pt").stat().st_size
    (path / "meta.json").write_text(json.dumps(head))
    with pytest.raises(ValueError, match=r"state\.pt: damaged"):
        store.load(path)


def test_resolve(tmp_path):
    store = CheckpointStore(tmp_path / "run")
    old, new = store.save(1, meta={}, state={}), store.save(2, meta={}, state={})
    assert resolve(tmp_path / "run") == new
    assert resolve(str(store.folder)) == new
    assert resolve(old) == old
    for path, text in ((tmp_path, "no complete checkpoint in it"), (tmp_path / "none", "no such path")):
        with pytest.raises(FileNotFoundError, match=f"{text}; give a run directory"):
            resolve(path)
