from __future__ import annotations

import builtins
import io
import json
import math
import os
import resource
import sys
import types

import numpy as np
import pytest
import torch

from onegraph.train import log as log_module
from onegraph.train.log import Logger


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


def rows(directory):
    text = (directory / "metrics.jsonl").read_text()
    return [json.loads(line, parse_constant=refuse_constant) for line in text.splitlines()]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def quiet(directory, **options):
    return Logger(directory, total_steps=100, progress=False, **options)


def test_rows_are_strict_json(tmp_path):
    with quiet(tmp_path / "new" / "run") as logger:
        got = logger.log(
            3,
            {
                "a/float": 1.5,
                "a/int": 2,
                "a/bool": np.bool_(True),
                "a/none": None,
                "a/nan": float("nan"),
                "a/inf": np.float32("inf"),
                "t/half": torch.tensor(0.5, dtype=torch.bfloat16),
                "t/grad": torch.tensor(2.0, requires_grad=True),
                "t/nan": torch.tensor(-math.inf),
                "t/count": torch.tensor(2**53 + 1),
                "t/flag": torch.tensor(False),
                "n/zero": np.array(4.0),
            },
        )
        logger.log(4, {})
    first, second = rows(tmp_path / "new" / "run")
    assert first.pop("time_s") >= 0
    assert first.pop("step") == 3
    assert first == got
    assert got == {
        "a/float": 1.5,
        "a/int": 2,
        "a/bool": 1,
        "a/none": None,
        "a/nan": None,
        "a/inf": None,
        "t/half": 0.5,
        "t/grad": 2.0,
        "t/nan": None,
        "t/count": 2**53 + 1,
        "t/flag": 0,
        "n/zero": 4.0,
    }
    assert list(second) == ["step", "time_s"]


def test_tensors_move_once_for_each_kind(tmp_path, monkeypatch):
    calls = []
    real = torch.stack
    monkeypatch.setattr(torch, "stack", lambda tensors: calls.append(len(tensors)) or real(tensors))
    with quiet(tmp_path) as logger:
        logger.log(0, {f"m/{i}": torch.tensor(float(i)) for i in range(50)} | {"n": torch.tensor(1), "x": 1.0})
    assert sorted(calls) == [1, 50]
    assert rows(tmp_path)[0]["m/49"] == 49


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({"a": torch.zeros(2)}, "metric 'a' has the shape [2]; log scalars (0-D)"),
        ({"a": np.zeros((1, 1))}, "metric 'a' has the shape [1, 1]"),
        ({"a": "x"}, "metric 'a' is 'x' (str); log a number"),
        ({"a": torch.tensor(1j)}, "(complex); log a number"),
        ({"step": 1}, "the metric name 'step' is reserved"),
    ],
)
def test_bad_metrics_are_named_and_write_nothing(tmp_path, metrics, text):
    with quiet(tmp_path) as logger:
        with pytest.raises(ValueError) as error:
            logger.log(0, metrics)
        assert text in str(error.value)
    assert rows(tmp_path) == []


def test_a_torn_line_is_removed_and_time_goes_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time_s": 50.0, "a": 1}\n{"step": 2, "time_s": 60.0, "a": 2}\n{"step": 3, "ti')
    with quiet(tmp_path) as logger:
        logger.log(3, {"a": 3})
    assert [r["step"] for r in rows(tmp_path)] == [1, 2, 3]
    assert 60 <= rows(tmp_path)[2]["time_s"] < 70
    with quiet(tmp_path, resume_step=1) as logger:
        logger.log(2, {"a": 9})
    assert [(r["step"], r["a"]) for r in rows(tmp_path)] == [(1, 1), (2, 9)]
    assert 50 <= rows(tmp_path)[1]["time_s"] < 60
    path.write_bytes(path.read_bytes() + b"\0\0\0\n")
    quiet(tmp_path).close()
    assert len(rows(tmp_path)) == 2
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_full_disk_leaves_whole_lines(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with quiet(tmp_path) as logger:
        logger.log(1, {"a": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (60, limits[1]))
        try:
            with pytest.raises(OSError, match=r"metrics\.jsonl: cannot write metrics .*; free disk space"):
                logger.log(2, {"a" * 100: 1})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        logger.log(3, {"a": 1})
    assert [r["step"] for r in rows(tmp_path)] == [1, 3]


def test_closed(tmp_path):
    logger = quiet(tmp_path)
    logger.close()
    logger.close()
    with pytest.raises(ValueError, match="log after close"):
        logger.log(0, {})


def test_plain_lines_when_there_is_no_terminal(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(log_module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with Logger(tmp_path, total_steps=1000, stream=stream) as logger:
        for step in range(0, 300, 10):
            logger.progress(step, updates_per_s=12.34, episode_return=345.678)
            now[0] += 1.0
        logger.message("saved [bold]x[/bold]")
        logger.progress(300, eta_s=4000)
    assert stream.getvalue().splitlines() == [
        "step 0 of 1,000, 12.3 updates/s, return 345.7",
        "step 100 of 1,000, 12.3 updates/s, return 345.7, ETA 0:01:30",
        "step 200 of 1,000, 12.3 updates/s, return 345.7, ETA 0:01:20",
        "saved [bold]x[/bold]",
        "step 300 of 1,000, ETA 1:06:40",
    ]


def test_bar_on_a_terminal(tmp_path):
    for progress, stream in (("auto", Terminal()), (True, io.StringIO())):
        with Logger(tmp_path, total_steps=1000, progress=progress, stream=stream) as logger:
            logger.progress(250, updates_per_s=9.0, episode_return=-3.0, eta_s=61)
            logger.message("hello [x]")
        text = stream.getvalue()
        for part in ("250/1,000 steps", "25%", "9.0 updates/s", "return -3", "ETA 0:01:01", "hello [x]"):
            assert part in text


def test_silent(tmp_path):
    stream = Terminal()
    with Logger(tmp_path, total_steps=10, progress=False, stream=stream) as logger:
        logger.progress(5)
    assert stream.getvalue() == ""


def test_videos_go_to_a_file_and_to_tensorboard(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with quiet(tmp_path, sinks=("tensorboard",), config={"a": 1}) as logger:
        logger.log(1, {"a/x": 1.0, "a/nan": float("nan")})
        logger.log(2, {"a/x": 2.0})
        path = logger.video(2, "eval/episode", np.zeros((4, 16, 18, 3), np.uint8), fps=5)
    assert path == tmp_path / "videos" / "eval_episode_000000002.mp4"
    assert os.listdir(path.parent) == [path.name]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("a/x")] == [(1, 1.0), (2, 2.0)]
    assert events.Tags()["scalars"] == ["a/x"]
    (image,) = events.Images("eval/episode")
    assert (image.step, image.width, image.height) == (2, 18, 16)
    assert image.encoded_image_string[:4] == b"GIF8"


def test_wandb(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, values, step):
            calls.append((step, values))

        def finish(self):
            calls.append("finish")

    def init(**options):
        calls.append(options)
        return Run()

    module = types.SimpleNamespace(init=init, Video=lambda path: ("video", path))
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for _ in range(2):
        with quiet(tmp_path / "run7", sinks=("wandb",), config={"a": 1}) as logger:
            logger.log(1, {"x": 1.0, "y": float("nan")})
    assert calls[1:3] == [(1, {"x": 1.0}), "finish"]
    assert calls[0]["config"] == {"a": 1}
    assert calls[0]["name"] == "run7"
    assert calls[0]["project"] == "onegraph"
    assert calls[0]["id"] == calls[3]["id"]


@pytest.mark.parametrize(
    ("sink", "package", "text"),
    [
        ("tensorboard", "torch.utils.tensorboard", r"^TensorBoard is not installed; pip install 'onegraph\[log\]'"),
        ("wandb", "wandb", r"^Weights & Biases is not installed; pip install 'onegraph\[log\]'"),
    ],
)
def test_missing_sinks_are_named(tmp_path, monkeypatch, sink, package, text):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith(package):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=text):
        quiet(tmp_path, sinks=(sink,))


def test_unknown_sink(tmp_path):
    with pytest.raises(
        ValueError, match=r"unknown sink 'tensorbord'; did you mean 'tensorboard'\? known: tensorboard, wandb"
    ):
        quiet(tmp_path, sinks=("tensorbord",))
    assert not list(tmp_path.iterdir())
