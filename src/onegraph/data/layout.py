"""Layout of stored steps: names, shapes and dtypes, and the checks that hold steps, values and saves to them."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch


class Field(NamedTuple):
    """Layout of one stored field.

    Attributes:
        shape: Shape of one step.
        dtype: NumPy dtype of one step.
    """

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of one step."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}"


def parse_fields(fields: Mapping[str, tuple[tuple[int, ...], str]]) -> dict[str, Field]:
    """Checks names, shapes and dtypes.

    Args:
        fields: Name to (shape of one step, NumPy dtype name).

    Returns:
        Name to `Field`, in the given order.

    Raises:
        ValueError: A dimension is not positive, or PyTorch has no such dtype.
    """
    parsed = {}
    for name, (shape, dtype_name) in fields.items():
        try:
            dtype = np.dtype(dtype_name)
            torch.from_numpy(np.empty(0, dtype))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"replay: field {name!r} has dtype {dtype_name!r}; PyTorch must know the dtype, such as 'float32'"
            ) from error
        if any(int(size) < 1 for size in shape):
            raise ValueError(f"replay: field {name!r} has shape {tuple(shape)}; every dimension must be at least 1")
        parsed[name] = Field(tuple(int(size) for size in shape), dtype)
    return parsed


def check_step(fields: Mapping[str, Field], step: Mapping[str, np.ndarray], num_rows: int) -> dict[str, np.ndarray]:
    """Checks one step of every stream.

    Args:
        fields: Layout of every field.
        step: Name to `[num_rows, *shape]`.
        num_rows: Number of streams.

    Returns:
        The arrays, by name.

    Raises:
        ValueError: A key is missing or unknown, or a shape or dtype differs.
    """
    if step.keys() != fields.keys():
        missing, unknown = sorted(fields.keys() - step.keys()), sorted(step.keys() - fields.keys())
        raise ValueError(f"replay: step lacks {missing} and has unknown {unknown}; give exactly the stored fields")
    rows = {}
    for name, field in fields.items():
        value = np.asarray(step[name])
        expected = (num_rows, *field.shape)
        if value.shape != expected or value.dtype != field.dtype:
            raise ValueError(
                f"replay: field {name!r} expects {field.dtype.name}{list(expected)} (one row a stream) but was given "
                f"{value.dtype.name}{list(value.shape)}; convert it before add"
            )
        rows[name] = value
    return rows


def to_stored(name: str, value: torch.Tensor | np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Brings values of a field to the CPU and to a dtype that casts to the stored one within its kind.

    Args:
        name: The field, for the error.
        value: Any shape, any device.
        dtype: The stored dtype.

    Returns:
        The values, of the same shape.

    Raises:
        ValueError: The values are of another kind (such as float for an integer field).
    """
    if not isinstance(value, np.ndarray):
        tensor = value.detach()
        if tensor.is_floating_point() and dtype.kind == "f":
            # On the way through torch: NumPy knows no bfloat16.
            tensor = tensor.to("cpu", torch.from_numpy(np.empty(0, dtype)).dtype)
        if tensor.dtype is torch.bfloat16:
            tensor = tensor.float()
        value = tensor.cpu().numpy()
    if not np.can_cast(value.dtype, dtype, "same_kind"):
        raise ValueError(f"replay: write_back of {name!r} is {value.dtype.name} but {dtype.name} is stored; convert it")
    return value


def check_layout(saved: Mapping[str, Any], ours: Mapping[str, Any], directory: Path) -> None:
    """Refuses a save of another layout; the order of fields does not matter.

    Args:
        saved: What the save was written with: `fields` (name to [shape, dtype name]) and counts.
        ours: The same keys of the replay that loads it.
        directory: The save, for the error.

    Raises:
        ValueError: They differ; the first difference is named.
    """
    for key, value in ours.items():
        if saved[key] == value:
            continue
        what, theirs = key, saved[key]
        if key == "fields":
            name = next(n for n in [*value, *theirs] if theirs.get(n) != value.get(n))
            what, theirs, value = f"field {name!r} as", theirs.get(name), value.get(name)
        raise ValueError(
            f"replay: {directory} was saved with {what} {theirs} but this replay has {value}; build the replay with "
            f"the saved configuration or start without the save"
        )
