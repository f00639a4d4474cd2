"""/v1/audio/transcriptions: the text of a sound file, with the times of its segments and words."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from io import BytesIO
from typing import Annotated, Any, Literal

from fastapi import APIRouter, File, Form, Request, UploadFile
from fastapi.responses import PlainTextResponse, Response

from clearhead.data.audio import load_audio
from clearhead.errors import InputError, did_you_mean
from clearhead.generation.scribe import Scribe
from clearhead.generation.transcript_formats import as_dict, as_srt, as_vtt
from clearhead.generation.transcription import Options, Run, Transcript, transcribe
from clearhead.models import EncoderDecoder
from clearhead.serving.cancellation import ClientSlots, cancel_on_disconnect, gather_or_cancel, run_held
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.service import Service

MAX_SOUNDS = 2  # of one client at once: half an hour of sound takes a hundred MB and more
# The form's fields, and those that are accepted with one value only: it is what this server does.
GRANULARITIES = "timestamp_granularities[]"
FIELDS = ("file", "model", "language", "prompt", "response_format", "temperature", GRANULARITIES)
FIXED = {"stream": ("false", "False")}
RESPONSE_FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
Granularity = Literal["word", "segment"]


def transcription_router(service: Service[ModelWorker]) -> APIRouter:
    router, slots = APIRouter(), ClientSlots(MAX_SOUNDS)

    @router.post("/v1/audio/transcriptions", response_model=None)
    async def transcriptions(
        request: Request,
        file: Annotated[UploadFile, File()],
        model: Annotated[str, Form()] = "",
        language: Annotated[str | None, Form()] = None,
        prompt: Annotated[str, Form()] = "",
        response_format: Annotated[str, Form()] = "json",
        temperature: Annotated[float, Form()] = 0.0,
        granularities: Annotated[tuple[Granularity, ...], Form(alias=GRANULARITIES)] = (),
    ) -> Response | dict[str, Any]:
        worker = service.find(model, "scribe")
        check_fields(await request.form())
        check_format(response_format, granularities)
        assert isinstance(worker.model, EncoderDecoder)
        assert worker.tokenizer is not None
        scribe = Scribe(worker.model, worker.tokenizer, language, "transcribe")
        # Temperature 0 goes on to higher ones where a text is bad; any other is taken as it is.
        options = Options(prompt=prompt, words="word" in granularities)
        options = replace(options, temperatures=(temperature,)) if temperature else options

        async def answer(data: bytes) -> Transcript:
            async with slots.one():
                held = service.slots.one()
                work = await run_held(held, lambda: transcribe(scribe, load_audio(BytesIO(data)), options))
                return await run_served(worker, work, service.limits.seconds)

        found = await cancel_on_disconnect(request, answer(await file.read()))
        return respond(found, response_format, granularities or ("segment",))

    return router


async def run_served(worker: ModelWorker, work: Run[Transcript], seconds: float) -> Transcript:
    """What `work` returns: its requests run in the worker's engine, and its other work between the engine's steps."""
    loop = asyncio.get_running_loop()
    deadline, result = loop.time() + seconds, None
    try:
        while True:
            asked = work.send(result)
            if isinstance(asked, list):
                left = max(0.0, deadline - loop.time())
                result = await gather_or_cancel([worker.finish(one, left) for one in asked])
            else:
                result = await worker.run_between_steps(asked)
    except StopIteration as done:
        return done.value
    finally:
        work.close()


def respond(found: Transcript, form: str, granularities: tuple[Granularity, ...]) -> Response | dict[str, Any]:
    if form == "verbose_json":
        wanted = dict(segments="segment" in granularities, words="word" in granularities)
        return {"task": "transcribe", **as_dict(found, **wanted)}
    if form == "json":
        return {"text": found.text}
    return PlainTextResponse({"text": f"{found.text}\n", "srt": as_srt(found), "vtt": as_vtt(found)}[form])


def check_format(form: str, granularities: tuple[Granularity, ...]) -> None:
    if form not in RESPONSE_FORMATS:
        raise InputError(
            f"response_format {form!r:.40} is not known; {did_you_mean(form[:40], RESPONSE_FORMATS)}; or leave it out"
        )
    if granularities and form != "verbose_json":
        raise InputError(
            f"timestamp_granularities are for response_format=verbose_json; got {form!r}; ask for that, or leave them out"
        )


def check_fields(form: Mapping[str, Any]) -> None:
    """InputError for a field of the form that would have no effect."""
    for name, value in form.items():
        if name in FIXED and value not in FIXED[name]:
            raise InputError(f"{name} is {FIXED[name][0]} in a transcription here; got {value!r:.40}; leave it out")
        if name not in FIELDS and name not in FIXED:
            raise InputError(
                f"there is no field {name!r:.60} here; got {value!r:.40}; {did_you_mean(name[:60], FIELDS)}"
            )
