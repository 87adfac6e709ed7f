"""Gymnasium spaces <-> named entries: what each leaf of a space looks like to a learner, and how values cross over.

A normalised space is a flat `gymnasium.spaces.Dict` of `Box`es, so that a batch of it is plain arrays of the right
dtype: `uint8` boxes are images, `float32` boxes are vectors, and an `int32` box with bounds `[0, n - 1]` holds classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from onegraph.specs import ArraySpec

_MAX_INTEGER_ACTIONS = 1024

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One leaf of a native space.

    Attributes:
        name: Name that learners see; parts of a nested name are joined by `/`.
        path: Keys and indices that lead to the leaf in a native value.
        space: The leaf.
        spec: Normalised shape and kind.
        start: Discrete entries: smallest native value, int64, the leaf's shape; None for others.
    """

    name: str
    path: Path
    space: gymnasium.Space[Any]
    spec: ArraySpec
    start: np.ndarray | None = None


def observation_entries(space: gymnasium.Space[Any], where: str, include: str = ".*") -> list[Entry]:
    """Entries of an observation space, sorted by name.

    Floats become float32; `Discrete`, `MultiDiscrete`, `MultiBinary` and boolean boxes become int32 classes from 0;
    uint8 boxes of two or three axes become images (two axes gain a channel axis); other integer boxes become float32.
    A bare space is named `image` if it is an image and `observation` otherwise. Leaves with an empty axis are dropped.

    Args:
        space: Native space.
        where: Prefix of error texts, such as `env: Pendulum-v1`.
        include: Regular expression; leaves whose whole name matches are kept.

    Raises:
        ValueError: No leaf matches, a kept one cannot be normalised (text, graphs, sequences), or two leaves get
            one name.
    """
    leaves = _leaves(space, "image" if _is_image(space) else "observation", f"{where}: observation space")
    kept = [leaf for leaf in leaves if re.fullmatch(include, leaf[0]) and prod(leaf[2].shape or ()) > 0]
    if not kept:
        available = ", ".join(name for name, _, _ in leaves)
        raise ValueError(f"{where}: include_keys {include!r} matches none of the observations; available: {available}")
    return [_observation_entry(name, path, leaf, where) for name, path, leaf in kept]


def action_entries(space: gymnasium.Space[Any], where: str) -> list[Entry]:
    """Entries of an action space, sorted by name.

    Float boxes become float32 in `[-1, 1]`; discrete kinds, and integer boxes with at most 1024 values for each
    element, become int32 classes from 0. A bare space is named `action`.

    Args:
        space: Native space.
        where: Prefix of error texts.

    Raises:
        ValueError: Bounds are not finite, an integer box is too wide, a leaf cannot be normalised, or two leaves get
            one name.
    """
    return [_action_entry(n, p, s, where) for n, p, s in _leaves(space, "action", f"{where}: action space")]


def normalized_space(entries: list[Entry], *, actions: bool) -> spaces.Dict:
    """Flat space of the entries; continuous actions are bounded by -1 and 1, float observations are not bounded."""
    return spaces.Dict({e.name: _box(e.spec, 1.0 if actions else np.inf) for e in entries})


def space_specs(space: gymnasium.Space[Any]) -> dict[str, ArraySpec]:
    """Reads the specs back from a normalised space, keys sorted.

    Raises:
        ValueError: The space is not a flat Dict of boxes, which means that the environment did not come from
            `make_env`.
    """
    if not isinstance(space, spaces.Dict) or not all(isinstance(leaf, spaces.Box) for leaf in space.values()):
        raise ValueError(f"env: {space} is not a normalised space; build the environment with make_env")
    specs = {}
    for name in sorted(space.keys()):
        box = space[name]
        assert isinstance(box, spaces.Box)
        classes = tuple(int(n) + 1 for n in box.high.reshape(-1)) if box.dtype == np.int32 else None
        specs[name] = ArraySpec(shape=tuple(box.shape), dtype=str(box.dtype), num_classes=classes)
    return specs


def pick(value: Any, path: Path) -> Any:
    """The leaf of a native value at `path`.

    Raises:
        LookupError: The value has no such key or index.
        TypeError: The value is no container.
    """
    for part in path:
        if isinstance(part, str) and not isinstance(value, Mapping):
            raise TypeError(f"{type(value).__name__} has no keys")
        value = value[part]
    return value


def rebuild(space: gymnasium.Space[Any], leaves: Mapping[Path, Any], path: Path = ()) -> Any:
    """Native value with the declared keys, in the declared order: the inverse of taking leaves by path."""
    if isinstance(space, spaces.Dict):
        return {key: rebuild(sub, leaves, (*path, key)) for key, sub in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(rebuild(sub, leaves, (*path, i)) for i, sub in enumerate(space.spaces))
    return leaves[path]


def encode_observation(entry: Entry, value: Any, where: str) -> np.ndarray:
    """Native observation -> normalised array; it may share memory with `value`.

    Args:
        entry: What the space declares.
        value: What the environment returned.
        where: Prefix of error texts, naming the environment and the step.

    Returns:
        Array of the spec's shape and dtype.

    Raises:
        ValueError: Shape, kind or class index differ from what the space declares.
    """
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty((), object)
    native, spec = entry.space, entry.spec
    kinds = "biu" if spec.is_discrete else "fiub" if native.dtype is not None and native.dtype.kind == "f" else "iu"
    is_same_kind = array.dtype == np.uint8 if spec.is_image else array.dtype.kind in kinds
    if array.shape != native.shape or not is_same_kind:
        given = f"a {type(value).__name__}" if array.dtype == object else f"{array.shape} {array.dtype}"
        raise ValueError(
            f"{where}: observation {entry.name!r} is {given}; its space declares {native.shape} {native.dtype}; "
            "correct what the environment returns or its observation_space"
        )
    if entry.start is not None:
        array = array - entry.start
        counts = np.reshape(np.asarray(spec.num_classes), spec.shape)
        if (array < 0).any() or (array >= counts).any():
            raise ValueError(f"{where}: observation {entry.name!r} is {value}, which is outside of {native}")
    return array.reshape(spec.shape).astype(spec.dtype, copy=False)


def decode_action(entry: Entry, value: Any, where: str) -> Any:
    """Policy action -> native action.

    Continuous values are clipped to `[-1, 1]` and mapped linearly to the bounds; classes are shifted to the declared
    start.

    Args:
        entry: What the space declares.
        value: Policy action of the spec's shape.
        where: Prefix of error texts.

    Returns:
        An int for `Discrete`, else an array of the space's shape and dtype.

    Raises:
        ValueError: Shape differs, a value is not finite, or a class index is out of range.
    """
    array, spec, native = np.asarray(value), entry.spec, entry.space
    if array.shape != spec.shape:
        raise ValueError(f"{where}: action {entry.name!r} has shape {array.shape}; the environment takes {spec.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{where}: action {entry.name!r} is {array}; actions must be finite; the policy has diverged")
    if entry.start is None:
        assert isinstance(native, spaces.Box)
        low, high = native.low.astype(np.float64), native.high.astype(np.float64)
        scaled = low + (np.clip(array.astype(np.float64), -1.0, 1.0) + 1.0) * 0.5 * (high - low)
        return np.clip(scaled.astype(native.dtype), native.low, native.high)
    counts = np.reshape(np.asarray(spec.num_classes), spec.shape)
    if (array < 0).any() or (array >= counts).any():
        raise ValueError(f"{where}: action {entry.name!r} is {array}; classes are 0 to {counts - 1}")
    shifted = array.astype(np.int64) + entry.start
    return int(shifted) if isinstance(native, spaces.Discrete) else shifted.astype(native.dtype)


def _leaves(
    space: gymnasium.Space[Any], bare: str, where: str, path: Path = ()
) -> list[tuple[str, Path, gymnasium.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        items: list[tuple[str | int, gymnasium.Space[Any]]] = list(space.items())
    elif isinstance(space, spaces.Tuple):
        items = list(enumerate(space.spaces))
    else:
        return [("/".join(map(str, path)) or bare, path, space)]
    leaves = [leaf for key, sub in items for leaf in _leaves(sub, bare, where, (*path, key))]
    names = [name for name, _, _ in leaves]
    if repeated := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"{where} flattens to the same name twice: {', '.join(repeated)}; rename one of the entries")
    return sorted(leaves, key=lambda leaf: leaf[0])


def _is_image(space: gymnasium.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)


def _discrete(space: gymnasium.Space[Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Class counts and smallest values of a discrete leaf, both int64 of its shape; None for other kinds."""
    if isinstance(space, spaces.Discrete):
        return np.asarray(space.n, np.int64), np.asarray(space.start, np.int64)
    if isinstance(space, spaces.MultiDiscrete):
        start = getattr(space, "start", np.zeros_like(space.nvec))
        return np.asarray(space.nvec, np.int64), np.asarray(start, np.int64)
    if isinstance(space, spaces.MultiBinary) or (isinstance(space, spaces.Box) and space.dtype == np.bool_):
        return np.full(space.shape, 2, np.int64), np.zeros(space.shape, np.int64)
    return None


def _observation_entry(name: str, path: Path, space: gymnasium.Space[Any], where: str) -> Entry:
    if discrete := _discrete(space):
        return _class_entry(name, path, space, *discrete)
    shape = _box_shape(name, space, f"{where}: observation")
    if _is_image(space):
        return Entry(name, path, space, ArraySpec(shape=(*shape, 1)[:3], dtype="uint8"))
    return Entry(name, path, space, ArraySpec(shape=shape, dtype="float32"))


def _action_entry(name: str, path: Path, space: gymnasium.Space[Any], where: str) -> Entry:
    if discrete := _discrete(space):
        return _class_entry(name, path, space, *discrete)
    shape = _box_shape(name, space, f"{where}: action")
    assert isinstance(space, spaces.Box)
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ValueError(
            f"{where}: action {name!r} has no finite bounds ({space}), so policy values in [-1, 1] cannot be "
            "mapped to it; give it finite bounds, for example with gymnasium.wrappers.TransformAction in a "
            "module:function factory"
        )
    if np.issubdtype(space.dtype, np.integer):
        low = space.low.astype(np.int64)
        counts = space.high.astype(np.int64) - low + 1
        if (counts > _MAX_INTEGER_ACTIONS).any():
            raise ValueError(
                f"{where}: action {name!r} is an integer box with {counts.max()} values; at most "
                f"{_MAX_INTEGER_ACTIONS} can be treated as classes; declare a float box and round in the environment"
            )
        return _class_entry(name, path, space, counts, low)
    return Entry(name, path, space, ArraySpec(shape=shape, dtype="float32"))


def _class_entry(name: str, path: Path, space: gymnasium.Space[Any], counts: np.ndarray, start: np.ndarray) -> Entry:
    classes = tuple(int(n) for n in counts.reshape(-1))
    return Entry(name, path, space, ArraySpec(shape=tuple(counts.shape), dtype="int32", num_classes=classes), start)


def _box_shape(name: str, space: gymnasium.Space[Any], where: str) -> tuple[int, ...]:
    if not isinstance(space, spaces.Box):
        raise ValueError(
            f"{where} {name!r} is a {type(space).__name__} space, which has no fixed array form; leave it out "
            "(observations: include_keys) or convert it in a module:function factory"
        )
    if prod(space.shape) == 0:
        raise ValueError(f"{where} {name!r} has shape {space.shape}; an entry without elements must be left out")
    return tuple(space.shape)


def _box(spec: ArraySpec, bound: float) -> spaces.Box:
    if spec.num_classes is not None:
        high = np.reshape(np.asarray(spec.num_classes, np.int32) - 1, spec.shape)
        return spaces.Box(np.zeros(spec.shape, np.int32), high.astype(np.int32), spec.shape, np.int32)
    if spec.dtype == "uint8":
        return spaces.Box(0, 255, spec.shape, np.uint8)
    return spaces.Box(-bound, bound, spec.shape, np.float32)
