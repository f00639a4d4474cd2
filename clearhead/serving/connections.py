"""Connections: how many may be open, how long a request may take to arrive, and in how many pieces its body may come.

Uvicorn has none of these limits. A connection either waits for its client (for a header, a body or the next request), or is being
answered. Only those that wait are ever closed. Beyond a bound the one that waits longest makes room; if none waits, the new
connection is accepted all the same, but answered for health checks only: the guard reads `OVER` in its scope.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from typing import Any, Literal

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from clearhead.serving.guards import OVER, Limits, error, network_of
from clearhead.serving.shared_counts import Counts

log = logging.getLogger("clearhead.serving")

BODY_RATE = 1000  # bytes of a body that give its client one second more
SMALL_PIECE = 512  # bytes
MAX_SMALL_PIECES = 2000  # of one body: each costs the event loop as much as a large one
ALL = "all"  # the key under which connections of every address are counted
FLUSH_SECONDS = 10.0  # for a client to read the end of an answer


class ConnectionTable:
    """The open connections of a process, and among them those that wait for their client, longest first.

    Those of the server's other processes count too; room is made among this one's.
    """

    def __init__(self, limits: Limits, counts: Counts) -> None:
        self.limits, self.most, self.counts = limits, limits.connections, counts
        self.open: dict[Connection, str] = {}  # with their addresses
        self.waiting: dict[Connection, None] = {}

    @property
    def most_of_one(self) -> int:
        return max(1, self.most // 2)

    def add(self, connection: Connection) -> str | None:
        """Count a new connection and make room for it. If there is none to make, why it is one too many."""
        address = network_of(connection.client)
        self.open[connection] = address
        self.counts.add(ALL, 1)
        self.counts.add(address, 1)
        if self.counts.of(address) > self.most_of_one:
            others = [each for each in self.waiting if self.open[each] == address]
            why = f"{self.most_of_one:,} connections at once from one address are the limit"
        elif self.counts.of(ALL) > self.most:
            n_waiting = Counter(self.open[each] for each in self.waiting)
            others = sorted(self.waiting, key=lambda each: -n_waiting[self.open[each]])[:1]
            why = f"{self.most:,} connections at once are the limit"
        else:
            return None
        if not others:
            return f"{why}, and all are being answered; close one, or try again later"
        others[0].drop(503, f"{why}, and this one waited longest; try again later")
        return None

    def remove(self, connection: Connection) -> None:
        self.waiting.pop(connection, None)
        address = self.open.pop(connection, None)
        if address is not None:
            self.counts.add(ALL, -1)
            self.counts.add(address, -1)

    def sweep(self) -> None:
        """Close connections whose clients took too long. Called about once a second."""
        for connection in list(self.waiting):
            connection.check_time()
        for connection in list(self.open):
            connection.check_flushed()


class Connection(H11Protocol):
    """Uvicorn's connection, with a time limit on headers and bodies and a limit on small pieces."""

    def __init__(self, *args: Any, table: ConnectionTable, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = PieceCounter(h11.SERVER)
        self.table = table
        self.awaits: Literal["header", "body", "request"] | None = None
        self.since, self.n_received = 0.0, 0
        self.closing_since = self.paused_since = math.inf

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if (why := self.table.add(self)) is not None:
            self.app_state = {**self.app_state, OVER: why}
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        self.table.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.n_received += len(data)
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def _note(self) -> None:
        """What the connection waits for now, and since when."""
        if self.transport.is_closing():
            awaits = None
        elif self.conn.their_state is h11.IDLE:
            awaits = "header" if self.timeout_keep_alive_task is None else "request"
        else:
            awaits = "body" if self.conn.their_state is h11.SEND_BODY else None
        if awaits != self.awaits:
            self.awaits, self.since, self.n_received = awaits, self.loop.time(), 0
            self.table.waiting.pop(self, None)
            if awaits is not None:
                self.table.waiting[self] = None

    def check_time(self) -> None:
        """Close the connection if its client is late. Uvicorn itself closes one that sends no further request."""
        limits, seconds = self.table.limits, self.loop.time() - self.since
        if self.awaits == "header" and seconds > limits.header_seconds:
            self.drop(408, f"the request did not arrive within {limits.header_seconds:g} seconds; send it again")
        elif self.flow.read_paused:
            return  # the server is behind, not its client
        elif self.awaits == "body" and seconds > limits.body_seconds + self.n_received / BODY_RATE:
            self.drop(
                408, f"the body came too slowly: {self.n_received:,} bytes in {seconds:.0f} seconds; send it again"
            )

    def pause_writing(self) -> None:
        super().pause_writing()
        self.paused_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.paused_since = math.inf

    def check_flushed(self) -> None:
        """Cut a connection whose client does not read: after the longest time of a request, and soon if it is closed already."""
        now = self.loop.time()
        if self.transport.is_closing():
            self.closing_since = min(self.closing_since, now)
        late = now - FLUSH_SECONDS
        if self.closing_since < late or self.paused_since < late - self.table.limits.seconds:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """The answer to bytes that are not HTTP, or not acceptable."""
        self.drop(400, self.conn.refusal or "the bytes received are no request in HTTP/1.1; check the client")

    def drop(self, status: int, message: str) -> None:
        """Close the connection; a client that has begun a request, or should have, is told why."""
        log.info("connection closed with status=%d, waiting for %s", status, self.awaits, extra={"kind": "closed"})
        if self.awaits != "request" and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            kind = {408: "timeout_error", 503: "overloaded_error"}.get(status, "invalid_request_error")
            content = json.dumps(error(status, message, kind)[1]).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(content))),
                ("connection", "close"),
            ]
            head = h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status])
            for event in (head, h11.Data(data=content), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        cycle: Any = self.cycle  # None before the first request
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # the route's answer would follow ours
            cycle.message_event.set()
        self.transport.close()
        self._note()


class PieceCounter(h11.Connection):
    """HTTP/1.1 as h11 parses it, until a client sends too many small pieces."""

    n_small, refusal = 0, ""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.n_small = 0
        elif isinstance(event, h11.Data) and len(event.data) < SMALL_PIECE:
            self.n_small += 1
            if self.n_small > MAX_SMALL_PIECES:
                self.refusal = f"the body came in more than {MAX_SMALL_PIECES:,} pieces below {SMALL_PIECE} bytes; send larger ones"
                raise h11.RemoteProtocolError(self.refusal)
        return event
