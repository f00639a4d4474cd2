"""When a search is over, and what it keeps: on scores written by hand."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.config import Generation
from clearhead.errors import InputError
from clearhead.sampling.beam_search import Beams, BeamSearchParams, Candidate
from clearhead.sampling.logits_processors import LogitsProcessor
from clearhead.sampling.strategy import Strategy
from tests.models.tiny import tiny

END = 0


@functools.cache
def processor() -> LogitsProcessor:
    model = tiny("gpt2", vocab_size=11)
    model.generation = Generation()
    return LogitsProcessor(model, END, Strategy())


def search(*, n: int = 1, limit: int = 20, trace: bool = False, **options: Any) -> Beams:
    """n requests of two beams, which may write `limit` tokens."""
    fields = {"beams": 2, "length_penalty": 1.0, "early_stopping": False, **options}
    params = BeamSearchParams(**fields, processor=processor())
    return Beams(params, [[5]] * n, [limit] * n, torch.float64, [[] if trace else None for _ in range(n)])


def step(beams: Beams, *candidates: tuple[int, int, float]) -> tuple[list[int], list[int]]:
    """One step of a single request, with candidates of (token, parent, score), best first."""
    tokens, parents, scores = (np.array([column]) for column in zip(*candidates, strict=True))
    tokens, parents = beams.advance(slice(None), scores, tokens, parents)
    return tokens[0].tolist(), parents[0].tolist()


# Two texts of one token end with scores -1.0 and -1.1; the best running beam has -1.5.
TWO_END = ((END, 0, -1.0), (END, 1, -1.1), (3, 0, -1.5), (4, 0, -2.0))


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "goes_on"),
    [
        (True, 1.0, False),  # enough texts
        (False, 1.0, False),  # -1.5 / 1 < -1.1: at its present length it does not win
        ("never", 1.0, True),  # -1.5 / 20 > -1.1: at its greatest length it may
        ("never", 0.5, True),
        ("never", 0.0, False),  # a length does not count
        ("never", -1.0, False),  # length only harms: the present one is the best
    ],
)
def test_when_it_stops(early_stopping: Any, length_penalty: float, goes_on: bool) -> None:
    beams = search(early_stopping=early_stopping, length_penalty=length_penalty)
    assert step(beams, *TWO_END) == ([3, 4], [0, 0])
    assert beams.is_open.tolist() == [goes_on]
    assert [one.tokens for one in beams.finished[0]] == [[], []]


def test_one_finished_text_never_stops_it() -> None:
    for early_stopping in (True, False, "never"):
        beams = search(early_stopping=early_stopping)
        step(beams, (END, 0, -0.1), (3, 0, -9.0), (4, 0, -9.5), (6, 0, -9.9))
        assert beams.is_open.all()


def test_a_beam_as_good_as_the_worst_text_does_not_go_on() -> None:
    beams = search()
    step(beams, (END, 0, -1.0), (END, 1, -1.1), (3, 0, -1.1), (4, 0, -2.0))
    assert not beams.is_open.any()
    beams = search()
    step(beams, (END, 0, -1.0), (END, 1, -1.1), (3, 0, -1.09), (4, 0, -2.0))
    assert beams.is_open.all()


def test_only_the_best_k_candidates_may_end_a_text() -> None:
    beams = search()
    step(beams, (3, 0, -1.0), (4, 0, -1.1), (END, 0, -1.2), (END, 1, -1.3))
    assert beams.finished == [[]]
    assert beams.scores.tolist() == [[-1.0, -1.1]]


def test_the_limit_ends_all() -> None:
    """The last token is part of a text that did not end by itself; a running score has no text any more."""
    beams = search(limit=2)
    step(beams, (3, 0, -1.0), (4, 0, -1.1), (6, 0, -1.2), (7, 0, -1.3))
    assert beams.is_open.all()
    step(beams, (7, 1, -1.4), (END, 0, -1.5), (8, 0, -1.6), (9, 1, -1.7))
    assert not beams.is_open.any()
    assert [(one.tokens, one.score, one.finished) for one in beams.finished[0]] == [
        ([4, 7], -0.7, False),
        ([3], -0.75, True),
    ]
    assert beams.scores.tolist() == [[-math.inf, -math.inf]]


def test_scores_of_finished_texts() -> None:
    """Divided by their length with the end, to the power of the penalty; a better one replaces the worst."""
    beams = search(length_penalty=2.0, early_stopping="never")
    step(beams, *TWO_END)
    assert [one.score for one in beams.finished[0]] == [-1.0, -1.1]
    step(beams, (END, 0, -2.0), (3, 0, -2.1), (4, 1, -2.2), (6, 1, -2.3))
    assert [(one.tokens, one.score) for one in beams.finished[0]] == [([3], -0.5), ([], -1.0)]
    assert beams.worst.tolist() == [-1.0]


def test_no_candidate_is_left() -> None:
    """A grammar that allows nothing more: no text is finished, and the search is over."""
    beams = search()
    step(beams, *((token, 0, -math.inf) for token in (END, 1, 2, 3)))
    assert beams.finished == [[]]
    assert not beams.is_open.any()


def test_many_beams_keep_their_order() -> None:
    """Every second of twenty candidates ends a text: the others are the beams, the best first."""
    beams = search(beams=10, early_stopping="never")
    tokens, parents = step(beams, *((END if at % 2 else 1 + at // 2, at % 10, -1.0 - at) for at in range(20)))
    assert tokens == list(range(1, 11))
    assert parents == [0, 2, 4, 6, 8] * 2
    assert beams.scores.tolist() == [[-1.0 - at for at in range(0, 20, 2)]]
    assert [one.score for one in beams.finished[0]] == [-2.0, -4.0, -6.0, -8.0, -10.0]


def test_a_beam_continues_its_parent_s_tokens() -> None:
    beams = search()
    step(beams, (3, 0, -1.0), (4, 0, -1.1), (6, 0, -1.2), (7, 0, -1.3))
    assert step(beams, (8, 1, -1.5), (9, 1, -1.6), (6, 0, -1.7), (7, 0, -1.8)) == ([8, 9], [1, 1])
    assert beams.tokens[0, :, :2].tolist() == [[4, 8], [4, 9]]
    assert beams.steps.tolist() == [2]


def test_merged_and_kept() -> None:
    """Requests of different ages and limits in one group; each keeps what is its own."""
    old, new = search(limit=3), search(limit=5, trace=True)
    step(old, (3, 0, -1.0), (END, 0, -1.1), (6, 0, -1.2), (7, 0, -1.3))
    old.merge(new)
    assert (old.limits.tolist(), old.steps.tolist(), old.tokens.shape) == ([3, 5], [1, 0], (2, 2, 5))
    assert old.is_traced
    old.keep([1, 0])
    assert (old.limits.tolist(), old.steps.tolist()) == ([5, 3], [0, 1])
    assert [len(texts) for texts in old.finished] == [0, 1]
    assert old.tokens[1, :, 0].tolist() == [3, 6]
    assert old.traces == [[], None]
    assert old.scores.tolist() == [[0.0, -math.inf], [-1.0, -1.2]]


def test_a_trace_has_each_candidate_and_its_fate() -> None:
    beams = search(trace=True)
    step(beams, (END, 0, -1.0), (3, 0, -1.1), (END, 1, -1.2), (4, 0, -1.3))
    assert beams.traces == [
        [
            [
                Candidate(END, 0, -1.0, "finished", None),
                Candidate(3, 0, -1.1, "kept", 0),
                Candidate(END, 1, -1.2, "dropped", None),
                Candidate(4, 0, -1.3, "kept", 1),
            ]
        ]
    ]


def test_a_search_that_is_over_is_not_traced() -> None:
    beams = search(trace=True)
    step(beams, *TWO_END)
    step(beams, *TWO_END)
    assert beams.traces[0] is not None
    assert len(beams.traces[0]) == 1


def test_a_vocabulary_that_just_suffices() -> None:
    assert BeamSearchParams(10, 1.0, False, processor()).n_candidates == 20
    with pytest.raises(InputError, match="11 beams need as many tokens to go on with; got vocab_size=11; take fewer"):
        BeamSearchParams(11, 1.0, False, processor())
