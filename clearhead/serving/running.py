"""The server's life: told to end, it lets requests finish for a while, then tells those that have not."""

from __future__ import annotations

import asyncio
import copy
import socket
from collections.abc import Iterable
from typing import Any

import uvicorn
import uvicorn.config
from fastapi import FastAPI

from clearhead.serving.hosts import Host

LAST_WORDS = 5  # seconds in which answers that say no are read


class Server(uvicorn.Server):
    """Uvicorn alone would cut streams off without a word when their time is over."""

    def __init__(self, config: uvicorn.Config, hosts: Iterable[Host], grace: float) -> None:
        super().__init__(config)
        self.hosts, self.grace = list(hosts), grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        for host in self.hosts:
            loop.call_later(self.grace, host.stop)
        await super().shutdown(sockets)


def run_app(app: FastAPI, hosts: Iterable[Host], grace: float, **options: Any) -> None:
    """Serve until told to end. Requests under way have `grace` seconds; then a stream ends with an error, others get a 503."""
    logs: dict[str, Any] = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    logs["loggers"]["clearhead.serving"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    timeout = int(grace) + LAST_WORDS
    # Its access log names paths and addresses; ours, routes and times.
    config = uvicorn.Config(app, log_config=logs, access_log=False, timeout_graceful_shutdown=timeout, **options)
    Server(config, hosts, grace).run()
