"""Streams in processes of their own, and errors that find their way back from them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from onegraph.envs.config import EnvConfig
from onegraph.envs.make import make_env
from onegraph.envs.recall import RecallableEnv

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_CLOSE_S = 5.0

Spaces = tuple[gymnasium.Space[Any], gymnasium.Space[Any]]


class EnvError(RuntimeError):
    """An environment failed; the text names the stream and the task and has the original traceback.

    It is built from its text alone, so that it crosses process borders whatever the original exception was.
    """


@dataclass(frozen=True)
class Stream:
    """Builds one stream; picklable.

    Attributes:
        config: The task.
        index: Which of `config.num_envs` streams.
        render: Whether frames will be asked for.
        spaces: Observation and action space, known before a worker starts. With it, the process `owner` gets a stand-in
            that has only those spaces, and a worker in which the environment cannot be built says so at the first
            reset.
        owner: Process id of the parent.
    """

    config: EnvConfig
    index: int
    render: bool = False
    spaces: Spaces | None = None
    owner: int = 0

    def with_spaces(self, spaces: Spaces) -> Stream:
        """A copy for a worker process."""
        return dataclasses.replace(self, spaces=spaces, owner=os.getpid())

    @property
    def name(self) -> str:
        """How error texts call the stream."""
        return f"stream {self.index} of {self.config.num_envs} ({self.config.task})"

    def __call__(self) -> gymnasium.Env[Any, Any]:
        """The environment of this stream, recallable and guarded by `GuardedEnv`."""
        if self.spaces is None:
            return GuardedEnv(RecallableEnv(make_env(self.config, render=self.render)), self.name)
        if os.getpid() == self.owner:
            return _StandIn(self.spaces, None)
        # Ctrl-C and some schedulers signal the whole process group; the parent decides when a worker ends.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        try:
            return GuardedEnv(RecallableEnv(make_env(self.config, render=self.render)), self.name)
        except Exception as error:
            return _StandIn(self.spaces, _describe(self.name, error))


class GuardedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Turns every exception into an `EnvError` and reduces `info` to the numbers of an episode's end.

    Args:
        env: Environment from `make_env`.
        name: How error texts call the stream.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], name: str) -> None:
        super().__init__(env)
        self._name = name

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets; `info` is empty.

        Raises:
            EnvError: The environment raised.
        """
        try:
            observation, _ = self.env.reset(seed=seed, options=options)
        except Exception as error:
            raise EnvError(_describe(self._name, error)) from error
        return observation, {}

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Steps; `info` has flat float entries where the episode ends and is empty elsewhere.

        Raises:
            EnvError: The environment raised.
        """
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
            numbers = dict(_numbers(info)) if terminated or truncated else {}
            return observation, float(reward), bool(terminated), bool(truncated), numbers
        except Exception as error:
            raise EnvError(_describe(self._name, error)) from error


class ProcessVectorEnv(AsyncVectorEnv):
    """Gymnasium's process workers: spawned (never forked), one thread each, and ended for certain.

    Spawning rather than forking, because the parent has torch's threads and perhaps a CUDA context.

    Args:
        streams: One for each worker, from `Stream.with_spaces`.

    Raises:
        EnvError: A worker raised or died.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        try:
            with _one_thread(), self._names_dead_workers():
                super().__init__(streams, context="spawn", autoreset_mode=AutoresetMode.NEXT_STEP)
        except BaseException:
            self._end_processes()
            self.closed = True
            raise

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Resets every worker and waits."""
        with self._names_dead_workers():
            return super().reset(seed=seed, options=options)

    def step_async(self, actions: Any) -> None:
        """Sends one action to each worker."""
        with self._names_dead_workers():
            super().step_async(actions)

    def step_wait(self, timeout: float | None = None) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Waits for the rows."""
        with self._names_dead_workers():
            return super().step_wait(timeout)

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """Asks the workers to close, waits up to 5 s (`timeout`), then ends those that are left."""
        if not terminate:
            for pipe in self.parent_pipes:
                if pipe is not None and not pipe.closed:
                    with contextlib.suppress(OSError):
                        pipe.send(("close", None))
        self._end_processes(0.0 if terminate else _CLOSE_S if timeout is None else timeout)

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        """Without Gymnasium's warnings, which repeat the traceback that the error already carries."""
        results = list(successes)
        if not all(results):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                super()._raise_if_errors(results)

    def _end_processes(self, patience_s: float = 0.0) -> None:
        processes = [p for p in getattr(self, "processes", []) if p.pid is not None]
        deadline = time.monotonic() + patience_s
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for end in ("terminate", "kill"):
            left = [p for p in processes if p.is_alive()]
            for process in left:
                getattr(process, end)()
            for process in left:
                process.join(2.0)
        for pipe in getattr(self, "parent_pipes", []):
            if pipe is not None:
                pipe.close()

    @contextlib.contextmanager
    def _names_dead_workers(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            for stream, process in zip(self._streams, self.processes):
                process.join(0.2)
                if process.exitcode is not None:
                    raise EnvError(
                        f"env: the process of {stream.name} died with exit code {process.exitcode} before it "
                        "answered; its own message is above, and a negative code is a signal (-9: often out of "
                        "memory); a script that starts workers must keep its entry behind if __name__ == '__main__'; "
                        "workers='inline' shows the error here"
                    ) from error
            raise


class _StandIn(gymnasium.Env[Any, Any]):
    """Has spaces and nothing else; `reset` raises what kept the environment from being built."""

    def __init__(self, spaces: Spaces, failure: str | None) -> None:
        self.observation_space, self.action_space = spaces
        self._failure = failure

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        raise EnvError(self._failure or "env: a stand-in cannot be reset")


def _describe(name: str, error: BaseException) -> str:
    return f"env: {name} raised {type(error).__name__}: {error}\n{''.join(traceback.format_exception(error)).rstrip()}"


def _numbers(info: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Scalar numeric entries of a nested dict, as floats: Gymnasium gives a key the dtype of its first value."""
    for key, value in info.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}/")
        elif isinstance(value, (bool, int, float, np.generic, np.ndarray)):
            array = np.asarray(value)
            if array.ndim == 0 and array.dtype.kind in "biuf" and not name.startswith("_"):
                yield name, float(array)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limits numerical libraries to one thread in processes that start inside; this process is already set up."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
