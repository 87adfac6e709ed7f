"""Pendulum-v1 is learned clearly beyond random over three seeds (slow; `make learn`). Writes runs/learn/pendulum.png."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from onegraph.envs.config import EnvConfig
from onegraph.envs.vector import VectorEnv
from onegraph.train.plot import learning_curve, read_run

pytestmark = pytest.mark.slow
RUNS = Path("runs") / "learn"
SEEDS = (0, 1, 2)


def random_return(episodes: int = 50) -> float:
    rng = np.random.default_rng(0)
    with VectorEnv(EnvConfig(task="Pendulum-v1", num_envs=episodes, workers="inline"), seed=0) as envs:
        rows, total = envs.reset(), np.zeros(episodes)
        while not rows.is_last.all():
            envs.send({"action": rng.uniform(-1, 1, (episodes, 1)).astype(np.float32)})
            rows = envs.recv()
            total += rows.reward
    return float(total.mean())


def train(seed: int) -> Path:
    directory = RUNS / f"pendulum-{seed}"
    command = [sys.executable, "-m", "onegraph", "train", "dreamer", "--preset", "pendulum", "--seed", str(seed)]
    command += ["--directory", str(directory), "--overwrite"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(RUNS / f"pendulum-{seed}.txt", "w") as log:
        subprocess.run(command, check=True, stderr=log, env=env)
    return directory


def test_pendulum_is_learned() -> None:
    RUNS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max_workers=min(len(SEEDS), len(os.sched_getaffinity(0)))) as pool:
        runs = list(pool.map(train, SEEDS))
    summary = learning_curve(runs, RUNS / "pendulum.png", key="eval/return")
    final = [float(read_run(run)["eval/return"][1][-1]) for run in runs]
    baseline = random_return()
    print(f"\nrandom actions {baseline:.0f}; after training {[round(x) for x in final]}; {summary}")
    shutil.copy(runs[0] / "learning_curve.png", RUNS / "pendulum-0.png")
    assert -1500 < baseline < -1000
    assert min(final) > 0.5 * baseline, "one seed has learned little"
    assert np.median(final) > 0.3 * baseline
