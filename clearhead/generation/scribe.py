"""Whisper's tokenizer and its special tokens: how a transcript starts, in which language, and for which task."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from clearhead.data import Tokenizer, load_tokenizer
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
    """A Whisper with its tokenizer, for one task in one language, given or detected."""

    def __init__(self, model: EncoderDecoder, tokenizer: Tokenizer, language: str | None, task: str) -> None:
        self.model, self.tokenizer, self.task = model, tokenizer, task
        self.start, self.end = tokenizer.id("<|startoftranscript|>"), tokenizer.id("<|endoftext|>")
        self.plain = tokenizer.id("<|notimestamps|>")
        self.previous = tokenizer.vocab.get("<|startofprev|>")
        # Older files of transformers have the other name.
        self.no_speech = tokenizer.vocab.get("<|nospeech|>", tokenizer.vocab.get("<|nocaptions|>"))
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

    @property
    def spoken(self) -> str:
        """The language's name, such as "en". It is known once `find_language` has run."""
        return "en" if self.language is None else self.tokenizer.token(self.language).strip("<|>")

    def start_tokens(self) -> list[int]:
        """What a transcript with timestamps starts with."""
        if self.english_only:
            return [self.start]
        assert self.language is not None, "find_language first"
        return [self.start, self.language, self.tokenizer.id(f"<|{self.task}|>")]

    def find_language(self, frames: Tensor) -> None:
        """Unless it was given, the language whose token is the likeliest first one after this window of sound."""
        if self.language is not None or self.english_only:
            return
        weight, ids = example_weight(self.model), list(self.languages.values())
        start = torch.tensor([[self.start]], device=weight.device)
        with torch.no_grad():
            logits = self.model(frames[None].to(weight.device, weight.dtype), start)[0, -1]
        self.language = ids[int(logits[ids].argmax())]

    def ask(self, frames: Tensor, beams: int) -> Request:
        """The request for one window's text, without timestamps."""
        # The ids after the end token are languages, tasks and timestamps.
        plain = Strategy(suppress=range(self.end + 1, self.model.config.vocab_size))
        # Half of the positions are for the text, as in OpenAI's code.
        room = self.model.config.max_len // 2
        self.find_language(frames)
        prompt = [*self.start_tokens(), self.plain]
        return Request(source=frames, prompt=prompt, max_new_tokens=room, strategy=plain, eos=self.end, beams=beams)
