"""What to build: the task, how many copies, and how its observations are shaped."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal

_WORKERS = ("auto", "inline", "process")
_OBSERVATIONS = ("auto", "proprio", "pixels", "both")
_SLOW_FAMILIES = ("dmc", "atari", "atari100k", "crafter")
_ATARI_FRAME_SKIP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvConfig:
    """A task and the way it is run.

    Attributes:
        task: One of
            a Gymnasium id (`Pendulum-v1`, or `package:Name-v0` where importing `package` registers it);
            `dmc/<domain>_<task>` (`dmc/walker_walk`); `atari/<game>` or `atari100k/<game>` (`atari/ms_pacman`);
            `crafter/reward` or `crafter/noreward`;
            `module:function`, a callable that returns a `gymnasium.Env`, importable from the current directory too.
        num_envs: Number of streams stepped together.
        workers: `inline` steps every stream in this process, `process` gives each stream a process of its own. `auto`
            chooses by the rule of `use_processes`.
        observations: `proprio`, `pixels` or `both` for `dmc/` tasks (`auto` is `proprio`). Other tasks have one kind of
            observation and take `auto`; Atari and Crafter also accept `pixels`.
        image_size: Height and width of rendered images in pixels; None is the task family's own size: 96 for `atari/`,
            64 elsewhere. Tasks that bring their own images (Gymnasium ids, factories) ignore it.
        action_repeat: Environment steps for each agent step; rewards are summed. Comes on top of Atari's frame skip
            of 4.
        max_episode_steps: Time limit in agent steps, added to the task's own limits; it truncates and never terminates.
            None adds none, except for Atari: 27000 steps, 108000 frames.
        include_keys: Regular expression; observation keys that it matches in full are kept.
        kwargs: Keyword arguments of `gymnasium.make`, of the factory, or of the suite's loader.
    """

    task: str
    num_envs: int = 16
    workers: Literal["auto", "inline", "process"] = "auto"
    observations: Literal["auto", "proprio", "pixels", "both"] = "auto"
    image_size: int | None = None
    action_repeat: int = 1
    max_episode_steps: int | None = None
    include_keys: str = ".*"
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.task.strip():
            raise ValueError("env: task is empty; name one, for example Pendulum-v1 or dmc/walker_walk")
        for name in ("num_envs", "image_size", "action_repeat", "max_episode_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"env: {name} is {value}; it must be at least 1")
        if self.workers not in _WORKERS:
            raise ValueError(f"env: workers is {self.workers!r}; it must be one of {', '.join(_WORKERS)}")
        if self.observations not in _OBSERVATIONS:
            raise ValueError(
                f"env: observations is {self.observations!r}; it must be one of {', '.join(_OBSERVATIONS)}"
            )
        allowed = {"dmc": _OBSERVATIONS, "atari": ("auto", "pixels"), "atari100k": ("auto", "pixels")}
        allowed["crafter"] = ("auto", "pixels")
        if self.observations not in allowed.get(self.family, ("auto",)):
            raise ValueError(
                f"env: observations is {self.observations!r} but {self.task} has one kind of observation; leave it at "
                "auto and choose entries with include_keys"
            )
        try:
            re.compile(self.include_keys)
        except re.error as error:
            raise ValueError(f"env: include_keys {self.include_keys!r} is not a regular expression: {error}") from None

    @property
    def family(self) -> str:
        """`dmc`, `atari`, `atari100k`, `crafter`, or `gymnasium` for ids and factories."""
        prefix, slash, _ = self.task.partition("/")
        return prefix if slash and prefix in _SLOW_FAMILIES else "gymnasium"

    @property
    def frames_per_step(self) -> int:
        """Simulator frames that one agent step takes; curves against frames multiply the step count by it."""
        return self.action_repeat * (_ATARI_FRAME_SKIP if self.family.startswith("atari") else 1)

    @property
    def use_processes(self) -> bool:
        """Whether the streams get processes of their own.

        The rule of `auto`: processes for more than one stream of a `dmc/`, `atari/`, `atari100k/` or `crafter/` task
        on a machine with at least 4 usable cores; in line otherwise. A step of those suites takes longer than the 0.1
        ms or so that a message to a worker costs, a classic-control step takes less. Both ways give the same rows for
        the same seed.
        """
        if self.workers != "auto":
            return self.workers == "process"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return self.num_envs > 1 and self.family in _SLOW_FAMILIES and cores >= 4
