"""A request's tokens on their way to their reader."""

from __future__ import annotations

import asyncio

import pytest

from clearhead.generation import Request, Token
from clearhead.serving.worker import Arrival, LoopChannel


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("end", [None, ValueError("this one")], ids=["end", "error"])
def test_who_waits_for_a_whole_answer_is_woken_for_its_first_token_and_at_the_end(
    is_whole: bool, end: BaseException | None
) -> None:
    arrivals: list[Arrival] = [*map(Token, range(5)), end]

    async def run() -> list[list[Arrival]]:
        channel, taken = LoopChannel(Request(), is_whole=is_whole), list[list[Arrival]]()

        async def read() -> None:
            while not taken or isinstance(taken[-1][-1], Token):
                taken.append(await channel.take())

        reader = asyncio.create_task(read())
        for arrived in arrivals:
            await asyncio.sleep(0.001)
            channel.put(arrived)
        await asyncio.wait_for(reader, 5)
        return taken

    taken = asyncio.run(run())
    assert [arrived for each in taken for arrived in each] == arrivals
    assert len(taken) == (2 if is_whole else 6)


def test_a_late_whole_answer_is_ended() -> None:
    async def run() -> list[Arrival]:
        channel = LoopChannel(Request(), is_whole=True)
        channel.put(Token(1))
        channel.put(Token(2))
        first = await channel.take()
        asyncio.get_running_loop().call_later(0.01, channel.expire)
        return [*first, *await asyncio.wait_for(channel.take(), 5)]

    *tokens, end = asyncio.run(run())
    assert tokens == [Token(1), Token(2)]
    assert isinstance(end, asyncio.TimeoutError)
