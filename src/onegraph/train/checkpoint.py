"""Checkpoints as whole step folders that are complete or absent, whatever kills the process that writes them.

    run/checkpoints/latest                text: the name of the folder saved last
    run/checkpoints/step_000001000/       meta.json, state.pt and the files of the caller's extras

A save fills a hidden sibling folder, flushes it to disk and renames it; `latest` is replaced after that. `latest` is a
text file rather than a link, so that it survives copies to file systems and archives that have no links.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

FORMAT_VERSION = 1
_STEP = re.compile(r"(?:\.old-)?step_(\d{9,})")
_RESERVED = ("meta.json", "state.pt")


class CheckpointStore:
    """The checkpoints of one run. One process writes; any number may read.

    Args:
        root: The run's directory; checkpoints go into its folder `checkpoints`, made at the first save.
        keep: How many of the newest checkpoints stay.
        keep_every: Also keep, for good, the first checkpoint at or after each multiple of so many steps.

    Raises:
        ValueError: `keep` or `keep_every` is below 1.
    """

    def __init__(self, root: Path | str, keep: int = 2, keep_every: int | None = None) -> None:
        if keep < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"CheckpointStore: keep {keep}, keep_every {keep_every}; each must be at least 1")
        self.folder = Path(root) / "checkpoints"
        self.keep = keep
        self.keep_every = keep_every

    def save(
        self,
        step: int,
        *,
        meta: Mapping[str, Any],
        state: Mapping[str, Any],
        extras: Mapping[str, Callable[[Path], None]] | None = None,
    ) -> Path:
        """Writes a checkpoint, points `latest` at it and removes those that are no longer kept.

        Args:
            step: The step it belongs to; a checkpoint of the same step is replaced.
            meta: JSON values such as counters and the config; `load` returns them with `step` added.
            state: Nested dicts, lists and tuples of tensors, numbers, strings, bytes and None. Tensors of any dtype and
                device; a view of a larger buffer is stored without the rest of the buffer.
            extras: More files by name: each callable gets the path at which to write a file or make a folder.

        Returns:
            The folder of the checkpoint.

        Raises:
            TypeError: `state` or `meta` holds something that cannot be stored; the text has its path.
            ValueError: The step is negative, or a name is not allowed.
            OSError: Writing failed, in an extra too. Nothing is left of this save; earlier checkpoints are untouched.
        """
        extras = extras or {}
        if step < 0 or meta.get("step", step) != step:
            raise ValueError(f"checkpoint: step {step}, meta step {meta.get('step')}; give one step of at least 0")
        for name in extras:
            if not name or name in _RESERVED or Path(name).name != name or name.startswith("."):
                raise ValueError(f"checkpoint: extra {name!r}; use a plain file name other than {', '.join(_RESERVED)}")
        try:
            json.dumps(dict(meta), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise TypeError(f"checkpoint: meta has no JSON form ({error}); put tensors and bytes into state") from error
        tree = _storable(state, "state")

        final = self.folder / f"step_{step:09d}"
        temporary = self.folder / f".tmp-{final.name}-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            torch.save(tree, temporary / "state.pt")
            for name, write in extras.items():
                write(temporary / name)
            files = [p for p in sorted(temporary.rglob("*")) if p.is_file()]
            sizes = {p.relative_to(temporary).as_posix(): p.stat().st_size for p in files}
            head = {"format_version": FORMAT_VERSION, "step": step, "files": sizes, "meta": dict(meta)}
            _write_synced(temporary / "meta.json", json.dumps(head, indent=1, allow_nan=False))
            for path in [*files, *(p for p in temporary.rglob("*") if p.is_dir()), temporary]:
                _sync(path)
            self._publish(temporary, final)
        except Exception as error:
            raise OSError(
                f"checkpoint: saving step {step} under {self.folder} failed: {error}; earlier checkpoints are "
                f"untouched; free disk space or correct the cause, then save again"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._retain(step)
        return final

    def latest(self) -> Path | None:
        """Finds the checkpoint to continue from.

        Returns:
            The folder that `latest` names; if that is missing or incomplete, the complete one of the highest step; None
            if there is none.
        """
        try:
            named = (self.folder / "latest").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            named = ""
        if _STEP.fullmatch(named):
            for candidate in (self.folder / named, self.folder / f".old-{named}"):
                if _is_complete(candidate):
                    return candidate
        found = self._folders()
        return found[max(found)] if found else None

    def load(self, path: Path | str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads a checkpoint.

        Args:
            path: A step folder, from `latest` or `resolve`.

        Returns:
            The meta values with `step` added, and the state. Tensors are on the CPU and mapped from the file: their
            bytes are read when they are used.

        Raises:
            FileNotFoundError: There is no such checkpoint.
            ValueError: A file is damaged, or a newer release wrote it; the text names the file.
        """
        path = Path(path)
        head = _read_head(path)
        for name, size in head["files"].items():
            if not (path / name).is_file() or (path / name).stat().st_size != size:
                raise ValueError(f"{path / name}: damaged (missing or not {size} bytes); use another step folder")
        try:
            state = torch.load(path / "state.pt", map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise ValueError(f"{path / 'state.pt'}: damaged ({error}); use another step folder") from error
        return {**head["meta"], "step": head["step"]}, state

    def clean(self) -> list[str]:
        """Removes what killed saves left. Call it while no other process saves, such as at the start of a run.

        Returns:
            The names of the removed folders and files.
        """
        removed = []
        for entry in sorted(self.folder.glob(".*")) if self.folder.is_dir() else []:
            if entry.name.startswith(".old-"):
                standing = self.folder / entry.name.removeprefix(".old-")
                if not standing.exists() and _is_complete(entry):
                    os.rename(entry, standing)  # killed between the two renames of a replacement
                    continue
            elif not entry.name.startswith(".tmp-"):
                continue
            _remove(entry)
            removed.append(entry.name)
        return removed

    def _publish(self, temporary: Path, final: Path) -> None:
        old = self.folder / f".old-{final.name}"
        pointer = self.folder / f".tmp-latest-{os.getpid()}"
        try:
            _write_synced(pointer, final.name + "\n")  # first, so that a full disk is met before anything changes
            if final.exists():
                _remove(old)
                os.rename(final, old)
            try:
                os.rename(temporary, final)
            except OSError:
                if old.exists() and not final.exists():
                    os.rename(old, final)
                raise
            _sync(self.folder)
            os.replace(pointer, self.folder / "latest")
            _sync(self.folder)
        finally:
            pointer.unlink(missing_ok=True)
        _remove(old)

    def _folders(self) -> dict[int, Path]:
        """Complete checkpoints by step; a folder set aside by a replacement stands in where the new one is missing."""
        found: dict[int, Path] = {}
        for entry in sorted(self.folder.iterdir()) if self.folder.is_dir() else []:  # ".old-" sorts before "step_"
            match = _STEP.fullmatch(entry.name)
            if match and _is_complete(entry):
                found[int(match[1])] = entry
        return found

    def _retain(self, saved: int) -> None:
        # Higher steps belong to a run that was rewound; they are not this run's to delete.
        steps = sorted(s for s in self._folders() if s <= saved)
        kept = set(steps[-self.keep :])
        if self.keep_every is not None:
            first: dict[int, int] = {}
            for s in steps:
                first.setdefault(s // self.keep_every, s)
            kept |= {s for bucket, s in first.items() if bucket > 0}
        for s in steps:
            if s not in kept:
                folder = self.folder / f"step_{s:09d}"
                doomed = self.folder / f".tmp-removed-{folder.name}"
                try:
                    os.rename(folder, doomed)  # so that nobody finds a half-removed folder
                    shutil.rmtree(doomed)
                except OSError:
                    continue  # the save itself is good; clean() tries again


def resolve(path: Path | str) -> Path:
    """Finds the checkpoint that a path given by a user means.

    Args:
        path: A run's directory, its `checkpoints` folder, or one step folder.

    Returns:
        The step folder; of a run, the latest complete one.

    Raises:
        FileNotFoundError: There is no complete checkpoint there.
    """
    path = Path(path)
    if (path / "meta.json").is_file():
        return path
    for root in (path, path.parent) if path.name == "checkpoints" else (path,):
        found = CheckpointStore(root).latest()
        if found is not None:
            return found
    kind = "no complete checkpoint in it" if path.exists() else "no such path"
    raise FileNotFoundError(f"{path}: {kind}; give a run directory, its checkpoints folder or one step folder")


def _read_head(folder: Path) -> dict[str, Any]:
    file = folder / "meta.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; {folder} is not a checkpoint; give a step folder")
    try:
        head = json.loads(file.read_text(encoding="utf-8"))
        version = int(head["format_version"])
        kinds = {key: type(head.get(key)) for key in ("step", "files", "meta")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: damaged ({error!r}); use another step folder") from error
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{file}: format version {version}, but this release reads up to {FORMAT_VERSION}; upgrade onegraph"
        )
    if kinds != {"step": int, "files": dict, "meta": dict}:
        raise ValueError(f"{file}: damaged (step, files or meta is missing); use another step folder")
    return head


def _is_complete(folder: Path) -> bool:
    try:
        head = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in head["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _storable(value: Any, path: str) -> Any:
    """Copies the tree with detached tensors; refuses what `torch.load(weights_only=True)` would refuse later."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"checkpoint: {path} is a {type(value).__name__}; store plain tensors")
        is_view = value.layout == torch.strided and value.untyped_storage().nbytes() > value.nbytes
        return value.clone() if is_view else value
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Mapping) and not hasattr(value, "batch_size"):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"checkpoint: {path} has the key {key!r}; use strings or ints as keys")
        return {k: _storable(v, f"{path}[{k!r}]") for k, v in value.items()}
    if type(value) is list or type(value) is tuple:
        items = [_storable(v, f"{path}[{i}]") for i, v in enumerate(value)]
        return items if type(value) is list else tuple(items)
    raise TypeError(
        f"checkpoint: {path} is a {type(value).__module__}.{type(value).__qualname__}; store tensors, numbers, "
        "strings, bytes, None, and dicts, lists and tuples of them; torch.from_numpy and .to_dict() help"
    )


def _write_synced(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
