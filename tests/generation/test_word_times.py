"""Word times: time warping and the median against loops; words, punctuation, and the rules for words that last too long."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.data import Tokenizer
from clearhead.data.tokenizer_formats import read_tiktoken
from clearhead.generation.word_times import (
    Word,
    align,
    alignment_heads,
    median_filter,
    place,
    split_words,
    tidy,
    time_warp,
)


def cheapest(costs: np.ndarray) -> float:
    """The cost of the cheapest path, by the definition."""
    N, S = costs.shape
    total = np.full((N, S), math.inf)
    for i in range(N):
        for j in range(S):
            before = [total[a, b] for a, b in ((i - 1, j - 1), (i - 1, j), (i, j - 1)) if a >= 0 and b >= 0]
            total[i, j] = costs[i, j] + (min(before) if before else 0)
    return float(total[-1, -1])


@pytest.mark.parametrize(("N", "S"), [(1, 1), (1, 7), (7, 1), (5, 13), (13, 5), (11, 17)])
def test_time_warp(N: int, S: int) -> None:
    costs = np.random.default_rng(N).normal(size=(N, S))
    rows, columns = time_warp(costs)
    assert (rows[0], columns[0], rows[-1], columns[-1]) == (0, 0, N - 1, S - 1)
    steps = {*zip(np.diff(rows).tolist(), np.diff(columns).tolist(), strict=True)}
    assert steps <= {(0, 1), (1, 0), (1, 1)}
    assert costs[rows, columns].sum() == pytest.approx(cheapest(costs), abs=1e-5)  # sums are kept in float32


def test_median_filter() -> None:
    x = torch.randn(2, 3, 11)
    mirrored = [*range(3, 0, -1), *range(11), *range(9, 6, -1)]
    expected = torch.stack([x[..., mirrored[at : at + 7]].sort(-1).values[..., 3] for at in range(11)], -1)
    assert torch.equal(median_filter(x), expected)
    assert torch.equal(median_filter(x[..., :3]), x[..., :3])  # too short to be mirrored


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The 256 bytes, and a few words with their spaces."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"th", b" a", b" th", b"e", b" the"]
    unique = list(dict.fromkeys(pieces))
    file: Path = tmp_path_factory.mktemp("ranks") / "x.tiktoken"
    file.write_bytes(b"\n".join(base64.b64encode(piece) + f" {rank}".encode() for rank, piece in enumerate(unique)))
    return read_tiktoken(file)


def test_split_words(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" the café, and 日本!", special=False)
    words = split_words(tokenizer, ids, "en")
    assert [text for text, _ in words] == [" the", " café", ",", " and", " 日本", "!"]
    assert sum(n for _, n in words) == len(ids)
    assert words[0][1] < 4  # " the" is fewer tokens than letters
    spaceless = split_words(tokenizer, tokenizer.encode("日本", special=False), "ja")
    assert spaceless == [("日", 3), ("本", 3)]
    half = split_words(tokenizer, tokenizer.encode("a日", special=False)[:-1], "en")  # a character that is cut
    assert sum(n for _, n in half) == 3


def word(text: str, start: float, end: float, n: int = 1) -> Word:
    return Word(text, start, end, 0.5, n)


def test_punctuation_joins_its_words() -> None:
    words, _ = tidy(
        [word(" “", 0.0, 0.1), word("Ask", 0.1, 0.5), word(",", 0.5, 0.9), word(" not", 0.9, 1.2), word(".", 1.2, 1.3)]
    )
    assert [(each.text, each.start, each.end, each.n_tokens) for each in words] == [
        (" “Ask,", 0.1, 0.5, 3),
        (" not.", 0.9, 1.2, 2),
    ]


def test_long_words_at_the_ends_of_sentences_are_cut() -> None:
    words = [
        word(" a", 0.0, 0.2),
        word(" b", 0.2, 0.4),
        word(".", 0.4, 3.0),
        word(" c", 3.0, 6.0),
        word(" d", 6.0, 6.2),
    ]
    found, median = tidy(words)
    assert median == pytest.approx(0.2)
    assert [each.text for each in found] == [" a", " b.", " c", " d"]
    assert (found[2].start, found[2].end) == (pytest.approx(5.6), 6.0)


def test_words_and_segment_agree() -> None:
    words = [word(" a", 1.0, 4.0), word(" b", 4.0, 4.3)]
    placed, start, end = place(words, 0.5, 9.0, last_speech=0.0, median=0.3)
    assert placed[0].start == pytest.approx(3.4)  # twice the median before its end: it does not last through the pause
    assert (start, end) == (pytest.approx(3.4), 4.3)
    placed, start, end = place(words, 3.9, 4.2, last_speech=3.0, median=1.0)
    assert (placed[0].start, start) == (pytest.approx(3.0), 3.9)  # a second too early: the segment's time is believed
    assert place([], 1.0, 2.0, 0.0, 0.3) == ([], 1.0, 2.0)


def model(**fields: Any) -> ch.EncoderDecoder:
    sizes: dict[str, Any] = dict(n_layers=3, d_model=22, n_heads=2, d_ff=37, max_len=41, max_source_len=29, n_mels=5)
    built = ch.build(ch.preset("whisper-tiny", **sizes, vocab_size=1868))
    assert isinstance(built, ch.EncoderDecoder)
    built.generation = ch.Generation(**fields)
    return built.eval()


def test_alignment_heads() -> None:
    assert alignment_heads(model()) == {1: [0, 1], 2: [0, 1]}
    assert alignment_heads(model(alignment_heads=((2, 1), (0, 0), (2, 0)))) == {2: [1, 0], 0: [0]}
    with pytest.raises(ch.InputError, match=r"not heads of this model; got \(\(3, 0\),\); it has 3 layers of 2"):
        alignment_heads(model(alignment_heads=((3, 0),)))


@torch.no_grad()
def test_align_is_the_equation(tokenizer: Tokenizer) -> None:
    """The same as by the whole attention of one forward, with loops."""
    whisper = model(alignment_heads=((1, 1), (2, 0)))
    for parameter in whisper.parameters():
        parameter.mul_(6 if parameter.ndim > 1 else 1)  # attention that is not uniform
    memory = whisper.encode(torch.randn(1, 5, 58))
    text, end = tokenizer.encode(" the cat", special=False), tokenizer.id("<|endoftext|>")
    start = [tokenizer.id("<|startoftranscript|>"), tokenizer.id("<|notimestamps|>")]
    facts: dict[str, Any] = dict(n_times=23, end=end, language="en")
    found = align(whisper, tokenizer, memory[0], start, text, **facts)
    with ch.probe(whisper, "decoder.blocks.*.cross.scores") as seen:
        logits = whisper.decode(torch.tensor([[*start, *text, end]]), memory)
    maps: list[torch.Tensor] = []
    for layer, head in ((1, 1), (2, 0)):
        weights = seen[f"decoder.blocks.{layer}.cross.scores"][0, head, :, :23].softmax(-1)
        maps.append(median_filter((weights - weights.mean(0)) / weights.std(0, unbiased=False)))
    rows, columns = time_warp(-torch.stack(maps).mean(0)[1:-1].numpy())
    first = [int(columns[(rows == at).argmax()]) for at in range(len(text) + 1)]
    n = [n for _, n in split_words(tokenizer, text, "en")]
    assert [(each.start, each.end) for each in found] == [
        (first[0] / 50, first[n[0]] / 50),
        (first[n[0]] / 50, first[-1] / 50),
    ]
    probs = logits[0, 1:-2, :end].softmax(-1)[range(len(text)), text]
    assert found[1].probability == pytest.approx(float(probs[n[0] :].mean()), abs=1e-5)
    assert align(whisper, tokenizer, memory[0], start, [], **facts) == []
