"""When something is due: updates per environment step, periods in steps and in seconds, and where the time went."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any


class Ratio:
    """How many updates are owed after each environment step.

    The first call owes one update and sets the origin. Later calls owe the whole updates that `ratio` times the steps
    since then amounts to, less those already given; what is left over carries on. The count is kept in integers, so it
    is exact over any number of steps. (Reference: elements.when.Ratio, which accumulates a float.)

    Args:
        ratio: Updates per step, for example 1/32; 0 means never.

    Raises:
        ValueError: The ratio is negative or not finite.
    """

    def __init__(self, ratio: float | Fraction) -> None:
        if not 0 <= ratio < float("inf"):
            raise ValueError(f"Ratio: {ratio} updates per step; the ratio must be finite and at least 0")
        exact = Fraction(ratio)
        # 1/3 as a float lies just below a third, and would owe its first update one step late.
        simple = exact.limit_denominator(1_000_000)
        self.ratio = simple if float(simple) == float(exact) else exact
        self._origin: int | None = None
        self._given = 0
        self._last = 0

    def __call__(self, step: int) -> int:
        """Counts the updates that are owed at a step.

        Args:
            step: Environment steps so far; must not decrease.

        Returns:
            Number of updates to make now; the caller is expected to make them all.

        Raises:
            ValueError: The step is lower than in the call before.
        """
        if self.ratio == 0:
            return 0
        if self._origin is None:
            self._origin, self._given, self._last = step, 0, step
            return 1
        if step < self._last:
            raise ValueError(f"Ratio: step {step} after step {self._last}; it must not decrease; call skip to restart")
        self._last = step
        due = (step - self._origin) * self.ratio.numerator // self.ratio.denominator
        owed, self._given = due - self._given, due
        return owed

    def skip(self, step: int) -> None:
        """Tells that no update is possible at this step, as while the replay holds too few steps.

        No debt builds up: the next call is treated as the first one, owes one update and sets the origin.

        Args:
            step: Environment steps so far.
        """
        self._origin, self._given, self._last = None, 0, step

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which `load_state_dict` continues exactly."""
        exact = [self.ratio.numerator, self.ratio.denominator]
        return {"ratio": exact, "origin": self._origin, "given": self._given, "last": self._last}

    def load_state_dict(self, state: dict[str, Any], *, step: int | None = None) -> None:
        """Continues from a saved state.

        Args:
            state: From `state_dict`. With another ratio than this object's, counting restarts at the saved step with
                nothing owed.
            step: Environment steps at which the run continues. If the state was saved at another step, counting
                restarts at `step` with nothing owed, so that no burst of updates follows. None trusts the state.
        """
        self._origin, self._given, self._last = state["origin"], state["given"], state["last"]
        same_ratio = Fraction(*state["ratio"]) == self.ratio
        if self._origin is not None and (not same_ratio or step not in (None, self._last)):
            self._last = self._last if step is None else step
            self._origin, self._given = self._last, 0


class Every:
    """True once for each period of steps, at the first call on or after each multiple of the period.

    Args:
        period: Steps; 0 means never.
        initial: Whether the very first call is true.

    Raises:
        ValueError: The period is negative.
    """

    def __init__(self, period: int, *, initial: bool = True) -> None:
        if period < 0:
            raise ValueError(f"Every: a period of {period} steps; it must be at least 0, and 0 means never")
        self.period = period
        self.initial = initial
        self._index: int | None = None

    def __call__(self, step: int) -> bool:
        """Whether the action is due.

        Args:
            step: The counter that the period refers to.

        Returns:
            True at most once for each period; periods that were jumped over are not made up for.
        """
        if self.period == 0:
            return False
        index = step // self.period
        if self._index is None:
            self._index = index
            return self.initial
        due = index > self._index
        self._index = max(index, self._index)
        return due

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which `load_state_dict` continues."""
        return {"last": None if self._index is None else self._index * self.period}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`, also where the period is another one now."""
        last = state["last"]
        self._index = None if last is None or self.period == 0 else last // self.period


class EverySeconds:
    """True once for each period of wall time.

    Args:
        period_s: Seconds; 0 means never.
        initial: Whether the very first call is true.
        clock: Seconds on a clock that never goes back.

    Raises:
        ValueError: The period is negative or not finite.
    """

    def __init__(self, period_s: float, *, initial: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 <= period_s < float("inf"):
            raise ValueError(f"EverySeconds: a period of {period_s} s; it must be finite and at least 0; 0 means never")
        self.period_s = period_s
        self._clock = clock
        self._next = clock() if initial else clock() + period_s

    def __call__(self) -> bool:
        """Whether the action is due; the period counts from the last time it was."""
        if self.period_s == 0 or self._clock() < self._next:
            return False
        self._next = self._clock() + self.period_s
        return True


class Timer:
    """Wall seconds spent in named sections of a loop.

    A section inside another takes its time off the outer one, so the fractions add up to at most 1. Work queued on a
    GPU counts where the loop waits for it, not where it was queued.

    Args:
        clock: Seconds on a clock that never goes back.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []
        self._start = clock()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Adds the time of the `with` block to a section.

        Args:
            name: The section, such as `collect`.
        """
        begin = self._clock()
        self._inner.append(0.0)
        try:
            yield
        finally:
            spent = self._clock() - begin
            self._seconds[name] = self._seconds.get(name, 0.0) + spent - self._inner.pop()
            if self._inner:
                self._inner[-1] += spent

    def seconds(self) -> dict[str, float]:
        """Seconds in each section since the last reset."""
        return dict(self._seconds)

    def fractions(self, *, reset: bool = True) -> dict[str, float]:
        """Shares of the wall time since the last reset.

        Args:
            reset: Whether to start counting anew; sections that were seen stay, at 0.

        Returns:
            For each section a number in [0, 1]; what is missing to 1 was spent outside all sections.
        """
        now = self._clock()
        total = now - self._start
        shares = {name: min(1.0, s / total) if total > 0 else 0.0 for name, s in self._seconds.items()}
        if reset:
            self._seconds = dict.fromkeys(self._seconds, 0.0)
            self._start = now
        return shares


class Rate:
    """Items a second since the last reading.

    Args:
        clock: Seconds on a clock that never goes back.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._count = 0
        self._start = clock()

    def add(self, count: int = 1) -> None:
        """Counts items.

        Args:
            count: How many were done.
        """
        self._count += count

    def read(self) -> float:
        """Items a second since the last reading, or since the start; starts counting anew."""
        now = self._clock()
        elapsed, count = now - self._start, self._count
        self._start, self._count = now, 0
        return count / elapsed if elapsed > 0 else 0.0
