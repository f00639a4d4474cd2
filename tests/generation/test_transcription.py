"""Transcription: windows that move by timestamps, fallback, prompts, against a plain loop with transformers' logits; formats."""

from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

import clearhead as ch
from clearhead.checkpoint import load
from clearhead.data.audio import HOP, RATE, log_mel, log_mel_of_all
from clearhead.engine.request import Memory, Request, Ticket
from clearhead.generation import Engine
from clearhead.generation.scribe import Scribe, find_tokenizer
from clearhead.generation.transcript_formats import as_dict, as_srt, as_vtt
from clearhead.generation.transcription import (
    Decoded,
    Options,
    Segment,
    Transcript,
    Transcription,
    run_local,
    transcribe,
)
from clearhead.generation.word_times import Word
from clearhead.sampling.beam_search import Hypothesis
from tests.families.compare import saved, tiny

END, START, FIRST = 256, 257, 256 + 2 + 99 + 6
PLAIN, PREVIOUS = FIRST - 1, FIRST - 3
WINDOW = 26  # frames: 0.26 s
PLAINLY = Options(temperatures=(0.0,), no_speech=2.0)  # each window once


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Scribe]:
    folder: Path = tmp_path_factory.mktemp("whisper")
    sizes: dict[str, Any] = dict(d_model=24, encoder_layers=2, decoder_layers=2, max_source_positions=13)
    sizes |= dict(encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=96, decoder_ffn_dim=96)
    sizes |= dict(vocab_size=FIRST + 1501, num_mel_bins=7, max_target_positions=40)
    sizes |= dict(pad_token_id=256, bos_token_id=256, eos_token_id=256, decoder_start_token_id=257)
    theirs = tiny(WhisperForConditionalGeneration, WhisperConfig(**sizes), seed=3)
    theirs.generation_config.suppress_tokens = [5, 7, 100]
    theirs.generation_config.begin_suppress_tokens = [32, 256]
    saved(theirs, folder)
    ranks = [base64.b64encode(bytes([byte])) + b" " + str(byte).encode() for byte in range(256)]
    (folder / "gpt2.tiktoken").write_bytes(b"\n".join(ranks))
    model = load(folder)
    assert isinstance(model, ch.EncoderDecoder)
    return theirs, Scribe(model, find_tokenizer(folder, model.config.vocab_size), None, "transcribe")


def run(scribe: Scribe, sound: torch.Tensor, options: Options) -> Transcript:
    """The transcript. Its progress adds up to the whole sound, and to no more than the last window's step beyond it."""
    engine, moved = Engine(scribe.model, max_tokens=2048, max_rows=8), list[int]()
    found = run_local(engine, transcribe(scribe, sound, options, moved.append))
    assert 0 <= sum(moved) - len(sound) // HOP <= 2
    assert all(step > 0 for step in moved)
    return found


@torch.no_grad()
def loop(theirs: Any, sound: torch.Tensor, *, condition: bool) -> list[tuple[int, list[int]]]:
    """Each window's first frame and tokens, greedily, without a cache: the plainest form of the rules."""
    mel, seek, read, found = log_mel_of_all(sound, 7), 0, list[int](), list[tuple[int, list[int]]]()
    config: Any = SimpleNamespace(no_timestamps_token_id=PLAIN, eos_token_id=END, bos_token_id=END)
    config.max_initial_timestamp_index = 50
    while seek < mel.shape[1]:
        frames = mel[:, seek : seek + WINDOW]
        size = frames.shape[1]
        prompt = [PREVIOUS, *read[-19:], START] if read and condition else [START]
        tokens, rules = list(prompt), WhisperTimeStampLogitsProcessor(config, begin_index=len(prompt))
        while len(tokens) - len(prompt) < min(20, 40 - len(prompt) + 1):
            given = F.pad(frames, (0, WINDOW - size))[None]
            logits = theirs(given, decoder_input_ids=torch.tensor([tokens])).logits[0, -1:]
            logits[:, [5, 7, 100]] = logits[:, END + 1 : FIRST] = logits[:, FIRST + 14 :] = -torch.inf
            token = int(rules(torch.tensor([tokens]), logits).argmax())
            if token == END:
                break
            tokens.append(token)
        text = tokens[len(prompt) :]
        found.append((seek, text))
        late = [token >= FIRST for token in text]
        cuts = [at for at in range(1, len(text)) if late[at] and late[at - 1]]
        if cuts and late[-2:] != [False, True]:
            step, kept = 2 * (text[cuts[-1] - 1] - FIRST), text[: cuts[-1]]
        else:
            step, kept = size, text
        spans = [kept[a:b] for a, b in zip([0, *cuts], [*cuts, len(kept)], strict=True)] if cuts else [kept]
        read += [token for part in spans if not cuts or part[-1:] != part[:1] for token in part if part]
        seek += max(2, step)
    return found


@pytest.mark.parametrize("condition", [True, False])
def test_windows_move_by_timestamps(pair: tuple[Any, Scribe], condition: bool) -> None:
    theirs, scribe = pair
    generator = torch.Generator().manual_seed(5)
    sound = torch.randn(round(1.1 * RATE), generator=generator) / 4
    found = run(scribe, sound, replace(PLAINLY, condition=condition))
    expected = loop(theirs, sound, condition=condition)
    windows = {segment.seek: segment.decoded.tokens for segment in found.segments}
    assert [*windows.items()] == expected
    assert len(expected) > 4
    assert found.duration == 1.1


def test_log_mel_of_all() -> None:
    """The frames of a window's own spectrogram, on one scale; pieces of any size give the same."""
    sound = torch.randn(RATE // 2) / 4
    whole, window = log_mel_of_all(sound, 7), log_mel(sound, 7, seconds=0.8)
    assert whole.shape == (7, 50)
    torch.testing.assert_close(whole, window[:, :50], rtol=0, atol=1e-5)  # sums of 400 products in float32
    assert log_mel_of_all(sound[:100], 7).shape == (7, 0)


def test_log_mel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = torch.randn(RATE // 2) / 4
    whole = log_mel_of_all(sound, 7)
    monkeypatch.setattr("clearhead.data.audio.FRAMES", 7)
    torch.testing.assert_close(log_mel_of_all(sound, 7), whole, rtol=0, atol=1e-6)


def ticket(*tokens: int, score: float) -> Ticket:
    made = Ticket(Request())
    made.hypotheses, made.reason = [Hypothesis(list(tokens), score, True)], "end"
    return made


def decode(scribe: Scribe, answers: list[tuple[float, list[Ticket]]], no_speech: float) -> Decoded:
    """What the fallback decides, given the tickets at each temperature."""
    work = Transcription(scribe, torch.zeros(7, 26), Options())._decode(torch.zeros(13, 24))  # pyright: ignore[reportPrivateUsage]
    asked = next(work)
    assert not isinstance(asked, list)
    result: Any = no_speech
    for temperature, tickets in answers:
        asked = work.send(result)
        assert isinstance(asked, list)
        assert {request.strategy.temperature for request in asked} == {temperature}
        assert len(asked) == (1 if temperature == 0 else 5)
        assert isinstance(asked[0].source, Memory)
        result = tickets
    with pytest.raises(StopIteration) as done:
        work.send(result)
    return done.value.value


def test_fallback(pair: tuple[Any, Scribe]) -> None:
    _, scribe = pair
    good, unlikely = ticket(FIRST, 65, 66, score=-1.0), ticket(FIRST, 67, score=-9.0)
    again = ticket(*[65, 66] * 60, score=-1.0)
    assert decode(scribe, [(0.0, [good])], 0.9).text == "AB"
    found = decode(scribe, [(0.0, [unlikely]), (0.2, [unlikely, good])], 0.1)
    assert (found.temperature, found.text, found.avg_logprob) == (0.2, "AB", -0.25)
    assert decode(scribe, [(0.0, [again]), (0.2, [good])], 0.9).temperature == 0.2  # it repeats itself
    assert decode(scribe, [(0.0, [unlikely])], 0.9).temperature == 0  # silence: no other temperature is tried
    last = [(round(0.2 * at, 1), [unlikely]) for at in range(6)]
    assert decode(scribe, last, 0.1).temperature == 1.0


@pytest.mark.parametrize(
    ("text", "spans", "moved"),
    [
        ("0 a 3 3 b 5", [(0, 3), (3, 5)], 26),  # a single time at the end: no more speech
        ("0 a 3 3 b 5 5", [(0, 3), (3, 5)], 10),
        ("0 a 3 3 b", [(0, 3)], 6),  # b is not complete, and is heard again
        ("0 a 3", [(0, 3)], 26),
        ("0 a", [(0, 13)], 26),
        ("a", [(0, 13)], 26),
        ("", [(0, 13)], 26),
    ],
)
def test_segments(pair: tuple[Any, Scribe], text: str, spans: list[tuple[int, int]], moved: int) -> None:
    _, scribe = pair
    tokens = [FIRST + int(each) if each.isdigit() else ord(each) for each in text.split()]
    job = Transcription(scribe, torch.zeros(7, 126), Options())
    found, at, _ = job._segments(Decoded(tokens, "", 0.0, 0.0, 0.0), 100, 26)  # pyright: ignore[reportPrivateUsage]
    assert [(each.start, each.end) for each in found] == [(1 + a / 50, 1 + b / 50) for a, b in spans]
    assert at == 100 + moved


def test_words_prompts_beams_and_samples(pair: tuple[Any, Scribe]) -> None:
    _, scribe = pair
    sound = torch.randn(RATE // 2, generator=torch.Generator().manual_seed(1)) / 4
    plain = run(scribe, sound, PLAINLY)
    assert run(scribe, sound, replace(PLAINLY, prompt="names")).text != plain.text
    for options in (replace(PLAINLY, beams=3), replace(PLAINLY, temperatures=(0.6,)), replace(PLAINLY, words=True)):
        found = run(scribe, sound, options)
        assert found.segments
        words = [word for segment in found.segments for word in segment.words]
        assert bool(words) == options.words
        for segment in found.segments:
            joined = "".join(word.text for word in segment.words)
            assert joined in ("", segment.text)
    with pytest.raises(ch.InputError, match=r"temperatures are numbers from 0 to 2; got \(3.0,\)"):
        Options(temperatures=(3.0,))
    assert run(scribe, torch.zeros(100), PLAINLY).segments == []  # not one frame


def test_silence_is_skipped(pair: tuple[Any, Scribe]) -> None:
    _, scribe = pair
    found = run(scribe, torch.randn(RATE // 2) / 4, Options(temperatures=(0.0,), no_speech=-1.0, min_logprob=0.0))
    assert (found.text, found.segments) == ("", [])


def test_the_language_of_almost_no_sound(pair: tuple[Any, Scribe], monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a frame of sound has a language, too: that of silence, and not English without a look."""
    _, known = pair
    monkeypatch.setattr("clearhead.generation.scribe.ENGLISH_ONLY", 0)
    scribe = Scribe(known.model, known.tokenizer, None, "transcribe")
    found = run(scribe, torch.zeros(100), PLAINLY)
    expected = Scribe(known.model, known.tokenizer, None, "transcribe")
    expected.find_language(torch.zeros(7, WINDOW))
    assert (found.text, found.segments, found.duration) == ("", [], 0.0)
    assert found.language == expected.spoken != "en"


def test_formats() -> None:
    decoded = Decoded([], "a a", -0.5, 0.1, 0.0)
    segments = [
        Segment(0, 0.0, 1.5, [1], " a --> b", decoded),
        Segment(0, 1.5, 2.0, [], "", decoded),
        Segment(0, 3599.9996, 3723.004, [2], " c", decoded),
    ]
    found = Transcript("a --> b c", "en", 3724.0, segments)
    assert as_srt(found) == "1\n00:00:00,000 --> 00:00:01,500\na -> b\n\n2\n01:00:00,000 --> 01:02:03,004\nc\n\n"
    assert as_vtt(found).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\na -> b\n\n01:00:00.000")
    segments[0].words = [Word(" a", 0.1, 0.2, 0.9), Word(" b", 0.2, 0.3, 0.8)]
    assert as_srt(found).count(" --> ") == 3  # a cue for each word
    fields = as_dict(found, segments=False, words=True)
    assert fields.keys() == {"language", "duration", "text", "words"}
    assert fields["words"][0] == dict(word="a", start=0.1, end=0.2, probability=0.9)


def test_a_memory_of_the_wrong_width(pair: tuple[Any, Scribe]) -> None:
    _, scribe = pair
    with pytest.raises(ch.InputError, match=r"states of shape \(tokens, 24\); got \(13, 23\); use encode"):
        Engine(scribe.model, max_tokens=64).submit(Request(source=Memory(torch.zeros(13, 23))))
