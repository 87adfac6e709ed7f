"""Atari games through ale-py, with the preprocessing of the DreamerV3 configurations."""

from __future__ import annotations

import difflib
from typing import Any

import gymnasium

from onegraph.envs.packages import import_optional
from onegraph.envs.wrappers import RepeatActions

FRAME_SKIP = 4
_MAX_NOOPS = 30
_STICKY = 0.25


def make_atari(
    task: str, *, image_size: int, action_repeat: int, render: bool, kwargs: dict[str, Any]
) -> gymnasium.Env[Any, Any]:
    """Builds `atari/<game>` or `atari100k/<game>`; the game is written as `ms_pacman` or `MsPacman`.

    Both: 4 frames a step, maximum over the last two, 1 to 30 no-ops after a reset, no signal at a lost life, rewards
    as they are. `atari`: gray images, all 18 actions, each frame keeps the last action with probability 0.25.
    `atari100k`: colour, the game's own actions, no sticky actions. The time limit is the caller's.

    Frames are shrunk by area averaging, where the reference implementation uses Pillow's bilinear filter.

    Args:
        task: Full name with its prefix.
        image_size: Height and width in pixels.
        action_repeat: Repeats on top of the frame skip.
        render: Whether `render()` must return frames, uint8 `[210, 160, 3]`.
        kwargs: Keyword arguments of `gymnasium.make`; they win over the settings above.

    Raises:
        ImportError: A package of the `atari` extra is missing.
        ValueError: ale-py has no such game.
    """
    ale_py = import_optional("ale_py", extra="atari", task=task)
    import_optional("cv2", extra="atari", task=task)
    gymnasium.register_envs(ale_py)
    family, _, game = task.partition("/")
    ids = {_plain(name[4:-3]): name for name in gymnasium.registry if name.startswith("ALE/") and name.endswith("-v5")}
    if _plain(game) not in ids:
        close = difflib.get_close_matches(_plain(game), ids, n=3) or sorted(ids)[:3]
        raise ValueError(
            f"env: unknown task {task!r}; close matches: {', '.join(f'{family}/{ids[name][4:-3]}' for name in close)}"
        )
    is_100k = family == "atari100k"
    settings: dict[str, Any] = {
        "frameskip": 1,
        "repeat_action_probability": 0.0 if is_100k else _STICKY,
        "full_action_space": not is_100k,
        "max_num_frames_per_episode": 0,
        "render_mode": "rgb_array" if render else None,
        "disable_env_checker": True,
        **kwargs,
    }
    env = gymnasium.make(ids[_plain(game)], **settings)
    env = gymnasium.wrappers.AtariPreprocessing(
        env,
        noop_max=_MAX_NOOPS,
        frame_skip=FRAME_SKIP,
        screen_size=image_size,
        terminal_on_life_loss=False,
        grayscale_obs=not is_100k,
        grayscale_newaxis=True,
    )
    return RepeatActions(env, action_repeat)


def _plain(game: str) -> str:
    return game.replace("_", "").lower()
