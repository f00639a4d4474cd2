"""Chat templates. One comes with a checkpoint, so it is a stranger's code: it runs in Jinja's sandbox, in a process apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from clearhead.data.isolated_process import HandlerError, IsolatedError, IsolatedProcesses
from clearhead.errors import InputError

SECONDS, MEGABYTES = 10.0, 256  # for one prompt; the usual ones take a millisecond


@cache
def _processes() -> IsolatedProcesses:
    handler = Path(__file__).with_name("chat_template.py")
    return IsolatedProcesses(handler, seconds=SECONDS, megabytes=MEGABYTES, n=2)


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
    request = {"template": template, "messages": [dict(message) for message in messages], "variables": dict(variables)}
    try:
        return _processes().call(request)
    except TypeError as error:  # of json
        raise InputError(
            f"messages are plain texts, numbers, lists and dicts; got others ({error}); convert them"
        ) from None
    except IsolatedError as error:
        raise InputError(
            f"the chat template failed on these {len(messages)} messages: it {error}; send fewer or shorter ones, or "
            "correct the template"
        ) from None
    except HandlerError as error:
        if error.kind == "RefusedError":
            raise InputError(
                f"the chat template refuses these messages: {error}; change their roles or their order"
            ) from None
        raise InputError(
            f"the chat template failed on these {len(messages)} messages: {error.kind}: {error}; "
            "check the order of their roles, or correct the template"
        ) from None
