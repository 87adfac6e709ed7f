"""Device, threads and generators of a training process."""

from __future__ import annotations

from typing import Any

import torch


def pick_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one, else the CPU; other names as PyTorch knows them.

    Raises:
        ValueError: The name is unknown or the device is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"train: device {name!r} is unknown; choose auto, cpu, cuda, cuda:<index> or mps") from error
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(device.type, False):
        raise ValueError(f"train: device {name!r} is not available on this machine; choose cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"train: device {name!r}, but there are {torch.cuda.device_count()} CUDA devices; choose a lower index"
        )
    return device


def set_threads(threads: int, *, is_parallel: bool) -> int:
    """Sets the learner's CPU threads.

    Two spinning OpenMP threads beside busy environment workers made one update 5 to 15 times slower, so 0 means one
    thread where there are workers, and PyTorch's own choice where there are none.

    Returns:
        The number in force.
    """
    if threads or is_parallel:
        torch.set_num_threads(threads or 1)
    return torch.get_num_threads()


def rng_state(device: torch.device) -> dict[str, Any]:
    """Global generator states that a run draws from: the CPU's and the device's."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(state: dict[str, Any], device: torch.device) -> None:
    """Restores `rng_state`; a state of a device that is not used now is ignored."""
    torch.set_rng_state(state["cpu"].clone())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].clone(), device)
