"""The explorer over HTTP: its page at /, the page's files, and the page's requests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from clearhead.errors import InputError, did_you_mean
from clearhead.explorer.explorer import Explorer, Work, describe, model_of
from clearhead.explorer.page_export import export
from clearhead.explorer.standalone_page import PAGE_FILES, read_lean
from clearhead.serving.cancellation import cancel_on_disconnect, run_held
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.service import Service

UPLOADS = {
    "picture": "patches",
    "sound": "frames",
}  # requests with a file as body, and the inputs of a model that reads it
MEDIA_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}

# The page may load its own files and ask this server, and nothing else, whatever a text or a model's name contains.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def explorer_router(service: Service[ModelWorker]) -> APIRouter:
    router, workers = APIRouter(), service.workers
    explorers = {
        name: Explorer(worker.model, worker.tokenizer, name=name, path=worker.path) for name, worker in workers.items()
    }

    # A measurement would hold up the engine's thread for seconds: it has modules and a thread of its own, one at a time.
    apart = {name: each.apart() for name, each in explorers.items()} if service.limits.measures else {}
    measuring = asyncio.Lock()

    @router.get("/")
    async def page() -> Response:
        text = (PAGE_FILES / "index.html").read_text(encoding="utf-8")
        linked = re.sub(r'(<link rel="stylesheet" href=|<script type="module" src=)"(\w+\.\w+)"', r'\1"page/\2"', text)
        return Response(linked, media_type="text/html", headers=HEADERS)

    @router.get("/page/{name}")
    async def file(name: str) -> Response:
        files = {each.name: each for each in PAGE_FILES.iterdir() if each.suffix in MEDIA_TYPES}
        if name not in files:
            raise HTTPException(404, "the page has no such file")
        headers = {**HEADERS, "content-type": MEDIA_TYPES[files[name].suffix]}
        return Response(read_lean(files[name]), headers=headers)

    @router.post("/explore/{name}")
    async def explore(name: str, request: Request) -> Response:
        body = await request.body()
        if name in UPLOADS:
            model = _upload_model(explorers, name, request.query_params.get("model"))
            answer = await service.prepare(request, explorers[model].take, name, body)
        elif name == "models":
            answer = await asyncio.to_thread(describe, list(explorers.values()))
        else:
            params = read_params(body)
            model = model_of(params)
            if model not in explorers:
                raise InputError(f"there is no model {model!r:.100} here; {did_you_mean(model[:100], explorers)}")
            if name == "measure":
                check_measures(service)
                work = run_in_thread(apart[model].work(name, params), measuring)
            else:
                asked = explorers[model].work(name, params) if name != "export" else export(explorers[model], params)
                work = run_work(workers[model], asked)
            answer = await cancel_on_disconnect(request, asyncio.wait_for(work, service.limits.seconds))
        return Response(answer, media_type="application/octet-stream", headers=HEADERS)

    return router


def _upload_model(explorers: Mapping[str, Explorer], kind: str, model: str | None) -> str:
    """The model that an upload is for: the one named, or the first that reads such a file."""
    fitting = [name for name, each in explorers.items() if each.model.config.inputs == UPLOADS[kind]]
    if not fitting or model not in (None, *fitting):
        raise InputError(f"no model here takes a {kind}; got model={model!r:.100}; there are: {', '.join(fitting)}")
    return model or fitting[0]


def read_params(body: bytes) -> dict[str, Any]:
    try:
        params: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"a request is a JSON object; got {body[:60]!r} ({error}); see the page's own") from None
    if not isinstance(params, dict):
        raise InputError(f"a request is a JSON object; got {params!r:.60}; write {{...}} with the fields' names")
    return params  # pyright: ignore[reportUnknownVariableType]


def check_measures(service: Service[ModelWorker]) -> None:
    if not service.limits.measures:
        raise HTTPException(
            403,
            "this server does not measure, which takes time from its other users; forecasts are free; see --measure",
        )


async def run_work(worker: ModelWorker, work: Work) -> bytes:
    """What `work` returns, computed step by step: between steps of the model's engine, or while nobody else uses the model."""
    return await (run_in_thread(work, worker.lock) if worker.engine is None else worker.run_sliced(work))


async def run_in_thread(work: Work, lock: asyncio.Lock) -> bytes:
    """What `work` returns, computed in a thread while nobody else holds the lock.

    After the client has gone no further step is computed: a page that follows typing asks more than it reads.
    """
    has_gone = False

    def run() -> bytes:
        while not has_gone:
            try:
                next(work)
            except StopIteration as end:
                return end.value
        return b""

    try:
        return await run_held(lock, run)
    except asyncio.CancelledError:
        has_gone = True
        raise


def address_of(port: int, model: str, text: str, target: str | None) -> str:
    """The page's address, opened at this model and text."""
    state = {"model": model, "text": text, "target": target or ""}
    fragment = "&".join(f"{key}={quote(value)}" for key, value in state.items() if value)
    return f"http://127.0.0.1:{port}/#{fragment}"
