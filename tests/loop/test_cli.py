"""The command line: what a user types, and what a user mistypes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from onegraph.cli import main


def ok(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(argv) == 0
    return capsys.readouterr().out


def fails(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 2) -> str:
    try:
        got = main(argv)
    except SystemExit as error:  # tyro ends the program itself
        got = error.code
    assert got == code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return out + err


def test_help_version_and_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert "train dreamer" in ok(capsys, "--help")
    assert "onegraph 0" in ok(capsys, "--version")
    assert "dreamer" in ok(capsys, "train", "--help")
    listing = ok(capsys, "config", "--list")
    assert all(name in listing for name in ("dmc_proprio", "atari100k", "crafter", "tiny", "size400m"))


def test_config_shows_presets_sizes_and_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads(ok(capsys, "config", "--preset", "dmc_proprio"))
    assert config["env"]["task"] == "dmc/walker_walk"
    assert config["agent"]["belief_dim"] == 512
    assert config["train_ratio"] == 1024
    config = json.loads(
        ok(capsys, "config", "--size=size12m", "--task", "Pendulum-v1", "--lr=1e-3", "--replay.capacity", "5000")
    )
    assert config["agent"]["belief_dim"] == 2048
    assert config["agent"]["lr"] == 1e-3
    assert config["env"]["task"] == "Pendulum-v1"
    assert config["replay"]["capacity"] == 5000
    config = json.loads(ok(capsys, "config", "--env-kwargs", '{"gravity": 9.8}'))
    assert config["env"]["kwargs"] == {"gravity": 9.8}


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["train", "dremer"], "unknown learner 'dremer'; did you mean 'dreamer'?"),
        (["train", "dreamer", "--stpes", "5"], "--steps"),
        (["train", "dreamer", "--preset", "atarri"], "preset 'atarri' is unknown; choose one of"),
        (["train", "dreamer", "--size", "size2m"], "size 'size2m' is unknown"),
        (["train", "dreamer", "--steps", "many"], "many"),
        (["train", "dreamer", "--env-kwargs", "[1]"], "not a JSON object"),
        (["train", "dreamer", "--resume", "--overwrite", "--directory", "x"], "exclude each other"),
        (["eval", "nothing-here"], "nothing-here: no such path"),
        (["plot"], "no run is given"),
        (["plot", "nothing-here"], "nothing-here"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], argv: list[str], text: str) -> None:
    assert text in fails(capsys, *argv)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--task", "Pendulumm-v1"], "Pendulum"),
        (["--num-envs", "0"], "env: num_envs is 0; it must be at least 1"),
        (["--batch-length", "1"], "train: batch_length is 1; it must be finite and at least 2"),
        (["--lr", "-1"], "agent.lr is -1"),
        (["--env.include-keys", "nothing"], "observation"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--sinks", "tensorbord"], "choose tensorboard or wandb"),
        (["--replay.capacity", "10"], "replay.capacity is 10"),
    ],
)
def test_bad_values(capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], text: str) -> None:
    base = ["train", "dreamer", "--preset", "tiny", "--quiet", "--directory", str(tmp_path / "run")]
    assert text in fails(capsys, *base, *argv)


def test_overwrite_deletes_runs_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    text = fails(capsys, "train", "dreamer", "--preset", "tiny", "--overwrite", "--directory", str(tmp_path))
    assert "is not a run directory" in text
    assert (tmp_path / "thesis.txt").exists()


def test_train_eval_and_plot(tmp_path: Path) -> None:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", "onegraph", *argv],
            capture_output=True,
            text=True,
            env=env,
            cwd=tmp_path,
            timeout=120,
        )

    common = [
        "train",
        "dreamer",
        "--preset",
        "tiny",
        "--steps",
        "200",
        "--learning-starts",
        "64",
        "--eval-episodes",
        "2",
    ]
    for seed in ("0", "1"):
        done = run(*common, "--seed", seed)
        assert done.returncode == 0, done.stderr
        assert "evaluation over 2 episodes" in done.stderr
    again = run(*common, "--seed", "0")
    assert again.returncode == 2
    assert "holds a run already" in again.stderr
    done = run("eval", "runs/CartPole-v1-0")
    assert done.returncode == 0, done.stderr
    assert "2 episodes" in done.stdout
    assert "success not available" in done.stdout
    done = run("plot", "runs/CartPole-v1-0", "runs/CartPole-v1-1", "--output", "both.png")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "both.json").read_text())
    assert (tmp_path / "both.png").stat().st_size > 10_000
