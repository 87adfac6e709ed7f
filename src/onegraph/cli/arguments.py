"""From words to dataclasses: short forms, presets, and the parser. The only file that imports tyro."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from onegraph.dreamer.config import sized
from onegraph.train.config import TrainConfig, preset

# What tyro has to be told about a field, so that the commands need not know it.
TrainOptions = Annotated[TrainConfig, tyro.conf.arg(name="")]
Word = tyro.conf.Positional[str]
OnePath = tyro.conf.Positional[Path]
Paths = tyro.conf.Positional[tuple[Path, ...]]

# Short forms of options that everybody types.
SHORT = {
    "--task": "--env.task",
    "--num-envs": "--env.num-envs",
    "--workers": "--env.workers",
    "--observations": "--env.observations",
    "--action-repeat": "--env.action-repeat",
    "--image-size": "--env.image-size",
    "--lr": "--agent.lr",
    "--fast": "--optimization.fast",
    "--compile-learner": "--optimization.compile-learner",
    "--compile-rollout": "--optimization.compile-rollout",
    "--mixed-precision": "--optimization.mixed-precision",
}

T = TypeVar("T")


def parse(cls: type[T], argv: Sequence[str], prog: str, default: T | None = None) -> T:
    """Reads options into a dataclass; a mistake ends the program with code 2.

    Args:
        cls: What to fill; its docstring documents the options.
        argv: Words after the command.
        prog: Name of the command.
        default: Where options that are not given come from.
    """
    kwargs: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(cls, args=list(argv), prog=prog, **kwargs)


def expand(argv: Sequence[str]) -> list[str]:
    """Replaces short forms, also in `--task=value`."""
    out = []
    for word in argv:
        name, equals, value = word.partition("=")
        out.append(SHORT.get(name.replace("_", "-"), name) + equals + value if name.startswith("--") else word)
    return out


def pick(argv: Sequence[str], name: str) -> str | None:
    """Value of an option that decides the defaults of the others, read before the real parse."""
    for i, word in enumerate(argv):
        if word == name and i + 1 < len(argv):
            return argv[i + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return None


def with_env_kwargs(config: TrainConfig, text: str) -> TrainConfig:
    """The config with the environment's keyword arguments from a JSON object; as it is for "".

    Raises:
        ValueError: The text is no JSON object.
    """
    if not text:
        return config
    try:
        kwargs = json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"--env-kwargs {text!r} is not JSON ({error}); give an object such as '{{\"gravity\": 9.8}}'"
        ) from None
    if not isinstance(kwargs, dict):
        raise ValueError(f"--env-kwargs {text!r} is not a JSON object; give one such as '{{\"gravity\": 9.8}}'")
    return replace(config, env=replace(config.env, kwargs=kwargs))


def base_config(argv: Sequence[str], saved: TrainConfig | None = None) -> TrainConfig:
    """Where defaults come from: the preset and size that the words name, or a run's saved config.

    Raises:
        ValueError: Unknown preset or size.
    """
    name, size = pick(argv, "--preset"), pick(argv, "--size")
    base = saved if saved is not None and name is None else preset(name or "default")
    return replace(base, agent=sized(size, base.agent)) if size else base
