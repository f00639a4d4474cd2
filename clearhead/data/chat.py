"""Chat templates. A template comes with a checkpoint, so it is untrusted code: it runs in Jinja's sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from clearhead.errors import InputError, MissingExtraError


def render_chat(template: str | None, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The prompt that `template` makes of `messages`. Each message is a mapping with at least "role" and "content"."""
    if template is None:
        raise InputError(
            f"this tokenizer has no chat template, so {len(messages)} messages cannot become a prompt; "
            "encode plain text instead, or put a chat_template.jinja beside the tokenizer"
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"message {index} is {message!r}, without a role and a content; "
                'write each as {"role": "user", "content": "..."}'
            )
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise MissingExtraError("chat templates need jinja2, which is missing; pip install clearhead[chat]") from error

    # The sandbox refuses attributes that start with an underscore, tricks with str.format, and changes to `messages`.
    # It does not limit time and memory: a template can still waste both.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    helpers: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    environment.filters["tojson"] = _to_json
    try:
        return environment.from_string(template).render(messages=messages, **helpers, **variables)
    except InputError:
        raise
    except Exception as error:  # an expression in a template can raise any error
        raise InputError(
            f"the chat template failed on these {len(messages)} messages: {type(error).__name__}: {error}; "
            "check the order of their roles, or correct the template"
        ) from error


def _refuse(reason: object) -> NoReturn:
    raise InputError(f"the chat template refuses these messages: {reason}; change their roles or their order")


def _to_json(value: Any, **options: Any) -> str:
    # Jinja's own filter escapes <, > and & for web pages, which would change the model's prompt.
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)
