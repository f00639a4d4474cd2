"""Explanations equal what the library computes itself, and do not change other requests' texts."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import torch

import clearhead as ch
from clearhead.inside import intervene, logit_lens, mean, probe, zero
from clearhead.serving.explanation import MAX_NEW, MAX_TEXTS

SITE = "blocks.1.attention"
# The server reads texts in other parts than one whole pass: only the order of float32 sums differs.
CLOSE = 2e-5


def post(address: str, route: str, **body: Any) -> Any:
    return httpx.post(f"{address}/v1/{route}", json=body, timeout=60).raise_for_status().json()


@pytest.fixture(scope="module")
def gpt(places: dict[str, Path]) -> Any:
    return ch.load(places["gpt"]).eval()


@pytest.fixture(scope="module")
def tokenizer(places: dict[str, Path]) -> ch.Tokenizer:
    return ch.load_tokenizer(places["gpt"])


def new_ids(model: Any, prompt: list[int], **options: Any) -> list[int]:
    return ch.generate(model, [prompt], max_new_tokens=9, eos=(), **options)[0]


@torch.no_grad()
def score(model: Any, prompt: list[int], written: list[int]) -> list[float]:
    chances = model(torch.tensor([[*prompt, *written]]))[0].log_softmax(-1)
    return [float(chances[len(prompt) - 1 + at, id]) for at, id in enumerate(written)]


ASK: dict[str, Any] = dict(model="gpt", prompt="the cat sat", max_tokens=9, temperature=0, logit_bias={"1": -100})


def test_attention_and_lens(address: str, gpt: Any, tokenizer: ch.Tokenizer) -> None:
    asked = {"attention": [f"{SITE}.weights", {"site": "blocks.*", "head": [3, 1], "rows": [0, -1, 40]}], "lens": True}
    (choice,) = post(address, "completions", **ASK, explain=asked)["choices"]
    told = choice["explain"]
    prompt = tokenizer.encode("the cat sat")
    written = new_ids(gpt, prompt, logit_bias={1: -100})
    assert choice["text"] == tokenizer.decode([*prompt, *written]).removeprefix("the cat sat")
    assert len(told["tokens"]["written"]) == 9
    tokens, first = torch.tensor([[*prompt, *written]]), len(prompt) - 1
    with probe(gpt, "blocks.*.attention.weights") as seen, torch.no_grad():
        gpt(tokens)
    whole, *some = told["attention"]
    assert [one["site"] for one in some] == ["blocks.0.attention.weights", "blocks.1.attention.weights"]
    for one, heads, rows in ((whole, range(4), range(9)), *((each, (3, 1), (0, 8)) for each in some)):
        assert one["heads"] == list(heads)
        assert one["rows"] == list(rows)
        for told_head, head in zip(one["weights"], heads, strict=True):
            for told_row, row in zip(told_head, rows, strict=True):
                expected = seen[one["site"]][0, head, first + row, : first + row + 1]
                assert told_row == pytest.approx(expected.tolist(), abs=CLOSE)
    lens = logit_lens(gpt, tokens)[:, 0, first:-1].softmax(-1)
    assert [layer["site"] for layer in told["lens"]] == ["embedding", "blocks.0.residual", "blocks.1.residual"]
    for layer, chances in zip(told["lens"], lens, strict=True):
        assert layer["probabilities"] == pytest.approx(chances.amax(-1).tolist(), abs=CLOSE)
        picked = chances[torch.arange(9), torch.tensor(written)]
        assert layer["written"] == pytest.approx(picked.tolist(), abs=CLOSE)
        assert layer["tokens"] == tokenizer.names(chances.argmax(-1).tolist())


@pytest.mark.parametrize("how", ["zero", "mean"])
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_heads_taken_out(address: str, gpt: Any, tokenizer: ch.Tokenizer, how: str, temperature: float) -> None:
    sites = ["blocks.0.attention", SITE]
    asked = {"ablate": [{"site": site, "head": [0, 1, 2, 3], "how": how} for site in sites]}
    body = {**ASK, "temperature": temperature, "seed": 5}
    (choice,) = post(address, "completions", **body, explain=asked)["choices"]
    told = choice["explain"]["ablate"]
    prompt = tokenizer.encode("the cat sat")
    options: dict[str, Any] = dict(seed=5, temperature=temperature, logit_bias={1: -100})
    plain = new_ids(gpt, prompt, **options)
    with probe(gpt, "blocks.*.attention.out") as seen, torch.no_grad():
        gpt(torch.tensor([[*prompt, *plain[:-1]]]))
    outs = [f"{site}.out" for site in sites]
    changes = [
        zero(out, head=[0, 1, 2, 3]) if how == "zero" else mean(out, seen[out], head=[0, 1, 2, 3]) for out in outs
    ]
    with intervene(gpt, *changes):
        other, worth = new_ids(gpt, prompt, **options), score(gpt, prompt, plain)
    assert other != plain  # else the test would show nothing
    assert told["text"] == tokenizer.decode([*prompt, *other]).removeprefix("the cat sat")
    assert told["finish_reason"] == "length"
    assert told["token_logprobs"] == pytest.approx(score(gpt, prompt, plain), abs=CLOSE)
    assert told["ablated_token_logprobs"] == pytest.approx(worth, abs=CLOSE)
    assert told["logprob"] == pytest.approx(sum(told["token_logprobs"]), abs=1e-6)
    assert told["ablated_logprob"] == pytest.approx(sum(worth), abs=9 * CLOSE)


def test_others_are_untouched(address: str) -> None:
    """Texts that are generated while an ablation runs on the same model, between their steps."""
    long = {**ASK, "max_tokens": 120}
    expected = post(address, "completions", **long)["choices"][0]["text"]
    explained = {**ASK, "max_tokens": 60, "explain": {"ablate": [{"site": "blocks.*"}], "lens": True}}
    alone = post(address, "completions", **explained)["choices"][0]["explain"]
    assert alone["ablate"]["text"] != expected[: len(alone["ablate"]["text"])]
    found: list[Any] = []

    def ask(body: dict[str, Any]) -> None:
        found.append(post(address, "completions", **body)["choices"][0])

    threads = [threading.Thread(target=ask, args=(body,)) for body in (long, explained, long, explained, long, long)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    told = [one["explain"]["ablate"] for one in found if "explain" in one]
    assert [one["text"] for one in told] == [alone["ablate"]["text"]] * 2
    assert [one["text"] for one in found if "explain" not in one] == [expected] * 4


def test_in_a_stream_it_comes_last(client: openai.OpenAI) -> None:
    explain = {"attention": [SITE], "ablate": [{"site": SITE, "head": 1}]}
    options: Any = dict(model="gpt", max_tokens=9, seed=3, n=2, extra_body={"explain": explain})
    options["messages"] = [{"role": "user", "content": "hello there"}]
    whole = client.chat.completions.create(**options)
    text, told = ["", ""], dict[int, Any]()
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                told[choice.index] = choice.model_dump()["explain"]
            else:
                assert "explain" not in choice.model_dump()
    for choice in whole.choices:
        assert text[choice.index] == choice.message.content
        expected = choice.model_dump()["explain"]
        assert told[choice.index]["tokens"] == expected["tokens"]
        assert told[choice.index]["ablate"]["text"] == expected["ablate"]["text"]


def test_translations(address: str, places: dict[str, Path]) -> None:
    model: Any = ch.load(places["translator"]).eval()
    tokenizer = ch.load_tokenizer(places["translator"])
    sites = ["decoder.blocks.1.cross", "encoder.blocks.0.attention", "decoder.blocks.0.attention"]
    asked = {"attention": sites, "lens": True, "ablate": [{"site": sites[0], "how": "mean"}]}
    body = dict(model="translator", input="a dog ran", beams=3, n_best=2, max_tokens=6, explain=asked)
    (found,) = post(address, "translate", **body)["data"]
    source = tokenizer.encode("a dog ran")
    assert tokenizer.eos is not None
    source = source if source[-1] == tokenizer.eos else [*source, tokenizer.eos]
    options: dict[str, Any] = dict(beams=3, n_best=2, max_new_tokens=6, return_scores=True)
    expected = ch.translate(model, [source], **options)[0]
    for rank, (one, hypothesis) in enumerate(zip(found["translations"], expected, strict=True)):
        target = torch.tensor([[model.generation.decoder_start, *hypothesis.tokens[:-1]]])
        n, told = target.shape[1], one["explain"]
        with probe(model, "*.weights", f"{sites[0]}.out") as seen, torch.no_grad():
            chances = model(torch.tensor([source]), target)[0].log_softmax(-1)
        for site, each in zip(sites, told["attention"], strict=True):
            weights = seen[f"{site}.weights"][0]
            for head, rows in enumerate(each["weights"]):
                for at, row in enumerate(rows):
                    assert row == pytest.approx(weights[head, at, : len(row)].tolist(), abs=CLOSE)
            assert all(sum(row) == pytest.approx(1, abs=1e-4) for rows in each["weights"] for row in rows)
        assert len(told["attention"][0]["weights"][0]) == n
        assert told["tokens"]["source"][:2] == tokenizer.names(source[:2])
        lens = logit_lens(model, torch.tensor([source]), target)[:, 0].softmax(-1)
        assert told["lens"][-1]["probabilities"] == pytest.approx(lens[-1].amax(-1).tolist(), abs=CLOSE)
        assert len(told["lens"]) == 3
        out = f"{sites[0]}.out"
        with intervene(model, mean(out, seen[out])):
            other = ch.translate(model, [source], **options)[0][rank]
            with torch.no_grad():
                changed = model(torch.tensor([source]), target)[0].log_softmax(-1)
        assert told["ablate"]["text"] == tokenizer.decode(other.tokens)
        ids = torch.tensor(hypothesis.tokens)[:, None]
        assert told["ablate"]["logprob"] == pytest.approx(float(chances.gather(1, ids).sum()), abs=n * CLOSE)
        assert told["ablate"]["ablated_logprob"] == pytest.approx(float(changed.gather(1, ids).sum()), abs=n * CLOSE)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"explain": {"attention": ["blocks.7.attention.weights"]}}, "no site matches 'blocks.7.attention'"),
        ({"explain": {"attention": [{"site": SITE, "head": 4}]}}, "has heads 0 .. 3; got head=4"),
        ({"explain": {"ablate": [{"site": "blocks.0.residual"}]}}, "no site matches 'blocks.0.residual'"),
        ({"explain": {"ablate": [{"site": SITE, "how": "half"}]}}, "'zero' or 'mean'"),
        ({"explain": {"lens": True}, "max_tokens": MAX_NEW + 1}, f"{MAX_NEW} tokens may be written"),
        ({"explain": {"lens": True}, "n": MAX_TEXTS, "prompt": ["a", "b"]}, f"{MAX_TEXTS} texts may be explained"),
        ({"explain": {"attention": ["*"]}, "n": 16, "max_tokens": 200}, "up to .* 1,000,000 may be asked for"),
    ],
)
def test_what_is_too_much_or_not_there(address: str, more: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        said = httpx.post(f"{address}/v1/completions", json={**ASK, **more, "stream": stream}, timeout=60)
        assert said.status_code == 400, said.text
        assert re.search(words, said.json()["error"]["message"]), said.text


def test_texts_that_end_at_once(address: str) -> None:
    """A text without tokens has an empty explanation."""
    body = {
        **ASK,
        "logit_bias": {"1": 1000},
        "explain": {"attention": [SITE], "lens": True, "ablate": [{"site": SITE}]},
    }
    (choice,) = post(address, "completions", **body)["choices"]
    assert choice["text"] == ""
    assert choice["explain"]["tokens"]["written"] == []
    assert set(choice["explain"]) == {"tokens"}


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_scores(
    client: openai.OpenAI, gpt: Any, tokenizer: ch.Tokenizer, max_tokens: int, stream: bool
) -> None:
    """As evaluation tools request a text's probability."""
    prompts = ["the cat sat on the mat", "hello there " * 150]  # more than one strip of tokens
    rows = [tokenizer.encode(prompt) for prompt in prompts]
    options: Any = dict(model="gpt", prompt=rows, max_tokens=max_tokens, echo=True, logprobs=3, temperature=0)
    if stream:
        parts: list[Any] = [[], []]
        for chunk in client.completions.create(**options, stream=True):
            for choice in chunk.choices:
                parts[choice.index].append(choice)
    else:
        parts = [[choice] for choice in client.completions.create(**options).choices]
    for ids, each in zip(rows, parts, strict=True):
        tokens = [name for part in each for name in part.logprobs.tokens]
        scores = [one for part in each for one in part.logprobs.token_logprobs]
        top = [one for part in each for one in part.logprobs.top_logprobs]
        assert "".join(part.text for part in each).startswith(tokenizer.decode(ids))
        assert each[-1].finish_reason == "length"
        assert len(tokens) == len(scores) == len(top) == len(ids) + max_tokens
        assert scores[0] is None
        assert top[0] is None
        with torch.no_grad():
            chances = gpt(torch.tensor([ids]))[0].log_softmax(-1)
        expected = [float(chances[at, id]) for at, id in enumerate(ids[1:])]
        assert scores[1 : len(ids)] == pytest.approx(expected, abs=CLOSE)
        for at, likeliest in enumerate(top[1 : len(ids)]):
            best = chances[at].topk(3).values
            assert max(likeliest.values()) == pytest.approx(float(best[0]), abs=CLOSE)


def test_the_end_is_told_after_an_echo(address: str, gpt: Any, tokenizer: ch.Tokenizer) -> None:
    """Evaluation tools request one token more than they score, and cut it off, whether it is the end token or not."""
    body = {**ASK, "max_tokens": 1, "logit_bias": {str(tokenizer.eos): 1000}, "echo": True, "logprobs": 1}
    (choice,) = post(address, "completions", **body)["choices"]
    ids = tokenizer.encode("the cat sat")
    assert choice["text"] == "the cat sat"
    assert choice["logprobs"]["tokens"][-1] == "</s>"
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 1
    with torch.no_grad():
        expected = gpt(torch.tensor([ids]))[0, -1].log_softmax(-1)[tokenizer.eos]
    assert choice["logprobs"]["token_logprobs"][-1] == pytest.approx(float(expected), abs=CLOSE)


@pytest.mark.slow
def test_nothing_asked(address: str) -> None:
    said = httpx.post(f"{address}/v1/completions", json={**ASK, "max_tokens": 0}, timeout=60)
    assert said.status_code == 400
    assert "max_tokens=0 writes nothing" in said.text
