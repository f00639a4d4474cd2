"""Work that is cancelled when nobody waits for it any more, or waits for its client's other work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request

from clearhead.serving.guards import CLIENT

T = TypeVar("T")


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, the work is cancelled and its memory freed."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    watch, task = asyncio.create_task(disconnected()), asyncio.create_task(work)
    try:
        await asyncio.wait((watch, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(499, "the client has gone")
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(watch, task, return_exceptions=True)


async def run_held(hold: AbstractAsyncContextManager[Any], work: Callable[[], T]) -> T:
    """The result of `work`, run in a thread while `hold` (a lock, a slot) is taken.

    Cancelled while it waits for `hold`, it never runs. Later a thread can not be stopped: what it holds is given back at its end.
    """
    has_begun = False

    async def held() -> T:
        nonlocal has_begun
        async with hold:
            has_begun = True
            return await asyncio.to_thread(work)

    task = asyncio.create_task(held())
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to ask for its error
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not has_begun:
            task.cancel()
        raise


async def gather_or_cancel(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all. If one fails, or this is cancelled, the others are cancelled."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


class ClientSlots:
    """`async with` one of these: at most n at once of each client, and the others wait."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.slots: dict[str, tuple[asyncio.Semaphore, list[None]]] = {}  # with one item for each that runs or waits

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncGenerator[None, None]:
        client = CLIENT.get()
        slot, users = self.slots.setdefault(client, (asyncio.Semaphore(self.n), []))
        users.append(None)
        try:
            async with slot:
                yield
        finally:
            users.pop()
            if not users:
                del self.slots[client]
