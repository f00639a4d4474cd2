"""The server's life: told to end, it lets requests finish for a while, then tells those that have not."""

from __future__ import annotations

import asyncio
import copy
import socket
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import uvicorn
import uvicorn.config
from fastapi import FastAPI

from clearhead.serving.model_worker import Host

LAST_WORDS = 5  # seconds in which answers that say no are read
LATE = 0.5  # seconds in which whoever is connected and asks only now hears a no


class Server(uvicorn.Server):
    """Uvicorn alone would cut streams off without a word when their time is over."""

    def __init__(
        self, app: FastAPI, config: uvicorn.Config, hosts: Iterable[Host], grace: float, ready: Callable[[int], object]
    ) -> None:
        super().__init__(config)
        self.app, self.hosts, self.grace, self.ready = app, list(hosts), grace, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.app.state.is_ending = True  # from now on the guard says no
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.app.state.is_ending = True
        loop = asyncio.get_running_loop()
        for host in self.hosts:
            loop.call_later(self.grace, host.stop)
        for server in self.servers:
            server.close()
        if self.server_state.connections:
            await asyncio.sleep(LATE)
        await super().shutdown(sockets)


def run_app(
    app: FastAPI,
    hosts: Iterable[Host],
    grace: float,
    ready: Callable[[int], object] = lambda port: None,
    **options: Any,
) -> None:
    """Serve until told to end. Requests under way have `grace` seconds; then a stream ends with an error, others get a 503.

    `ready` is told the port once it answers.
    """
    logs: dict[str, Any] = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    logs["loggers"]["clearhead.serving"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    timeout = int(grace) + LAST_WORDS
    # Its access log names paths and addresses; ours, routes and times.
    config = uvicorn.Config(app, log_config=logs, access_log=False, timeout_graceful_shutdown=timeout, **options)
    Server(app, config, hosts, grace, ready).run()
