"""Metrics of a run: always a JSON line for each report; TensorBoard and Weights & Biases on request; progress."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, TextIO

import numpy as np
import torch

from onegraph.config import suggest
from onegraph.train.video import write_video

Scalar = float | int | bool | np.generic | np.ndarray | torch.Tensor | None
_PLAIN_EVERY_S = 10.0


class Sink(Protocol):
    """Where metrics go besides the JSON lines."""

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        """Takes metrics; None stands for an undefined one."""
        ...

    def video(self, step: int, name: str, path: Path, frames: np.ndarray, fps: int) -> None:
        """Takes a clip, uint8 [T, H, W, C], that was written to `path`."""
        ...

    def close(self) -> None:
        """Writes what is pending."""
        ...


class Logger:
    """The one place where a training loop reports. Only one process of a run has it.

    `metrics.jsonl` gets one strict JSON object a line: `step`, `time_s` (wall seconds since the start of the run, with
    earlier sessions counted) and the metrics; undefined ones are null. A line goes out in one write, and a line that a
    kill has torn is removed when the file is opened again.

    Args:
        directory: The run's directory; made if missing.
        sinks: Any of `tensorboard` and `wandb`.
        total_steps: Steps at which the run ends, for the progress bar.
        progress: `auto`: a bar on a terminal, else a plain line at most every 10 s. True: the bar in any case. False:
            nothing but messages.
        config: JSON values handed to the sinks.
        resume_step: The step at which the run continues: rows of later steps are dropped. None keeps all rows.
        stream: Where progress and messages go; default stderr.

    Raises:
        ImportError: A sink's package is missing; the text names the extra.
        ValueError: A sink is unknown.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        sinks: Sequence[str] = (),
        total_steps: int,
        progress: bool | Literal["auto"] = "auto",
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        stream: TextIO | None = None,
    ) -> None:
        for name in sinks:
            if name not in _SINKS:
                raise ValueError(f"Logger: unknown sink {name!r}; {suggest(name, _SINKS)}")
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path = self.directory / "metrics.jsonl"
        earlier_s = repair_jsonl(self.path, resume_step)
        self._start = time.monotonic() - earlier_s
        self._handle: int | None = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._sinks: list[Sink] = [_SINKS[name](self.directory, config, resume_step) for name in dict.fromkeys(sinks)]
        self._display = _Display(stream if stream is not None else sys.stderr, progress, total_steps)

    def log(self, step: int, metrics: Mapping[str, Scalar]) -> dict[str, float | None]:
        """Reports metrics.

        Args:
            step: Environment steps (or updates, offline) so far.
            metrics: Scalars by name (`area/name`): Python, numpy, or 0-D tensors on any device, which are fetched with
                one transfer for each device and dtype.

        Returns:
            The metrics as Python numbers; None for NaN and infinity.

        Raises:
            ValueError: A value is not a scalar, or a name is reserved.
            OSError: The line could not be written; no part of it stays in the file.
        """
        for name in ("step", "time_s"):
            if name in metrics:
                raise ValueError(f"Logger: the metric name {name!r} is reserved; rename it")
        if self._handle is None:
            raise ValueError("Logger: log after close; make a new Logger")
        values = _numbers(metrics)
        row = {"step": int(step), "time_s": round(time.monotonic() - self._start, 3), **values}
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        size = os.fstat(self._handle).st_size
        try:
            if os.write(self._handle, line) != len(line):
                raise OSError("only a part was written")
        except OSError as error:
            os.ftruncate(self._handle, size)
            raise OSError(f"{self.path}: cannot write metrics ({error}); free disk space and resume the run") from error
        for sink in self._sinks:
            sink.scalars(int(step), values)
        return values

    def video(self, step: int, name: str, frames: np.ndarray, *, fps: int = 20, suffix: str = ".mp4") -> Path:
        """Writes a clip into `videos/` and hands it to the sinks.

        Args:
            step: Environment steps so far.
            name: Such as `eval/episode`; slashes become underscores in the file's name.
            frames: uint8 [T, H, W, C], C 1 or 3.
            fps: Frames a second.
            suffix: `.mp4` or `.gif`.

        Returns:
            The file, such as `videos/eval_episode_000001000.mp4`.
        """
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name)
        path = write_video(self.directory / "videos" / f"{stem}_{int(step):09d}{suffix}", frames, fps=fps)
        for sink in self._sinks:
            sink.video(int(step), name, path, frames, fps)
        return path

    def progress(
        self,
        step: int,
        *,
        updates_per_s: float | None = None,
        episode_return: float | None = None,
        eta_s: float | None = None,
    ) -> None:
        """Shows how far the run is. Cheap enough for every step.

        Args:
            step: Environment steps so far.
            updates_per_s: Updates a second of late.
            episode_return: Return of late episodes.
            eta_s: Seconds left; default: from the speed of this session.
        """
        self._display.update(int(step), updates_per_s, episode_return, eta_s)

    def message(self, text: str) -> None:
        """Prints a line above the progress bar, as it is.

        Args:
            text: The line.
        """
        self._display.message(text)

    def close(self) -> None:
        """Closes the file, the sinks and the bar. May be called twice."""
        if self._handle is None:
            return
        os.close(self._handle)
        self._handle = None
        self._display.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Logger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def repair_jsonl(path: Path, resume_step: int | None = None) -> float:
    """Makes a metrics file whole again after a kill.

    Args:
        path: The file; may be missing.
        resume_step: Rows of later steps are dropped; None keeps them.

    Returns:
        `time_s` of the last row that stays, 0 if there is none.
    """
    if not path.exists():
        return 0.0
    content = path.read_bytes()
    kept: list[bytes] = []
    last_s = 0.0
    for line in content.splitlines(keepends=True):
        try:
            row = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            row = None
        if not isinstance(row, dict) or (resume_step is not None and row.get("step", 0) > resume_step):
            continue
        kept.append(line)
        last_s = float(row.get("time_s") or 0.0)
    whole = b"".join(kept)
    if whole != content:
        temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
        temporary.write_bytes(whole)
        os.replace(temporary, path)
    return last_s


def _numbers(metrics: Mapping[str, Scalar]) -> dict[str, float | None]:
    values: dict[str, Any] = dict(metrics)
    groups: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor | np.ndarray) and value.ndim != 0:
            raise ValueError(f"Logger: metric {name!r} has the shape {list(value.shape)}; log scalars (0-D)")
        if isinstance(value, torch.Tensor):
            groups.setdefault((value.device, value.dtype), []).append(name)
        elif isinstance(value, np.ndarray | np.generic):
            values[name] = value.item()
    for names in groups.values():
        values.update(zip(names, torch.stack([values[name].detach() for name in names]).tolist()))
    for name, value in values.items():
        if isinstance(value, bool):
            values[name] = int(value)
        elif value is not None and not isinstance(value, int | float):
            raise ValueError(f"Logger: metric {name!r} is {value!r} ({type(value).__name__}); log a number")
        elif isinstance(value, float) and not math.isfinite(value):
            values[name] = None
    return values


class _Display:
    """A Rich bar, plain lines, or nothing."""

    def __init__(self, stream: TextIO, progress: bool | Literal["auto"], total: int) -> None:
        self._stream = stream
        self._total = total
        self._first: tuple[int, float] | None = None
        self._shown_s = -math.inf
        self._plain = progress == "auto" and not stream.isatty()
        self._bar: Any = None
        if progress and not self._plain:
            self._bar = self._make_bar()
            self._task = self._bar.add_task("", total=total, note="")
            self._bar.start()

    def _make_bar(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        forced = None if self._stream.isatty() else True
        return Progress(
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} steps"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=Console(file=self._stream, force_terminal=forced),
            refresh_per_second=4,
        )

    def update(self, step: int, updates_per_s: float | None, episode_return: float | None, eta_s: float | None) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        if self._bar is None and (not self._plain or now - self._shown_s < _PLAIN_EVERY_S):
            return
        done, elapsed = step - self._first[0], now - self._first[1]
        if eta_s is None and done > 0:
            eta_s = max(0, self._total - step) * elapsed / done
        parts = [] if updates_per_s is None else [f"{updates_per_s:.1f} updates/s"]
        parts += [] if episode_return is None else [f"return {episode_return:.4g}"]
        parts += [] if eta_s is None or not math.isfinite(eta_s) else [f"ETA {_duration(eta_s)}"]
        if self._bar is not None:
            self._bar.update(self._task, completed=step, note="  ".join(parts))
            return
        self._shown_s = now
        print(", ".join([f"step {step:,} of {self._total:,}", *parts]), file=self._stream, flush=True)

    def message(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class _TensorBoard:
    def __init__(self, directory: Path, config: Mapping[str, Any] | None, resume_step: int | None) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard is not installed; pip install 'onegraph[log]'") from error
        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=purge)
        if config is not None:
            self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```", resume_step or 0)

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    def video(self, step: int, name: str, path: Path, frames: np.ndarray, fps: int) -> None:
        from tensorboard.compat.proto import summary_pb2

        # TensorBoard plays a gif inside an image entry; SummaryWriter.add_video would need moviepy for the same.
        gif = path if path.suffix == ".gif" else write_video(path.with_name(f".tmp-{path.stem}.gif"), frames, fps=fps)
        summary: Any = getattr(summary_pb2, "Summary")  # noqa: B009 (generated code, opaque to type checkers)
        image = summary.Image(height=frames.shape[1], width=frames.shape[2], colorspace=3)
        image.encoded_image_string = gif.read_bytes()
        if gif != path:
            gif.unlink()
        self._writer._get_file_writer().add_summary(summary(value=[summary.Value(tag=name, image=image)]), step)

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, directory: Path, config: Mapping[str, Any] | None, resume_step: int | None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("Weights & Biases is not installed; pip install 'onegraph[log]'") from error
        marker = directory / "wandb_id.txt"  # a resumed run continues the same page
        if not marker.exists():
            marker.write_text(secrets.token_hex(8))
        options: dict[str, Any] = {} if "WANDB_PROJECT" in os.environ else {"project": "onegraph"}
        options |= {"id": marker.read_text().strip(), "resume": "allow", "config": dict(config or {})}
        self._module = wandb
        self._run = wandb.init(dir=str(directory), name=directory.name, **options)

    def scalars(self, step: int, values: Mapping[str, float | None]) -> None:
        self._run.log({name: value for name, value in values.items() if value is not None}, step=step)

    def video(self, step: int, name: str, path: Path, frames: np.ndarray, fps: int) -> None:
        self._run.log({name: self._module.Video(str(path))}, step=step)

    def close(self) -> None:
        self._run.finish()


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}"


_SINKS: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _WandB}
