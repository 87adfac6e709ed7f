"""Shapes and kinds of one observation or action entry: the only thing that learners know of an environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One entry of an observation or of an action, without batch and time axes.

    Attributes:
        shape: Axes of one step; `()` for a scalar, `(H, W, C)` for an image.
        dtype: Numpy name: `float32`, `uint8`, `int32` or `bool`.
        num_classes: Discrete entries only: number of classes of each element in row-major order, each element an
            integer in `[0, num_classes[i])`. None for floats and images.
    """

    shape: tuple[int, ...]
    dtype: str
    num_classes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "uint8", "int32", "bool"):
            raise ValueError(
                f"ArraySpec: dtype {self.dtype!r} is not one of float32, uint8, int32, bool; convert the entry"
            )
        if any(n < 1 for n in self.shape):
            raise ValueError(f"ArraySpec: shape {self.shape} has an empty axis; drop the entry")
        if self.num_classes is not None and len(self.num_classes) != prod(self.shape):
            raise ValueError(
                f"ArraySpec: {len(self.num_classes)} class counts for shape {self.shape}; give one count for each element"
            )
        if self.num_classes is not None and any(n < 1 for n in self.num_classes):
            raise ValueError(f"ArraySpec: class counts {self.num_classes} must be positive")

    @property
    def is_discrete(self) -> bool:
        """Whether the entry holds class indices."""
        return self.num_classes is not None

    @property
    def is_image(self) -> bool:
        """Whether the entry goes through the image encoder: three axes of bytes."""
        return self.num_classes is None and len(self.shape) == 3 and self.dtype == "uint8"

    @property
    def flat_dim(self) -> int:
        """Columns that the entry takes once flattened; discrete elements count one column a class."""
        return sum(self.num_classes) if self.num_classes is not None else prod(self.shape)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reads them back."""
        classes = None if self.num_classes is None else list(self.num_classes)
        return {"shape": list(self.shape), "dtype": self.dtype, "num_classes": classes}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ArraySpec:
        """Inverse of `to_json`."""
        classes = value["num_classes"]
        return cls(
            shape=tuple(value["shape"]),
            dtype=value["dtype"],
            num_classes=None if classes is None else tuple(classes),
        )
