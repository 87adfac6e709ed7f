"""Rings of steps, one array a field: allocation (memory or mapped files), gather, scatter, and `.npy` files.

The storage knows slots, not episodes: `onegraph.data.replay.Replay` decides which slots hold what.
"""

import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from onegraph.data.layout import Field


class Piece(NamedTuple):
    """A run of consecutive slots that belongs to one row of a batch.

    Attributes:
        row: Row of the batch.
        begin: First time step of the row.
        end: Time step after the last.
        position: Position of step `begin` in the flat storage.
    """

    row: int
    begin: int
    end: int
    position: int


class RingStorage:
    """One ring of `length` slots for each stream, laid out as `[num_streams * length, *shape]` a field.

    Slot `k` of stream `s` is at position `s * length + k`. Untouched slots cost no memory and no disk: arrays come from
    the operating system as unwritten zero pages, mapped files are sparse.

    Args:
        fields: Layout of every field.
        num_streams: Number of rings.
        length: Slots of each ring.
        memory_budget: Bytes the arrays in memory may take when full. The largest fields move to mapped files, one by
            one, until the rest fits.
        directory: Where a private folder for the mapped files is made; the system's temporary directory if None. The
            private folder is removed by `close`, when the storage is collected, and when the interpreter ends.

    Raises:
        OSError: The disk has less free space than the mapped files need when full.
    """

    def __init__(
        self,
        fields: Mapping[str, Field],
        *,
        num_streams: int,
        length: int,
        memory_budget: int,
        directory: Path | None,
    ):
        self.fields = dict(fields)
        self.length = length
        num_slots = num_streams * length
        self.mapped = _choose_mapped({name: num_slots * field.nbytes for name, field in fields.items()}, memory_budget)
        self._folder = None if not self.mapped else _private_folder(directory)
        self._remove = lambda: None
        if self._folder is not None:
            self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            self._check_disk(self._folder, sum(num_slots * fields[name].nbytes for name in self.mapped), memory_budget)
        self.arrays: dict[str, np.ndarray] = {}
        for index, (name, field) in enumerate(fields.items()):
            shape = (num_slots, *field.shape)
            if self._folder is not None and name in self.mapped:
                mapped = np.memmap(self._folder / _file_name(index, name, "bin"), field.dtype, "w+", shape=shape)
                # The plain view avoids the subclass's cost at every indexing.
                self.arrays[name] = np.asarray(mapped)
            else:
                self.arrays[name] = np.zeros(shape, field.dtype)

    def _check_disk(self, folder: Path, needed: int, memory_budget: int) -> None:
        free = shutil.disk_usage(folder).free
        if needed > free:
            self._remove()
            raise OSError(
                f"replay: {', '.join(self.mapped)} need {needed / 1e9:.1f} GB of mapped files (memory_budget "
                f"{memory_budget / 1e9:.1f} GB) but {folder.parent} has {free / 1e9:.1f} GB free; lower capacity, "
                f"raise memory_budget or pass a directory on a larger disk"
            )

    def put(self, step: Mapping[str, np.ndarray], positions: np.ndarray) -> None:
        """Writes one step to each position.

        Args:
            step: Name to `[N, *shape]`, of the field's dtype.
            positions: `[N]` int64, all different.
        """
        for name, array in self.arrays.items():
            array[positions] = step[name]

    def gather(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Copies steps out.

        Args:
            positions: `[B, L]` int64.

        Returns:
            Name to `[B, L, *shape]`, newly allocated.
        """
        taken = {}
        for name, array in self.arrays.items():
            out = np.empty((*positions.shape, *array.shape[1:]), array.dtype)
            # Any mode but "raise" writes to `out` directly, without a buffer; the positions are in range anyway.
            np.take(array, positions, axis=0, out=out, mode="clip")
            taken[name] = out
        return taken

    def scatter(self, name: str, values: np.ndarray, pieces: Iterable[Piece]) -> None:
        """Writes pieces of a batch; where two pieces share a slot, the later one remains.

        Args:
            name: The field.
            values: `[B, T, *shape]`.
            pieces: What goes where; a piece never runs over the end of a ring.
        """
        array = self.arrays[name]
        for row, begin, end, position in pieces:
            array[position : position + end - begin] = values[row, begin:end]

    def split(self, row: int, stream: int, first: int, begin: int, end: int) -> list[Piece]:
        """Cuts steps `begin` to `end` of a row at the end of the ring.

        Args:
            row: Row of the batch.
            stream: The ring.
            first: Absolute index of the row's step 0.
            begin: First time step to write.
            end: Time step after the last; at most `length` steps.

        Returns:
            None, one or two pieces.
        """
        if begin >= end:
            return []
        base = stream * self.length
        slot = (first + begin) % self.length
        cut = min(end, begin + self.length - slot)
        pieces = [Piece(row, begin, cut, base + slot)]
        if cut < end:
            pieces.append(Piece(row, cut, end, base))
        return pieces

    def save(self, directory: Path, counts: np.ndarray) -> None:
        """Writes each field as one `.npy` file of shape `[steps, *shape]`: stream after stream, oldest step first.

        Args:
            directory: Where; it exists.
            counts: `[num_streams]` int64, steps ever added to each stream.

        Raises:
            OSError: A file cannot be written.
        """
        pieces = self._stored(counts)
        num_steps = sum(piece.end - piece.begin for piece in pieces)
        for name, path in self._files(directory):
            field = self.fields[name]
            header = {
                "descr": np.lib.format.dtype_to_descr(field.dtype),
                "fortran_order": False,
                "shape": (num_steps, *field.shape),
            }
            with path.open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for _, begin, end, position in pieces:
                    # By write and not through a mapped file: a full disk is then an error, not a killed process.
                    file.write(self.arrays[name][position : position + end - begin].reshape(-1).view(np.uint8).data)

    def open(self, directory: Path, counts: np.ndarray) -> dict[str, np.ndarray]:
        """Opens the files that `save` wrote, checks them and changes nothing.

        Args:
            directory: Where they are.
            counts: `[num_streams]` int64, as when they were saved.

        Returns:
            Name to a mapped `[steps, *shape]`.

        Raises:
            ValueError: A file is missing or damaged.
        """
        num_steps = sum(piece.end - piece.begin for piece in self._stored(counts))
        return {
            name: open_saved(path, (num_steps, *self.fields[name].shape), self.fields[name].dtype)
            for name, path in self._files(directory)
        }

    def load(self, sources: Mapping[str, np.ndarray], counts: np.ndarray) -> None:
        """Puts what `open` returned into its slots."""
        pieces = self._stored(counts)
        for name, source in sources.items():
            self.scatter(name, source[None], pieces)

    def _stored(self, counts: np.ndarray) -> list[Piece]:
        # As pieces of one row, whose time steps count on from stream to stream.
        pieces, done = [], 0
        for stream, count in enumerate(counts.tolist()):
            size = min(count, self.length)
            pieces += self.split(0, stream, count - size - done, done, done + size)
            done += size
        return pieces

    def _files(self, directory: Path) -> list[tuple[str, Path]]:
        return [(name, directory / _file_name(index, name, "npy")) for index, name in enumerate(sorted(self.fields))]

    def close(self) -> None:
        """Frees the arrays and removes the mapped files."""
        self.arrays = {}
        self._remove()


def _file_name(index: int, name: str, suffix: str) -> str:
    # Unique by the index, readable by the name.
    return f"{index:02d}-{re.sub(r'[^A-Za-z0-9_]+', '.', name)}.{suffix}"


def open_saved(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Opens a `.npy` file read-only, without reading its data yet.

    Args:
        path: The file.
        shape: Shape it must have.
        dtype: Dtype it must have.

    Returns:
        A mapped array.

    Raises:
        ValueError: The file is missing, damaged, of another size, or holds something else.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # a damaged header raises errors of many kinds
        raise damaged(path, str(error)) from error
    if not isinstance(array, np.memmap) or array.shape != shape or array.dtype != dtype:
        found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise damaged(path, f"it holds {found}, expected {dtype}{list(shape)}")
    size = path.stat().st_size
    if size != array.offset + array.nbytes:
        raise damaged(path, f"it has {size} bytes, expected {array.offset + array.nbytes}")
    return np.asarray(array)


def damaged(path: Path, reason: str) -> ValueError:
    """The error for a file of a save that cannot be used."""
    return ValueError(f"replay: cannot load {path}: {reason}; the save is incomplete or damaged, load another one")


def _choose_mapped(sizes: Mapping[str, int], memory_budget: int) -> tuple[str, ...]:
    mapped = []
    in_memory = sum(sizes.values())
    for name in sorted(sizes, key=lambda key: sizes[key], reverse=True):
        if in_memory <= memory_budget:
            break
        mapped.append(name)
        in_memory -= sizes[name]
    return tuple(mapped)


def _private_folder(directory: Path | None) -> Path:
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="onegraph-replay-", dir=directory))
