"""Beam search: ids and scores of transformers, and for each source the text that it gets alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from clearhead.config import Generation
from clearhead.errors import InputError
from clearhead.generation import Hypothesis, generate, translate
from clearhead.models import EncoderDecoder
from tests.generation.models import ENDS, TRANSLATORS, cut, pair, texts
from tests.models.tiny import tiny

# Options of ours, and the same in theirs.
SEARCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": (dict(beams=1), {}),
    "plain": (dict(beams=3), {}),
    "early": (dict(beams=4, length_penalty=0.6, early_stopping=True), dict(length_penalty=0.6, early_stopping=True)),
    "never": (
        dict(beams=3, length_penalty=0.5, early_stopping="never"),
        dict(length_penalty=0.5, early_stopping="never"),
    ),
    "short": (dict(beams=2, length_penalty=-1.0), dict(length_penalty=-1.0)),
    "options": (
        dict(beams=3, min_new_tokens=4, no_repeat_ngram=2, repetition_penalty=1.3, suppress=[5], logit_bias={7: 1.0}),
        dict(min_new_tokens=4, no_repeat_ngram_size=2, repetition_penalty=1.3, suppress_tokens=[5]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", SEARCHES)
@pytest.mark.parametrize("name", TRANSLATORS)
def test_as_transformers(name: str, option: str) -> None:
    """All beams of all sources, of several models; ours in one batch, theirs one by one."""
    our_options, their_options = SEARCHES[option]
    beams, lengths = our_options["beams"], set[int]()
    if option == "options":
        their_options = dict(their_options, sequence_bias=[[[7], 1.0]])
    for seed in range(4):
        theirs, ours = pair(name, seed)
        sources = texts(5, seed=seed)
        found = translate(ours, sources, max_new_tokens=11, n_best=beams, return_scores=True, **our_options)
        for source, hypotheses in zip(sources, found, strict=True):
            asked = dict(max_new_tokens=11, num_beams=beams, num_return_sequences=beams, do_sample=False)
            asked |= dict(return_dict_in_generate=True, output_scores=True)
            told = theirs.generate(torch.tensor([source]), **asked, **their_options)
            assert [one.tokens for one in hypotheses] == [cut(row[1:]) for row in told.sequences]
            if beams > 1:  # fp32: sums in another order
                assert [one.score for one in hypotheses] == pytest.approx(told.sequences_scores.tolist(), rel=1e-5)
            lengths |= {len(one.tokens) for one in hypotheses}
    assert len(lengths) > 1  # some ended early, and not all alike


def test_forced_tokens_as_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair("marian")
    monkeypatch.setattr(ours, "generation", replace(ours.generation, forced_bos=5))
    for beams in (1, 3):
        for source, text in zip(texts(3), translate(ours, texts(3), beams=beams, max_new_tokens=7), strict=True):
            told = dict(num_beams=beams, do_sample=False, forced_bos_token_id=5)
            assert text == cut(theirs.generate(torch.tensor([source]), max_new_tokens=7, **told)[0, 1:])
            assert text[0] == 5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "beams"), [("t5", 3), ("original", 1), ("original", 3)])
def test_batched_is_single(name: str, beams: int) -> None:
    """In one batch, in several, and one by one, in any order; each source with its own limit."""
    model, sources = translator(name), texts(7, high=17)
    options: dict[str, Any] = dict(beams=beams, n_best=beams, return_scores=True, eos=ENDS)
    alone = [translate(model, [source], **options)[0] for source in sources]
    for budget in (16_384, 400):
        assert_same(translate(model, sources, batch_tokens=budget, **options), alone)
    assert_same(translate(model, sources[::-1], **options), alone[::-1])
    assert len({len(one.tokens) for hypotheses in alone for one in hypotheses}) > 2


def assert_same(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    for some, others in zip(found, expected, strict=True):
        assert [(one.tokens, one.finished) for one in some] == [(one.tokens, one.finished) for one in others]
        # float64: a sum over a larger batch may be in another order
        assert [one.score for one in some] == pytest.approx([one.score for one in others], abs=1e-9)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["t5", "original"])
def test_scores_are_of_the_whole_text(name: str) -> None:
    """Cached = uncached: one forward pass over the text gives the log-probabilities that the search added up."""
    model, penalty = translator(name), 0.7
    for source, hypotheses in zip(
        texts(5),
        translate(model, texts(5), beams=3, n_best=3, length_penalty=penalty, eos=3, return_scores=True),
        strict=True,
    ):
        assert [one.score for one in hypotheses] == sorted((one.score for one in hypotheses), reverse=True)
        for one in hypotheses:
            text = [*one.tokens, *([3] if one.finished else [])]
            logits = model(torch.tensor([source]), torch.tensor([[1, *text[:-1]]]))[0]
            total = logits.log_softmax(-1)[range(len(text)), text].sum()
            assert one.score == pytest.approx(float(total) / len(text) ** penalty, abs=1e-9)


@torch.no_grad()
def test_as_many_beams_as_texts_find_the_best() -> None:
    """Texts of at most two tokens from a vocabulary of 11, all of them tried by hand."""
    model = translator("original", vocab_size=11)
    for source in ([5, 3], [7], [2, 9, 4]):
        found = translate(
            model, [source], beams=10, n_best=5, eos=3, max_new_tokens=2, early_stopping="never", return_scores=True
        )
        first = model(torch.tensor([source]), torch.tensor([[1]]))[0, -1].log_softmax(-1)
        every: dict[tuple[int, ...], float] = {(): float(first[3])}
        for token in set(range(11)) - {3}:
            after = model(torch.tensor([source]), torch.tensor([[1, token]]))[0, -1].log_softmax(-1)
            for last in range(11):
                every[(token,) if last == 3 else (token, last)] = float(first[token] + after[last]) / 2
        best = sorted(every, key=lambda text: -every[text])[:5]
        assert [tuple(one.tokens) for one in found[0]] == best
        assert [one.score for one in found[0]] == pytest.approx([every[text] for text in best], abs=1e-9)


def translator(name: str, **changes: Any) -> EncoderDecoder:
    model: Any = tiny(name, **changes)
    model.generation = Generation(decoder_start=1)
    return model


@pytest.mark.slow
def test_limits() -> None:
    """Two tokens a token of the source and 20, at most the model's max_len; and beams=1 needs no more than that."""
    model = translator("original", max_len=31)
    assert [len(text) for text in translate(model, [[5] * 3, [5] * 17], eos=())] == [26, 31]
    assert translate(model, []) == []
    best = translate(model, texts(3), eos=ENDS)
    assert best == [one[0].tokens for one in translate(model, texts(3), eos=ENDS, n_best=2, return_scores=True)]


def test_what_is_done_leaves_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source with a long text costs its own beams only."""
    model, sizes = translator("original"), list[int]()
    real = model.states
    monkeypatch.setattr(model, "states", lambda *args, **more: sizes.append(len(args[0])) or real(*args, **more))
    found = translate(model, texts(13), beams=2, eos=ENDS, early_stopping=True)
    assert len({len(text) for text in found}) > 2
    assert sizes[:2] == [13, 26]  # one row a source, then one a beam
    assert sizes[-1] < 13
    assert sum(sizes) < 0.95 * 26 * len(sizes)


def test_a_model_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = translator("original")
    monkeypatch.setattr(model, "generation", Generation(decoder_start=1, suppress=tuple(range(53))))
    with pytest.raises(
        InputError, match="source 0 has no text: no token's score is a number; got NaN logits, or every"
    ):
        translate(model, [[5]])


def test_two_vocabularies_and_narrow_numbers() -> None:
    """Source ids may be beyond the target's vocabulary; bfloat16 logits are scored in float32."""
    model = translator("original", source_vocab_size=97, dtype=torch.bfloat16)
    (found,) = translate(model, [[90, 61]], beams=2, max_new_tokens=5, return_scores=True)
    assert math.isfinite(found[0].score)
    assert len(found[0].tokens) == 5


@pytest.mark.parametrize(
    ("sources", "options", "words"),
    [
        ([[5], []], {}, "source 1 must have 1 to max_source_len=31 tokens; got 0; give at least one"),
        ([[5] * 40], {}, "source 0 must have 1 to max_source_len=31 tokens; got 40; shorten or split it"),
        ([[5, 53]], {}, r"source 0 holds ids from 5 to 53; the vocabulary has 0 \.\. 52"),
        (["text"], {}, "sources are a list of lists of ids; got source 0 = 'text'; encode text"),
        ([[5]], dict(max_new_tokens=32), "max_new_tokens=32 is more than the model's max_len=31; lower it"),
        ([[5]], dict(max_new_tokens=0), "max_new_tokens is a whole number of at least 1; got 0"),
        ([[5]], dict(beams=0), "beams is a whole number of at least 1; got 0; raise it"),
        ([[5]], dict(beams=53), "53 beams need as many tokens to go on with; got vocab_size=53; take fewer"),
        (
            [[5]],
            dict(n_best=5, return_scores=True),
            "as many texts as it has beams.*got n_best=5, beams=4, return_scores=True; change",
        ),
        ([[5]], dict(n_best=2), "tells with return_scores=True; got n_best=2, beams=4, return_scores=False"),
        ([[5]], dict(length_penalty=math.inf), "length_penalty must be finite; got inf; 1 is the mean"),
        (
            [[5]],
            dict(early_stopping="always"),
            "early_stopping is True, False or 'never'; got 'always'; False is usual",
        ),
        (
            [[5]],
            dict(temperature=0.5),
            "beam search takes the likeliest and draws nothing; got temperature=0.5; leave it",
        ),
        ([[5]], dict(suppress=[53]), "logit_bias or suppress holds ids from 53 to 53"),
        ([[5]], dict(beam=3), "there is no option 'beam'"),
        ([[5]], dict(eos=99), "eos holds ids from 99 to 99"),
        ([[5]], dict(batch_tokens=0), "batch_tokens is a whole number of at least 1; got 0"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_input(sources: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        translate(translator("original"), sources, **dict(eos=3) | options)


@pytest.mark.usefixtures("unchecked")
def test_other_models() -> None:
    gpt2: Any = tiny("gpt2")
    with pytest.raises(
        InputError,
        match=r"takes a model of shape='encoder-decoder' over tokens; got shape='decoder', .*generate is for decoders",
    ):
        translate(gpt2, [[5]])
    whisper: Any = tiny("whisper")
    with pytest.raises(InputError, match=r"over tokens; got shape='encoder-decoder', inputs='frames'"):
        translate(whisper, [[5]])
    bert: Any = tiny("bert")
    with pytest.raises(InputError, match=r"shape='decoder' over tokens; got shape='encoder'"):
        generate(bert, [[5]])
    original: Any = tiny("original")
    with pytest.raises(InputError, match=r"does not say which token a text starts with.*set model\.generation"):
        translate(original, [[5]])
