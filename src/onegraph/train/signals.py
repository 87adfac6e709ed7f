"""Stops a training loop between two steps, so that a preempted or interrupted run can save first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """What a loop looks at after each step.

    Attributes:
        requested: `SIGINT` or `SIGTERM` once one came, else None. A loop may also set it itself.
    """

    def __init__(self) -> None:
        self.requested: str | None = None

    def __bool__(self) -> bool:
        return self.requested is not None


@contextmanager
def graceful_stop() -> Iterator[StopRequest]:
    """Turns SIGINT (Ctrl-C) and SIGTERM (preemption) into a request to stop.

    The first signal only sets `requested`; a second SIGINT raises KeyboardInterrupt, for a loop that hangs. The former
    handlers are put back at the end. Python delivers signals to the main thread alone, so elsewhere nothing is
    installed and `requested` stays None.

    Yields:
        The request, for the loop to read.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    interrupts = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        if request.requested is None:
            request.requested = signal.Signals(number).name
        if number == signal.SIGINT:
            interrupts += 1
            if interrupts > 1:
                raise KeyboardInterrupt

    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside Python
