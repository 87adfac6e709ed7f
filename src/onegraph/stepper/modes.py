"""Names of torch.compile's modes; torch-free, so that the command line can check them at once."""

from __future__ import annotations

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def check_mode(mode: str, where: str) -> str:
    """Returns `mode`.

    Raises:
        ValueError: It is none of `COMPILE_MODES`.
    """
    if mode not in COMPILE_MODES:
        raise ValueError(f"{where}: compile_mode is {mode!r}; choose one of {', '.join(COMPILE_MODES)}")
    return mode
