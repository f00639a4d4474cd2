"""The guard in front of every route: host names, keys, sizes and numbers of requests. Refusals are in OpenAI's form."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOCAL = ("localhost", "127.0.0.1", "::1")
PATIENCE = 5.0  # seconds for a client to read a refusal
STOPPING = "the server is shutting down"
OPEN = (
    "/healthz",
    "/readyz",
    "/",
)  # without a key: health probes have none, and a browser none before the page is loaded
PAGE = "/page/"  # the page's files, also without a key


@dataclass(frozen=True)
class Limits:
    """The limits for one client."""

    body: int = 8_000_000  # bytes
    sound: int = 32_000_000  # bytes of an uploaded file
    streams: int = 512  # requests at once under one key
    seconds: float = 600.0  # for one request
    hosts: tuple[str, ...] = ()  # names of the server that are allowed in Host and Origin, besides local ones
    keys: tuple[str, ...] = field(default=(), repr=False)


def error(status: int, message: str, kind: str = "invalid_request_error", **more: Any) -> tuple[int, dict[str, Any]]:
    """The status and body of a refusal."""
    body = {"message": message, "type": kind, "param": None, "code": None, **more}
    return status, {"error": {name: said and _one_line(said) for name, said in body.items()}}


def _one_line(text: str) -> str:
    """The text on one line, printable. It may quote what a client sent, such as half a surrogate pair, which can not be encoded."""
    printable = "".join(each if each.isprintable() else " " for each in text[:2000])
    return " ".join(printable.split())[:1000]


class Guard:
    """Middleware that checks Host and Origin, the key, the size of the body, and the number of requests at once."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits, self.open = app, limits, Counter[str]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        refusal = self._refuse(headers, path)
        if refusal is None and path.startswith("/v1/") and scope["app"].state.is_ending:
            refusal = error(503, STOPPING, "server_error")
        if refusal is not None:
            await answer(send, *refusal)
            return
        key = _given_key(headers) if self.limits.keys else ""
        if self.open[key] >= self.limits.streams:
            message = f"{self.limits.streams} requests at once are the limit; wait for one to end"
            await answer(send, *error(429, message, "rate_limit_error"))
            return
        self.open[key] += 1
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            # Ends clients that send or read too slowly. Routes have a shorter limit and a better message.
            work = self.app(scope, self._counted(receive, path), watched)
            await asyncio.wait_for(work, self.limits.seconds + PATIENCE)
        except asyncio.TimeoutError:
            if not has_begun:
                await answer(send, *error(408, "the request took too long to arrive", "timeout_error"))
        finally:
            self.open[key] -= 1
            if not self.open[key]:
                del self.open[key]

    def _refuse(self, headers: Headers, path: str) -> tuple[int, dict[str, Any]] | None:
        # A page of another site must not reach this server, even if its name resolves to this machine (DNS rebinding).
        if not self._is_ours(headers.get("host", "")):
            return error(421, "this server is not known under that name; see --allow-host")
        origin = headers.get("origin")
        if origin is not None and not self._is_ours(origin.split("://", 1)[-1]):
            return error(403, "pages of other sites may not ask this server", "permission_error")
        if self.limits.keys and path not in OPEN and not path.startswith(PAGE):
            given = _given_key(headers).encode()
            # All keys are compared, each in constant time, so that timing tells nothing about them.
            fits = [hmac.compare_digest(given, key.encode()) for key in self.limits.keys]
            if not any(fits):
                return error(401, "a valid API key is needed: Authorization: Bearer ...", code="invalid_api_key")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 20 or int(length) > self._most(path):
            return error(413, self._too_large(path))
        return None

    def _is_ours(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return name.strip("[]").lower() in (*LOCAL, *self.limits.hosts)

    def _most(self, path: str) -> int:
        return self.limits.sound if path.startswith("/v1/audio") else self.limits.body

    def _too_large(self, path: str) -> str:
        return f"the body is larger than {self._most(path):,} bytes; send less"

    def _counted(self, receive: Receive, path: str) -> Callable[[], Awaitable[Message]]:
        left = self._most(path)

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, self._too_large(path))
            return message

        return counted


def _given_key(headers: Headers) -> str:
    """The key of `Authorization: Bearer KEY`; without that scheme, which is the same in any case of letters, none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def answer(send: Send, status: int, body: dict[str, Any]) -> None:
    headers: Iterable[tuple[bytes, bytes]] = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if status == 401:
        headers = [*headers, (b"www-authenticate", b"Bearer")]
    if status == 503:
        headers = [*headers, (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
