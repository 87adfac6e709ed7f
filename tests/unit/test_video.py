from __future__ import annotations

import builtins
import os

import numpy as np
import pytest

from onegraph.train.video import grid, require_video, write_video


def clip(length=12, height=33, width=48, channels=3):
    frames = np.zeros((length, height, width, channels), np.uint8)
    for t in range(length):
        frames[t, :, : 4 * (t + 1)] = 200
    return frames


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
@pytest.mark.parametrize("channels", [1, 3])
def test_files_play_back(tmp_path, suffix, channels):
    pytest.importorskip("imageio_ffmpeg")
    imageio = pytest.importorskip("imageio.v3")
    frames = clip(channels=channels)
    path = write_video(tmp_path / "new" / f"a{suffix}", frames, fps=10)
    read = np.asarray(imageio.imread(path, index=None))
    assert read.shape == (12, 34 if suffix == ".mp4" else 33, 48, 3)
    wanted = np.repeat(frames, 3 // channels, axis=-1).astype(int)
    assert np.abs(read[:, :33].astype(int) - wanted).mean() < 6
    assert os.listdir(path.parent) == [path.name]
    if suffix == ".mp4":
        assert imageio.immeta(path)["fps"] == pytest.approx(10)


@pytest.mark.parametrize(
    ("name", "frames", "fps", "text"),
    [
        ("a.avi", clip(), 20, "'a.avi' ends in '.avi'; use one of .mp4, .gif"),
        ("a.mp4", clip().astype(np.float32), 20, "frames are float32 [12, 33, 48, 3]; give uint8 [T, H, W, C]"),
        ("a.mp4", clip()[0], 20, "frames are uint8 [33, 48, 3]"),
        ("a.mp4", clip()[:0], 20, "frames are uint8 [0, 33, 48, 3]"),
        ("a.mp4", clip(channels=4), 20, "C 1 or 3"),
        ("a.mp4", clip(), 0, "0 frames a second"),
    ],
)
def test_errors(tmp_path, name, frames, fps, text):
    with pytest.raises(ValueError) as error:
        write_video(tmp_path / name, frames, fps=fps)
    assert text in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("missing", "text"), [("imageio", "imageio"), ("imageio_ffmpeg", "imageio-ffmpeg")])
def test_missing_packages_are_named(monkeypatch, missing, text):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == missing:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    if missing != "imageio":
        pytest.importorskip("imageio")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=rf"^{text} is not installed; pip install 'onegraph\[video\]'"):
        require_video()


def test_grid():
    a, b, c = clip(5, 7, 9), clip(3, 5, 9, 1), clip(5, 7, 4)
    tiled = grid([a, b, c])
    assert tiled.shape == (5, 14, 18, 3)
    assert (tiled[:, :7, :9] == a).all()
    assert (tiled[4, :5, 9:18] == b[-1]).all()
    assert (tiled[:, 5:7, 9:] == 0).all()
    assert (tiled[:, 7:, :4] == c).all()
    assert grid([a], columns=3).shape == (5, 8, 10, 3)
    assert grid([a, a, a], columns=3).shape == (5, 8, 28, 3)
    with pytest.raises(ValueError, match="no clips"):
        grid([])
    with pytest.raises(ValueError, match="0 columns"):
        grid([a], columns=0)
    with pytest.raises(ValueError, match="grid: clip 1: frames are uint8"):
        grid([a, a[0]])
