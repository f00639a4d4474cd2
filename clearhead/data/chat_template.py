"""A chat template rendered by Jinja, as the handler of a process apart (isolated_process.py). Imports nothing of ours.

Jinja's sandbox refuses attributes that start with an underscore, tricks with str.format, and changes to the messages. It does not
limit time and memory; the process does.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment


class RefusedError(Exception):
    """The template itself refuses the messages."""


def answer(request: dict[str, Any]) -> str:
    """The text of `template` for `messages`, with further `variables`."""
    return _compiled(request["template"]).render(messages=request["messages"], **_HELPERS, **request["variables"])


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    return environment.from_string(template)


def _refuse(reason: object) -> NoReturn:
    raise RefusedError(str(reason))


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for web pages, which would change the model's prompt.
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


_HELPERS: dict[str, Any] = {
    "raise_exception": _refuse,
    "strftime_now": lambda form: datetime.now().strftime(form),
}
