"""A limit on the values in a JSON body, checked before it is parsed: parsing millions of them holds up every other client."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

MAX_VALUES = 300_000  # more than any vocabulary has tokens: `logit_bias` may name each


class BoundedRoute(APIRoute):
    """A route whose body is checked before it is parsed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handle(BoundedRequest(request.scope, request.receive))

        return bounded


class BoundedRequest(Request):
    async def body(self) -> bytes:
        body = await super().body()
        check_values(body)
        return body


def check_values(body: bytes) -> None:
    """HTTPException for JSON of too many values: one more than the commas outside of strings."""
    if body.count(b",") < MAX_VALUES:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # no quotes but those at the ends of strings
    # A value has four quotes at most, two of its key and two of its own.
    if plain.count(b'"') > 4 * MAX_VALUES or b"".join(plain.split(b'"')[::2]).count(b",") >= MAX_VALUES:
        raise HTTPException(413, f"the body holds more than {MAX_VALUES:,} values; send fewer")
