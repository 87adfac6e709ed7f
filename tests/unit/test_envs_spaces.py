"""Spaces <-> named entries: names, dtypes, checks of observations, mapping of actions."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from onegraph.envs.make import action_specs, observation_specs
from onegraph.envs.wrappers import MapActions, NormalizeObservations, RepeatActions
from onegraph.specs import ArraySpec


class Scripted(gymnasium.Env):
    """Returns the given observations one after another and keeps the actions."""

    def __init__(self, observation_space=None, observations=(), action_space=None, length=1000):
        self.observation_space = observation_space or spaces.Box(-1, 1, (1,), np.float32)
        self.action_space = action_space or spaces.Discrete(2)
        self.observations = list(observations) or [np.zeros(1, np.float32)]
        self.length, self.actions, self.inner_steps = length, [], []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observations[0], {}

    def step(self, action):
        self.count += 1
        self.actions.append(action)
        if self.count >= self.length:
            self.inner_steps.append(self.count)
        observation = self.observations[min(self.count, len(self.observations) - 1)]
        return observation, 1.0, self.count >= self.length, False, {}


def observing(space, *observations, include_keys=".*"):
    return NormalizeObservations(Scripted(space, observations), "fake", include_keys)


def acting(space):
    native = Scripted(action_space=space)
    env = MapActions(NormalizeObservations(native, "fake"), "fake")
    env.reset()
    return env, native


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        ([-2], [6], {-1: [-2], 0: [2], 0.5: [4], 1: [6], 1.7: [6]}),
        ([0, 0], [800, 1], {-1: [0, 0], 0: [400, 0.5], 1: [800, 1]}),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_continuous_actions_are_clipped_and_mapped_to_the_bounds(low, high, expected, dtype):
    env, native = acting(spaces.Box(np.array(low, dtype), np.array(high, dtype), dtype=dtype))
    assert action_specs(env) == {"action": ArraySpec(shape=(len(low),), dtype="float32")}
    for value, wanted in expected.items():
        env.step({"action": np.full(len(low), value, np.float32)})
        assert native.actions[-1].tolist() == wanted
        assert native.actions[-1].dtype == dtype
        assert native.action_space.contains(native.actions[-1])


def test_infinite_action_bounds_are_refused_with_a_way_out():
    with pytest.raises(ValueError, match=r"env: fake: action 'action' has no finite bounds") as caught:
        acting(spaces.Box(-np.inf, np.inf, (2,), np.float32))
    assert "gymnasium.wrappers.TransformAction" in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_actions_that_are_not_finite_never_reach_the_environment(value):
    env, native = acting(spaces.Box(-1, 1, (2,), np.float32))
    with pytest.raises(ValueError, match=r"env: fake: action 'action' is .* actions must be finite"):
        env.step({"action": np.array([0, value], np.float32)})
    assert native.actions == []


def test_two_discrete_heads():
    space = spaces.Dict({"foil": spaces.Discrete(2, start=-1), "direction": spaces.Discrete(5)})
    env, native = acting(space)
    assert action_specs(env) == {
        "direction": ArraySpec(shape=(), dtype="int32", num_classes=(5,)),
        "foil": ArraySpec(shape=(), dtype="int32", num_classes=(2,)),
    }
    env.step({"direction": np.int32(4), "foil": np.int32(0)})
    assert native.actions[-1] == {"direction": 4, "foil": -1}
    assert list(native.actions[-1]) == list(space.keys())
    assert all(type(value) is int for value in native.actions[-1].values())
    with pytest.raises(ValueError, match="action 'direction' is 5; classes are 0 to 4"):
        env.step({"direction": np.int32(5), "foil": np.int32(0)})
    with pytest.raises(ValueError, match="action 'foil' is missing; given: direction"):
        env.step({"direction": np.int32(1)})


def test_multi_discrete_and_mixed_heads():
    env, native = acting(spaces.MultiDiscrete([3, 3, 2]))
    assert action_specs(env) == {"action": ArraySpec(shape=(3,), dtype="int32", num_classes=(3, 3, 2))}
    env.step({"action": np.array([2, 0, 1], np.int32)})
    assert native.actions[-1].tolist() == [2, 0, 1]
    assert native.action_space.contains(native.actions[-1])

    mixed = spaces.Dict({"move": spaces.Box(0, 4, (2,), np.float32), "grip": spaces.Discrete(2)})
    env, native = acting(spaces.Dict({"arm": mixed, "flags": spaces.MultiBinary(2)}))
    assert sorted(action_specs(env)) == ["arm/grip", "arm/move", "flags"]
    env.step({"arm/grip": np.int32(1), "arm/move": np.array([-1, 1], np.float32), "flags": np.array([0, 1], np.int32)})
    assert native.actions[-1]["arm"]["move"].tolist() == [0, 4]
    assert native.action_space.contains(native.actions[-1])


def test_integer_boxes_of_actions_are_classes_up_to_a_width():
    env, native = acting(spaces.Box(-3, 3, (2,), np.int64))
    assert action_specs(env)["action"].num_classes == (7, 7)
    env.step({"action": np.array([0, 6], np.int32)})
    assert native.actions[-1].tolist() == [-3, 3]
    with pytest.raises(ValueError, match="is an integer box with 70001 values; at most 1024"):
        acting(spaces.Box(0, 70000, (1,), np.int64))


def test_tuples_of_actions_come_back_as_tuples():
    env, native = acting(spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (1,), np.float32)]))
    assert sorted(action_specs(env)) == ["0", "1"]
    env.step({"0": np.int32(2), "1": np.zeros(1, np.float32)})
    assert native.action_space.contains(native.actions[-1])


def test_nested_observations_are_flattened_and_unified():
    space = spaces.Dict(
        {
            "robot": spaces.Dict(
                {"joints": spaces.Box(-9, 9, (7,), np.float64), "height": spaces.Box(0, 9, (), np.float32)}
            ),
            "camera": spaces.Box(0, 255, (8, 8, 3), np.uint8),
            "depth": spaces.Box(0, 255, (8, 8), np.uint8),
            "ram": spaces.Box(0, 255, (16,), np.uint8),
            "level": spaces.Discrete(4, start=2),
            "keys": spaces.MultiBinary(3),
            "touch": spaces.Box(0, 1, (2,), np.bool_),
            "pair": spaces.Tuple([spaces.MultiDiscrete([3, 2]), spaces.Box(-5, 5, (2,), np.int64)]),
        }
    )
    observation = space.sample()
    observation["level"] = np.int64(5)
    env = observing(space, observation)
    result, _ = env.reset()
    assert observation_specs(env) == {
        "camera": ArraySpec(shape=(8, 8, 3), dtype="uint8"),
        "depth": ArraySpec(shape=(8, 8, 1), dtype="uint8"),
        "keys": ArraySpec(shape=(3,), dtype="int32", num_classes=(2, 2, 2)),
        "level": ArraySpec(shape=(), dtype="int32", num_classes=(4,)),
        "pair/0": ArraySpec(shape=(2,), dtype="int32", num_classes=(3, 2)),
        "pair/1": ArraySpec(shape=(2,), dtype="float32"),
        "ram": ArraySpec(shape=(16,), dtype="float32"),
        "robot/height": ArraySpec(shape=(), dtype="float32"),
        "robot/joints": ArraySpec(shape=(7,), dtype="float32"),
        "touch": ArraySpec(shape=(2,), dtype="int32", num_classes=(2, 2)),
    }
    assert list(observation_specs(env)) == sorted(observation_specs(env))
    assert env.observation_space.contains(result)
    assert result["level"] == 3
    np.testing.assert_array_equal(result["depth"][..., 0], observation["depth"])
    np.testing.assert_allclose(result["robot/joints"], observation["robot"]["joints"], rtol=1e-6)


@pytest.mark.parametrize(
    ("space", "name"),
    [
        (spaces.Box(-1, 1, (3,), np.float32), "observation"),
        (spaces.Discrete(3), "observation"),
        (spaces.Box(0, 255, (4, 4, 3), np.uint8), "image"),
        (spaces.Box(0, 255, (4, 4), np.uint8), "image"),
    ],
)
def test_bare_spaces_get_a_name(space, name):
    assert list(observation_specs(observing(space))) == [name]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(4),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.Dict({"a": spaces.Text(4)}),
    ],
)
def test_spaces_without_an_array_form_are_refused_by_name(space):
    kind = "Text" if isinstance(space, spaces.Dict) else type(space).__name__
    with pytest.raises(ValueError, match=f"is a {kind} space, which has no fixed array form"):
        observing(space)


def test_names_that_collide_are_refused_and_empty_entries_dropped():
    leaf = spaces.Discrete(2)
    with pytest.raises(ValueError, match="observation space flattens to the same name twice: a/b"):
        observing(spaces.Dict({"a/b": leaf, "a": spaces.Dict({"b": leaf})}))
    empty = spaces.Dict({"a": spaces.Box(-1, 1, (0,), np.float32), "b": leaf})
    assert list(observation_specs(observing(empty))) == ["b"]


def test_include_keys():
    space = spaces.Dict({"image": spaces.Box(0, 255, (4, 4, 3), np.uint8), "text": spaces.Text(3)})
    assert list(observation_specs(observing(space, include_keys="image"))) == ["image"]
    with pytest.raises(
        ValueError, match="env: fake: include_keys 'imag' matches none of the observations; available: image, text"
    ):
        observing(space, include_keys="imag")


IMAGE = spaces.Box(0, 255, (64, 64, 3), np.uint8)
RIGHT = np.zeros((64, 64, 3), np.uint8)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (RIGHT[1:], r"observation 'image' is \(63, 64, 3\) uint8; its space declares \(64, 64, 3\) uint8"),
        (RIGHT / 255, r"observation 'image' is \(64, 64, 3\) float64; its space declares \(64, 64, 3\) uint8"),
        ((RIGHT, {}), r"observation 'image' is a tuple; its space declares \(64, 64, 3\) uint8"),
        (None, r"observation 'image' is a NoneType; its space declares \(64, 64, 3\) uint8"),
    ],
)
def test_wrong_frames_stop_at_the_step_that_returns_them(wrong, text):
    env = MapActions(observing(IMAGE, *[RIGHT] * 5, wrong), "fake")
    env.reset()
    for _ in range(4):
        env.step({"action": np.int32(0)})
    with pytest.raises(ValueError, match=f"env: fake: step 5: {text}"):
        env.step({"action": np.int32(0)})


def test_wrong_observations_of_a_reset():
    with pytest.raises(ValueError, match=r"env: fake: step 0: observation 'image' is \(63"):
        observing(IMAGE, RIGHT[1:]).reset()
    nested = spaces.Dict({"a": spaces.Box(-1, 1, (1,), np.float32)})
    for wrong in ({"b": np.zeros(1)}, ({"a": np.zeros(1)}, {}), np.zeros(1)):
        with pytest.raises(ValueError, match=r"step 0: observation 'a' is missing from the \w+"):
            observing(nested, wrong).reset()
    with pytest.raises(ValueError, match="step 0: observation 'observation' is 3, which is outside of Discrete"):
        observing(spaces.Discrete(3), 3).reset()
    with pytest.raises(ValueError, match=r"is \(\) float64; its space declares \(\) int64"):
        observing(spaces.Discrete(3), 1.0).reset()


def test_action_repeat_works_in_every_episode():
    native = Scripted(length=10)
    env = RepeatActions(native, 4)
    for _ in range(3):
        env.reset()
        rewards, over = [], False
        while not over:
            _, reward, terminated, truncated, _ = env.step(0)
            rewards.append(reward)
            over = terminated or truncated
        assert rewards == [4, 4, 2]
    assert native.inner_steps == [10, 10, 10]


def test_specs_of_a_raw_environment_are_refused():
    with pytest.raises(ValueError, match="build the environment with make_env"):
        observation_specs(Scripted())
