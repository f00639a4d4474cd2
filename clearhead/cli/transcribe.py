"""`clearhead transcribe`: speech to text with Whisper."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from clearhead.cli.inputs import Device, ModelName, find_device, find_model, follow
from clearhead.errors import CheckpointError, InputError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.data import Tokenizer
    from clearhead.generation import Request
    from clearhead.models import EncoderDecoder

AT_ONCE = 8  # windows
N_TIMES = 1501  # the vocabulary's last tokens: a time every 20 ms of 30 s
ENGLISH_ONLY = 51_864  # the vocabulary's size in models without languages and tasks


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
    from clearhead.data.audio import HOP, RATE, load_audio, log_mel
    from clearhead.generation import Engine
    from clearhead.generation.engine import BLOCK
    from clearhead.generation.texts import in_order

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
    window = 2 * HOP * config.max_source_len  # samples; the second convolution halves the frames
    pieces = sound.split(window)
    requests = (scribe.ask(log_mel(piece, config.n_mels, window / RATE), beams) for piece in pieces)
    # Memory for so many windows: their sound, and each beam's text.
    max_tokens = AT_ONCE * (config.max_source_len + BLOCK + beams * (config.max_len + BLOCK))
    engine = Engine(scribe.model, max_tokens=max_tokens, max_rows=AT_ONCE * beams)
    tickets = follow(in_order(engine, requests, AT_ONCE), "listening", len(pieces), printing=True)
    for number, ticket in enumerate(tickets):
        text = scribe.tokenizer.decode(ticket.hypotheses[0].tokens).strip()
        typer.echo((" " if number else "") + text, nl=False)
        sys.stdout.flush()
    typer.echo()


def find_tokenizer(place: Path, vocab_size: int) -> Tokenizer:
    """Whisper's tokenizer in or beside `place`, checked to be this model's."""
    from clearhead.data import load_tokenizer
    from clearhead.data.tokenizer_formats import read_tiktoken

    if place.suffix != ".tiktoken":
        folder = place if place.is_dir() else place.parent
        files = [] if (folder / "tokenizer.json").is_file() else sorted(folder.glob("*.tiktoken"))
        place = files[0] if files else folder
    # OpenAI's ranks do not say how many languages follow them; the model does.
    languages = 100 if vocab_size > ENGLISH_ONLY + 1 else 99
    try:
        found = read_tiktoken(place, languages) if place.suffix == ".tiktoken" else load_tokenizer(place)
        last = found.id("<|notimestamps|>")
    except (CheckpointError, InputError) as error:
        raise CheckpointError(
            f"no tokenizer of Whisper's in {place} ({error}); put gpt2.tiktoken (.en models) or multilingual.tiktoken of the "
            f"openai-whisper package beside the model, or give --tokenizer"
        ) from None
    if last + 1 + N_TIMES != vocab_size:
        raise CheckpointError(
            f"the tokenizer in {place} is for {last + 1 + N_TIMES} tokens, the model for {vocab_size}; English-only models take "
            f"gpt2.tiktoken, the others multilingual.tiktoken"
        )
    return found


class Scribe:
    """What is asked of the model for each window of sound, in the language it is told or finds in the first one."""

    def __init__(self, model: EncoderDecoder, tokenizer: Tokenizer, language: str | None, task: str) -> None:
        self.model, self.tokenizer, self.task = model, tokenizer, task
        self.start, self.end = tokenizer.id("<|startoftranscript|>"), tokenizer.id("<|endoftext|>")
        self.plain = tokenizer.id("<|notimestamps|>")
        self.english_only = model.config.vocab_size <= ENGLISH_ONLY
        if self.english_only and (task != "transcribe" or language not in (None, "en")):
            raise InputError(
                f"this model knows only English; got --task {task}, --language {language}; "
                f"take a multilingual one, or leave them out"
            )
        # The names between the start and the first task are the languages.
        spoken = range(self.start + 1, tokenizer.id("<|translate|>"))
        self.languages = {tokenizer.token(id).strip("<|>"): id for id in spoken}
        if language is not None and language not in self.languages:
            raise InputError(
                f"--language {language!r} is not one of the model's; {did_you_mean(language, self.languages)}"
            )
        self.language = None if language is None else self.languages[language]

    def ask(self, frames: Tensor, beams: int) -> Request:
        """For the text of one window."""
        from clearhead.generation import Request, Strategy

        # Beyond the end come languages, tasks and times.
        plain = Strategy(suppress=range(self.end + 1, self.model.config.vocab_size))
        # Half of the positions are for text, as OpenAI has it; the other half, for what was said before, is not used.
        room = self.model.config.max_len // 2
        prompt = self._prompt(frames)
        return Request(source=frames, prompt=prompt, max_new_tokens=room, strategy=plain, eos=self.end, beams=beams)

    def _prompt(self, frames: Tensor) -> list[int]:
        if self.english_only:
            return [self.start, self.plain]
        if self.language is None:
            self.language = self._hear(frames)
        return [self.start, self.language, self.tokenizer.id(f"<|{self.task}|>"), self.plain]

    def _hear(self, frames: Tensor) -> int:
        """The language: the likeliest of them as the first token."""
        import torch

        device, ids = next(self.model.parameters()).device, list(self.languages.values())
        with torch.no_grad():
            logits = self.model(frames[None].to(device), torch.tensor([[self.start]], device=device))[0, -1]
        return ids[int(logits[ids].argmax())]
