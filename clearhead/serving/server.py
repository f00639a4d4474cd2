"""The server process: when it is asked to stop, requests have some time to finish; the rest end with an error."""

from __future__ import annotations

import asyncio
import copy
import logging
import socket
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
import uvicorn.config
from fastapi import FastAPI

from clearhead.errors import ClearheadError
from clearhead.serving.connections import Connection
from clearhead.serving.log_limits import RepeatLimit
from clearhead.serving.worker import Worker

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None

REFUSAL_SECONDS = 5  # for clients to read the errors at the end
LATE_SECONDS = 0.5  # in which requests on open connections still get a 503
BACKLOG = 256  # connections that are accepted at once
FILES = 256  # other open files of the process


class Server(uvicorn.Server):
    """Uvicorn, but streams that are still open at the end get an error; uvicorn itself would just cut them off."""

    def __init__(
        self,
        app: FastAPI,
        config: uvicorn.Config,
        workers: Iterable[Worker],
        grace: float,
        ready: Callable[[int], object],
    ) -> None:
        super().__init__(config)
        self.table, self.log_limit = app.state.connections, RepeatLimit()
        config.http = partial(Connection, table=self.table)  # type: ignore[assignment]
        for handler in logging.getLogger("uvicorn").handlers:
            handler.addFilter(self.log_limit)
        self.app, self.workers, self.grace, self.ready = app, list(workers), grace, ready

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:  # once a second
            self.table.sweep()
            self.log_limit.tell()
            self.should_exit |= any(worker.is_broken for worker in self.workers)
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.app.state.is_ending = True  # the guard refuses requests from now on
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.state.is_ending = True
        loop = asyncio.get_running_loop()
        for worker in self.workers:
            loop.call_later(self.grace, worker.stop)
        for server in self.servers:
            server.close()
        if self.server_state.connections:
            await asyncio.sleep(LATE_SECONDS)
        await super().shutdown(sockets)


def run_app(
    app: FastAPI,
    workers: Iterable[Worker],
    grace: float,
    ready: Callable[[int], object] = lambda port: None,
    **options: Any,
) -> None:
    """Serve until a signal. Open requests then have `grace` seconds; after that streams end with an error, others get a 503.

    `ready` is called with the port when the server answers. ClearheadError if an engine failed and could not be made again.
    """
    config = make_config(app, grace, **options)
    server = Server(app, config, workers, grace, ready)
    server.run()
    check_engines(server.workers)


def check_engines(workers: Iterable[Worker]) -> None:
    """ClearheadError if an engine failed for good."""
    if broken := [worker.name for worker in workers if worker.is_broken]:
        raise ClearheadError(
            f"the server ended: an engine failed and could not be made again; got {', '.join(broken)}; see the log above, and "
            f"start it anew"
        )


def make_config(app: FastAPI, grace: float, **options: Any) -> uvicorn.Config:
    app.state.connections.most = open_files(app.state.connections.most)
    timeout = int(grace) + REFUSAL_SECONDS
    # Uvicorn's access log holds paths and addresses; ours only routes and times.
    more: dict[str, Any] = dict(access_log=False, backlog=BACKLOG, timeout_graceful_shutdown=timeout, **options)
    more |= dict(ws="none")  # no route has a websocket, and one would take its connection out of the table's sight
    return uvicorn.Config(app, log_config=log_config(), **more)


def log_config() -> dict[str, Any]:
    logs: dict[str, Any] = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    logs["loggers"]["clearhead.serving"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    logs["root"] = {"handlers": ["default"], "level": "WARNING"}  # what asyncio says, within the log's limit, too
    return logs


def open_files(n_connections: int) -> int:
    """Allow the process so many connections; returns how many it may have.

    With every file descriptor in use no connection would be accepted, not even a health check's.
    """
    if resource is None:
        return n_connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, infinite = n_connections + BACKLOG + FILES, resource.RLIM_INFINITY
    if soft != infinite and soft < needed:
        soft = needed if hard == infinite else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return n_connections if soft == infinite else min(n_connections, max(16, soft - BACKLOG - FILES))
