from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from onegraph import config as cfg


@dataclass(frozen=True, slots=True, kw_only=True)
class Optim:
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Env:
    task: str
    num_envs: int = 16
    sizes: tuple[int, ...] = ()
    options: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_envs < 1:
            raise ValueError(f"Env: num_envs {self.num_envs}; give at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    env: Env
    optim: Optim = field(default_factory=Optim)
    critic: Optim | None = None
    mode: Literal["off", "all", 3] = "off"
    is_fast: bool = False
    either: int | str | None = None
    folder: Path = Path("runs")
    names: list[str] = field(default_factory=list)
    anything: Any = None


RUN = Run(env=Env(task="walker", sizes=(1, 2), options={"a": 1}), critic=Optim(lr=1), mode="all", names=["x"])


def test_round_trip_through_json():
    values = json.loads(json.dumps(cfg.to_dict(RUN), allow_nan=False))
    again = cfg.from_dict(Run, values)
    assert again == RUN
    assert again.env.sizes == (1, 2)
    assert isinstance(again.folder, Path)
    assert isinstance(again.critic, Optim)
    assert isinstance(again.critic.lr, float)


def test_defaults_stay():
    assert cfg.from_dict(Run, {"env": {"task": "a"}}) == Run(env=Env(task="a"))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"env": {"task": "a", "num_env": 3}},
            "Run: unknown key 'env.num_env'; did you mean 'env.num_envs'? known: env.task",
        ),
        ({"zzz": 1, "env": {"task": "a"}}, "Run: unknown key 'zzz'; known: env, optim"),
        ({}, "Run: 'env' is missing and has no default"),
        ({"env": {}}, "Run: 'env.task' is missing"),
        ({"env": 3}, "Run: env is 3 (int); expected a dict of Env"),
        ({"env": {"task": "a", "num_envs": True}}, "Run: env.num_envs is True (bool); expected int"),
        ({"env": {"task": "a", "num_envs": 2.0}}, "Run: env.num_envs is 2.0 (float); expected int"),
        ({"env": {"task": "a", "sizes": [1, "b"]}}, "Run: env.sizes[1] is 'b' (str); expected int"),
        ({"env": {"task": "a", "options": {"k": "v"}}}, "Run: env.options.k is 'v' (str); expected int"),
        ({"env": {"task": "a", "options": {1: 1}}}, "Run: env.options is {1: 1} (dict); expected dict[str, int]"),
        ({"env": {"task": None}}, "Run: env.task is None (NoneType); expected str"),
        ({"env": {"task": "a", "num_envs": 0}}, "Env: num_envs 0; give at least 1"),
        ({"env": {"task": "a"}, "optim": {"lr": True}}, "Run: optim.lr is True (bool); expected float"),
        (
            {"env": {"task": "a"}, "optim": {"betas": [0.9]}},
            "Run: optim.betas is [0.9] (list); expected tuple[float, float]",
        ),
        ({"env": {"task": "a"}, "critic": {"lr": "x"}}, "Run: critic.lr is 'x' (str); expected float"),
        ({"env": {"task": "a"}, "mode": "some"}, "Run: mode is 'some' (str); expected one of 'off', 'all', 3"),
        ({"env": {"task": "a"}, "mode": 3.0}, "Run: mode is 3.0 (float); expected one of"),
        ({"env": {"task": "a"}, "either": 1.5}, "Run: either is 1.5 (float); expected int or str or None"),
        ({"env": {"task": "a"}, "is_fast": 1}, "Run: is_fast is 1 (int); expected bool"),
        ({"env": {"task": "a"}, "names": "abc"}, "Run: names is 'abc' (str); expected list[str]"),
    ],
)
def test_bad_values_are_named(values, text):
    with pytest.raises(ValueError) as error:
        cfg.from_dict(Run, values)
    assert text in str(error.value)


def test_floats_that_json_lacks_are_refused():
    with pytest.raises(ValueError, match=r"optim\.lr: inf is not finite"):
        cfg.to_dict(Run(env=Env(task="a"), optim=Optim(lr=float("inf"))))
    with pytest.raises(ValueError, match=r"anything: <object .* has no JSON form"):
        cfg.to_dict(Run(env=Env(task="a"), anything=object()))
    with pytest.raises(ValueError, match="not a dataclass instance"):
        cfg.to_dict(Run)  # type: ignore[arg-type]


def test_diff_lists_leaves():
    other = cfg.replace(RUN, {"env.num_envs": 4, "critic": None, "env.options": {"b": 2}, "is_fast": True})
    assert cfg.diff(RUN, RUN) == []
    assert cfg.diff(RUN, other) == [
        "env.num_envs: 16 -> 4",
        "env.options.a: 1 -> (absent)",
        "critic.lr: 1 -> (absent)",
        "critic.betas: [0.9, 0.999] -> (absent)",
        "critic.warmup: null -> (absent)",
        "is_fast: false -> true",
        "env.options.b: (absent) -> 2",
        "critic: (absent) -> null",
    ]


def test_fingerprint_follows_content():
    same = cfg.from_dict(Run, cfg.to_dict(RUN))  # 1 became 1.0 in critic.lr
    assert cfg.fingerprint(same) == cfg.fingerprint(RUN)
    assert cfg.fingerprint(cfg.replace(RUN, {"optim.lr": 2e-3})) != cfg.fingerprint(RUN)
    assert len(cfg.fingerprint(RUN)) == 12
    assert int(cfg.fingerprint(RUN), 16) >= 0


def test_replace():
    new = cfg.replace(RUN, {"optim.betas": (0.8, 0.9), "optim.lr": 1, "env.options.b": 7, "critic.warmup": 3})
    assert new.optim == Optim(lr=1.0, betas=(0.8, 0.9))
    assert new.env.options == {"a": 1, "b": 7}
    assert new.critic is not None
    assert new.critic.warmup == 3
    assert RUN.optim.lr == 1e-3
    for path, text in [
        ("optim.lrr", "Run: unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ("optim.lr.x", "unknown key 'optim.lr.x'"),
        ("optm.lr", "did you mean 'optim.lr'?"),
    ]:
        with pytest.raises(ValueError) as error:
            cfg.replace(RUN, {path: 1})
        assert text in str(error.value)
    with pytest.raises(ValueError, match=r"cannot set 'critic\.lr' as 'critic' is None; set 'critic' as a whole"):
        cfg.replace(Run(env=Env(task="a")), {"critic.lr": 1.0})
    with pytest.raises(ValueError, match=r"optim\.lr is 'fast'"):
        cfg.replace(RUN, {"optim.lr": "fast"})


def test_files(tmp_path):
    path = tmp_path / "config.json"
    cfg.save_json(RUN, path)
    assert cfg.load_json(Run, path) == RUN
    assert os.listdir(tmp_path) == ["config.json"]
    path.write_text('{"env": {"task": 3}}')
    with pytest.raises(ValueError, match=r"config\.json: Run: env\.task is 3"):
        cfg.load_json(Run, path)
    path.write_text('{"env": ')
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        cfg.load_json(Run, path)
    with pytest.raises(FileNotFoundError):
        cfg.load_json(Run, tmp_path / "none.json")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    cfg.save_json(RUN, path)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        cfg.save_json(cfg.replace(RUN, {"is_fast": True}), path)
    assert cfg.load_json(Run, path) == RUN
    assert os.listdir(tmp_path) == ["config.json"]


def test_imports_no_torch():
    code = "import sys, onegraph.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
