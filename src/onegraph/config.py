"""Frozen dataclasses to plain JSON values and back, with differences, fingerprints and dotted overrides.

A config is a frozen, slotted, keyword-only dataclass that its own package declares and validates in `__post_init__`.
This module knows only the shapes that such dataclasses use: `bool`, `int`, `float`, `str`, `None`, `pathlib.Path`,
`Literal`, `Optional` and other unions, `tuple`, `list`, `dict` with string keys, and dataclasses inside dataclasses.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    C = TypeVar("C", bound=DataclassInstance)
else:
    C = TypeVar("C")

_ABSENT = "(absent)"


def to_dict(config: DataclassInstance) -> dict[str, Any]:
    """Turns a config into plain JSON values.

    Args:
        config: A dataclass instance.

    Returns:
        A dict of None, bools, ints, floats, strings, lists and dicts; `from_dict` reads it back.

    Raises:
        ValueError: A float is not finite (JSON has no such number) or a value has no JSON form; the text has its path.
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ValueError(f"config: {config!r} is not a dataclass instance; pass a config object")
    plain = _plain(config, "")
    assert isinstance(plain, dict)
    return plain


def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
    """Builds a config from plain JSON values; fields that are not given keep their defaults.

    An int is accepted where a float is declared (and becomes a float); a bool is never accepted as a number.

    Args:
        cls: The dataclass to build.
        values: JSON values by field name, nested like the dataclass.

    Returns:
        A new instance, validated by its own `__post_init__`.

    Raises:
        ValueError: A key is unknown, a required key is missing, a value has the wrong type, or the class refused it.
    """
    return _read(cls, values, "", cls.__name__)


def diff(a: DataclassInstance, b: DataclassInstance) -> list[str]:
    """Compares two configs.

    Args:
        a: The old config.
        b: The new config.

    Returns:
        One line for each leaf that differs, such as `env.num_envs: 16 -> 4`, in the order of the fields.
    """
    old, new = dict(_leaves(to_dict(a), "")), dict(_leaves(to_dict(b), ""))
    lines = []
    for path in dict.fromkeys([*old, *new]):
        x, y = old.get(path, _ABSENT), new.get(path, _ABSENT)
        if x != y or isinstance(x, bool) != isinstance(y, bool):
            lines.append(f"{path}: {_show(x)} -> {_show(y)}")
    return lines


def fingerprint(config: DataclassInstance) -> str:
    """Names a config by its content.

    Args:
        config: A dataclass instance.

    Returns:
        12 hexadecimal digits of the SHA-256 of the canonical JSON (sorted keys, whole floats written as ints), the same
        on every machine and in every process.
    """
    text = json.dumps(_canonical(to_dict(config)), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def save_json(config: DataclassInstance, path: Path | str) -> None:
    """Writes a config as indented JSON; a reader sees the old file or the new one, never a part.

    Args:
        config: A dataclass instance.
        path: The file; its folder must exist.
    """
    path = Path(path)
    text = json.dumps(to_dict(config), indent=2, allow_nan=False) + "\n"
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_json(cls: type[C], path: Path | str) -> C:
    """Reads a config that `save_json` wrote.

    Args:
        cls: The dataclass to build.
        path: The file.

    Returns:
        A new instance.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not JSON, or its values do not fit `cls`; the text names the file.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); restore the file or write it anew") from error
    try:
        return from_dict(cls, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def replace(config: C, overrides: Mapping[str, Any]) -> C:
    """Copies a config with some values changed.

    All overrides are applied before anything is validated, so values that only fit together can change together.

    Args:
        config: A dataclass instance; it is left as it is.
        overrides: New values by dotted path, such as `{"optimizer.learning_rate": 1e-4}`.

    Returns:
        A new, validated instance of the same class.

    Raises:
        ValueError: A path does not exist, or a value does not fit.
    """
    name = type(config).__name__
    values = to_dict(config)
    for path, value in overrides.items():
        *heads, last = path.split(".")
        at: Any = values
        for i, head in enumerate(heads):
            at = at.get(head, _ABSENT) if isinstance(at, dict) else _ABSENT
            if not isinstance(at, dict):
                if at is None:
                    parent = ".".join(heads[: i + 1])
                    raise ValueError(f"{name}: cannot set {path!r} as {parent!r} is None; set {parent!r} as a whole")
                raise _unknown(name, path, _paths(values, ""))
        at[last] = _plain(value, path)
    return from_dict(type(config), values)


def suggest(word: str, known: Iterable[str]) -> str:
    """Says what a misspelt name may have meant.

    Args:
        word: What was given.
        known: The names that exist.

    Returns:
        Text such as `did you mean 'lr'? known: beta, lr`, for the end of an error.
    """
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names) if names else '(none)'}"


def _plain(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{path or 'config'}: {value} is not finite, which JSON cannot hold; use None")
        return value
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f.name for f in dataclasses.fields(value) if f.init]
        return {name: _plain(getattr(value, name), _join(path, name)) for name in fields}
    if isinstance(value, tuple | list):
        return [_plain(v, f"{path}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: _plain(v, _join(path, k)) for k, v in value.items()}
    raise ValueError(f"{path or 'config'}: {value!r} has no JSON form; use numbers, strings, lists or dicts")


def _read(cls: Any, values: Any, path: str, root: str) -> Any:
    if isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        raise _mistyped(root, path, values, f"a dict of {cls.__name__}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key in values:
        if key not in fields:
            raise _unknown(root, _join(path, str(key)), [_join(path, name) for name in fields])
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(f"{root}: {_join(path, name)!r} is missing and has no default; give it a value")
    return cls(**{key: _convert(hints[key], value, _join(path, key), root) for key, value in values.items()})


def _convert(hint: Any, value: Any, path: str, root: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if hint in (None, type(None)):
        good = value is None
    elif origin is typing.Literal:
        good = any(value == a and type(value) is type(a) for a in args)
    elif origin in (typing.Union, types.UnionType):
        return _convert_union(hint, value, path, root)
    elif dataclasses.is_dataclass(hint):
        return _read(hint, value, path, root)
    elif origin is tuple or hint is tuple:
        good = isinstance(value, tuple | list)
        if good and args and args[-1] is not Ellipsis:
            good = len(value) == len(args)
        if good:
            hints = args if args and args[-1] is not Ellipsis else [args[0] if args else Any] * len(value)
            return tuple(_convert(h, v, f"{path}[{i}]", root) for i, (h, v) in enumerate(zip(hints, value)))
    elif origin is list or hint is list:
        good = isinstance(value, tuple | list)
        if good:
            return [_convert(args[0] if args else Any, v, f"{path}[{i}]", root) for i, v in enumerate(value)]
    elif isinstance(origin or hint, type) and issubclass(origin or hint, Mapping):
        good = isinstance(value, Mapping) and all(isinstance(k, str) for k in value)
        if good:
            return {k: _convert(args[1] if args else Any, v, _join(path, k), root) for k, v in value.items()}
    elif hint is float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if good else value
    elif hint is int:
        good = isinstance(value, int) and not isinstance(value, bool)
    elif hint is Path:
        good = isinstance(value, str | Path)
        value = Path(value) if good else value
    else:
        good = isinstance(hint, type) and isinstance(value, hint)
    if not good:
        raise _mistyped(root, path, value, _type_name(hint))
    return value


def _convert_union(hint: Any, value: Any, path: str, root: str) -> Any:
    members = typing.get_args(hint)
    if value is None and type(None) in members:
        return None
    members = [m for m in members if m is not type(None)]
    if len(members) == 1 and (dataclasses.is_dataclass(members[0]) or isinstance(value, Mapping | tuple | list)):
        return _convert(members[0], value, path, root)  # the inner error is more exact
    members.sort(key=lambda member: member is not type(value))  # an exact type first: 3 stays an int in float | int
    for member in members:
        try:
            return _convert(member, value, path, root)
        except ValueError:
            continue
    raise _mistyped(root, path, value, _type_name(hint))


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(repr(a) for a in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_type_name(a) for a in typing.get_args(hint))
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _mistyped(root: str, path: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{root}: {path or 'the config'} is {value!r} ({type(value).__name__}); expected {expected}")


def _unknown(root: str, path: str, known: Iterable[str]) -> ValueError:
    return ValueError(f"{root}: unknown key {path!r}; {suggest(path, known)}")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _leaves(value: Any, path: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, _join(path, key))
    else:
        yield path, value


def _paths(value: dict[str, Any], path: str) -> list[str]:
    return [p for p, _ in _leaves(value, path)]


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _canonical(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_canonical(v) for v in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _show(value: Any) -> str:
    return value if value is _ABSENT else json.dumps(value)
