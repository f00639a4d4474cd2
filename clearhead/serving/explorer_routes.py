"""The explorer over HTTP: its page at /, the page's files, and what the page asks."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Generator, Mapping
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from clearhead.errors import InputError, did_you_mean
from clearhead.explorer.explorer import Explorer, describe, model_of
from clearhead.explorer.standalone_page import PAGE_FILES
from clearhead.serving import text_deltas as answers
from clearhead.serving.model_worker import Host

UPLOADS = {"picture": "patches", "sound": "frames"}  # what is sent as it is, and what such a model reads
KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}

# The page runs its own files and asks this server: nothing else, whatever a text or a model's name should hold.
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def add_explorer(app: FastAPI, hosts: Mapping[str, Host], seconds: float) -> None:
    """The page's routes; a question may take so many seconds."""
    explorers = {
        name: Explorer(host.model, host.tokenizer, name=name, place=host.place) for name, host in hosts.items()
    }

    @app.get("/")
    async def page() -> Response:
        text = (PAGE_FILES / "index.html").read_text(encoding="utf-8")
        linked = re.sub(r'(<link rel="stylesheet" href=|<script type="module" src=)"(\w+\.\w+)"', r'\1"page/\2"', text)
        return Response(linked, media_type="text/html", headers=HEADERS)

    @app.get("/page/{name}")
    async def file(name: str) -> Response:
        files = {each.name: each for each in PAGE_FILES.iterdir() if each.suffix in KINDS}
        if name not in files:
            raise HTTPException(404, "the page has no such file")
        return Response(files[name].read_bytes(), headers={**HEADERS, "content-type": KINDS[files[name].suffix]})

    @app.post("/explore/{name}")
    async def explore(name: str, request: Request) -> Response:
        body = await request.body()
        if name in UPLOADS:
            at = uploaded_to(name, request.query_params.get("model"))
            found = await asyncio.to_thread(explorers[at].take, name, body)
        elif name == "models":
            found = await asyncio.to_thread(describe, list(explorers.values()))
        else:
            params = read_params(body)
            at = model_of(params)
            if at not in explorers:
                raise InputError(f"there is no model {at!r:.100} here; {did_you_mean(at[:100], explorers)}")
            work = use(hosts[at], explorers[at].work(name, params))
            found = await answers.unless_gone(request, asyncio.wait_for(work, seconds))
        return Response(found, media_type="application/octet-stream", headers=HEADERS)

    def uploaded_to(kind: str, model: str | None) -> str:
        """The model that an upload is for: the one named, or the first that reads such a thing."""
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


async def use(host: Host, work: Generator[None, None, bytes]) -> bytes:
    """What `work` returns, piece by piece: between two steps of the model's engine, or while nobody else uses the model.

    Who has gone gets no further piece computed: a page that follows somebody's typing asks more than it reads.
    """
    if host.engine is not None:
        return await host.in_turns(work)
    has_gone = False

    def run() -> bytes:
        while not has_gone:
            try:
                next(work)
            except StopIteration as end:
                return end.value
        return b""

    async def alone() -> bytes:
        async with host.alone:
            return await asyncio.to_thread(run)

    # Whoever waits may go, but the thread goes on to the end of a piece: until then the model is not free.
    task = asyncio.create_task(alone())
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        has_gone = True
        raise


def address_of(port: int, model: str, text: str, target: str | None) -> str:
    """Where the page is, open at this model and text."""
    told = {"model": model, "text": text, "target": target or ""}
    fragment = "&".join(f"{key}={quote(value)}" for key, value in told.items() if value)
    return f"http://127.0.0.1:{port}/#{fragment}"
