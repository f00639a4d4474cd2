"""`clearhead transcribe`: speech to text with Whisper."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clearhead.cli.arguments import Beams, Device, ModelName, check_output, find_device, find_model, open_binary
from clearhead.cli.console import progress_bar
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.config import Config
    from clearhead.models import EncoderDecoder

Format = Literal["txt", "srt", "vtt", "json"]


def run(
    model: ModelName,
    audio: Annotated[
        str, typer.Argument(metavar="AUDIO", help="A sound file: wav, flac, ogg, mp3; - reads standard input.")
    ],
    format: Annotated[
        Format, typer.Option(help="Text, subtitles (SubRip, WebVTT), or JSON with segments and their scores.")
    ] = "txt",
    words: Annotated[
        bool, typer.Option("--words", help="When each word is said, from cross-attention; for srt, vtt and json.")
    ] = False,
    language: Annotated[
        str | None, typer.Option(help="The language spoken, e.g. de. Without it: detected in the first 30 seconds.")
    ] = None,
    task: Annotated[
        Literal["transcribe", "translate"], typer.Option(help="A transcript, or its English translation.")
    ] = "transcribe",
    prompt: Annotated[str, typer.Option(help="A text to read first: names, spelling, style.")] = "",
    condition: Annotated[
        bool, typer.Option("--condition/--no-condition", help="Each window reads the text before it, or does not.")
    ] = True,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Where the tokenizer is. Without it: beside the model, e.g. gpt2.tiktoken.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write to this file. Default: stdout.")] = None,
    beams: Beams = 1,
    device: Device = "auto",
) -> None:
    """Transcribe a sound file of any length, with times."""
    check_output("--out", out)
    if words and format == "txt":
        raise InputError("--words are times of words, and txt has no times; got --format txt; take srt, vtt or json")
    from clearhead.data.audio import HOP, load_audio
    from clearhead.generation import Engine
    from clearhead.generation.scribe import Scribe, find_tokenizer
    from clearhead.generation.transcript_formats import FORMATS, as_dict
    from clearhead.generation.transcription import Options, run_local, transcribe

    sound = load_audio(open_binary(audio))
    path = find_model(model)
    whisper = load_whisper(path, model, device)
    config = whisper.config
    scribe = Scribe(whisper, find_tokenizer(tokenizer or path, config.vocab_size), language, task)
    if words:
        say_heads(whisper, path)
    options = Options(beams=beams, words=words, prompt=prompt, condition=condition)
    engine = Engine(whisper, max_tokens=max_tokens(config, options), max_rows=max(beams, options.best_of))
    with progress_bar("transcribing", len(sound) // HOP) as advance:
        found = run_local(engine, transcribe(scribe, sound, options, advance))
    if format == "json":
        text = json.dumps(as_dict(found, words=words), ensure_ascii=False, indent=2)
    else:
        text = FORMATS[format](found).rstrip("\n")
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")


def say_heads(model: EncoderDecoder, path: Path) -> None:
    """Say by which heads words are timed, and who named them. OpenAI's .pt names none: there they go by its sizes."""
    from clearhead.generation.word_times import alignment_heads

    origin = "none are named: all of the later half of the layers"
    if model.generation.alignment_heads:
        origin = "OpenAI's for a model of these sizes" if path.suffix == ".pt" else "as the checkpoint names them"
    heads = " ".join(f"{layer}.{head}" for layer, own in alignment_heads(model).items() for head in own)
    print(f"clearhead: words are timed by heads (layer.head) {heads} ({origin})", file=sys.stderr)


def load_whisper(path: Path, name: str, device: str) -> EncoderDecoder:
    import torch

    from clearhead.checkpoint import load
    from clearhead.models import EncoderDecoder

    model = load(path, dtype=torch.float32, device=find_device(device))
    if not isinstance(model, EncoderDecoder) or model.config.inputs != "frames":
        raise InputError(
            f"transcribe takes a model of sound; {name!r} has shape={model.config.shape!r}, inputs={model.config.inputs!r}; "
            f"take a Whisper"
        )
    return model


def max_tokens(config: Config, options: object) -> int:
    """The engine's memory, in tokens: for each row of a window the sound and the text."""
    from clearhead.engine.allocator import BLOCK_SIZE
    from clearhead.generation.transcription import Options

    assert isinstance(options, Options)
    rows = max(options.beams, options.best_of)
    return rows * (config.max_source_len + config.max_len + 2 * BLOCK_SIZE)
