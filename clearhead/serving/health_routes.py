"""/healthz, /readyz, /metrics, and /v1/models: what the server is and how it is."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from clearhead.serving.guards import STOPPING
from clearhead.serving.service import Service
from clearhead.serving.worker import BROKEN, Worker


def health_router(service: Service[Any]) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> Response:
        is_broken = any(worker.is_broken for worker in service.workers.values())
        return PlainTextResponse(f"{BROKEN}\n", 503) if is_broken else PlainTextResponse("ok\n")

    @router.get("/readyz")
    async def readyz(request: Request) -> Response:
        if request.app.state.is_ending:
            return PlainTextResponse(f"{STOPPING}\n", 503)
        ready = all(worker.is_healthy for worker in service.workers.values())
        return PlainTextResponse("ready\n" if ready else "an engine has stopped\n", 200 if ready else 503)

    return router


def facts_router(service: Service[Any]) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.metrics.expose(), media_type="text/plain; version=0.0.4")

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_describe(worker) for worker in service.workers.values()]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        return _describe(service.find(name, "decoder", "translator", "scribe", "encoder", "pictures"))

    return router


def _describe(worker: Worker) -> dict[str, Any]:
    return {
        "id": worker.name,
        "object": "model",
        "created": worker.created,
        "owned_by": "clearhead",
        "kind": worker.kind,
    }
