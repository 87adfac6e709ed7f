"""From a task's name to an environment: ids, factories, missing packages, and each suite for a few steps."""

from __future__ import annotations

import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest

from onegraph.envs import dmc
from onegraph.envs.config import EnvConfig
from onegraph.envs.make import action_specs, make_env, observation_specs
from onegraph.specs import ArraySpec

FACTORY = """
import gymnasium
def make(size=3):
    return gymnasium.wrappers.RescaleObservation(gymnasium.make("Pendulum-v1"), -1.0, 1.0)
def nothing():
    return object()
def needs_a_package():
    import a_package_that_is_missing
"""


def play(config, num_steps, seed=0):
    env = make_env(config)
    env.action_space.seed(seed)
    observation, _ = env.reset(seed=seed)
    history = []
    for _ in range(num_steps):
        assert env.observation_space.contains(observation)
        observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
        history.append((observation, reward, terminated, truncated, info))
        if terminated or truncated:
            observation, _ = env.reset()
    env.close()
    return history


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "onegraph_factories.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    yield
    sys.modules.pop("onegraph_factories", None)


def test_classic_control_by_shape_without_any_setting():
    pendulum, cart = make_env(EnvConfig(task="Pendulum-v1")), make_env(EnvConfig(task="CartPole-v1"))
    assert observation_specs(pendulum) == {"observation": ArraySpec(shape=(3,), dtype="float32")}
    assert action_specs(pendulum) == {"action": ArraySpec(shape=(1,), dtype="float32")}
    assert action_specs(cart) == {"action": ArraySpec(shape=(), dtype="int32", num_classes=(2,))}
    assert len(play(EnvConfig(task="CartPole-v1"), 200)) == 200


def test_nothing_is_rendered_unless_asked(monkeypatch):
    def refuse(*_):
        raise AssertionError("render was called")

    monkeypatch.setattr("gymnasium.envs.classic_control.pendulum.PendulumEnv.render", refuse)
    play(EnvConfig(task="Pendulum-v1"), 5)


def test_action_repeat_and_time_limit_count_agent_steps():
    history = play(EnvConfig(task="Pendulum-v1", action_repeat=2, max_episode_steps=5), 5)
    assert [truncated for *_, truncated, _ in history] == [False] * 4 + [True]
    assert not any(terminated for _, _, terminated, _, _ in history)
    native = play(EnvConfig(task="Pendulum-v1", action_repeat=40), 5)
    assert [truncated for *_, truncated, _ in native] == [False] * 4 + [True]


def test_keyword_arguments_reach_gymnasium():
    env = make_env(EnvConfig(task="Pendulum-v1", kwargs={"g": 1.5}))
    assert env.unwrapped.g == 1.5


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("CartPol-v1", r"env: unknown task 'CartPol-v1'; close matches: CartPole-v1"),
        ("CartPole-v9", r"env: unknown task 'CartPole-v9'; close matches: CartPole-v1"),
        ("crafter/points", "env: unknown task 'crafter/points'; close matches: crafter/reward, crafter/noreward"),
        ("dm/walker_walk", "env: unknown task 'dm/walker_walk'; close matches: dmc/walker_walk"),
        ("zzzz", "env: unknown task 'zzzz'; it is no Gymnasium id, and the other forms are dmc/<domain>_<task>"),
        ("no_such_module:make", "names the module 'no_such_module', which is neither installed nor in "),
        ("onegraph.envs.make:make_en", "env: onegraph.envs.make has no callable 'make_en'; close matches: make_env"),
    ],
)
def test_unknown_tasks(task, text):
    with pytest.raises(ValueError, match=text):
        make_env(EnvConfig(task=task))


def test_package_of_an_id_that_cannot_be_imported():
    with pytest.raises(ImportError, match=r"env: no_such_package:Env-v0 could not be made: No module named"):
        make_env(EnvConfig(task="no_such_package:Env-v0"))


@pytest.mark.usefixtures("factories")
def test_factories_of_the_current_directory():
    assert len(play(EnvConfig(task="onegraph_factories:make", kwargs={"size": 4}), 5)) == 5
    with pytest.raises(TypeError, match="onegraph_factories:nothing returned a object; a factory must return"):
        make_env(EnvConfig(task="onegraph_factories:nothing"))
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        make_env(EnvConfig(task="onegraph_factories:needs_a_package"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'width'"):
        make_env(EnvConfig(task="onegraph_factories:make", kwargs={"width": 4}))


@pytest.mark.parametrize(
    ("task", "module", "extra"),
    [
        ("dmc/walker_walk", "dm_control.suite", "dmc"),
        ("atari/pong", "ale_py", "atari"),
        ("ALE/Pong-v5", "ale_py", "atari"),
        ("crafter/reward", "crafter", "crafter"),
    ],
)
def test_missing_packages_name_the_extra(monkeypatch, task, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError) as caught:
        make_env(EnvConfig(task=task))
    assert f"env: {task} needs the package {module.partition('.')[0]}" in str(caught.value)
    assert f"pip install 'onegraph[{extra}]'" in str(caught.value)


def test_missing_packages_of_gymnasium_name_the_extra(monkeypatch):
    def fail(*_, **__):
        raise gymnasium.error.DependencyNotInstalled("Box2D is not installed, run `pip install gymnasium[box2d]`")

    monkeypatch.setattr(gymnasium, "make", fail)
    with pytest.raises(ImportError, match=r"LunarLander-v3 needs a package .*pip install 'onegraph\[box2d\]'"):
        make_env(EnvConfig(task="LunarLander-v3"))


def test_no_opengl_backend_is_one_message_with_variable_and_packages(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.setattr(dmc, "_probe", lambda backend: f"no {backend}")
    with pytest.raises(RuntimeError) as caught:
        dmc.choose_backend("dmc/walker_walk")
    for part in ("egl: no egl; osmesa: no osmesa", "libegl1", "MUJOCO_GL=egl", "libosmesa6", "MUJOCO_GL=osmesa"):
        assert part in str(caught.value)
    monkeypatch.setattr(dmc, "_probe", lambda backend: None if backend == "osmesa" else "no")
    assert dmc.choose_backend("dmc/walker_walk") == os.environ["MUJOCO_GL"] == "osmesa"
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    assert dmc.choose_backend("dmc/walker_walk") == "glfw"


@pytest.mark.slow
def test_dmc_proprio_loads_no_opengl():
    pytest.importorskip("dm_control")
    pytest.importorskip("shimmy")
    code = """
import os, sys
from onegraph.envs.config import EnvConfig
from onegraph.envs.make import make_env
env = make_env(EnvConfig(task="dmc/walker_walk"))
env.reset(seed=0)
for _ in range(50):
    env.step(env.action_space.sample())
loaded = open("/proc/self/maps").read()
assert not any(name in loaded for name in ("libGL.", "libEGL", "libOSMesa", "libOpenGL")), "an OpenGL library is loaded"
assert not any(name.split(".")[0] == "OpenGL" for name in sys.modules)
assert "MUJOCO_GL" not in os.environ
assert sorted(env.observation_space) == ["height", "orientations", "velocity"]
"""
    clean = {k: v for k, v in os.environ.items() if k not in ("MUJOCO_GL", "DISPLAY", "PYOPENGL_PLATFORM")}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_dmc_pixels_after_proprio_in_one_process():
    pytest.importorskip("dm_control")
    pytest.importorskip("shimmy")
    proprio = play(EnvConfig(task="dmc/walker_walk"), 50)
    try:
        both = play(EnvConfig(task="dmc/walker_walk", observations="both"), 50)
    except RuntimeError as error:
        if "OpenGL" not in str(error):
            raise
        pytest.skip(str(error))
    assert both[0][0]["image"].shape == (64, 64, 3)
    assert both[-1][0]["image"].std() > 0
    np.testing.assert_array_equal(both[-1][0]["velocity"], proprio[-1][0]["velocity"])
    env = make_env(EnvConfig(task="dmc/walker_walk", observations="pixels", image_size=32))
    assert observation_specs(env) == {"image": ArraySpec(shape=(32, 32, 3), dtype="uint8")}
    env.close()
    with pytest.raises(ValueError, match="env: unknown task 'dmc/walker_wak'; close matches: dmc/walker_walk"):
        make_env(EnvConfig(task="dmc/walker_wak"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "shape", "classes"), [("atari/pong", (96, 96, 1), 18), ("atari100k/MsPacman", (64, 64, 3), 9)]
)
def test_atari(task, shape, classes):
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    env = make_env(EnvConfig(task=task))
    assert observation_specs(env) == {"image": ArraySpec(shape=shape, dtype="uint8")}
    assert action_specs(env)["action"].num_classes == (classes,)
    assert env.spec is not None
    env.close()
    one, two = play(EnvConfig(task=task), 50, seed=3), play(EnvConfig(task=task), 50, seed=3)
    np.testing.assert_array_equal(one[-1][0]["image"], two[-1][0]["image"])
    limited = play(EnvConfig(task=task, max_episode_steps=4), 4)
    assert limited[-1][2:4] == (False, True)
    with pytest.raises(ValueError, match="env: unknown task 'atari/pog'; close matches: atari/Pong"):
        make_env(EnvConfig(task="atari/pog"))


@pytest.mark.slow
def test_crafter_is_determined_by_its_seed_across_processes():
    pytest.importorskip("crafter")
    code = """
import hashlib
from tests.unit.test_envs_make import play
from onegraph.envs.config import EnvConfig
history = play(EnvConfig(task="crafter/reward", kwargs={"length": 40}), 60, seed=7)
print(hashlib.sha1(b"".join(row[0]["image"].tobytes() for row in history)).hexdigest(), [row[3] for row in history][39])
"""
    digests = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout)
    assert len(digests) == 1
    assert digests.pop().endswith("True\n")
