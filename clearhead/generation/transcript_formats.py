"""A transcript as text, subtitles (SubRip, WebVTT) or JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from clearhead.generation.transcription import Segment, Transcript
from clearhead.generation.word_times import Word


def as_text(transcript: Transcript) -> str:
    return transcript.text


def as_srt(transcript: Transcript) -> str:
    """SubRip: numbered cues, a comma before the milliseconds. A transcript with words has a cue for each word."""
    return "".join(
        f"{number}\n{_clock(start, ',')} --> {_clock(end, ',')}\n{text}\n\n"
        for number, (start, end, text) in enumerate(_cues(transcript), 1)
    )


def as_vtt(transcript: Transcript) -> str:
    """WebVTT; as `as_srt`, with a point before the milliseconds."""
    cues = (f"{_clock(start, '.')} --> {_clock(end, '.')}\n{text}\n\n" for start, end, text in _cues(transcript))
    return "WEBVTT\n\n" + "".join(cues)


def as_dict(transcript: Transcript, *, segments: bool = True, words: bool = False) -> dict[str, Any]:
    """What OpenAI's API calls verbose_json. Times are seconds, rounded to milliseconds; the language is its code, such as "en"."""
    found: dict[str, Any] = dict(language=transcript.language, duration=transcript.duration, text=transcript.text)
    if segments:
        found["segments"] = [_segment(number, segment) for number, segment in enumerate(transcript.segments)]
    if words:
        found["words"] = [_word(word) for segment in transcript.segments for word in segment.words]
    return found


FORMATS: dict[str, Callable[[Transcript], str]] = {"txt": as_text, "srt": as_srt, "vtt": as_vtt}


def _segment(number: int, segment: Segment) -> dict[str, Any]:
    decoded = segment.decoded
    return dict(
        id=number,
        seek=segment.seek,
        start=round(segment.start, 3),
        end=round(segment.end, 3),
        text=segment.text,
        tokens=segment.tokens,
        temperature=decoded.temperature,
        avg_logprob=decoded.avg_logprob,
        compression_ratio=decoded.compression_ratio,
        no_speech_prob=decoded.no_speech_prob,
    )


def _word(word: Word) -> dict[str, Any]:
    facts = dict(start=round(word.start, 3), end=round(word.end, 3), probability=word.probability)
    return {"word": word.text.strip(), **facts}


def _cues(transcript: Transcript) -> list[tuple[float, float, str]]:
    cues = [
        (cue.start, cue.end, cue.text.strip().replace("-->", "->"))  # the arrow is the format's own
        for segment in transcript.segments
        for cue in (segment.words or [segment])
    ]
    return [cue for cue in cues if cue[2]]


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
