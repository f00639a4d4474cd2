"""Logits processors and strategies against those of transformers and naive loops; and the distribution of samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import clearhead as ch
from clearhead.errors import InputError
from clearhead.models import EncoderDecoder
from clearhead.sampling import strategy
from clearhead.sampling.logits_processors import (
    LogitsProcessor,
    bias_vector,
    forbid_ngrams,
    force_token,
    penalise_counts,
    penalise_repetition,
)
from clearhead.sampling.strategy import Strategy, keep_min_p, keep_top_k, keep_top_p, sample

ABSENT = -1


def drawn_logits(seed: int, *, batch: int = 5, vocab_size: int = 53) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Of four numbers some are equal now and then, and all of a float's fractions are exact: ties are tested too.
    return torch.randint(-24, 25, (batch, vocab_size), generator=generator) / 8


def test_in_place_says_the_same() -> None:
    model = ch.build(ch.preset("opus-mt-en-de", n_layers=1, d_model=8, n_heads=2, d_ff=8, vocab_size=53))
    assert isinstance(model, EncoderDecoder)
    model.generation = ch.Generation(decoder_start=52, eos=(0,), forced_eos=0, suppress=(52,))
    processor, logits = LogitsProcessor(model, None, Strategy(logit_bias={3: 2.0})), drawn_logits(1)
    before, steps = logits.clone(), torch.tensor([0, 1, 2, 3, 4])
    processed = processor(logits, None, torch.ones(5, dtype=torch.int64), steps, torch.full((5,), 5))
    assert torch.equal(logits, before)
    again = processor(logits, None, torch.ones(5, dtype=torch.int64), steps, torch.full((5,), 5), in_place=True)
    assert torch.equal(processed, again)
    assert processed[4].argmax() == 0  # the last of five tokens is the end
    assert torch.equal(processed[:4, 3], before[:4, 3] + 2.0)


@pytest.mark.parametrize("field", ["suppress", "begin_suppress"])
@pytest.mark.parametrize("id", [-1, 53])
def test_a_checkpoints_rules_are_about_its_vocabulary(field: str, id: int) -> None:
    model = ch.build(ch.preset("gpt2", n_layers=1, d_model=8, n_heads=2, vocab_size=53, max_len=8))
    model.generation = ch.Generation(**{field: (id,)})  # type: ignore[arg-type]
    with pytest.raises(InputError, match=rf"suppress or begin_suppress holds ids from {id} to {id}; .* 0 \.\. 52"):
        LogitsProcessor(model, None, Strategy())


@given(seed=st.integers(0, 99), k=st.integers(1, 60))
@settings(max_examples=20)
def test_top_k(seed: int, k: int) -> None:
    logits = drawn_logits(seed)
    assert torch.equal(keep_top_k(logits, k), TopKLogitsWarper(k)(None, logits))


@given(seed=st.integers(0, 99), p=st.floats(0.01, 0.999))
@settings(max_examples=30)
def test_top_p(seed: int, p: float) -> None:
    """Without ties: of two equal tokens either may stay."""
    logits = torch.randn(5, 53, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    assert torch.equal(keep_top_p(logits, p), TopPLogitsWarper(p)(None, logits))


def test_top_p_keeps_as_few_as_reach_it() -> None:
    logits = torch.tensor([[0.5, 0.1, 0.25, 0.15]]).log()
    for p, kept in [(1e-9, [0]), (0.49, [0]), (0.51, [0, 2]), (0.74, [0, 2]), (0.76, [0, 2, 3]), (0.91, [0, 1, 2, 3])]:
        assert keep_top_p(logits, p).isfinite().nonzero()[:, 1].tolist() == kept


def test_top_p_of_a_large_vocabulary_needs_no_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as by sorting all, for peaked and flat rows, ties at the border, few tokens left, and all mixed."""
    generator = torch.Generator().manual_seed(0)
    peaked, flat = (torch.randn(3, 5003, generator=generator) * by for by in (4, 0.1))
    tied = peaked.round()
    few = peaked.masked_fill(torch.arange(5003) % 1000 > 0, -torch.inf)
    for logits in (peaked, flat, tied, few, torch.cat([peaked, flat, tied, few])):
        for p in (0.01, 0.5, 0.9, 0.95, 0.999):
            found = keep_top_p(logits, p)
            with monkeypatch.context() as patch:
                patch.setattr(strategy, "LIKELY", ())
                assert torch.equal(found, keep_top_p(logits, p))
            assert torch.equal(found[1:2], keep_top_p(logits[1:2], p)), "alone as in the batch"


@given(seed=st.integers(0, 99), p=st.floats(0.0, 1.0))
@settings(max_examples=20)
def test_min_p(seed: int, p: float) -> None:
    logits = drawn_logits(seed)
    assert torch.equal(keep_min_p(logits, p), MinPLogitsWarper(p)(None, logits))


def histories(seed: int) -> list[list[int]]:
    """Few kinds of tokens, so that they repeat; rows of many lengths, one of them empty."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 5, (n,), generator=generator).tolist() for n in (13, 0, 1, 7, 2)]


def padded(rows: list[list[int]]) -> Tensor:
    return torch.tensor([row + [ABSENT] * (13 - len(row)) for row in rows])


@given(seed=st.integers(0, 99), n=st.integers(1, 4), penalty=st.sampled_from([0.5, 1.25, 2.0]))
@settings(max_examples=20)
def test_repetition(seed: int, n: int, penalty: float) -> None:
    """Each row with its own history, as theirs with that row alone."""
    logits, rows = drawn_logits(seed), histories(seed)
    fewer, none = penalise_repetition(logits, padded(rows), penalty), forbid_ngrams(logits, padded(rows), n)
    for row, history in enumerate(rows):
        ids, one = torch.tensor([history], dtype=torch.long), logits[row : row + 1]
        assert torch.equal(fewer[row], RepetitionPenaltyLogitsProcessor(penalty)(ids, one)[0])
        if n > 1:  # theirs forbids single tokens only from the second on
            assert torch.equal(none[row], NoRepeatNGramLogitsProcessor(n)(ids, one)[0])
        else:
            assert {*none[row].isinf().nonzero()[:, 0].tolist()} == {*history}


def test_counts() -> None:
    logits, rows = drawn_logits(0), histories(0)
    found = penalise_counts(logits, padded(rows), 0.5, 0.25)
    for row, written in enumerate(rows):
        for token in range(53):
            lost = 0.5 * (token in written) + 0.25 * written.count(token)
            assert float(found[row, token]) == float(logits[row, token]) - lost


def test_offsets_and_force() -> None:
    logits, some = drawn_logits(0), torch.tensor([True, False, False, True, False])
    made = bias_vector({3: 1.5, 7: -math.inf}, 53, logits.device)
    assert {at: float(made[at]) for at in made.nonzero()[:, 0].tolist()} == {3: 1.5, 7: -math.inf}
    forced = force_token(logits, 7, some)
    assert torch.equal(forced[~some], logits[~some])
    assert forced[some].log_softmax(-1).argmax(-1).tolist() == [7, 7]
    assert torch.equal(force_token(logits, 7, torch.zeros_like(some)), logits)


@pytest.mark.parametrize("kept", [0, 1, 7, 249, 250, 1000])
def test_noise_for_the_possible_alone_draws_the_same(kept: int) -> None:
    """Where few tokens are left, others get no noise; where they are as good as impossible, all get it."""
    generator = torch.Generator().manual_seed(kept)
    logits = torch.randn(40, 1000, generator=generator)
    order = torch.rand(40, 1000, generator=generator).argsort(-1)
    seeds, steps = torch.arange(40) - 20, torch.arange(40) * 3
    impossible = logits.masked_fill(order >= kept, -torch.inf)
    drawn = sample(impossible, seeds, steps)
    if kept:
        assert torch.equal(drawn, sample(impossible.clamp(min=-1e30), seeds, steps))
    assert torch.equal(
        drawn, torch.cat([sample(impossible[i : i + 1], seeds[i : i + 1], steps[i : i + 1]) for i in range(40)])
    )


@pytest.mark.parametrize("over", ["seeds", "steps"])
def test_drawn_as_often_as_likely(over: str) -> None:
    """20,000 draws of 11 tokens, over seeds at one step or over steps of one seed: chi-square with 9 degrees of freedom
    (one token is forbidden) stays below 27.9, which chance passes once in a thousand times."""
    probs = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.08, 0.06, 0.05, 0.03, 0.02, 0.01, 0.0], dtype=torch.float64)
    many, same = torch.arange(20_000), torch.full((20_000,), 5)
    drawn = sample(probs.log().expand(20_000, -1), *((many, same) if over == "seeds" else (same, many)))
    counts, expected = drawn.bincount(minlength=11), 20_000 * probs
    assert counts[10] == 0
    assert float(((counts - expected)[:10] ** 2 / expected[:10]).sum()) < 27.9
    # and one draw says nothing about the next: pairs of neighbours are as likely as their product
    pairs = (drawn[:-1] * 11 + drawn[1:]).bincount(minlength=121).unflatten(0, (11, 11))[:5, :5]
    product = 19_999 * probs[:5, None] * probs[:5]
    assert float(((pairs - product) ** 2 / product).sum()) < 52.6  # 25 degrees of freedom, once in a thousand


def test_noise_is_gumbels() -> None:
    """Tokens of one row get unrelated noise: with 2,003 as likely tokens, 4,001 draws have the mean and spread of a die."""
    drawn = sample(
        torch.zeros(4_001, 2_003), torch.arange(4_001) - 2_000, torch.zeros(4_001, dtype=torch.long)
    ).double()
    spread = 2_003 / math.sqrt(12)
    assert abs(float(drawn.mean()) - 1_001) < 3.3 * spread / math.sqrt(4_001)  # once in a thousand
    assert float(drawn.std()) == pytest.approx(spread, rel=0.03)


def test_a_rows_draw_is_its_own() -> None:
    logits, seeds, steps = drawn_logits(1), torch.tensor([5, -3, 2**62, 0, 5]), torch.tensor([0, 3, 1, 2, 0])
    whole = sample(logits, seeds, steps)
    for row in range(5):
        assert sample(logits[row : row + 1], seeds[row : row + 1], steps[row : row + 1]) == whole[row]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(top_p=7), "top_p must be above 0 and at most 1; got 7; 1 is off, 0.95 is usual"),
        (dict(top_p=0), "top_p must be above 0 and at most 1; got 0"),
        (dict(top_p="0.9"), "top_p is a number; got '0.9'"),
        (dict(temperature=-1), "temperature must be 0 or more; got -1; 0 is greedy"),
        (dict(temperature=1e-45), "a temperature above 0 is at least 1e-06; got 1e-45; 0 is greedy"),
        (dict(temperature=math.inf), "temperature must be 0 or more; got inf"),
        (dict(temperature=math.nan), "temperature must be 0 or more; got nan"),
        (dict(temperature=True), "temperature is a number; got True"),
        (dict(top_k=-1), "top_k must be 0 or more; got -1; 0 is off, 50 is usual"),
        (dict(top_k=2.5), "top_k is a whole number; got 2.5"),
        (dict(min_p=1.5), "min_p must be 0 or more and at most 1; got 1.5"),
        (dict(repetition_penalty=0), "repetition_penalty must be above 0; got 0; 1 is off"),
        (dict(presence_penalty=math.nan), "presence_penalty must be -100 or more and at most 100; got nan"),
        (dict(frequency_penalty=101), "frequency_penalty must be -100 or more and at most 100; got 101"),
        (dict(no_repeat_ngram=-1), "no_repeat_ngram must be 0 or more; got -1"),
        (dict(min_new_tokens=-1), "min_new_tokens must be 0 or more; got -1; 0 is off"),
        (dict(logit_bias={5: math.inf}), "a logit_bias is a number, or -inf; got {5: inf}; 5 makes a token likely"),
        (dict(logit_bias={5: "1"}), "a logit_bias is a number, or -inf; got {5: '1'}"),
        (dict(temprature=1.0), "there is no option 'temprature' .value 1.0.; did you mean 'temperature'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        Strategy.of(options)


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.5}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}]
)
def test_each_penalty_alone_needs_the_text_so_far(options: dict[str, float]) -> None:
    model = ch.build(ch.preset("gpt2", n_layers=1, d_model=12, n_heads=3, d_ff=20, vocab_size=31, max_len=17))
    processor = LogitsProcessor(model, (), Strategy(**options))
    assert processor.needs_history
    assert not processor.is_identity
    assert LogitsProcessor(model, (), Strategy()).is_identity
