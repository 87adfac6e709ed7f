"""Compiled regions: functions that torch.compile turns into graphs of their own, with a name and a voice.

Functions are compiled, never modules, so that `state_dict` keys are the same in every mode.
"""

from __future__ import annotations

import copy
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import list_mode_options, list_options
from torch.utils import _pytree as pytree

Listener = Callable[[str], None]
_listeners: list[Listener] = []


@contextmanager
def announce_compiles(listener: Listener) -> Iterator[None]:
    """Passes lines such as "compiling encoder" to `listener` while the context lasts."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def num_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    return counters["stats"]["unique_graphs"]


class Region:
    """A function in a compile scope of its own; call it like the function.

    Each region has its own cache of graphs, also where several are made of one function: they neither share nor fill
    each other's recompile limit. Copies and unpickled regions compile anew. Called while an outer region is being
    traced, the function is inlined there.

    Args:
        function: What to compile: a function or a bound method.
        name: For progress lines and the logs of torch.compile.
        mode: A torch.compile mode; "default" if neither this nor `options` is given.
        fullgraph: Refuse graph breaks.
        dynamic: Passed on.
        options: Inductor options, in place of `mode`.
        backend: Passed on.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        mode: str | None = None,
        fullgraph: bool = True,
        dynamic: bool | None = False,
        options: dict[str, Any] | None = None,
        backend: str | Callable[..., Any] = "inductor",
    ):
        self.function = function
        self.name = name
        self.settings: dict[str, Any] = {
            "mode": mode,
            "fullgraph": fullgraph,
            "dynamic": dynamic,
            "options": options,
            "backend": backend,
        }
        self._compiled: Callable[..., Any] | None = None
        self._num_graphs = 0

    @property
    def num_graphs(self) -> int:
        """Forward graphs compiled so far; more than one for one input shape is a graph break or a recompile."""
        return self._num_graphs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the compiled function; the first call with new shapes compiles it."""
        if torch.compiler.is_compiling():
            return self.function(*args, **kwargs)
        before = num_graphs()
        started = time.perf_counter()
        if not self._num_graphs:
            _say(f"compiling {self.name}")
        if self._compiled is None:
            settings = _for_device(self.settings, _device_of((args, kwargs)))
            self._compiled = torch.compile(_with_own_code(self.function, self.name), **settings)
        result = self._compiled(*args, **kwargs)
        new = num_graphs() - before
        if new:
            self._num_graphs += new
            _say(f"compiled {self.name} in {time.perf_counter() - started:.1f} s")
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        """A region of its own around the copied function."""
        return Region(copy.deepcopy(self.function, memo), self.name, **self.settings)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the function and the settings, not the graphs."""
        return _restore_region, (self.function, self.name, self.settings)


def _for_device(settings: dict[str, Any], device: str | None) -> dict[str, Any]:
    """Settings of torch.compile. On the CPU graphs get a C++ wrapper, compiled apart from the kernels.

    That wrapper calls the kernels faster than a Python one, and small files compile faster than one large file.
    """
    mode, options = settings["mode"], settings["options"]
    # "default" is passed as None: the two mean the same, and other backends know no modes.
    settings = settings | {"mode": None if mode == "default" else mode}
    if device != "cpu" or settings["backend"] != "inductor" or options is not None:
        return settings
    options = {k: True for k in ("cpp_wrapper", "cpp_wrapper_build_separate") if k in list_options()}
    return settings | {"mode": None, "options": list_mode_options(mode or "default") | options}


def _device_of(args: Any) -> str | None:
    """Type of the device of the first tensor in nested arguments."""
    for leaf in pytree.tree_leaves(args):
        if isinstance(leaf, nn.Module):
            leaf = next(leaf.parameters(), None)
        if isinstance(leaf, Tensor):
            return leaf.device.type
    return None


def _restore_region(function: Callable[..., Any], name: str, settings: dict[str, Any]) -> Region:
    return Region(function, name, **settings)


def _say(text: str) -> None:
    for listener in _listeners:
        listener(text)


def _with_own_code(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same function with a code object of its own: torch.compile keeps its graphs, and their limit, by code object."""
    if isinstance(function, types.MethodType):
        return types.MethodType(_with_own_code(function.__func__, name), function.__self__)
    if not isinstance(function, types.FunctionType):
        return function
    code = function.__code__.replace(co_name=f"{function.__code__.co_name}__{_identifier(name)}")
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def compiled_scope(module: nn.Module) -> str | None:
    """Path of the first submodule that has been compiled on its own, by `module.compile()` or `torch.compile(module)`."""
    for path, child in module.named_modules():
        if isinstance(child, torch._dynamo.OptimizedModule) or child._compiled_call_impl is not None:
            return path or type(child).__name__
    return None
