"""A server that drafts, by prompt lookup or with a smaller model: the same texts, in fewer steps."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

import clearhead as ch
from clearhead.cli.serve import load_workers, run
from clearhead.errors import InputError
from tests.serving.live_server import served

ASKED: list[dict[str, Any]] = [
    dict(prompt="the cat sat on the mat the cat sat", temperature=0, seed=1),
    dict(prompt="a dog ran over the hill", temperature=0.9, seed=2, top_p=0.9),
    dict(prompt="hello there, how are you?", temperature=0.2, seed=3, n=2, logprobs=1),
]
ROOM = 60


def texts_and_steps(url: str) -> tuple[list[Any], int]:
    """The answers to ASKED one by one, and how many steps they took; then all at once, which must be the same."""

    def ask(body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{url}/v1/completions", json=dict(model="gpt", max_tokens=ROOM, **body), timeout=120)
        assert answer.status_code == 200, answer.text
        return [(one["text"], one["finish_reason"]) for one in answer.json()["choices"]]

    alone = [ask(body) for body in ASKED]
    found = re.search(r'clearhead_steps\{model="gpt"\} ([\d.]+)', httpx.get(f"{url}/metrics").text)
    assert found is not None
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, ASKED * 4)) == alone * 4
    return alone, int(float(found[1]))


@pytest.mark.slow
def test_a_server_that_drafts_writes_the_same_in_fewer_steps(places: dict[str, Path], tmp_path: Path) -> None:
    ch.save(ch.load(places["gpt"]), tmp_path / "small")
    ch.load_tokenizer(places["gpt"]).save(tmp_path / "small")
    with served(str(places["gpt"])) as (url, _):
        texts, plain = texts_and_steps(url)
    ways = (["--lookup"], ["--draft", str(tmp_path / "small"), "--draft-quantize", "int8"])
    for way in (*ways, [*ways[0], "--front-ends", "2"]):
        with served(str(places["gpt"]), *way) as (url, _):
            drafted, steps = texts_and_steps(url)
        assert drafted == texts, way
        assert steps < 0.8 * plain, way


def test_a_text_too_long_for_the_draft_model_is_written_without(places: dict[str, Path], tmp_path: Path) -> None:
    small = ch.build(replace(ch.load(places["gpt"]).config, max_len=32))
    ch.save(small, tmp_path / "small")
    ch.load_tokenizer(places["gpt"]).save(tmp_path / "small")
    with served(str(places["gpt"]), "--draft", str(tmp_path / "small")) as (url, _):
        body = dict(model="gpt", prompt="the cat", max_tokens=100, temperature=0)
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["usage"]["completion_tokens"] == 100


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(lookup=True, draft="gpt"), "--lookup and --draft both draft; got --draft 'gpt'"),
        (dict(draft_quantize="int8"), "--draft-quantize int8 is for the model of --draft, and there is none"),
        (dict(lookup=True, max_texts=1), "drafts need rows of their own; got --max-texts 1"),
    ],
)
def test_refused_before_loading(options: dict[str, Any], words: str, places: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=words):
        run([str(places["gpt"])], port=0, device="cpu", **options)


def test_refused_models(places: dict[str, Path]) -> None:
    gpt, encoder = str(places["gpt"]), str(places["encoder"])
    options: dict[str, Any] = dict(device="cpu", quantize=None, max_tokens=None, max_rows=8)
    with pytest.raises(InputError, match=r"--draft .*gpt' drafts for one model; got gpt, encoder"):
        load_workers([gpt, encoder], draft=(gpt, None), **options)
    with pytest.raises(InputError, match=r"--draft takes a decoder; .*encoder' has shape='encoder'"):
        load_workers([gpt], draft=(encoder, None), **options)
    with pytest.raises(InputError, match="--lookup is for decoders; got encoder"):
        load_workers([encoder], lookup=True, **options)
