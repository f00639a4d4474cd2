"""The guard in front of every route: host names, keys, sizes and numbers of requests. Refusals are in OpenAI's form."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from clearhead.serving.shared_counts import Counts

LOCAL = ("localhost", "127.0.0.1", "::1")
PATIENCE = 5.0  # seconds for a client to read a refusal
STOPPING = "the server is shutting down"
OPEN = (
    "/healthz",
    "/readyz",
    "/",
)  # without a key: health probes have none, and a browser none before the page is loaded
PAGE = "/page/"  # the page's files, also without a key
HEALTH = ("/healthz", "/readyz")  # answered whatever else is refused: a server that is only busy must not be restarted
CLIENT: ContextVar[str] = ContextVar(
    "client", default=""
)  # of the request being answered; clients share the engine evenly
OVER = "over"  # in a scope's state: why its connection is one too many


@dataclass(frozen=True)
class Limits:
    """The limits for one client."""

    body: int = 8_000_000  # bytes
    sound: int = 32_000_000  # bytes of an uploaded file
    bodies: int = 128_000_000  # bytes, of all requests of one client that are not answered yet
    streams: int = 512  # requests at once of one client: of one key, or of one address where there are no keys
    seconds: float = 600.0  # for one request
    connections: int = 2048  # in all; half of them from one address
    header_seconds: float = 10.0  # for the header of a request to arrive
    body_seconds: float = 20.0  # for its body, which has longer the more of it has arrived
    measures: bool = True  # whether the explorer's page may measure the model's speed
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

    def __init__(self, app: ASGIApp, limits: Limits, counts: tuple[Counts, Counts]) -> None:
        self.app, self.limits = app, limits
        self.open, self.held = counts  # requests at once, bytes of their bodies; by client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, path = Headers(scope=scope), scope["path"]
        if (refusal := self._refuse(scope, headers, path)) is not None:
            await answer(send, *refusal)
        elif path in HEALTH:
            await self.app(scope, receive, send)
        else:
            await self._run(scope, receive, send, headers)

    async def _run(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        """The request within its client's limits and its time."""
        client = self._client(scope, headers)
        CLIENT.set(client)
        share = Share(self, client, self._most(scope["path"]))
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            if not ("content-length" in headers or "transfer-encoding" in headers):
                share.take_slot()
            # Ends clients that read too slowly. Routes have a shorter limit and a better message.
            work = self.app(scope, share.counted(receive), watched)
            await asyncio.wait_for(work, self.limits.seconds + PATIENCE)
        except asyncio.TimeoutError:
            if not has_begun:
                await answer(send, *error(408, "the request took too long to arrive", "timeout_error"))
        except HTTPException as raised:
            await answer(send, *error(raised.status_code, raised.detail, "rate_limit_error"))
        finally:
            share.give_back()

    def _refuse(self, scope: Scope, headers: Headers, path: str) -> tuple[int, dict[str, Any]] | None:
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
                return error(401, _why_no_key(headers), code="invalid_api_key")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 20 or int(length) > self._most(path):
            return error(413, too_large(self._most(path)))
        if path.startswith("/v1/") and scope["app"].state.is_ending:
            return error(503, STOPPING, "server_error")
        if path not in HEALTH and (why := scope.get("state", {}).get(OVER)):
            return error(503, why, "overloaded_error")
        return None

    def _client(self, scope: Scope, headers: Headers) -> str:
        """Who asks: the number of its key, or without one its address."""
        key = _given_key(headers)
        return f"key {self.limits.keys.index(key)}" if key in self.limits.keys else network_of(scope.get("client"))

    def _is_ours(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        return name.strip("[]").lower() in (*LOCAL, *self.limits.hosts)

    def _most(self, path: str) -> int:
        return self.limits.sound if path.startswith("/v1/audio") else self.limits.body


class Share:
    """What one request takes of its client's limits: bytes while its body arrives, then one of the requests at once.

    A body that does not arrive takes no slot: a client with many of them would lock out its own others.
    """

    def __init__(self, guard: Guard, client: str, most: int) -> None:
        self.guard, self.client, self.most = guard, client, most
        self.n_bytes, self.has_slot = 0, False

    def take_slot(self) -> None:
        limit = self.guard.limits.streams
        if self.guard.open.of(self.client) >= limit:
            raise HTTPException(429, f"{limit} requests at once are the limit; wait for one to end")
        self.guard.open.add(self.client, 1)
        self.has_slot = True

    def counted(self, receive: Receive) -> Callable[[], Awaitable[Message]]:
        async def counted() -> Message:
            message = await receive()
            n, limit = len(message.get("body", b"")), self.guard.limits.bodies
            self.n_bytes += n
            self.guard.held.add(self.client, n)
            if self.n_bytes > self.most:
                raise HTTPException(413, too_large(self.most))
            if self.guard.held.of(self.client) > limit:
                raise HTTPException(429, f"{limit:,} bytes of requests at once are the limit; wait for one to end")
            if message["type"] == "http.request" and not message.get("more_body", False) and not self.has_slot:
                self.take_slot()
            return message

        return counted

    def give_back(self) -> None:
        self.guard.open.add(self.client, -int(self.has_slot))
        self.guard.held.add(self.client, -self.n_bytes)


def too_large(most: int) -> str:
    return f"the body is larger than {most:,} bytes; send less"


def network_of(client: tuple[str, int] | None) -> str:
    """What counts as one address: one of IPv4, or the first 64 bits of one of IPv6, as providers give them out."""
    if client is None:
        return ""
    try:
        address = ipaddress.ip_address(client[0].partition("%")[0])
    except ValueError:
        return client[0]
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((int(address), 64), strict=False))
    return str(address)


def _given_key(headers: Headers) -> str:
    """The key of `Authorization: Bearer KEY`; without that scheme, which is the same in any case of letters, none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _why_no_key(headers: Headers) -> str:
    """What is wrong with the key, without a word of it."""
    given = headers.get("authorization")
    if given is None:
        return "an API key is needed; got no Authorization header; send Authorization: Bearer KEY"
    if given.partition(" ")[0].lower() != "bearer":
        return "the Authorization header must begin with Bearer; got another scheme or none; send Authorization: Bearer KEY"
    return "the API key is not valid; got one that this server does not know; ask its owner for another"


async def answer(send: Send, status: int, body: dict[str, Any]) -> None:
    headers: Iterable[tuple[bytes, bytes]] = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if status == 401:
        headers = [*headers, (b"www-authenticate", b"Bearer")]
    if status == 503:
        headers = [*headers, (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
