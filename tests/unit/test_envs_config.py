"""Environment configuration: what is refused, and the values derived from a task's name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from onegraph.envs.config import EnvConfig


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"task": " "}, "env: task is empty; name one"),
        ({"num_envs": 0}, "env: num_envs is 0; it must be at least 1"),
        ({"image_size": 0}, "env: image_size is 0; it must be at least 1"),
        ({"action_repeat": -1}, "env: action_repeat is -1; it must be at least 1"),
        ({"max_episode_steps": 0}, "env: max_episode_steps is 0; it must be at least 1"),
        ({"workers": "thread"}, "env: workers is 'thread'; it must be one of auto, inline, process"),
        ({"observations": "state"}, "env: observations is 'state'; it must be one of auto, proprio, pixels, both"),
        ({"observations": "pixels"}, "env: observations is 'pixels' but Pendulum-v1 has one kind of observation"),
        ({"task": "atari/pong", "observations": "proprio"}, "but atari/pong has one kind of observation"),
        ({"include_keys": "("}, r"env: include_keys '\(' is not a regular expression"),
    ],
)
def test_invalid_values_are_refused(kwargs, text):
    with pytest.raises(ValueError, match=text):
        EnvConfig(**{"task": "Pendulum-v1", **kwargs})


@pytest.mark.parametrize(
    ("task", "family", "frames"),
    [
        ("dmc/walker_walk", "dmc", 2),
        ("atari/pong", "atari", 8),
        ("atari100k/pong", "atari100k", 8),
        ("crafter/reward", "crafter", 2),
        ("ALE/Pong-v5", "gymnasium", 2),
        ("my.module:make", "gymnasium", 2),
    ],
)
def test_family_and_frames(task, family, frames):
    config = EnvConfig(task=task, action_repeat=2)
    assert config.family == family
    assert config.frames_per_step == frames


@pytest.mark.parametrize(
    ("task", "num_envs", "cores", "expected"),
    [
        ("dmc/walker_walk", 16, 8, True),
        ("dmc/walker_walk", 16, 2, False),
        ("crafter/reward", 1, 8, False),
        ("Pendulum-v1", 16, 8, False),
        ("my.module:make", 16, 8, False),
    ],
)
def test_rule_of_auto_workers(monkeypatch, task, num_envs, cores, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert EnvConfig(task=task, num_envs=num_envs).use_processes is expected
    assert EnvConfig(task=task, num_envs=num_envs, workers="process").use_processes is True
    assert EnvConfig(task=task, num_envs=num_envs, workers="inline").use_processes is False


def test_config_imports_neither_gymnasium_nor_numpy_and_envs_no_torch():
    code = "import sys, onegraph.envs.config; sys.exit('gymnasium' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import sys, onegraph.envs.vector; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
