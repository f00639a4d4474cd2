"""/v1/audio/transcriptions: the text of a sound file."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Annotated, Any

from fastapi import APIRouter, File, Form, Request, UploadFile
from fastapi.responses import PlainTextResponse, Response

from clearhead.data.audio import load_audio
from clearhead.errors import InputError, did_you_mean
from clearhead.generation.transcription import Scribe
from clearhead.models import EncoderDecoder
from clearhead.serving.cancellation import ClientSlots, cancel_on_disconnect, gather_or_cancel, run_held
from clearhead.serving.service import Service

MAX_SOUNDS = 2  # of one client at once: half an hour of sound takes a hundred MB and more
# The form's fields, and those that are accepted with one value only: it is what this server does.
FIELDS = ("file", "model", "language", "response_format")
FIXED = {"temperature": ("0", "0.0"), "stream": ("false", "False")}


def transcription_router(service: Service) -> APIRouter:
    router, slots = APIRouter(), ClientSlots(MAX_SOUNDS)

    @router.post("/v1/audio/transcriptions", response_model=None)
    async def transcriptions(
        request: Request,
        file: Annotated[UploadFile, File()],
        model: Annotated[str, Form()] = "",
        language: Annotated[str | None, Form()] = None,
        response_format: Annotated[str, Form()] = "json",
    ) -> Response | dict[str, Any]:
        worker = service.find(model, "scribe")
        check_fields(await request.form())
        assert isinstance(worker.model, EncoderDecoder)
        assert worker.tokenizer is not None
        if response_format not in ("json", "text"):
            raise InputError(f"response_format is json or text; got {response_format!r:.40}; leave it out")
        scribe = Scribe(worker.model, worker.tokenizer, language, "transcribe")

        async def transcribe(data: bytes) -> str:
            async with slots.one():
                requests = await run_held(service.slots.one(), lambda: list(scribe.requests(load_audio(BytesIO(data)))))
                work = [worker.finish(one, service.limits.seconds) for one in requests]
                tickets = await gather_or_cancel(work)
            return " ".join(scribe.tokenizer.decode(ticket.hypotheses[0].tokens).strip() for ticket in tickets)

        text = await cancel_on_disconnect(request, transcribe(await file.read()))
        return PlainTextResponse(text + "\n") if response_format == "text" else {"text": text}

    return router


def check_fields(form: Mapping[str, Any]) -> None:
    """InputError for a field of the form that would have no effect."""
    for name, value in form.items():
        if name in FIXED and value not in FIXED[name]:
            raise InputError(f"{name} is {FIXED[name][0]} in a transcription here; got {value!r:.40}; leave it out")
        if name not in FIELDS and name not in FIXED:
            raise InputError(
                f"there is no field {name!r:.60} here; got {value!r:.40}; {did_you_mean(name[:60], FIELDS)}"
            )
