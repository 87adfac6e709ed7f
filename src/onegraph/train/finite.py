"""Stops a run whose numbers are no longer numbers, before they are saved over good ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def check_finite(metrics: dict[str, float], update: int) -> None:
    """Stops a run whose losses are no longer numbers.

    Raises:
        FloatingPointError: A loss or the gradient norm is NaN or infinite; names the first.
    """
    bad = [
        k for k, v in metrics.items() if (k.startswith("loss/") or k.startswith("optimizer/")) and not np.isfinite(v)
    ]
    if bad:
        raise FloatingPointError(
            f"train: {bad[0]} is not finite at or shortly before update {update} (also: {', '.join(bad[1:]) or 'none'}); "
            "resume from the last checkpoint with a lower agent.lr, or check the environment's rewards and observations"
        )


def check_finite_state(state: Mapping[str, Tensor], update: int, latest: Path | None) -> None:
    """Refuses to save a learner with NaN or infinite entries.

    Raises:
        FloatingPointError: Names the first such entry.
    """
    broken = [k for k, v in state.items() if not torch.isfinite(v).all()]
    if broken:
        raise FloatingPointError(
            f"train: {broken[0]} is not finite at update {update}; nothing was saved over the last good checkpoint "
            f"({latest}); lower agent.lr or check the environment's rewards and observations"
        )
