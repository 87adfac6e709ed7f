"""A task's name -> a Gymnasium environment with flat, checked spaces."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from typing import Any

import gymnasium

from onegraph.envs.config import EnvConfig
from onegraph.envs.packages import import_optional
from onegraph.envs.spaces import space_specs
from onegraph.envs.wrappers import MapActions, NormalizeObservations, RepeatActions
from onegraph.specs import ArraySpec

_FAMILIES = ("dmc", "atari", "atari100k", "crafter")
_ATARI_MAX_STEPS = 27_000


def make_env(config: EnvConfig, *, render: bool = False) -> gymnasium.Env[Any, Any]:
    """Builds one environment.

    Observations are a flat dict; nested names are joined by `/`, a bare space is called `image` (uint8, two or three
    axes) or `observation`. Dtypes are float32, uint8 for images and int32 for classes counted from 0. Actions are a
    flat dict too (a bare space is `action`): float32 in `[-1, 1]`, clipped and mapped to the declared bounds, or
    int32 classes. Every observation is checked against its space.

    A time limit truncates. The reference implementation marks Atari's 108000-frame limit as terminal; here it is a
    truncation like every other, so that the value of the last state is not taught to be zero.

    Args:
        config: The task; `num_envs` and `workers` do not matter here.
        render: Whether `render()` must return frames. Off, nothing is drawn beyond the observations themselves.

    Returns:
        Environment whose spaces `observation_specs` and `action_specs` read.

    Raises:
        ImportError: An optional package is missing; the text names the extra.
        RuntimeError: Images must be rendered and no OpenGL backend works.
        TypeError: A factory returned something else than a `gymnasium.Env`.
        ValueError: The task is unknown, or its spaces cannot be normalised.
    """
    env = _native_env(config, render)
    limit = config.max_episode_steps
    if limit is None and config.family.startswith("atari"):
        limit = _ATARI_MAX_STEPS
    try:
        if limit is not None:
            env = gymnasium.wrappers.TimeLimit(env, limit)
        return MapActions(NormalizeObservations(env, config.task, config.include_keys), config.task)
    except Exception:
        env.close()
        raise


def observation_specs(env: gymnasium.Env[Any, Any]) -> dict[str, ArraySpec]:
    """Specs of the observations of an environment from `make_env`, keys sorted.

    Raises:
        ValueError: The environment did not come from `make_env`.
    """
    return space_specs(env.observation_space)


def action_specs(env: gymnasium.Env[Any, Any]) -> dict[str, ArraySpec]:
    """Specs of the actions of an environment from `make_env`, keys sorted.

    Raises:
        ValueError: The environment did not come from `make_env`.
    """
    return space_specs(env.action_space)


def _native_env(config: EnvConfig, render: bool) -> gymnasium.Env[Any, Any]:
    """The task with its action repeat, before spaces are normalised."""
    task, repeat, kwargs = config.task, config.action_repeat, dict(config.kwargs)
    size = config.image_size or (96 if config.family == "atari" else 64)
    if config.family == "dmc":
        from onegraph.envs.dmc import make_dmc

        kind = "proprio" if config.observations == "auto" else config.observations
        return make_dmc(task, observations=kind, image_size=size, action_repeat=repeat, render=render, kwargs=kwargs)
    if config.family in ("atari", "atari100k"):
        from onegraph.envs.atari import make_atari

        return make_atari(task, image_size=size, action_repeat=repeat, render=render, kwargs=kwargs)
    if config.family == "crafter":
        from onegraph.envs.crafter import CrafterEnv

        return RepeatActions(CrafterEnv(task, size=size, render=render, kwargs=kwargs), repeat)
    is_factory = ":" in task and not re.search(r"-v\d+$", task)
    return RepeatActions(_factory_env(task, kwargs) if is_factory else _gymnasium_env(task, render, kwargs), repeat)


def _factory_env(task: str, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    module_name, _, name = task.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise ValueError(
            f"env: task {task!r} names the module {module_name!r}, which is neither installed nor in {os.getcwd()}"
        ) from error
    factory = getattr(module, name, None)
    if not callable(factory):
        close = difflib.get_close_matches(name, [key for key in vars(module) if callable(getattr(module, key))], n=3)
        hint = f"; close matches: {', '.join(close)}" if close else ""
        raise ValueError(f"env: {module_name} has no callable {name!r}{hint}")
    env = factory(**kwargs)
    if not isinstance(env, gymnasium.Env):
        raise TypeError(
            f"env: {task} returned a {type(env).__name__}; a factory must return a gymnasium.Env; an environment of "
            "the old gym interface can be wrapped by shimmy.GymV26CompatibilityV0"
        )
    return env


def _gymnasium_env(task: str, render: bool, kwargs: dict[str, Any]) -> gymnasium.Env[Any, Any]:
    if task.startswith("ALE/"):
        gymnasium.register_envs(import_optional("ale_py", extra="atari", task=task))
    settings = {"disable_env_checker": True, "render_mode": "rgb_array" if render else None, **kwargs}
    try:
        return gymnasium.make(task, **settings)
    except gymnasium.error.DependencyNotInstalled as error:
        extra = "box2d" if "box2d" in str(error).lower() else "dmc" if "mujoco" in str(error).lower() else None
        hint = f"pip install 'onegraph[{extra}]'" if extra else "install what it names"
        raise ImportError(f"env: {task} needs a package that is missing ({error}); {hint}") from error
    except gymnasium.error.UnregisteredEnv as error:
        raise ValueError(f"env: unknown task {task!r}; {_suggest(task)}") from error
    except (gymnasium.error.Error, ImportError) as error:
        kind = ImportError if isinstance(error, ImportError) else ValueError
        raise kind(f"env: {task} could not be made: {error}") from error


def _suggest(task: str) -> str:
    prefix, slash, rest = task.partition("/")
    close = difflib.get_close_matches(task, gymnasium.registry, n=3)
    if slash:
        close += [f"{family}/{rest}" for family in difflib.get_close_matches(prefix, _FAMILIES, n=1)]
    if close:
        return f"close matches: {', '.join(close)}"
    return (
        "it is no Gymnasium id, and the other forms are dmc/<domain>_<task>, atari/<game>, atari100k/<game>, "
        "crafter/reward and module:function"
    )
