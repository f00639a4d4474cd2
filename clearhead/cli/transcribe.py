"""`clearhead transcribe`: speech to text with Whisper."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clearhead.cli.arguments import Beams, Device, ModelName, find_device, find_model, open_binary
from clearhead.cli.console import track
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.config import Config

BATCH = 8  # windows computed at once


def run(
    model: ModelName,
    audio: Annotated[
        str, typer.Argument(metavar="AUDIO", help="A sound file: wav, flac, ogg, mp3; - reads standard input.")
    ],
    language: Annotated[
        str | None, typer.Option(help="The language spoken, e.g. de. Without it: detected in the first 30 seconds.")
    ] = None,
    task: Annotated[
        Literal["transcribe", "translate"], typer.Option(help="A transcript, or its English translation.")
    ] = "transcribe",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Where the tokenizer is. Without it: beside the model, e.g. gpt2.tiktoken.")
    ] = None,
    beams: Beams = 1,
    device: Device = "auto",
) -> None:
    """Transcribe a sound file, in windows of 30 seconds, without timestamps."""
    import torch

    from clearhead.checkpoint import load
    from clearhead.data.audio import HOP, load_audio
    from clearhead.generation import Engine
    from clearhead.generation.texts import in_order
    from clearhead.generation.transcription import Scribe, find_tokenizer

    sound = load_audio(open_binary(audio))
    path = find_model(model)
    whisper = load(path, dtype=torch.float32, device=find_device(device))
    config = whisper.config
    if config.inputs != "frames":
        raise InputError(
            f"transcribe takes a model of sound; {model!r} has shape={config.shape!r}, inputs={config.inputs!r}; "
            f"take a Whisper"
        )
    scribe = Scribe(whisper, find_tokenizer(tokenizer or path, config.vocab_size), language, task)  # type: ignore[arg-type]
    n_windows = -(-len(sound) // (2 * HOP * config.max_source_len))
    engine = Engine(scribe.model, max_tokens=max_tokens(config, beams), max_rows=BATCH * beams)
    tickets = in_order(engine, scribe.requests(sound, beams), BATCH)
    for number, ticket in enumerate(track(tickets, "listening", n_windows, printing=True)):
        text = scribe.tokenizer.decode(ticket.hypotheses[0].tokens).strip()
        typer.echo((" " if number else "") + text, nl=False)
        sys.stdout.flush()
    typer.echo()


def max_tokens(config: Config, beams: int) -> int:
    """The engine's memory for a batch of windows, in tokens: the sound of each, and the text of each beam."""
    from clearhead.engine.allocator import BLOCK_SIZE

    return BATCH * (config.max_source_len + BLOCK_SIZE + beams * (config.max_len + BLOCK_SIZE))
