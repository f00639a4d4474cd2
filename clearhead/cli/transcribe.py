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
    from clearhead.models import EncoderDecoder

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
    device: Device = "auto",
) -> None:
    """Write down what is said in a sound file, 30 seconds after 30 seconds, without times."""
    import torch

    from clearhead.checkpoint import load
    from clearhead.data.audio import HOP, RATE, load_audio, log_mel

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
    for number, piece in enumerate(follow(pieces, "listening", len(pieces), printing=True)):
        text = scribe.write(log_mel(piece, config.n_mels, window / RATE)).strip()
        typer.echo((" " if number else "") + text, nl=False)
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
    """Writes greedily, one window of sound at a time, in the language it is told or finds in the first window."""

    def __init__(self, model: EncoderDecoder, tokenizer: Tokenizer, language: str | None, task: str) -> None:
        self.model, self.tokenizer, self.task = model, tokenizer, task
        self.device = next(model.parameters()).device
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

    def write(self, frames: Tensor) -> str:
        """The text of one window."""
        import torch

        with torch.no_grad():
            memory = self.model.encode(frames[None].to(self.device))
            return self.tokenizer.decode(self._decode(memory))

    def _decode(self, memory: Tensor) -> list[int]:
        import torch

        prompt = self._prompt(memory)
        never = torch.tensor(self.model.generation.suppress, dtype=torch.long, device=self.device)
        never_first = torch.tensor(self.model.generation.begin_suppress, dtype=torch.long, device=self.device)
        # Half of the positions are for text, as OpenAI has it; the other half, for what was said before, is not used.
        room = self.model.config.max_len // 2
        cache = self.model.new_cache(batch=1, max_len=len(prompt) + room)
        tokens: list[int] = []
        new = prompt
        while len(tokens) < room:
            logits = self.model.decode(self._row(new), None if tokens else memory, cache=cache)[0, -1]
            logits[never] = -torch.inf
            logits[self.end + 1 :] = -torch.inf  # languages, tasks and times
            if not tokens:
                logits[never_first] = -torch.inf
            new = [int(logits.argmax())]
            if new == [self.end]:
                break
            tokens += new
        return tokens

    def _prompt(self, memory: Tensor) -> list[int]:
        if self.english_only:
            return [self.start, self.plain]
        if self.language is None:
            ids = list(self.languages.values())
            logits = self.model.decode(self._row([self.start]), memory)[0, -1]
            self.language = ids[int(logits[ids].argmax())]
        return [self.start, self.language, self.tokenizer.id(f"<|{self.task}|>"), self.plain]

    def _row(self, tokens: list[int]) -> Tensor:
        import torch

        return torch.tensor([tokens], device=self.device)
