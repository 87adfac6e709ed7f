from __future__ import annotations

import os
import signal
import threading

import pytest

from onegraph.train.signals import graceful_stop


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_asks_to_stop(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with graceful_stop() as stop:
        assert stop.requested is None
        assert not stop
        os.kill(os.getpid(), number)
        assert stop.requested == name
        assert stop
    assert signal.getsignal(number) is before


def test_second_interrupt_raises_and_handlers_return():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with graceful_stop() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_does_nothing_outside_the_main_thread():
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work():
        with graceful_stop() as stop:
            seen.append((stop.requested, signal.getsignal(signal.SIGINT) is before))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, True)]
