"""Writes clips to mp4 or gif, and tiles several clips side by side."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_SUFFIXES = (".mp4", ".gif")


def require_video(suffix: str = ".mp4") -> Any:
    """Checks that the packages behind `write_video` are installed, so that a run can fail before it starts.

    Args:
        suffix: `.mp4` or `.gif`.

    Returns:
        The module `imageio.v2`.

    Raises:
        ImportError: A package is missing; the text names the extra.
    """
    try:
        import imageio.v2 as imageio
    except ImportError as error:
        raise ImportError("imageio is not installed; pip install 'onegraph[video]'") from error
    if suffix == ".mp4":
        try:
            import imageio_ffmpeg  # noqa: F401
        except ImportError as error:
            raise ImportError("imageio-ffmpeg is not installed; pip install 'onegraph[video]'") from error
    return imageio


def write_video(path: Path | str, frames: np.ndarray, *, fps: int = 20) -> Path:
    """Writes one clip. The file appears only when it is complete.

    Args:
        path: Where to, ending in `.mp4` (H.264, plays in browsers) or `.gif`; folders are made.
        frames: uint8 [T, H, W, C] with T >= 1 and C either 1 (gray) or 3 (RGB). Odd heights and widths of an mp4 are
            padded by one pixel, because the codec needs even ones.
        fps: Frames a second.

    Returns:
        The path.

    Raises:
        ImportError: imageio or imageio-ffmpeg is missing.
        ValueError: The suffix, the frames or the rate do not fit.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(f"write_video: {path.name!r} ends in {suffix!r}; use one of {', '.join(_SUFFIXES)}")
    if fps < 1:
        raise ValueError(f"write_video: {fps} frames a second; give at least 1")
    frames = _as_rgb(frames, "write_video")
    imageio = require_video(suffix)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        if suffix == ".mp4":
            options: dict[str, Any] = {"codec": "libx264", "macro_block_size": 2, "ffmpeg_log_level": "error"}
            with imageio.get_writer(temporary, format="FFMPEG", fps=fps, quality=8, **options) as writer:
                for frame in _pad_even(frames):
                    writer.append_data(frame)
        else:
            imageio.mimwrite(temporary, list(frames), format="GIF", duration=1000 / fps, loop=0)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def grid(videos: Sequence[np.ndarray], *, columns: int | None = None) -> np.ndarray:
    """Tiles clips in rows, left to right and top to bottom.

    Args:
        videos: Clips, each uint8 [T_i, H_i, W_i, C] with C 1 or 3. A shorter clip holds its last frame; a smaller one
            is padded with black on the right and below.
        columns: Clips in a row; default: as near to a square as possible, wider rather than higher.

    Returns:
        uint8 [max T, H, W, 3] with even H and W.

    Raises:
        ValueError: There is no clip, a clip does not fit, or `columns` is below 1.
    """
    if not videos:
        raise ValueError("grid: no clips were given; give at least one")
    columns = int(np.ceil(np.sqrt(len(videos)))) if columns is None else columns
    if columns < 1:
        raise ValueError(f"grid: {columns} columns; give at least 1")
    clips = [_as_rgb(video, f"grid: clip {i}") for i, video in enumerate(videos)]
    length, height, width = (max(clip.shape[axis] for clip in clips) for axis in range(3))
    columns = min(columns, len(clips))
    rows = -(-len(clips) // columns)
    canvas = np.zeros((length, rows * height, columns * width, 3), np.uint8)
    for i, clip in enumerate(clips):
        y, x = (i // columns) * height, (i % columns) * width
        t, h, w = clip.shape[:3]
        canvas[:t, y : y + h, x : x + w] = clip
        canvas[t:, y : y + h, x : x + w] = clip[-1]
    return _pad_even(canvas)


def _as_rgb(frames: np.ndarray, where: str) -> np.ndarray:
    frames = np.asarray(frames)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] not in (1, 3) or 0 in frames.shape:
        raise ValueError(
            f"{where}: frames are {frames.dtype} {list(frames.shape)}; give uint8 [T, H, W, C], T >= 1, C 1 or 3"
        )
    return np.repeat(frames, 3, axis=-1) if frames.shape[-1] == 1 else frames


def _pad_even(frames: np.ndarray) -> np.ndarray:
    _, height, width, _ = frames.shape
    if height % 2 == 0 and width % 2 == 0:
        return frames
    return np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
