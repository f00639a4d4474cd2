"""The routes. Each reads a request, asks a host, and answers in OpenAI's form."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, File, Form, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException

from clearhead.data.audio import load_audio
from clearhead.errors import ClearheadError, InputError
from clearhead.generation import Request as Asked
from clearhead.generation import Ticket
from clearhead.generation.transcription import Scribe
from clearhead.models import EncoderDecoder
from clearhead.serving import guards
from clearhead.serving import text_deltas as answers
from clearhead.serving.asking import align, ask, chat_ids, embed_texts, format_grammar, translation
from clearhead.serving.explanation import MAX_NEW, Plan, explain, make_plan
from clearhead.serving.explorer_routes import add_explorer
from clearhead.serving.guards import Guard, Limits
from clearhead.serving.metrics import Count, Metrics
from clearhead.serving.model_worker import MAX_WAITING, BrokenError, FullError, Host
from clearhead.serving.protocol import Chat, Completion, Embedding, Translation, Writing
from clearhead.serving.text_deltas import Piece, Wish

log = logging.getLogger("clearhead.serving")


class UnknownModelError(Exception):
    """A model that is not served, or not of the kind that this route needs."""


def make_app(hosts: Mapping[str, Host], limits: Limits | None = None) -> FastAPI:
    """The server of these models."""
    limits, metrics = limits or Limits(), Metrics(hosts)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        for host in hosts.values():
            host.stop()
        for host in hosts.values():
            await asyncio.to_thread(host.close)

    app = FastAPI(title="clearhead", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.is_ending = False
    app.add_middleware(Guard, limits=limits)  # type: ignore[arg-type]
    app.add_middleware(Count, metrics=metrics)  # type: ignore[arg-type]

    kinds = (RequestValidationError, HTTPException, ClearheadError, FullError, BrokenError, UnknownModelError)
    for kind in (*kinds, asyncio.TimeoutError, ValueError):
        app.add_exception_handler(kind, _refused)
    app.add_exception_handler(Exception, _refused)

    def find(name: str, *kinds: str) -> Host:
        fitting = [host for host in hosts.values() if host.kind in kinds]
        if name in hosts and hosts[name] in fitting:
            return hosts[name]
        if not name and fitting:
            return fitting[0]
        served = ", ".join(host.name for host in fitting) or "none"
        raise UnknownModelError(f"there is no model {name!r:.100} for this; served here: {served}")

    add_explorer(app, hosts, limits.seconds)

    @app.get("/healthz")
    async def healthz() -> Response:
        return PlainTextResponse("ok\n")

    @app.get("/readyz")
    async def readyz() -> Response:
        if app.state.is_ending:
            return PlainTextResponse(f"{guards.STOPPING}\n", 503)
        ready = all(host.is_healthy for host in hosts.values())
        return PlainTextResponse("ready\n" if ready else "an engine has stopped\n", 200 if ready else 503)

    @app.get("/metrics")
    async def tell_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    def described(host: Host) -> dict[str, Any]:
        return {"id": host.name, "object": "model", "created": host.created, "owned_by": "clearhead", "kind": host.kind}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [described(host) for host in hosts.values()]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        return described(find(name, "decoder", "translator", "scribe", "encoder", "pictures"))

    @app.post("/v1/completions", response_model=None)
    async def completions(body: Completion, request: Request) -> Response | dict[str, Any]:
        host = find(body.model, "decoder")
        n_texts = len(body.prompts) * body.n
        if n_texts == 0:
            raise InputError("there is no prompt; got an empty list; give one text at least")
        if n_texts > MAX_WAITING:
            raise InputError(
                f"{n_texts} texts in one request are too many; got n={body.n}; {MAX_WAITING} may be asked for"
            )
        if body.max_tokens == 0 and not body.echo:
            raise InputError("max_tokens=0 writes nothing; got no echo either; ask for one of them")
        more: dict[str, Any] = dict(scored=body.logprobs is not None, alternatives=body.logprobs or 0)

        def read() -> list[Wish]:
            asked = [
                ask(host, body, prompt, max(body.max_tokens, 1), at * body.n, **more)
                for at, prompt in enumerate(body.prompts)
            ]
            wishes = make_wishes(host, body, [each for texts in asked for each in texts])
            if not body.echo:
                return wishes
            texts = [each if isinstance(each, str) else host.tokenizer.decode(each) for each in body.prompts]  # type: ignore[union-attr]
            echo = [replace(wish, echo=texts[at // body.n]) for at, wish in enumerate(wishes)]
            return [replace(wish, writes=body.max_tokens > 0) for wish in echo]

        wishes = await asyncio.to_thread(read)
        head = dict(id=answers.new_id("cmpl"), object="text_completion", created=int(time.time()), model=host.name)

        def choice(at: int, piece: Piece) -> dict[str, Any]:
            told = answers.completion_logprobs(host, piece.tokens, body.logprobs, piece.offset)
            more = {} if piece.explained is None else {"explain": piece.explained}
            return {"index": at, "text": piece.text, "logprobs": told, "finish_reason": piece.reason, **more}

        work = streamed if body.stream else whole
        return await answers.unless_gone(request, work(host, body, wishes, head, choice))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(body: Chat, request: Request) -> Response | dict[str, Any]:
        host = find(body.model, "decoder")
        more: dict[str, Any] = dict(scored=body.logprobs, alternatives=(body.top_logprobs or 0) if body.logprobs else 0)

        def read() -> list[Wish]:
            ids = chat_ids(host, body)
            room = min(host.model.config.max_len - len(ids), 1024 if body.explain is None else MAX_NEW)
            most = body.max_completion_tokens or body.max_tokens or max(1, room)
            grammar = format_grammar(host, body.response_format)
            return make_wishes(host, body, ask(host, body, ids, most, 0, grammar=grammar, **more))

        wishes = await asyncio.to_thread(read)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = dict(id=answers.new_id("chatcmpl"), object=kind, created=int(time.time()), model=host.name)

        def choice(at: int, piece: Piece) -> dict[str, Any]:
            said: dict[str, Any] = {"role": "assistant"} if piece.is_first else {}
            if piece.text or piece.reason is None or not body.stream:
                said["content"] = piece.text
            told = {"delta": said} if body.stream else {"message": {**said, "refusal": None}}
            if piece.explained is not None:
                told["explain"] = piece.explained
            scores = answers.chat_logprobs(host, piece.tokens, body.logprobs)
            return {"index": at, **told, "logprobs": scores, "finish_reason": piece.reason}

        work = streamed if body.stream else whole
        return await answers.unless_gone(request, work(host, body, wishes, head, choice))

    def make_wishes(host: Host, body: Writing, asked: list[Asked]) -> list[Wish]:
        plan = make_plan(host, body.explain, asked)
        return [
            Wish(each, body.stops, limits.seconds, counts=at % body.n == 0, plan=plan) for at, each in enumerate(asked)
        ]

    async def streamed(host: Host, body: Writing, wishes: list[Wish], head: dict[str, Any], choice: Any) -> Response:
        usage, chunks = answers.Usage(), answers.Chunks(head, choice)
        news = mixed(host, wishes, usage)
        first = await anext(news)  # what is refused is refused before a status is sent

        async def events() -> AsyncGenerator[bytes, None]:
            yield chunks.make(*first)
            try:
                async for at, piece in news:
                    yield chunks.make(at, piece)
                if body.stream_options is not None and body.stream_options.include_usage:
                    yield answers.event({**head, "choices": [], "usage": usage.told()})
                yield answers.DONE
            except Exception as error:
                yield answers.event(_say(error)[1])

        return answers.Events(events(), news)

    async def whole(host: Host, _: Writing, wishes: list[Wish], head: dict[str, Any], choice: Any) -> Response:
        usage = answers.Usage()
        parts: list[list[Piece]] = [[] for _ in wishes]
        async with contextlib.aclosing(mixed(host, wishes, usage)) as news:
            async for at, piece in news:
                parts[at].append(piece)
        choices = [choice(at, answers.join(part)) for at, part in enumerate(parts)]
        return JSONResponse({**head, "choices": choices, "usage": usage.told()})

    async def mixed(host: Host, wishes: list[Wish], usage: answers.Usage) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of several texts as they come."""
        if len(wishes) == 1:
            async with contextlib.aclosing(answers.pieces(host, wishes[0], usage, metrics)) as source:
                async for piece in source:
                    yield 0, piece
            return
        news: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue()

        async def read(at: int, wish: Wish) -> None:
            try:
                async with contextlib.aclosing(answers.pieces(host, wish, usage, metrics)) as source:
                    async for piece in source:
                        news.put_nowait((at, piece))
                news.put_nowait((at, None))
            except Exception as error:
                news.put_nowait((at, error))

        readers = [asyncio.create_task(read(at, wish)) for at, wish in enumerate(wishes)]
        left = len(readers)
        try:
            while left:
                # What came while the last piece was sent goes as one: a server in a hurry sends fewer, longer pieces.
                come = [await news.get()]
                while not news.empty():
                    come.append(news.get_nowait())
                for at in dict.fromkeys(at for at, _ in come):
                    if parts := [piece for of, piece in come if of == at and isinstance(piece, Piece)]:
                        yield at, answers.join(parts)
                for _, piece in come:
                    if isinstance(piece, BaseException):
                        raise piece
                    left -= piece is None
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    @app.post("/v1/embeddings", response_model=None)
    async def embeddings(body: Embedding) -> dict[str, Any]:
        host = find(body.model, "encoder")
        async with host.alone:
            vectors, n_tokens = await asyncio.to_thread(embed_texts, host, body.texts)

        def told(vector: np.ndarray) -> Any:
            return base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()

        data = [{"object": "embedding", "index": at, "embedding": told(each)} for at, each in enumerate(vectors)]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "data": data, "model": host.name, "usage": usage}

    @app.post("/v1/translate", response_model=None)
    async def translate(body: Translation, request: Request) -> dict[str, Any]:
        host = find(body.model, "translator")
        requests = await asyncio.to_thread(lambda: [translation(host, body, text) for text in body.texts])
        plan = make_plan(host, body.explain, requests)
        each = [one_translation(host, body, one, plan) for one in requests]
        found = await answers.unless_gone(request, _together(each))
        return {"object": "list", "model": host.name, "data": [{"index": at, **each} for at, each in enumerate(found)]}

    async def one_translation(host: Host, body: Translation, request: Asked, plan: Plan | None) -> dict[str, Any]:
        assert host.tokenizer is not None
        source = [int(id) for id in request.source or ()]
        ticket = await last(host, request, limits.seconds)
        told: list[dict[str, Any]] = []
        for rank, one in enumerate(ticket.hypotheses):
            said: dict[str, Any] = {"text": host.tokenizer.decode(one.tokens), "score": one.score}
            said["finish_reason"] = "stop" if one.finished else "length"
            if body.alignment:
                said["alignment"] = await host.between_steps(partial(align, host, source, one.tokens))
            if plan is not None:
                work = host.in_turns(explain(host, plan, request, one.tokens, [], rank))
                said["explain"] = await asyncio.wait_for(work, limits.seconds)
            told.append(said)
        return {"translations": told, "prompt_tokens": len(source)}

    @app.post("/v1/audio/transcriptions", response_model=None)
    async def transcriptions(
        request: Request,
        file: Annotated[UploadFile, File()],
        model: Annotated[str, Form()] = "",
        language: Annotated[str | None, Form()] = None,
        response_format: Annotated[str, Form()] = "json",
    ) -> Response | dict[str, Any]:
        host = find(model, "scribe")
        assert isinstance(host.model, EncoderDecoder)
        assert host.tokenizer is not None
        if response_format not in ("json", "text"):
            raise InputError(f"response_format is json or text; got {response_format!r:.40}; leave it out")
        data = await file.read()
        sound = await asyncio.to_thread(lambda: load_audio(BytesIO(data)))
        scribe = Scribe(host.model, host.tokenizer, language, "transcribe")
        asked = await asyncio.to_thread(lambda: list(scribe.requests(sound)))
        each = [last(host, one, limits.seconds) for one in asked]
        tickets = await answers.unless_gone(request, _together(each))
        decoded = [host.tokenizer.decode(ticket.hypotheses[0].tokens).strip() for ticket in tickets]
        text = " ".join(decoded)
        return PlainTextResponse(text + "\n") if response_format == "text" else {"text": text}

    return app


async def _together(work: Sequence[Coroutine[Any, Any, answers.T]]) -> list[answers.T]:
    """All of them; where one fails or nobody waits any more, none goes on."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def last(host: Host, request: Asked, seconds: float) -> Ticket:
    """What came of a request, once it is over."""
    async with contextlib.aclosing(host.write(request, seconds)) as source:
        async for come in source:
            if isinstance(come, Ticket):
                return come
    raise BrokenError("the engine ended without an answer")


async def _refused(_: Request, error: Exception) -> JSONResponse:
    status, body = _say(error)
    if status == 500:
        log.error("failed: %s", type(error).__name__, exc_info=error)
    headers = {"retry-after": "1"} if status == 503 else None
    return JSONResponse(body, status, headers=headers)


def _say(error: BaseException) -> tuple[int, dict[str, Any]]:
    """What a client is told of an error: what it did, never what is inside."""
    match error:
        case RequestValidationError():
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
            return guards.error(400, f"{where}: {first['msg']}", param=where)
        case HTTPException():
            return guards.error(error.status_code, str(error.detail))
        case UnknownModelError():
            return guards.error(404, str(error), code="model_not_found")
        case ClearheadError() | ValueError():
            return guards.error(400, str(error))
        case FullError():
            return guards.error(503, str(error), "overloaded_error")
        case BrokenError():
            return guards.error(503, str(error), "server_error")
        case asyncio.TimeoutError():
            return guards.error(504, "the request took too long; ask for less", "timeout_error")
        case _:
            return guards.error(500, "something went wrong inside; the server's log has it", "server_error")
