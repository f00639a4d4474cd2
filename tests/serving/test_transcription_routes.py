"""/v1/audio/transcriptions through OpenAI's own client: every format, times of segments and words, and what is refused."""

from __future__ import annotations

import io
from collections.abc import Generator
from typing import Any

import numpy as np
import openai
import pytest

import clearhead as ch
from clearhead.data.audio import load_audio
from clearhead.generation import Engine
from clearhead.generation.scribe import Scribe, find_tokenizer
from clearhead.generation.transcript_formats import as_srt, as_vtt
from clearhead.generation.transcription import Options, Transcript, run_local, transcribe
from tests.serving.attack_table import make_scribe
from tests.serving.live_server import served


def sound() -> bytes:
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    wave = np.random.default_rng(0).normal(size=16_000) / 8
    soundfile.write(file, wave.astype(np.float32), 16_000, format="WAV", subtype="FLOAT")
    return file.getvalue()


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Generator[tuple[openai.OpenAI, Scribe]]:
    place = make_scribe(tmp_path_factory.mktemp("models"))
    model = ch.load(place)
    assert isinstance(model, ch.EncoderDecoder)
    scribe = Scribe(model, find_tokenizer(place, model.config.vocab_size), None, "transcribe")
    with (
        served(str(place)) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, scribe


WARM = 0.4  # one temperature: the text of random weights is bad at any, and all would be tried


def expected(scribe: Scribe, **options: Any) -> Transcript:
    engine = Engine(scribe.model, max_tokens=20_000, max_rows=8)
    return run_local(
        engine, transcribe(scribe, load_audio(io.BytesIO(sound())), Options(temperatures=(WARM,), **options))
    )


@pytest.mark.slow
def test_formats(setting: tuple[openai.OpenAI, Scribe]) -> None:
    client, scribe = setting

    def ask(form: str, **more: Any) -> Any:
        fields: dict[str, Any] = dict(file=("x.wav", sound()), response_format=form, temperature=WARM, **more)
        return client.audio.transcriptions.create(model="", **fields)

    found = expected(scribe)
    assert ask("json").text == found.text
    assert ask("text") == found.text + "\n"
    assert ask("srt") == as_srt(found)
    assert ask("vtt") == as_vtt(found)
    verbose = ask("verbose_json")
    assert (verbose.text, verbose.language, verbose.duration, verbose.words) == (found.text, "en", 1.0, None)
    assert [(one.start, one.end, one.tokens) for one in verbose.segments] == [
        (one.start, one.end, one.tokens) for one in found.segments
    ]
    timed = expected(scribe, words=True)
    both = ask("verbose_json", timestamp_granularities=["word", "segment"])
    assert len(both.segments) == len(timed.segments)
    assert [(word.word, word.start) for word in both.words] == [
        (word.text.strip(), round(word.start, 3)) for one in timed.segments for word in one.words
    ]
    only = ask("verbose_json", timestamp_granularities=["word"])
    assert (only.segments, only.words) == (None, both.words)
    assert {one.temperature for one in both.segments} == {WARM}
    assert ask("json", prompt="names", language="en").text == expected(scribe, prompt="names").text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            dict(response_format="json", timestamp_granularities=["word"]),
            "for response_format=verbose_json; got 'json'",
        ),
        (dict(response_format="str"), "response_format 'str' is not known; did you mean 'srt'"),
        (dict(response_format="verbose_json", timestamp_granularities=["letter"]), "should be 'word' or 'segment'"),
        (dict(temperature=3), "from 0 to 2"),
        (dict(language="xx"), "knows only English"),
    ],
)
def test_refusals(setting: tuple[openai.OpenAI, Scribe], fields: dict[str, Any], words: str) -> None:
    client, _ = setting
    with pytest.raises(openai.BadRequestError) as error:
        client.audio.transcriptions.create(model="", file=("x.wav", sound()), **fields)
    assert words in str(error.value)
