"""Errors of the library name Python's arguments. On the command line they are options: `top_k=7` is `--top-k 7`."""

from __future__ import annotations

import re
import sys

from clearhead.cli.command_list import SUMMARIES, load_command


def spell_options(message: str, words: list[str] | None = None) -> str:
    """The message with the names of the options of the command that was called (in `words`; by default, of this process)."""
    called = next((word for word in (sys.argv[1:] if words is None else words) if word in SUMMARIES), None)
    for param in load_command(called).params if called else ():
        flag = next((each for each in param.opts if each.startswith("--")), None)
        if flag is None:  # an argument
            continue
        message = re.sub(rf"(?<![\w.\[-]){param.name}=(?=\S)", f"{flag} ", message)
        if "_" in param.name:  # other names may be words of the sentence
            message = re.sub(rf"(?<![\w.\['-]){param.name}(?![\w=(.'])", flag, message)
    return message
