"""`make_app`: the server's routes, middleware and error handlers in one FastAPI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from fastapi import FastAPI

from clearhead.serving.chat_routes import chat_router
from clearhead.serving.completion_routes import completion_router
from clearhead.serving.connections import ConnectionTable
from clearhead.serving.embedding_routes import embedding_router
from clearhead.serving.explorer_routes import explorer_router
from clearhead.serving.guards import Guard, Limits
from clearhead.serving.health_routes import facts_router, health_router
from clearhead.serving.http_errors import add_error_handlers
from clearhead.serving.metrics import Count, Metrics
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.service import Service
from clearhead.serving.shared_counts import Counts, SharedTable
from clearhead.serving.transcription_routes import transcription_router
from clearhead.serving.translation_routes import translation_router

ROUTERS = (
    explorer_router,
    health_router,
    facts_router,
    completion_router,
    chat_router,
    embedding_router,
    translation_router,
    transcription_router,
)


def make_app(workers: Mapping[str, ModelWorker], limits: Limits | None = None) -> FastAPI:
    """The server of these models, by name."""
    app = make_routes(service := Service(workers, limits or Limits(), Metrics(workers)))
    guard(app, service)
    return app


def make_routes(service: Service[ModelWorker]) -> FastAPI:
    """All routes, without a guard in front of them."""
    workers = service.workers

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        for worker in workers.values():
            worker.stop()
        for worker in workers.values():
            await asyncio.to_thread(worker.close)

    app = FastAPI(title="clearhead", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.is_ending = False
    add_error_handlers(app)
    for router in ROUTERS:
        app.include_router(router(service))
    return app


def guard(app: FastAPI, service: Service[Any], table: SharedTable | None = None) -> None:
    """Put the limits on clients and connections, and the count of requests, in front of the routes."""
    app.state.is_ending, app.state.connections = False, ConnectionTable(service.limits, Counts(table, "connections"))
    service.metrics.connections.set_function(lambda: len(app.state.connections.open))
    counts = (Counts(table, "requests"), Counts(table, "bytes"))
    app.add_middleware(Guard, limits=service.limits, counts=counts)  # type: ignore[arg-type]
    app.add_middleware(Count, metrics=service.metrics)  # type: ignore[arg-type]
