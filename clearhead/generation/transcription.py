"""Transcription with Whisper: its tokenizer, and a request for each window of sound."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from clearhead.data import Tokenizer, load_tokenizer
from clearhead.data.audio import HOP, RATE, log_mel
from clearhead.data.tokenizer_formats import read_tiktoken
from clearhead.engine.request import Request
from clearhead.errors import CheckpointError, InputError, did_you_mean
from clearhead.models import EncoderDecoder
from clearhead.quantization.model_weights import example_weight
from clearhead.sampling.strategy import Strategy

N_TIMES = 1501  # timestamps are the vocabulary's last tokens: one for every 20 ms of 30 s
ENGLISH_ONLY = 51_864  # the vocabulary's size in models without languages and tasks


def find_tokenizer(place: Path, vocab_size: int) -> Tokenizer:
    """Whisper's tokenizer in or beside `place`, checked to be this model's."""
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
    """Requests for windows of sound, in the language given, or the one detected in the first window."""

    def __init__(self, model: EncoderDecoder, tokenizer: Tokenizer, language: str | None, task: str) -> None:
        self.model, self.tokenizer, self.task = model, tokenizer, task
        self.start, self.end = tokenizer.id("<|startoftranscript|>"), tokenizer.id("<|endoftext|>")
        self.plain = tokenizer.id("<|notimestamps|>")
        self.english_only = model.config.vocab_size <= ENGLISH_ONLY
        if self.english_only and (task != "transcribe" or language not in (None, "en")):
            raise InputError(
                f"this model knows only English; got task={task}, language={language}; "
                f"take a multilingual one, or leave them out"
            )
        # The names between the start and the first task are the languages.
        spoken = range(self.start + 1, tokenizer.id("<|translate|>"))
        self.languages = {tokenizer.token(id).strip("<|>"): id for id in spoken}
        if language is not None and language not in self.languages:
            raise InputError(
                f"language {language!r} is not one of the model's; {did_you_mean(language, self.languages)}"
            )
        self.language = None if language is None else self.languages[language]

    def ask(self, frames: Tensor, beams: int) -> Request:
        """The request for one window's text."""
        # The ids after the end token are languages, tasks and timestamps.
        plain = Strategy(suppress=range(self.end + 1, self.model.config.vocab_size))
        # Half of the positions are for the text, as in OpenAI's code. The other half, for earlier text, is not used.
        room = self.model.config.max_len // 2
        prompt = self._prompt(frames)
        return Request(source=frames, prompt=prompt, max_new_tokens=room, strategy=plain, eos=self.end, beams=beams)

    def _prompt(self, frames: Tensor) -> list[int]:
        if self.english_only:
            return [self.start, self.plain]
        if self.language is None:
            self.language = self._detect_language(frames)
        return [self.start, self.language, self.tokenizer.id(f"<|{self.task}|>"), self.plain]

    def _detect_language(self, frames: Tensor) -> int:
        """The language whose token is the likeliest first one."""
        device, ids = example_weight(self.model).device, list(self.languages.values())
        with torch.no_grad():
            logits = self.model(frames[None].to(device), torch.tensor([[self.start]], device=device))[0, -1]
        return ids[int(logits[ids].argmax())]

    def requests(self, sound: Tensor, beams: int = 1) -> Iterator[Request]:
        """A request for each window of a sound of any length."""
        config = self.model.config
        window = 2 * HOP * config.max_source_len  # samples; the second convolution halves the frames
        for piece in sound.split(window):
            yield self.ask(log_mel(piece, config.n_mels, window / RATE), beams)
