"""What the routes share: the workers by name, the limits and the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, ParamSpec, TypeVar

from starlette.requests import Request

from clearhead.serving.cancellation import ClientSlots, cancel_on_disconnect, run_held
from clearhead.serving.guards import Limits
from clearhead.serving.http_errors import UnknownModelError
from clearhead.serving.metrics import Metrics
from clearhead.serving.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W", bound=Worker)
MAX_PREPARED = 2  # requests of one client at once


@dataclass(frozen=True)
class Service(Generic[W]):
    workers: Mapping[str, W]
    limits: Limits
    metrics: Metrics
    slots: ClientSlots = field(default_factory=lambda: ClientSlots(MAX_PREPARED))

    def find(self, name: str, *kinds: str) -> W:
        """The worker of this name and one of these kinds; without a name, the first of these kinds."""
        fitting = [worker for worker in self.workers.values() if worker.kind in kinds]
        if name in self.workers and self.workers[name] in fitting:
            return self.workers[name]
        if not name and fitting:
            return fitting[0]
        served = ", ".join(worker.name for worker in fitting) or "none"
        raise UnknownModelError(f"there is no model {name!r:.100} for this; served here: {served}")

    async def prepare(self, request: Request, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The result of a function, in a thread: texts tokenised, a schema compiled, a picture decoded.

        So that a client with slow ones delays only itself, each has two at once; those of clients that have gone are not begun.
        """
        work = run_held(self.slots.one(), partial(function, *args, **options))
        return await cancel_on_disconnect(request, asyncio.wait_for(work, self.limits.seconds))
