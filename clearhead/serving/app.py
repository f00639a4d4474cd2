"""`make_app`: the server's routes, middleware and error handlers in one FastAPI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping

from fastapi import FastAPI

from clearhead.serving.chat_routes import chat_router
from clearhead.serving.completion_routes import completion_router
from clearhead.serving.connections import ConnectionTable
from clearhead.serving.embedding_routes import embedding_router
from clearhead.serving.explorer_routes import explorer_router
from clearhead.serving.guards import Guard, Limits
from clearhead.serving.health_routes import health_router
from clearhead.serving.http_errors import add_error_handlers
from clearhead.serving.metrics import Count, Metrics
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.service import Service
from clearhead.serving.transcription_routes import transcription_router
from clearhead.serving.translation_routes import translation_router

ROUTERS = (
    explorer_router,
    health_router,
    completion_router,
    chat_router,
    embedding_router,
    translation_router,
    transcription_router,
)


def make_app(workers: Mapping[str, ModelWorker], limits: Limits | None = None) -> FastAPI:
    """The server of these models, by name."""
    service = Service(workers, limits or Limits(), Metrics(workers))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        for worker in workers.values():
            worker.stop()
        for worker in workers.values():
            await asyncio.to_thread(worker.close)

    app = FastAPI(title="clearhead", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.is_ending, app.state.connections = False, ConnectionTable(service.limits)
    service.metrics.connections.set_function(lambda: len(app.state.connections.open))
    app.add_middleware(Guard, limits=service.limits)  # type: ignore[arg-type]
    app.add_middleware(Count, metrics=service.metrics)  # type: ignore[arg-type]
    add_error_handlers(app)
    for router in ROUTERS:
        app.include_router(router(service))
    return app
