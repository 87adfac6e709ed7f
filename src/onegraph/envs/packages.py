"""Optional packages: imported when a task needs them, and asked for by name when they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_optional(module: str, *, extra: str, task: str) -> ModuleType:
    """Imports `module`.

    Args:
        module: Dotted name.
        extra: Extra of onegraph that installs it.
        task: Task that needs it, for the error text.

    Raises:
        ImportError: The module, or one that it imports, is missing; the text names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"env: {task} needs the package {module.partition('.')[0]}, which could not be imported ({error}); "
            f"pip install 'onegraph[{extra}]'"
        ) from error
