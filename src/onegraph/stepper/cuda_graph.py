"""What captures the work of a function and does it again: CUDA graphs, and a stand-in that runs anywhere."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from tensordict import TensorDict

from onegraph.stepper.static import BatchSpec, copy_tensors, dense, first_difference, tensors

Run = Callable[[], TensorDict]


class Graph(Protocol):
    """Does the work of a function again on the same memory."""

    @property
    def device(self) -> torch.device | None:
        """Device whose work is captured; None: any."""
        ...

    def warm_up(self, function: Run) -> TensorDict:
        """Runs `function` the way `capture` will."""
        ...

    def capture(self, function: Run) -> TensorDict:
        """Captures `function` and returns its outputs: their values are those of the last replay."""
        ...

    def replay(self) -> None:
        """Does the captured work again."""
        ...

    def reset(self) -> None:
        """Frees the captured work and its memory."""
        ...


class CudaGraph:
    """A `torch.cuda.CUDAGraph`.

    Random draws differ between replays and follow the seed set before them, as in eager runs. torch registers the
    device's default generator with the graph by itself; others must be named before torch 2.14 and need not be from then on.

    Args:
        device: A CUDA device.
        generators: CUDA generators, other than the default one, that the function draws from.
        pool: Memory pool to share, see `torch.cuda.graph_pool_handle`; by default one of its own.

    Raises:
        ValueError: The device is no CUDA device.
    """

    def __init__(self, device: torch.device | str, generators: Iterable[torch.Generator] = (), *, pool: Any = None):
        device = torch.device(device)
        if device.type != "cuda":
            raise ValueError(
                f"capture: the device is {device}, but CUDA graphs need a CUDA device; move the learner to one, or leave "
                "capture out with cudagraph=False"
            )
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self.generators = tuple(generators)
        self.pool = pool
        # Warm-up and capture share one stream: autograd adds up a gradient on the stream of the parameter's first use,
        # and libraries make handles and workspaces for each stream, which they cannot do during a capture.
        self.stream = torch.cuda.Stream(self.device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            try:
                with torch.cuda.stream(self.stream):  # torch.cuda.graph leaves its stream set when a capture fails
                    yield
            finally:
                current.wait_stream(self.stream)

    def warm_up(self, function: Run) -> TensorDict:
        """Runs `function` on the stream of the capture."""
        with self._aside():
            return function()

    def capture(self, function: Run) -> TensorDict:
        """Captures `function`, which has been warmed up. The outputs have no values before the first replay.

        Raises:
            RuntimeError: The function did what a capture does not allow.
        """
        self.reset()
        gc.collect()  # what garbage holds on the GPU must not be freed in the middle of a capture
        graph = torch.cuda.CUDAGraph()
        if torch.__version__ < "2.14":  # a no-op that warns from then on
            for generator in self.generators:
                graph.register_generator_state(generator)
        outputs: list[TensorDict] = []
        errors: list[Exception] = []
        options: dict[str, Any] = {"pool": self.pool, "stream": self.stream, "capture_error_mode": "thread_local"}
        try:
            with self._aside(), torch.cuda.graph(graph, **options):
                # Kept, not raised: ending the capture fails too then, and that error would hide this one.
                try:
                    outputs.append(function())
                except Exception as error:
                    errors.append(error)
        except RuntimeError as error:
            errors.append(error)
        if errors:
            raise explained(errors[0])
        self._graph = graph
        return outputs[0]

    def replay(self) -> None:
        """Launches the graph on the current stream; does not synchronise."""
        assert self._graph is not None
        self._graph.replay()

    def reset(self) -> None:
        """Frees the graph; CUDA finishes replays in flight."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None


class EagerGraph:
    """A graph that runs the Python code again, on any device, and writes into the outputs of the capture.

    What reads results after a later replay goes wrong with it as with a real graph, and a function whose outputs change is
    found out. It is what tests and audits use where there is no CUDA.
    """

    device: torch.device | None = None

    def __init__(self):
        self.reset()

    def warm_up(self, function: Run) -> TensorDict:
        """Runs `function`."""
        return function()

    def capture(self, function: Run) -> TensorDict:
        """Runs `function` once and keeps it."""
        outputs = function()
        self._captured = (function, dense(outputs, lambda t: t.detach().clone()), BatchSpec.of(outputs))
        return self._captured[1]

    def replay(self) -> None:
        """Runs the function and copies its outputs into those of the capture.

        Raises:
            ValueError: Their kind has changed.
        """
        assert self._captured is not None
        function, outputs, spec = self._captured
        new = function()
        check_outputs(new, spec)
        copy_tensors(tensors(outputs), tensors(new))

    def reset(self) -> None:
        """Forgets the function."""
        self._captured: tuple[Run, TensorDict, BatchSpec] | None = None


def check_outputs(outputs: TensorDict, spec: BatchSpec) -> None:
    """Refuses outputs of another kind than those of the first run.

    Raises:
        ValueError: Names the first difference.
    """
    difference = first_difference(outputs, spec, what="the output", seen="the first run gave")
    if difference is not None:
        raise ValueError(f"capture: {difference}; capture needs a step whose outputs do not change")


def explained(error: Exception) -> Exception:
    """The error to raise for one that came up during a capture: what breaks captures is explained, the rest is as it was."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return error
    reason = str(error).strip().partition("\n")[0]
    explanation = RuntimeError(
        f"capture: the step cannot be captured in a CUDA graph ({reason}); a captured step must not wait for the GPU or "
        "depend on values there: look for .item(), .cpu(), printing or branching on a tensor, data-dependent shapes (masks "
        "as indices, nonzero), tensors made from Python values, and results of earlier steps that still hold their autograd "
        "graph; or run again with cudagraph=False"
    )
    explanation.__cause__ = error
    return explanation
