"""The training loop: exactness over resume, ratios, stops, refusals, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import onegraph
from onegraph.cli import main
from onegraph.config import replace as override
from onegraph.train.checkpoint import CheckpointStore, resolve
from onegraph.train.config import ReplayConfig, TrainConfig
from onegraph.train.online import OnlineTrainer
from onegraph.train.signals import StopRequest

from ..fakes import MICRO

BASE = TrainConfig(
    env=onegraph.EnvConfig(task="CartPole-v1", num_envs=2, workers="inline"),
    agent=MICRO,
    replay=ReplayConfig(capacity=2000),
    steps=120,
    batch_size=2,
    batch_length=6,
    train_ratio=6.0,  # half an update a step
    learning_starts=12,
    log_every=20,
    eval_episodes=0,
    save_every=0,
)
TIMES = ("time_s", "speed/", "time/")


def run(config: TrainConfig, directory: Path, **kwargs: Any) -> OnlineTrainer:
    trainer = OnlineTrainer(config, directory, progress=False, **kwargs)
    trainer.run()
    return trainer


def rows(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(TIMES)} for line in lines]


def checkpoint(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return CheckpointStore(directory).load(resolve(directory))


def assert_same_tree(a: Any, b: Any, path: str = "") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for k in a:
            assert_same_tree(a[k], b[k], f"{path}/{k}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same_tree(x, y, f"{path}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b, path


def assert_same_run(a: Path, b: Path) -> None:
    (meta_a, state_a), (meta_b, state_b) = checkpoint(a), checkpoint(b)
    for state in (state_a, state_b):
        state["clocks"].pop("eval")
    assert_same_tree(state_a, state_b)
    assert {k: v for k, v in meta_a.items() if k != "config"} == {k: v for k, v in meta_b.items() if k != "config"}
    files = sorted(p.name for p in (resolve(a) / "replay").iterdir())
    assert files == sorted(p.name for p in (resolve(b) / "replay").iterdir())
    for name in files:
        assert (resolve(a) / "replay" / name).read_bytes() == (resolve(b) / "replay" / name).read_bytes(), name


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_n_then_resume_then_n_is_bitwise_2n(tmp_path: Path, task: str) -> None:
    config = override(BASE, {"env.task": task})
    run(config, tmp_path / "whole")
    run(replace(config, steps=58), tmp_path / "parts")
    run(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_stop_between_two_updates_loses_nothing(tmp_path: Path) -> None:
    config = replace(BASE, train_ratio=24.0)  # two updates a step
    run(config, tmp_path / "whole")
    trainer = OnlineTrainer(config, tmp_path / "parts", progress=False)
    stop, step = StopRequest(), trainer.stepper.step

    def stop_after_34(*args: Any) -> Any:
        if trainer.updates == 33:
            stop.requested = "SIGTERM"
        return step(*args)

    trainer.stepper.step = stop_after_34
    trainer._loop(stop)
    assert trainer.updates == 34
    assert trainer.owed > 0
    trainer._save()
    trainer.close()
    run(config, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_the_same_seed_gives_the_same_metrics_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run(replace(BASE, seed=seed, eval_episodes=2), tmp_path / name)
    assert rows(tmp_path / "a") == rows(tmp_path / "b")
    assert rows(tmp_path / "a") != rows(tmp_path / "c")


@pytest.mark.parametrize("task", ["CartPole-v1", "tests.smoke.test_environments:Robot"])
def test_evaluation_and_video_change_nothing_in_training(tmp_path: Path, task: str) -> None:
    config = override(BASE, {"env.task": task})
    evaluated = replace(config, eval_every=30, eval_episodes=1)
    if task != "CartPole-v1":
        pytest.importorskip("imageio_ffmpeg")
        config, evaluated = replace(config, steps=60), replace(evaluated, steps=60, video=True)
    run(config, tmp_path / "without")
    run(evaluated, tmp_path / "with")
    assert_same_run(tmp_path / "without", tmp_path / "with")


@pytest.mark.parametrize(("ratio", "envs"), [(6.0, 2), (12.0, 1), (24.0, 3), (1.0, 2)])
def test_the_train_ratio_is_exact_over_the_run(tmp_path: Path, ratio: float, envs: int) -> None:
    config = override(BASE, {"train_ratio": ratio, "env.num_envs": envs, "steps": 180})
    trainer = run(config, tmp_path)
    first = next(r["step"] for r in rows(tmp_path) if r["train/updates"] > 0)
    assert first < 120
    # The first step with enough windows gives one update and starts the count.
    windows_from = next(n for n in range(envs, 300, envs) if n // envs >= 7 and n - 6 * envs >= 12)
    assert trainer.updates == 1 + int((180 - windows_from) * ratio / 12)


def test_resume_without_replay_makes_no_burst(tmp_path: Path) -> None:
    config = override(BASE, {"replay.save": False, "steps": 100})
    first = run(config, tmp_path)
    again = run(replace(config, steps=200), tmp_path, resume=True)
    waiting = 24  # 12 windows need 2 x 6 + 12 steps
    assert again.updates == first.updates + 1 + int((100 - waiting) * 0.5)


def test_resuming_twice_doubles_nothing(tmp_path: Path) -> None:
    run(replace(BASE, steps=60), tmp_path)
    for _ in range(2):
        trainer = OnlineTrainer(replace(BASE, steps=60), tmp_path, resume=True, progress=False)
        assert trainer.replay.num_steps == 60
        trainer.run()
    assert len([r for r in rows(tmp_path) if "loss/total" in r]) == len(
        {r["step"] for r in rows(tmp_path) if "loss/total" in r}
    )


def test_a_run_too_short_to_learn_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = run(override(BASE, {"steps": 10, "eval_episodes": 1}), tmp_path)
    assert trainer.updates == 0
    assert "no update was possible: 0 windows are stored" in capsys.readouterr().err


def test_what_a_run_leaves(tmp_path: Path) -> None:
    run(replace(BASE, eval_episodes=2, save_every=40, keep=2), tmp_path)
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "config.json").read_text())["agent"]["belief_dim"] == 16
    folders = sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.is_dir())
    assert folders == ["step_000000080", "step_000000120"]
    last = rows(tmp_path)[-1]
    assert last["eval/episodes"] == 2
    learner = [r for r in rows(tmp_path) if "loss/total" in r]
    assert len({frozenset(r) for r in learner[1:]}) == 1
    assert {"train/updates", "env/frames", "replay/steps", "optimizer/grad_norm", "behavior/entropy"} <= learner[
        -1
    ].keys()


def test_a_run_ends_once_its_target_is_reached(tmp_path: Path) -> None:
    config = replace(BASE, steps=120, eval_every=40, eval_episodes=2, stop_return=1.0)
    trainer = run(config, tmp_path)
    assert trainer.step == 40
    # The one that decided, the one that confirmed it, and the final one, each on episodes of its own.
    assert [r["step"] for r in rows(tmp_path) if "eval/return" in r] == [40, 40, 40]
    missed = run(replace(config, stop_return=1e6), tmp_path / "missed")
    assert missed.step == 120
    with pytest.raises(ValueError, match="stop_return needs evaluations"):
        replace(BASE, stop_return=1.0)


def test_refusals(tmp_path: Path) -> None:
    run(replace(BASE, steps=20), tmp_path)
    with pytest.raises(ValueError, match="holds a run already; add --resume"):
        OnlineTrainer(BASE, tmp_path)
    other = override(BASE, {"agent.lr": 2e-3, "env.num_envs": 4})
    with pytest.raises(ValueError, match=r"env\.num_envs: 2 -> 4\n  agent\.lr: 0\.001 -> 0\.002"):
        OnlineTrainer(other, tmp_path, resume=True)
    with pytest.raises(FileNotFoundError, match="has no complete checkpoint; run without --resume"):
        OnlineTrainer(BASE, tmp_path / "empty", resume=True)
    with pytest.raises(ValueError, match="device 'tpu' is unknown"):
        OnlineTrainer(replace(BASE, device="tpu"), tmp_path / "device")


def test_eval_repeats_the_final_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(replace(BASE, eval_episodes=3), tmp_path)
    want = {k: v for k, v in rows(tmp_path)[-1].items() if k.startswith("eval/")}
    assert main(["eval", str(tmp_path), "--json", "--device", "cpu"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert {k: v for k, v in got.items() if k.startswith("eval/")} == want


def test_a_loaded_agent_acts_as_the_trainer_does(tmp_path: Path) -> None:
    trainer = run(BASE, tmp_path)
    agent = onegraph.load_agent(tmp_path, device="cpu")
    env = agent.make_env()
    observation, _ = env.reset(seed=0)
    tensors = {k: torch.from_numpy(v[None]) for k, v in observation.items()}
    torch.manual_seed(5)
    want, _ = trainer.policy.act(tensors, torch.ones(1, dtype=torch.bool), trainer.policy.initial(1))
    torch.manual_seed(5)
    action = agent.act(observation)
    np.testing.assert_array_equal(action["action"], want["action"][0])
    done = False
    while not done:
        observation, _, terminated, truncated, _ = env.step(agent.act(observation))
        done = terminated or truncated
    with pytest.raises(ValueError, match="the policy was trained on"):
        agent.act({"other": np.zeros(4)})


class NaNReward(gymnasium.Env):
    """Gives one reward that is not a number."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.count += 1
        return np.zeros(2, np.float32), float("nan") if self.count == 15 else 1.0, False, self.count >= 30, {}


def test_a_loss_that_is_not_finite_ends_the_run_and_names_it(tmp_path: Path) -> None:
    config = override(BASE, {"env.task": "tests.loop.test_online:NaNReward"})
    with pytest.raises(FloatingPointError, match="is not finite at or shortly before update"):
        run(config, tmp_path)
    assert CheckpointStore(tmp_path).latest() is None


def cli(*args: str, **kwargs: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "onegraph", *args], stderr=subprocess.PIPE, text=True, env=env, **kwargs
    )


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


LONG = ["train", "dreamer", "--preset", "tiny", "--steps", "1000000", "--learning-starts", "64", "--save-every", "0"]


@pytest.mark.parametrize(
    ("number", "code", "workers"), [(signal.SIGTERM, 143, "inline"), (signal.SIGINT, 130, "process")]
)
def test_a_signal_saves_and_the_run_goes_on(tmp_path: Path, number: signal.Signals, code: int, workers: str) -> None:
    # A group of its own: like Ctrl-C, the signal goes to the workers too.
    process = cli(*LONG, "--workers", workers, "--directory", str(tmp_path / "run"), start_new_session=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 90
    while not (metrics.exists() and metrics.read_text().count("\n") >= 8):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert "continue with --resume" in err
    deadline = time.monotonic() + 10
    while group_is_alive(process.pid):
        assert time.monotonic() < deadline, "a worker is left"
        time.sleep(0.1)
    meta, _ = checkpoint(tmp_path / "run")
    resumed = cli(
        "train", "dreamer", "--resume", "--directory", str(tmp_path / "run"), "--steps", str(meta["step"] + 8)
    )
    _, err = resumed.communicate(timeout=90)
    assert resumed.returncode == 0, err
    assert checkpoint(tmp_path / "run")[0]["step"] == meta["step"] + 8
    assert checkpoint(tmp_path / "run")[0]["updates"] >= meta["updates"]


def test_an_evaluation_ends_at_a_signal(tmp_path: Path) -> None:
    trainer = OnlineTrainer(replace(BASE, eval_episodes=2), tmp_path, progress=False)
    stop = StopRequest()
    stop.requested = "SIGTERM"
    assert trainer._evaluate(stop, 0) == {}
    trainer.close()
