"""Replay: the steps of many streams in rings, drawn as windows, with latent write-back.

A stream is what one environment produces, episode after episode. Step `i` of a stream (its absolute index, counted from
0 and never reused) is in slot `i % stream_capacity`; it is stored until `stream_capacity` more steps have been added.
A window is `window` consecutive stored steps of one stream. It may cross episodes, never streams, never the write head.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from onegraph.data.layout import Field, check_layout, check_step, parse_fields, to_stored
from onegraph.data.storage import RingStorage, damaged, open_saved

_FLAGS = ("is_first", "is_last", "is_terminal")
_FORMAT = 1


class Sample(NamedTuple):
    """A batch of windows.

    Attributes:
        data: Field name to `[B, L, *shape]`, of the stored dtype, on the CPU; memory of its own, shared with nothing.
        streams: `[B]` int64, the stream of each window.
        starts: `[B]` int64, the absolute index of each window's first step.
    """

    data: dict[str, torch.Tensor]
    streams: np.ndarray
    starts: np.ndarray


class Replay:
    """Stores steps of `num_streams` streams and draws windows from them.

    Every stored window is equally likely, whichever stream it is in. With `online`, each stream also queues every
    `window`-th new window (first steps 1, 1 + window, 1 + 2 * window, ...), and training samples take queued windows
    first, oldest first, each once. One thread at a time.

    Args:
        fields: Name to (shape of one step, NumPy dtype name). Must hold `is_first`, `is_last` and `is_terminal`, each
            `((), "bool")`.
        num_streams: Number of streams.
        capacity: Steps of all streams together; each stream holds `capacity // num_streams`.
        window: Steps of a window (`batch_length + replay_context`).
        seed: Seed of the generator that draws windows.
        online: Whether new windows are queued.
        memory_budget: Bytes; beyond it the largest fields live in memory-mapped files.
        directory: Where the memory-mapped files live while the replay is open; the system's temporary directory if
            None. They are scratch: `save` is what keeps the contents.

    Raises:
        ValueError: A count is not positive, a stream would hold less than one window, or a field is missing or has a
            shape or dtype that cannot be stored.
        OSError: The disk cannot hold the memory-mapped files.
    """

    def __init__(
        self,
        fields: Mapping[str, tuple[tuple[int, ...], str]],
        *,
        num_streams: int,
        capacity: int,
        window: int,
        seed: int = 0,
        online: bool = True,
        memory_budget: int = 4 * 2**30,
        directory: Path | None = None,
    ):
        for name, value in (("num_streams", num_streams), ("window", window)):
            if value < 1:
                raise ValueError(f"replay: {name} is {value}; it must be at least 1")
        if capacity // num_streams < window:
            raise ValueError(
                f"replay: capacity {capacity} gives each of {num_streams} streams {capacity // num_streams} steps but "
                f"a window needs {window}; raise capacity to at least {num_streams * window} or lower batch_length"
            )
        self.num_streams = num_streams
        self.capacity = capacity
        self.window = window
        self.stream_capacity = capacity // num_streams
        self.num_stale = 0
        self._fields = parse_fields(fields)
        for name in _FLAGS:
            if self._fields.get(name) != Field((), np.dtype(bool)):
                raise ValueError(f"replay: field {name!r} is {self._fields.get(name)}; it must be ((), 'bool')")
        self._storage = RingStorage(
            self._fields,
            num_streams=num_streams,
            length=self.stream_capacity,
            memory_budget=memory_budget,
            directory=None if directory is None else Path(directory),
        )
        self._online = online
        self._closed = False
        self._counts = np.zeros(num_streams, np.int64)
        # (stream, start) in order of arrival. An entry leaves when it is drawn or its first step is overwritten.
        self._queue: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._rng = np.random.Generator(np.random.PCG64(seed))

    @property
    def num_steps(self) -> int:
        """Steps stored now, in all streams."""
        return int(np.minimum(self._counts, self.stream_capacity).sum())

    @property
    def num_windows(self) -> int:
        """Windows that can be drawn now, in all streams."""
        return int(self._stream_windows().sum())

    @property
    def total_added(self) -> int:
        """Steps added so far, overwritten ones included."""
        return int(self._counts.sum())

    def add(self, step: Mapping[str, np.ndarray], mask: np.ndarray | None = None) -> None:
        """Adds one step to each stream; changes nothing if it raises.

        Args:
            step: Exactly the stored fields, each `[num_streams, *shape]` of the field's dtype.
            mask: `[num_streams]` bool, the streams that add; all if None. Rows of the others are ignored.

        Raises:
            ValueError: A key is missing or unknown, or a shape or dtype differs.
        """
        self._check_open()
        rows = check_step(self._fields, step, self.num_streams)
        streams = np.arange(self.num_streams)
        if mask is not None:
            mask = np.asarray(mask)
            if mask.dtype != np.bool_ or mask.shape != (self.num_streams,):
                raise ValueError(
                    f"replay: mask is {mask.dtype}{list(mask.shape)}; it must be bool{[self.num_streams]}, one a stream"
                )
            if not mask.all():
                streams = np.flatnonzero(mask)
                rows = {name: value[streams] for name, value in rows.items()}
        index = self._counts[streams]
        self._storage.put(rows, streams * self.stream_capacity + index % self.stream_capacity)
        self._counts[streams] += 1
        if self._online:
            self._update_queue(streams, index)

    def can_sample(self, batch_size: int) -> bool:
        """Whether `sample(batch_size)` would return a batch.

        One stored window suffices, since windows are drawn with repetition. How many there should be before training
        starts is the training loop's rule.
        """
        return batch_size >= 1 and self.num_windows >= 1

    def sample(self, batch_size: int, *, online: bool = True, rng: np.random.Generator | None = None) -> Sample:
        """Draws windows: queued ones first, in order, then uniformly with repetition.

        In the returned copy `is_first` is True at every window's first step, and `is_last` is also True at steps whose
        successor in the window is first (an episode that was abandoned). The cost does not grow with what is stored.

        Args:
            batch_size: Number of windows B.
            online: False leaves the queue alone (reports and evaluation).
            rng: Drawn from in place of the replay's own generator, which then does not advance.

        Returns:
            The windows, `[B, window, *shape]` each.

        Raises:
            ValueError: `batch_size` is not positive, or no stream holds a window yet.
        """
        self._check_open()
        if batch_size < 1:
            raise ValueError(f"replay: batch_size is {batch_size}; it must be at least 1")
        windows = self._stream_windows()
        ends = np.cumsum(windows)
        if ends[-1] < 1:
            longest = int(min(self._counts.max(), self.stream_capacity))
            raise ValueError(
                f"replay: {self.num_steps} steps stored but a batch needs {batch_size} x {self.window}, that is "
                f"{self.window} consecutive steps of one stream, and the longest of {self.num_streams} streams holds "
                f"{longest}; raise learning_starts or lower batch_length"
            )
        num_queued = min(batch_size, len(self._queue)) if online else 0
        queued = [self._queue.popitem(last=False)[0] for _ in range(num_queued)]
        drawn = (self._rng if rng is None else rng).integers(ends[-1], size=batch_size - num_queued)
        picked = np.searchsorted(ends, drawn, side="right")
        first = drawn - (ends - windows)[picked] + self._oldest()[picked]
        streams = np.concatenate([np.array([s for s, _ in queued], np.int64), picked])
        starts = np.concatenate([np.array([i for _, i in queued], np.int64), first])

        slots = (starts[:, None] + np.arange(self.window)) % self.stream_capacity
        data = self._storage.gather(streams[:, None] * self.stream_capacity + slots)
        is_first, is_last = data["is_first"], data["is_last"]
        is_last[:, :-1] |= is_first[:, 1:]
        is_first[:, 0] = True
        return Sample({name: torch.from_numpy(value) for name, value in data.items()}, streams, starts)

    def write_back(self, sample: Sample, values: Mapping[str, torch.Tensor | np.ndarray], *, offset: int) -> int:
        """Overwrites fields of sampled steps that are still stored.

        A step that was overwritten by a newer one since the sample was drawn is skipped and counted in `num_stale`.
        Where windows of the batch overlap, the later row remains. A sample from before `load` must not be written back.

        Args:
            sample: The sample the values belong to.
            values: Field name to `[B, T, *shape]`, on any device; cast to the stored dtype within its kind (float to
                float). Waits for the device.
            offset: Time step in the window of the first value (`replay_context`); `offset + T <= window`.

        Returns:
            Number of skipped steps, of B x T.

        Raises:
            ValueError: A name is unknown, a shape does not fit, or a dtype would not survive the cast.
        """
        self._check_open()
        arrays = self._check_values(sample, values, offset)
        length = next(iter(arrays.values())).shape[1]
        first = sample.starts + offset
        # Overwriting goes from old to new, so the steps still stored are one run within the row.
        begin = np.clip(self._oldest()[sample.streams] - first, 0, length)
        end = np.maximum(np.clip(self._counts[sample.streams] - first, 0, length), begin)
        rows = zip(sample.streams.tolist(), first.tolist(), begin.tolist(), end.tolist())
        pieces = [piece for row, args in enumerate(rows) for piece in self._storage.split(row, *args)]
        for name, array in arrays.items():
            self._storage.scatter(name, array, pieces)
        stale = len(first) * length - int((end - begin).sum())
        self.num_stale += stale
        return stale

    def save(self, directory: Path) -> None:
        """Writes the contents, counts, queue and generator state: one `.npy` file a field, and `replay.json` last.

        Args:
            directory: Made if needed; a save already in it is replaced.

        Raises:
            OSError: A file cannot be written.
        """
        self._check_open()
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        # Without replay.json an interrupted save cannot be mistaken for a whole one.
        (directory / "replay.json").unlink(missing_ok=True)
        self._storage.save(directory, self._counts)
        np.save(directory / "online_queue.npy", np.array(list(self._queue), np.int64).reshape(-1, 2))
        meta = {
            "format": _FORMAT,
            **self._layout(),
            "counts": self._counts.tolist(),
            "num_queued": len(self._queue),
            "num_stale": self.num_stale,
            "rng": self._rng.bit_generator.state,
        }
        (directory / "replay.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="ascii")

    def load(self, directory: Path) -> None:
        """Replaces everything by what `save` wrote: sampling goes on exactly as it would have.

        A replay built with `online=False` drops the saved queue.

        Args:
            directory: A folder that `save` wrote.

        Raises:
            ValueError: The save has other fields, `num_streams`, `window` or `capacity` (the first difference is
                named), or a file is missing or damaged (it is named). The contents are then as before.
        """
        self._check_open()
        directory = Path(directory)
        path = directory / "replay.json"
        try:
            meta: dict[str, Any] = json.loads(path.read_text(encoding="ascii"))
            if meta["format"] != _FORMAT:
                raise ValueError(f"its format is {meta['format']}, expected {_FORMAT}")
            saved = {name: meta[name] for name in self._layout()}
            counts = np.array(meta["counts"], np.int64)
            num_queued, num_stale = int(meta["num_queued"]), int(meta["num_stale"])
            generator = np.random.PCG64()
            generator.state = meta["rng"]
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise damaged(path, str(error)) from error
        check_layout(saved, self._layout(), directory)
        if counts.shape != (self.num_streams,) or (counts < 0).any():
            raise damaged(path, f"counts are {counts.tolist()}")
        sources = self._storage.open(directory, counts)
        queue_path = directory / "online_queue.npy"
        queue = open_saved(queue_path, (num_queued, 2), np.dtype(np.int64)).tolist()
        for stream, start in queue:
            count = counts[stream] if 0 <= stream < self.num_streams else 0
            if not max(0, count - self.stream_capacity) <= start <= count - self.window:
                raise damaged(queue_path, f"window {start} of stream {stream} is not stored")

        self._storage.load(sources, counts)
        self._counts = counts
        self._queue = OrderedDict(((stream, start), None) for stream, start in queue if self._online)
        self._rng = np.random.Generator(generator)
        self.num_stale = num_stale

    def stats(self) -> dict[str, float]:
        """Metrics: stored steps, windows and their bytes; queued windows; write-backs skipped so far."""
        return {
            "replay/steps": float(self.num_steps),
            "replay/windows": float(self.num_windows),
            "replay/online_queue": float(len(self._queue)),
            "replay/stale_writes": float(self.num_stale),
            "replay/bytes": float(self.num_steps * sum(field.nbytes for field in self._fields.values())),
        }

    def close(self) -> None:
        """Frees the storage and removes its memory-mapped files; a second call does nothing."""
        self._closed = True
        self._storage.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("replay: it was closed; build a new one and load a save")

    def _oldest(self) -> np.ndarray:
        return np.maximum(self._counts - self.stream_capacity, 0)

    def _stream_windows(self) -> np.ndarray:
        return np.maximum(np.minimum(self._counts, self.stream_capacity) - self.window + 1, 0)

    def _layout(self) -> dict[str, Any]:
        fields = {name: [list(field.shape), field.dtype.name] for name, field in self._fields.items()}
        return {
            "fields": fields,
            "num_streams": self.num_streams,
            "window": self.window,
            "capacity": self.capacity,
        }

    def _update_queue(self, streams: np.ndarray, index: np.ndarray) -> None:
        gone = index - self.stream_capacity
        left = (gone >= 1) & ((gone - 1) % self.window == 0)
        for stream, start in zip(streams[left].tolist(), gone[left].tolist()):
            self._queue.pop((stream, start), None)
        due = (index > 0) & (index % self.window == 0)
        for stream, last in zip(streams[due].tolist(), index[due].tolist()):
            self._queue[stream, last + 1 - self.window] = None

    def _check_values(
        self, sample: Sample, values: Mapping[str, torch.Tensor | np.ndarray], offset: int
    ) -> dict[str, np.ndarray]:
        unknown = sorted(values.keys() - self._fields.keys())
        if unknown or not values:
            raise ValueError(f"replay: write_back was given {sorted(values)}; give one or more of {list(self._fields)}")
        if (sample.streams < 0).any() or (sample.streams >= self.num_streams).any():
            raise ValueError(f"replay: the sample names a stream beyond {self.num_streams}; it is of another replay")
        lead = tuple(next(iter(values.values())).shape[:2])
        if len(lead) < 2 or lead[0] != len(sample.starts) or offset < 0 or offset + lead[1] > self.window:
            raise ValueError(
                f"replay: write_back of [B, T] {list(lead)} at offset {offset} does not fit a sample of "
                f"{len(sample.starts)} x {self.window}; offset + T must be at most {self.window}"
            )
        arrays = {}
        for name, value in values.items():
            field = self._fields[name]
            if tuple(value.shape) != (*lead, *field.shape):
                raise ValueError(
                    f"replay: write_back of {name!r} expects shape {[*lead, *field.shape]} but was given "
                    f"{list(value.shape)}"
                )
            arrays[name] = to_stored(name, value, field.dtype)
        return arrays
