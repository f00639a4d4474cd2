"""Errors as HTTP answers in OpenAI's form. A client learns what is wrong with its request, never what is inside the server."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from clearhead.errors import ClearheadError
from clearhead.serving.guards import error
from clearhead.serving.worker import BrokenError, FullError

log = logging.getLogger("clearhead.serving")


# Errors of the library name Python's arguments; over HTTP they are these fields.
FIELDS = {r"\bmax_new_tokens\b": "max_tokens", r"\balternatives=": "top_logprobs=", r"\bgrammar=": "response_format="}


class UnknownModelError(Exception):
    """There is no such model, or not of the kind that the route needs."""


HANDLED = (
    RequestValidationError,
    HTTPException,
    ClientDisconnect,
    ClearheadError,
    FullError,
    BrokenError,
    UnknownModelError,
    asyncio.TimeoutError,
    ValueError,
    Exception,
)


def add_error_handlers(app: FastAPI) -> None:
    for kind in HANDLED:
        app.add_exception_handler(kind, _answer)


async def _answer(request: Request, raised: Exception) -> JSONResponse:
    status, body = error_body(raised)
    if isinstance(raised, RequestValidationError) and isinstance(raised.body, bytes):  # not read as JSON
        kind = request.headers.get("content-type", "no content type")
        said = f"the body must be sent as JSON; got {kind!r:.80}; send the header Content-Type: application/json"
        status, body = error(415, said)
    if status == 500:
        log.error("failed: %s", type(raised).__name__, exc_info=raised)
    headers = {"retry-after": "1"} if status == 503 else None
    return JSONResponse(body, status, headers=headers)


def _spell_fields(message: str) -> str:
    for argument, field in FIELDS.items():
        message = re.sub(argument, field, message)
    return message


def error_body(raised: BaseException) -> tuple[int, dict[str, Any]]:
    """The status and the body for an exception."""
    match raised:
        case RequestValidationError():
            found = raised.errors()
            # Where several types are allowed, each has its error; an unknown field says more than "not a string".
            first = next((each for each in found if each["type"] == "unknown_field"), found[0])
            where = ".".join(str(part) for part in first["loc"] if part != "body")
            message = f"{where}: {first['msg']}" if where else first["msg"]
            field = first.get("ctx", {}).get("field")  # the one that is unknown
            return error(400, message, param=".".join(filter(None, (where, field))) or "body")
        case HTTPException():
            kind = {403: "permission_error", 429: "rate_limit_error"}.get(raised.status_code, "invalid_request_error")
            return error(raised.status_code, str(raised.detail), kind)
        case ClientDisconnect():
            return error(499, "the client has gone")
        case UnknownModelError():
            return error(404, str(raised), code="model_not_found")
        case ClearheadError() | ValueError():
            return error(400, _spell_fields(str(raised)))
        case FullError():
            return error(503, str(raised), "overloaded_error")
        case BrokenError():
            return error(503, str(raised), "server_error")
        case asyncio.TimeoutError():
            return error(504, "the request took too long; ask for less", "timeout_error")
        case _:
            return error(500, "something went wrong inside; the server's log has it", "server_error")
