"""`clearhead transcribe`: speech to text with Whisper."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from typing import Annotated, Literal

import typer

from clearhead.cli.arguments import Device, ModelName, find_device, find_model, follow
from clearhead.errors import InputError

AT_ONCE = 8  # windows


def run(
    model: ModelName,
    audio: Annotated[
        str, typer.Argument(metavar="AUDIO", help="A sound file: wav, flac, ogg, mp3; - reads standard input.")
    ],
    language: Annotated[
        str | None, typer.Option(help="The language spoken, e.g. de. Without it, the first 30 seconds tell.")
    ] = None,
    task: Annotated[
        Literal["transcribe", "translate"], typer.Option(help="Write what is said, or its English translation.")
    ] = "transcribe",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Where the tokenizer is. Without it: beside the model, e.g. gpt2.tiktoken.")
    ] = None,
    beams: Annotated[int, typer.Option(min=1, help="Texts kept at each step; 1 is greedy.")] = 1,
    device: Device = "auto",
) -> None:
    """Write down what is said in a sound file, 30 seconds after 30 seconds, without times."""
    import torch

    from clearhead.checkpoint import load
    from clearhead.data.audio import HOP, load_audio
    from clearhead.engine.engine import BLOCK
    from clearhead.generation import Engine
    from clearhead.generation.texts import in_order
    from clearhead.generation.transcription import Scribe, find_tokenizer

    sound = load_audio(BytesIO(sys.stdin.buffer.read()) if audio == "-" else audio)
    place = find_model(model)
    whisper = load(place, dtype=torch.float32, device=find_device(device))
    config = whisper.config
    if config.inputs != "frames":
        raise InputError(
            f"transcribe takes a model of sound; {model!r} has shape={config.shape!r}, inputs={config.inputs!r}; "
            f"take a Whisper"
        )
    scribe = Scribe(whisper, find_tokenizer(tokenizer or place, config.vocab_size), language, task)  # type: ignore[arg-type]
    n_windows = -(-len(sound) // (2 * HOP * config.max_source_len))
    # Memory for so many windows: their sound, and each beam's text.
    max_tokens = AT_ONCE * (config.max_source_len + BLOCK + beams * (config.max_len + BLOCK))
    engine = Engine(scribe.model, max_tokens=max_tokens, max_rows=AT_ONCE * beams)
    listened = in_order(engine, scribe.requests(sound, beams), AT_ONCE)
    tickets = follow(listened, "listening", n_windows, printing=True)
    for number, ticket in enumerate(tickets):
        text = scribe.tokenizer.decode(ticket.hypotheses[0].tokens).strip()
        typer.echo((" " if number else "") + text, nl=False)
        sys.stdout.flush()
    typer.echo()
