"""Transcription with Whisper: windows of 30 seconds, each decoded with timestamps, and the next one starts where they say.

`transcribe` is a generator, so that a command (`run_local`) and a server, whose engine belongs to another thread, can both run it.
It yields requests for the engine, or work that calls the model; it is sent the tickets, or the result; and it returns a Transcript.

A window's text is decoded again, at the next higher temperature, if it repeats itself (it compresses too well) or is too unlikely;
a window without speech is skipped. These rules and their limits are those of OpenAI's code.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.data.audio import HOP, RATE, log_mel_of_all
from clearhead.engine.engine import Engine
from clearhead.engine.request import Memory, Request, Ticket
from clearhead.errors import InputError
from clearhead.generation.engines import eval_step, raise_failure
from clearhead.generation.scribe import Scribe
from clearhead.generation.word_times import Word, align, place, tidy
from clearhead.quantization.model_weights import example_weight
from clearhead.sampling.strategy import Strategy
from clearhead.sampling.timestamps import Timestamps

FRAMES_A_SECOND = RATE // HOP
STEP = 2  # frames of a timestamp: 20 ms
T = TypeVar("T")
Work = list[Request] | Callable[[], Any]  # what is to be run: by the engine, or as it is
Run = Generator[Work, Any, T]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to transcribe. With `beams` above 1, temperature 0 is a beam search; above 0, the best of `best_of` samples is taken.

    A text is decoded again if its compression ratio is above `max_compression`, or its mean log-probability below `min_logprob`; if
    the probability of no speech is above `no_speech` too, it is silence. `condition`: each window reads the text before it.
    `prompt` is a text to read before the first.
    """

    beams: int = 1
    best_of: int = 5
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    max_compression: float = 2.4
    min_logprob: float = -1.0
    no_speech: float = 0.6
    condition: bool = True
    prompt: str = ""
    words: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures or any(not 0 <= one <= 2 for one in self.temperatures):
            raise InputError(f"temperatures are numbers from 0 to 2; got {self.temperatures}; 0 is usual")


@dataclass(frozen=True)
class Decoded:
    """A window's text, with its timestamps."""

    tokens: list[int]
    text: str
    avg_logprob: float
    no_speech_prob: float
    temperature: float

    @property
    def compression_ratio(self) -> float:
        raw = self.text.encode()
        return len(raw) / len(zlib.compress(raw))


@dataclass
class Segment:
    """A piece of the transcript between two timestamps, in seconds. `seek` is its window's first frame."""

    seek: int
    start: float
    end: float
    tokens: list[int]
    text: str
    decoded: Decoded
    words: list[Word] = field(default_factory=list[Word])


@dataclass(frozen=True)
class Transcript:
    text: str
    language: str
    duration: float
    segments: list[Segment]


def transcribe(
    scribe: Scribe, sound: Float[Tensor, " n"], options: Options, show: Callable[[int], object] = lambda n: None
) -> Run[Transcript]:
    """The transcript of a sound of any length, at RATE. The call itself computes the spectrogram.

    `show` gets the number of frames (HOP samples each) by which the work has moved on.
    """
    return Transcription(scribe, log_mel_of_all(sound, scribe.model.config.n_mels), options).run(show)


def run_local(engine: Engine, work: Run[T]) -> T:
    """What `work` returns, run to its end by an engine of one's own."""
    step, result = eval_step(engine), None
    try:
        while True:
            asked = work.send(result)
            if isinstance(asked, list):
                tickets = [engine.submit(request) for request in asked]
                while not all(ticket.is_done for ticket in tickets):
                    step()
                result = tickets
            else:
                result = asked()
    except StopIteration as done:
        return done.value


class Transcription:
    """One transcription under way."""

    def __init__(self, scribe: Scribe, mel: Float[Tensor, "m frames"], options: Options) -> None:
        self.scribe, self.mel, self.options, config = scribe, mel, options, scribe.model.config
        self.window = 2 * config.max_source_len  # frames
        first = scribe.plain + 1
        times = Timestamps(first, min(config.vocab_size - first, config.max_source_len + 1), scribe.end)
        # Languages, tasks and the like are forbidden by the rules of timestamps too.
        self.times, self.first_time = times, first
        self.read = scribe.tokenizer.encode(" " + options.prompt.strip(), special=False) if options.prompt else []
        self.n_forgotten = 0  # tokens read before this one are no longer given to the model
        self.last_speech = 0.0  # seconds

    def run(self, show: Callable[[int], object]) -> Run[Transcript]:
        segments: list[Segment] = []
        n_frames = self.mel.shape[1]
        n_prompt, seek = len(self.read), 0
        # The first window tells the language, whatever its text is; of a sound of less than one frame, silence does.
        yield lambda: self.scribe.find_language(self._window(0)[0])
        while seek < n_frames:
            frames, size = self._window(seek)
            memory: Tensor = yield lambda frames=frames: self._encode(frames)
            decoded = yield from self._decode(memory)
            is_silent = decoded.no_speech_prob > self.options.no_speech
            if is_silent and decoded.avg_logprob <= self.options.min_logprob:
                seek += size
                show(size)
                continue
            found, moved, is_whole = self._segments(decoded, seek, size)
            if self.options.words:
                spoken = yield from self._add_words(memory, found, seek, size)
                moved = moved if is_whole or spoken is None else spoken
            for segment in found:
                if segment.start == segment.end or not segment.text.strip():
                    segment.text, segment.tokens, segment.words = "", [], []
            segments += found
            self.read += [token for segment in found for token in segment.tokens]
            if (
                not self.options.condition or decoded.temperature > 0.5
            ):  # a text that was hard to find may mislead the next
                self.n_forgotten = len(self.read)
            show(max(moved, seek + STEP) - seek)
            seek = max(moved, seek + STEP)  # always forward
        text = self.scribe.tokenizer.decode([token for token in self.read[n_prompt:] if token < self.scribe.end])
        return Transcript(text.strip(), self.scribe.spoken, n_frames / FRAMES_A_SECOND, segments)

    def _window(self, seek: int) -> tuple[Tensor, int]:
        """The frames from `seek` on, as many as the model reads, and how many of them are real. The rest are zeros."""
        frames = self.mel[:, seek : seek + self.window]
        return F.pad(frames, (0, self.window - frames.shape[1])), frames.shape[1]

    @torch.no_grad()
    def _encode(self, frames: Tensor) -> Tensor:
        weight = example_weight(self.scribe.model)
        return self.scribe.model.encode(frames[None].to(weight.device, weight.dtype))[0]

    def _prompt(self) -> list[int]:
        """The text before, as much as fits in half of the positions, then the start."""
        previous, start = self.scribe.previous, self.scribe.start_tokens()
        before = self.read[self.n_forgotten :]
        if previous is None or not before:
            return start
        room = self.scribe.model.config.max_len // 2 - 1
        return [previous, *before[-room:], *start]

    @torch.no_grad()
    def _no_speech(self, memory: Tensor, prompt: list[int]) -> float:
        """The probability, right after <|startoftranscript|>, that nobody speaks."""
        if self.scribe.no_speech is None:
            return 0.0
        read = prompt[: prompt.index(self.scribe.start) + 1]
        states = self.scribe.model.states(torch.tensor([read], device=memory.device), memory[None])
        return float(self.scribe.model.project(states[:, -1:])[0, 0].float().softmax(-1)[self.scribe.no_speech])

    def _decode(self, memory: Tensor) -> Run[Decoded]:
        """The window's text, at the first temperature at which it is good enough, else at the last."""
        options, prompt = self.options, self._prompt()
        no_speech: float = yield lambda: self._no_speech(memory, prompt)
        decoded = None
        for temperature in options.temperatures:
            tickets: list[Ticket] = yield self._requests(memory, prompt, temperature)
            decoded = self._best(tickets, no_speech, temperature)
            is_bad = decoded.compression_ratio > options.max_compression or decoded.avg_logprob < options.min_logprob
            is_silent = no_speech > options.no_speech and decoded.avg_logprob < options.min_logprob
            if not is_bad or is_silent:
                break
        assert decoded is not None
        return decoded

    def _requests(self, memory: Tensor, prompt: list[int], temperature: float) -> list[Request]:
        config, options = self.scribe.model.config, self.options
        strategy = Strategy(temperature=temperature, timestamps=self.times)
        room = min(config.max_len // 2, config.max_len - len(prompt) + 1)
        common: dict[str, Any] = dict(source=Memory(memory), prompt=prompt, max_new_tokens=room, eos=self.scribe.end)
        common |= dict(strategy=strategy, scored=True, length_penalty=0.0)
        if temperature:
            return [Request(**common, seed=options.seed + at) for at in range(options.best_of)]
        beams = options.beams
        # As in OpenAI's search: it stops at as many texts as it has beams.
        return [Request(**common, beams=beams, n_best=beams, early_stopping=beams > 1)]

    def _best(self, tickets: Sequence[Ticket], no_speech: float, temperature: float) -> Decoded:
        """The text with the largest mean log-probability of all that were found."""
        for ticket in tickets:
            raise_failure(ticket)
        found = [one for ticket in tickets for one in ticket.hypotheses]  # with length_penalty 0 a score is a sum
        if not found:
            raise InputError("no text was found: no token's score is a number; got NaN logits; look at the weights")
        best = max(found, key=lambda one: one.score / max(1, len(one.tokens)))
        tokens = list(best.tokens)
        text = self.scribe.tokenizer.decode([token for token in tokens if token < self.scribe.end]).strip()
        return Decoded(tokens, text, best.score / (len(tokens) + 1), no_speech, temperature)

    def _segments(self, decoded: Decoded, seek: int, size: int) -> tuple[list[Segment], int, bool]:
        """The segments between pairs of times, the frame at which the next window starts, and whether this one's text is whole.

        Text after the last pair is not complete, so the next window starts there. A single time at the end says that no more
        speech follows: the text is whole.
        """
        tokens, found = decoded.tokens, list[Segment]()
        is_time = [token >= self.first_time for token in tokens]
        cuts = [at for at in range(1, len(tokens)) if is_time[at - 1] and is_time[at]]
        is_whole = is_time[-2:] == [False, True]

        def add(part: list[int], start: int, end: int) -> None:
            text = self.scribe.tokenizer.decode([token for token in part if token < self.scribe.end])
            first, last = ((seek + STEP * at) / FRAMES_A_SECOND for at in (start, end))
            found.append(Segment(seek, first, last, part, text, decoded))

        if not cuts:
            times = [token - self.first_time for token in tokens if token >= self.first_time]
            add(tokens, 0, times[-1] if times and times[-1] else size // STEP)
            return found, seek + size, is_whole
        ends = [*cuts, len(tokens)] if is_whole else cuts
        for first, last in zip([0, *cuts], ends, strict=False):  # without an end, the last is not complete
            part = tokens[first:last]
            add(part, part[0] - self.first_time, part[-1] - self.first_time)
        done = tokens[cuts[-1] - 1] - self.first_time
        return found, seek + (size if is_whole else min(size, STEP * done)), is_whole

    def _add_words(self, memory: Tensor, segments: list[Segment], seek: int, size: int) -> Run[int | None]:
        """Give the segments their words. Returns the frame at which the last one ends, if that is after `seek`."""
        scribe, offset = self.scribe, seek / FRAMES_A_SECOND
        texts = [[token for token in segment.tokens if token < scribe.end] for segment in segments]
        start = [*scribe.start_tokens(), scribe.plain]
        text = [token for each in texts for token in each]
        facts: dict[str, Any] = dict(n_times=size // STEP, end=scribe.end, language=scribe.spoken)
        aligned: list[Word] = yield lambda: align(scribe.model, scribe.tokenizer, memory, start, text, **facts)
        words, median = tidy(aligned)
        at = 0
        for segment, own in zip(segments, texts, strict=True):
            taken, mine = 0, list[Word]()
            while at < len(words) and taken < len(own):
                word = words[at]
                mine.append(Word(word.text, offset + word.start, offset + word.end, word.probability, word.n_tokens))
                taken += word.n_tokens
                at += 1
            segment.words, segment.start, segment.end = place(
                mine, segment.start, segment.end, self.last_speech, median
            )
            if segment.words:
                self.last_speech = segment.end
        spoken = [segment.words[-1].end for segment in segments if segment.words]
        return round(spoken[-1] * FRAMES_A_SECOND) if spoken and spoken[-1] > offset else None
