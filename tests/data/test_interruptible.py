"""Ctrl-C while a call of a library runs that does not return to Python."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from clearhead.data.interruptible import call_interruptibly
from clearhead.errors import InputError


@pytest.fixture(autouse=True)
def plain_handler() -> Iterator[None]:
    """Python's own: a process that was started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_signal_does_not_wait_for_the_call() -> None:
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    began = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        call_interruptibly(lambda items: time.sleep(60), [])
    assert time.monotonic() < began + 30
    timer.join()


def test_the_items_end_after_a_signal() -> None:
    taken: list[int] = []

    def slowly() -> Iterator[int]:
        for number in range(1000):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
            yield number
            time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt):
        call_interruptibly(taken.extend, slowly())
    before = len(taken)
    time.sleep(0.3)
    assert len(taken) == before < 1000


def test_results_and_errors_come_through() -> None:
    taken: list[int] = []
    call_interruptibly(taken.extend, range(5))
    assert taken == [0, 1, 2, 3, 4]

    def wrong() -> Iterator[int]:
        yield 1
        raise InputError("line 2 is no text; mend it")

    with pytest.raises(InputError, match="line 2 is no text"):
        call_interruptibly(taken.extend, wrong())


def test_outside_the_main_thread_it_is_a_plain_call() -> None:
    seen: list[str] = []
    thread = threading.Thread(
        target=lambda: call_interruptibly(lambda _: seen.append(threading.current_thread().name), [])
    )
    thread.start()
    thread.join()
    assert seen == [thread.name]
