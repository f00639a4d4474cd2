"""`clearhead generate`: a decoder goes on with a text, or answers in a conversation, word by word."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.inputs import Device, ModelName, find_device, find_model
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.data import Tokenizer
    from clearhead.models import Decoder


def run(
    model: ModelName,
    prompt: Annotated[str, typer.Argument(help="The text to go on with; - reads standard input.")] = "-",
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="A conversation, with the model's own template: a line of yours, an answer, and so on."
        ),
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: what the model is told first.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="The most tokens to write.")
    ] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; 1 draws as the model says.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens that sum to this.")] = 0.95,
    top_k: Annotated[int, typer.Option(help="Draw from so many likeliest tokens; 0: from all.")] = 0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens less likely than this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: say less again.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    truncate: Annotated[
        bool,
        typer.Option("--truncate", help="Cut a prompt that is too long at its start. Without it, that is an error."),
    ] = False,
    device: Device = "auto",
) -> None:
    """Write on from a prompt, shown as it is written."""
    if chat and prompt != "-":
        raise InputError(f"--chat asks for your lines one by one; got the prompt {prompt!r:.40}; leave one of them out")
    if any(not text for text in stop or []):
        raise InputError("--stop is empty, and every text would end at once; give the text to end before")
    from clearhead.checkpoint import load
    from clearhead.data import load_tokenizer
    from clearhead.models import Decoder

    place = find_model(model)
    decoder = load(place, device=find_device(device))
    if not isinstance(decoder, Decoder):
        raise InputError(
            f"generate takes a decoder; {model!r} has shape={decoder.config.shape!r}; take a GPT or a LLaMA"
        )
    found = load_tokenizer(place if place.is_dir() or place.suffix == ".gguf" else Path(place).parent)
    options: dict[str, Any] = dict(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    options |= dict(repetition_penalty=repetition_penalty, max_new_tokens=max_new_tokens)
    writer = Writer(decoder, found, options, list(stop or []), cut=truncate)
    if chat:
        converse(writer, system)
    else:
        text = sys.stdin.read() if prompt == "-" else prompt
        typer.echo(text, nl=False)
        writer.write(found.encode(text))
        typer.echo()


class Writer:
    """Writes one text after another to standard output, and keeps to the same options."""

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, options: dict[str, Any], stops: list[str], *, cut: bool
    ) -> None:
        self.model, self.tokenizer, self.options, self.stops, self.cut = model, tokenizer, options, stops, cut

    def write(self, ids: list[int]) -> str:
        """Go on from these ids; returns what was written."""
        room = self.model.config.max_len - self.options["max_new_tokens"]
        if len(ids) > room and self.cut and room > 0:
            ids = ids[-room:]
        written = ""
        for piece in hold_back(self.pieces(ids), self.stops):
            typer.echo(piece, nl=False)
            sys.stdout.flush()
            written += piece
        return written

    def pieces(self, ids: list[int]) -> Iterator[str]:
        from clearhead.generation import stream

        text = self.tokenizer.stream()
        for token in stream(self.model, ids, **self.options):
            yield text.push(token)
        yield text.finish()


def hold_back(pieces: Iterator[str], stops: list[str]) -> Iterator[str]:
    """The pieces up to the stop that is complete first; text that a stop might begin in waits until that is known."""
    held, longest = "", max(map(len, stops), default=1) - 1
    for piece in pieces:
        held += piece
        ends = [(held.find(stop) + len(stop), held.find(stop)) for stop in stops if stop in held]
        if ends:
            yield held[: min(ends)[1]]
            return
        safe = len(held) - longest
        if safe > 0:
            yield held[:safe]
            held = held[safe:]
    yield held


def converse(writer: Writer, system: str | None) -> None:
    """Lines in, answers out, until the input ends."""
    messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    asks = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if asks else "")
        except (EOFError, KeyboardInterrupt):
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        ids = writer.tokenizer.encode(writer.tokenizer.chat(messages), special=False)
        messages.append({"role": "assistant", "content": writer.write(ids).strip()})
        typer.echo()
