"""DeepMind Control tasks through Shimmy, with an OpenGL backend only where something is rendered."""

from __future__ import annotations

import difflib
import importlib
import os
import subprocess
import sys
from typing import Any

import gymnasium
import numpy as np

from onegraph.envs.packages import import_optional
from onegraph.envs.wrappers import RenderImages, RepeatActions

_BACKENDS = ("egl", "osmesa")
_CAMERAS = {"quadruped": 2, "rodent": 4}
_RODENT_MODULE = "dm_control.locomotion.examples.basic_rodent_2020"
_RODENT_TASKS = ("rodent_escape_bowl", "rodent_run_gaps", "rodent_maze_forage", "rodent_two_touch")
_VIDEO_SIZE = (240, 320)
_PROBE = "import dm_control._render as r; r.Renderer(8, 8).free()"


def make_dmc(
    task: str, *, observations: str, image_size: int, action_repeat: int, render: bool, kwargs: dict[str, Any]
) -> gymnasium.Env[Any, Any]:
    """Builds `dmc/<domain>_<task>`.

    Vectors keep dm_control's names. Images are under `image`, from camera 0 (quadruped 2, rodent 4). dm_control's own
    time limit truncates. Without pixels and without `render` no OpenGL library is loaded, except for the rodent tasks,
    which have a camera of their own.

    Args:
        task: Full name with the `dmc/` prefix.
        observations: `proprio`, `pixels` or `both`.
        image_size: Height and width in pixels.
        action_repeat: Control steps for each action.
        render: Whether `render()` must return frames, uint8 `[240, 320, 3]`.
        kwargs: Keyword arguments of `dm_control.suite.load`: `task_kwargs`, `environment_kwargs`, `visualize_reward`.

    Returns:
        Environment with a Dict observation space and dm_control's action bounds.

    Raises:
        ImportError: A package of the `dmc` extra is missing.
        RuntimeError: Pixels are wanted and no OpenGL backend works.
        ValueError: dm_control has no such task.
    """
    pixels, wanted = observations != "proprio", task.removeprefix("dmc/")
    is_rodent = wanted in _RODENT_TASKS  # its own observations have a camera image
    suite = _import_suite(task, choose_backend(task) if pixels or render or is_rodent else None)
    names = {f"{domain}_{name}": (domain, name) for domain, name in suite.ALL_TASKS}
    names |= {name: ("rodent", name) for name in _RODENT_TASKS}
    if wanted not in names:
        close = difflib.get_close_matches(wanted, names, n=3) or sorted(names)[:3]
        raise ValueError(f"env: unknown task {task!r}; close matches: {', '.join('dmc/' + name for name in close)}")
    domain, name = names[wanted]
    shimmy = import_optional("shimmy.dm_control_compatibility", extra="dmc", task=task)
    if is_rodent:
        native = getattr(importlib.import_module(_RODENT_MODULE), name)(**kwargs)
    else:
        native = suite.load(domain, name, **kwargs)
    camera = _CAMERAS.get(domain, 0)
    video = {"height": _VIDEO_SIZE[0], "width": _VIDEO_SIZE[1], "camera_id": camera}
    env = shimmy.DmControlCompatibilityV0(
        native, render_mode="rgb_array" if render else None, render_kwargs=video if render else None
    )
    env = RepeatActions(env, action_repeat)
    if not pixels:
        return env

    def frame() -> np.ndarray:
        return native.physics.render(image_size, image_size, camera_id=camera)

    return RenderImages(env, frame, size=image_size, keep=observations == "both")


def choose_backend(task: str) -> str:
    """Chooses the OpenGL backend: `MUJOCO_GL` if set, else the first of EGL and OSMesa that draws in a trial process.

    The choice is put into `MUJOCO_GL`, so that workers and MuJoCo's own renderers follow it.

    Raises:
        RuntimeError: None works; the text names the variable and the Debian packages.
    """
    if backend := os.environ.get("MUJOCO_GL"):
        return backend
    failures = []
    for backend in _BACKENDS:
        error = _probe(backend)
        if error is None:
            os.environ["MUJOCO_GL"] = backend
            return backend
        failures.append(f"{backend}: {error}")
    raise RuntimeError(
        f"env: {task} renders images, but no off-screen OpenGL backend works ({'; '.join(failures)}); "
        "apt-get install libegl1 libegl-mesa0 libgl1 libopengl0 and set MUJOCO_GL=egl, or apt-get install libosmesa6 "
        "and set MUJOCO_GL=osmesa; observations='proprio' needs no OpenGL"
    )


def _probe(backend: str) -> str | None:
    """Draws once in another process, because a failed import of PyOpenGL cannot be undone in this one."""
    env = {**os.environ, "MUJOCO_GL": backend}
    env.pop("PYOPENGL_PLATFORM", None)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], env=env, capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return "no answer within 60 s"
    lines = done.stderr.strip().splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")


def _import_suite(task: str, backend: str | None) -> Any:
    """Imports dm_control, which picks its renderer while it is imported.

    Without a backend the import is done with rendering off. A later task that renders re-imports the one module that
    holds the choice; so does a task that finds GLFW, which dm_control prefers, even without a display, where someone
    imported it before.
    """
    is_unset = backend is None and "MUJOCO_GL" not in os.environ
    if is_unset:
        os.environ["MUJOCO_GL"] = "disable"
    try:
        suite = import_optional("dm_control.suite", extra="dmc", task=task)
    finally:
        if is_unset:
            del os.environ["MUJOCO_GL"]
    if backend is not None:
        chosen = importlib.import_module("dm_control._render")
        names = importlib.import_module("dm_control._render.constants")
        if backend not in names.GLFW and chosen.BACKEND in (None, *names.NO_RENDERER, *names.GLFW):
            importlib.reload(chosen)
    return suite
