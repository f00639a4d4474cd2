"""Long calls of the `tokenizers` library that Ctrl-C can end. Python handles a signal only when such a call returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 0.5  # seconds in which an interrupted call may end by itself


def call_interruptibly(work: Callable[[Iterator[T]], object], items: Iterable[T]) -> None:
    """work(items) in a thread of its own, while the main thread waits for it and for signals.

    After a signal the items end with an error. A call that has read them all goes on until the process ends, for nobody.
    """
    if threading.current_thread() is not threading.main_thread():
        work(iter(items))
        return
    stopped, errors = threading.Event(), list[BaseException]()

    def until_stopped() -> Iterator[T]:
        for item in items:
            if stopped.is_set():
                raise KeyboardInterrupt
            yield item

    def run() -> None:
        try:
            work(until_stopped())
        except BaseException as error:  # raised again below, in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)  # with a limit: on Windows a signal does not end a wait
    except BaseException:
        stopped.set()
        thread.join(PATIENCE)
        raise
    if errors:
        raise errors[0]
