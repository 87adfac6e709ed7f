"""What must not change under a compiled or captured step, and which change comes first: kinds of batches, addresses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

Key = tuple[str, ...]


class LeafSpec(NamedTuple):
    """What a compiled or captured step relies on in one tensor of a batch."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """The kind of a batch. Values, strides and the order of keys do not belong to it.

    Attributes:
        leaves: The tensors by path of keys, in the order of the sample.
        batch_size: Of the outermost TensorDict.
        ignore: Top-level keys that are left out, such as entries that the step itself adds to its batch.
    """

    leaves: Mapping[Key, LeafSpec]
    batch_size: torch.Size
    ignore: frozenset[str] = frozenset()

    @classmethod
    def of(cls, td: TensorDictBase, ignore: Collection[str] = ()) -> BatchSpec:
        """The kind of `td`.

        Raises:
            ValueError: An entry is no tensor.
        """
        leaves = {key: LeafSpec(t.shape, t.dtype, t.device) for key, t in tensors(td, ignore).items()}
        return cls(leaves, td.batch_size, frozenset(ignore))

    def check(self, td: TensorDictBase, where: str = "stepper") -> None:
        """Refuses a batch of another kind; synchronises nothing.

        Raises:
            ValueError: Keys, a shape, a dtype, a device or the batch size differ; the first difference is named.
        """
        difference = first_difference(td, self)
        if difference is not None:
            raise ValueError(
                f"{where}: {difference}; a compiled or captured step is made for one kind of batch: keep it, or call "
                "warmup with the new kind"
            )


def first_difference(
    batch: TensorDictBase, sample_spec: BatchSpec, *, what: str = "the batch", seen: str = "warm-up saw"
) -> str | None:
    """In which way a batch is of another kind than the sample, or None.

    Args:
        batch: Compared; top-level keys that the spec ignores are left out.
        sample_spec: Of the sample.
        what: Name of the batch in the text.
        seen: Name of the sample and a verb.

    Returns:
        A clause such as `the batch's "reward" has dtype torch.float64, but warm-up saw torch.float32`.
    """
    found = tensors(batch, sample_spec.ignore)
    for key, (shape, dtype, device) in sample_spec.leaves.items():
        value = found.get(key)
        if value is None:
            return f"{what} has no {key_text(key)}, but {seen} one"
        if value.shape != shape:
            return f"{what}'s {key_text(key)} has shape {list(value.shape)}, but {seen} {list(shape)}"
        if value.dtype != dtype:
            return f"{what}'s {key_text(key)} has dtype {value.dtype}, but {seen} {dtype}"
        if value.device != device:
            return f"{what}'s {key_text(key)} is on {value.device}, but {seen} it on {device}"
    if len(found) > len(sample_spec.leaves):
        return f"{what} has {key_text(next(k for k in found if k not in sample_spec.leaves))}, but {seen} none"
    if batch.batch_size != sample_spec.batch_size:
        return f"{what} has batch size {list(batch.batch_size)}, but {seen} {list(sample_spec.batch_size)}"
    return None


def tensors(td: TensorDictBase, ignore: Collection[str] = ()) -> dict[Key, Tensor]:
    """The tensors of a TensorDict by path of keys, without those under the top-level keys `ignore`.

    Raises:
        ValueError: An entry is no tensor.
    """
    found: dict[Key, Tensor] = {}
    _collect(td, (), ignore, found)
    return found


def _collect(td: TensorDictBase, prefix: Key, ignore: Collection[str], found: dict[Key, Tensor]) -> None:
    for key, value in td.items():
        if key in ignore:
            continue
        if isinstance(value, Tensor):
            found[(*prefix, key)] = value
        elif isinstance(value, TensorDictBase):
            _collect(value, (*prefix, key), (), found)
        else:
            raise ValueError(
                f"stepper: the entry {key_text((*prefix, key))} is a {type(value).__name__}; a compiled or captured step "
                "takes and returns tensors: keep other values out of the TensorDict"
            )


def key_text(key: Key) -> str:
    """`"reward"` or `("observation", "image")`."""
    quoted = ", ".join(f'"{k}"' for k in key)
    return quoted if len(key) == 1 else f"({quoted})"


def dense(td: TensorDictBase, function: Callable[[Tensor], Tensor], ignore: Collection[str] = ()) -> TensorDict:
    """A plain TensorDict, nested ones too, of `function` of each tensor; top-level keys `ignore` are left out."""
    items: Any = td.items()
    entries = {
        key: dense(value, function) if isinstance(value, TensorDictBase) else function(value)
        for key, value in items
        if key not in ignore
    }
    return TensorDict(entries, td.batch_size, device=td.device)


@torch.no_grad()
def copy_tensors(targets: Mapping[Key, Tensor], sources: Mapping[Key, Tensor]) -> None:
    """Writes sources into the targets of the same keys, in one kernel for each dtype; does not synchronise."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for key, target in targets.items():
        into, out_of = groups.setdefault(target.dtype, ([], []))
        into.append(target)
        out_of.append(sources[key])
    for into, out_of in groups.values():
        torch._foreach_copy_(into, out_of, non_blocking=True)


class Live(Mapping[str, Any]):
    """Parameters or buffers of a module by name, looked up anew at each access.

    A dict of `named_parameters()` would go on holding parameters that `load_state_dict(assign=True)` has replaced.
    Submodules that are exchanged are not followed.

    Args:
        module: The owner.
        kind: "parameters" or "buffers".
    """

    def __init__(self, module: nn.Module, kind: str = "parameters"):
        named = module.named_parameters() if kind == "parameters" else module.named_buffers()
        self._tables: dict[str, tuple[Mapping[str, Tensor | None], str]] = {}
        for name, _ in named:
            path, _, local = name.rpartition(".")
            self._tables[name] = (getattr(module.get_submodule(path), f"_{kind}"), local)

    def get(self, key: str, default: Any = None) -> Any:
        """The tensor, or `default` where the module has lost it."""
        entry = self._tables.get(key)
        value = None if entry is None else entry[0].get(entry[1])
        return default if value is None else value

    def __getitem__(self, name: str) -> Any:
        """Raises KeyError where the module has lost the tensor."""
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


def addresses(named: Mapping[str, Tensor]) -> dict[str, int]:
    """Where each tensor's memory begins."""
    return {name: tensor.data_ptr() for name, tensor in named.items()}


def first_move(known: Mapping[str, int], find: Callable[[str], Tensor | None]) -> str | None:
    """The first tensor that is gone or whose memory begins elsewhere than in `known`, as a clause, or None."""
    for name, address in known.items():
        tensor = find(name)
        if tensor is None:
            return f'"{name}" is gone'
        if tensor.data_ptr() != address:
            return f'"{name}" lies at another address than before'
    return None
