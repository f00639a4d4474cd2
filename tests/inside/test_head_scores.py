"""Head scores and rollout against loops over transformers' attentions, and a model built by hand whose heads are known."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from models.tiny import EVERY, assert_same, inputs, tiny
from torch import Tensor

import clearhead as ch
from clearhead.inside import (
    HeadScore,
    attention_rollout,
    copied_tokens,
    entropy,
    head_scores,
    repeated_tokens,
)
from clearhead.lessons import references
from clearhead.lessons.models import designed_decoder
from tests.inside.models import FP32, TOKENS, gpt2s


def test_entropy_of_known_rows() -> None:
    rows = torch.tensor([[1.0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(entropy(rows), torch.tensor([0, math.log(4), math.log(2), 0.0]))


def test_rollout_as_a_loop_over_transformers_attentions(tmp_path: Path) -> None:
    theirs, ours = gpt2s(tmp_path)
    with torch.no_grad():
        attentions = theirs(TOKENS, output_attentions=True).attentions
    for b in range(3):
        flow = [[float(i == j) for j in range(11)] for i in range(11)]
        for layer in attentions:
            mean = layer[b].double().mean(0)
            flow = [
                [sum((0.5 * float(mean[i, m]) + 0.5 * (i == m)) * flow[m][j] for m in range(11)) for j in range(11)]
                for i in range(11)
            ]
        found = attention_rollout(ours, TOKENS)[b]
        torch.testing.assert_close(found, torch.tensor(flow, dtype=torch.float32), rtol=0, atol=FP32)
        torch.testing.assert_close(found.sum(-1), torch.ones(11))


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_rollout_of_one_stack_of_two(stack: str) -> None:
    model = tiny("marian")
    flow = attention_rollout(model, *inputs(model.config), stack=stack)
    assert flow.shape == ((3, 13, 13) if stack == "encoder" else (3, 11, 11))
    assert_same(flow.sum(-1), torch.ones(flow.shape[:2], dtype=torch.float64))
    assert bool((flow.triu(1) == 0).all()) == (stack == "decoder")


def test_rollouts_mistakes_are_told() -> None:
    model = tiny("gpt2")
    with pytest.raises(ch.InputError, match="one stack; leave it out"):
        attention_rollout(model, TOKENS, stack="encoder")
    with pytest.raises(ch.InputError, match="from 0 to 1"):
        attention_rollout(model, TOKENS, residual=1.5)
    model = tiny("marian")
    with pytest.raises(ch.InputError, match="'encoder' or 'decoder'"):
        attention_rollout(model, *inputs(model.config), stack="middle")


def counted_by_hand(weights: Tensor, tokens: Tensor | None, first: list[int]) -> dict[str, float | int]:
    """One head's scores, one query at a time; weights (B, T, S), and the first real token of each row."""
    sums: dict[str, list[float]] = {name: [] for name in ("entropy", "confidence", "previous", "first", "induction")}
    distances: Counter[int] = Counter()
    for b, map_ in enumerate(weights.tolist()):
        sums["induction"] += [] if tokens is None else references.induction(map_, tokens[b].tolist())
        for t, row in enumerate(map_):
            if t < first[b]:
                continue
            sums["entropy"].append(-sum(w * math.log(w) for w in row if w > 0))
            sums["confidence"].append(max(row))
            if t > first[b]:
                sums["previous"].append(row[t - 1])
                sums["first"].append(row[first[b]])
                distances[row.index(max(row)) - t] += 1
    scores: dict[str, float | int] = {name: sum(values) / len(values) for name, values in sums.items() if values}
    best = max(distances.values())
    return scores | {"positional": best / distances.total(), "most": best}


@pytest.mark.parametrize("strip", [2**22, 4 * 3 * 3 * 11, 1])
def test_scores_as_counted_by_hand_from_transformers_attentions(
    tmp_path: Path, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["clearhead.inside.head_scores"], "STRIP", strip)
    theirs, ours = gpt2s(tmp_path)
    tokens = TOKENS % 7  # so that some repeat
    with torch.no_grad():
        attentions = theirs(tokens, output_attentions=True).attentions
    found = head_scores(ours, tokens)
    assert [(score.site, score.head) for score in found] == [
        (f"blocks.{layer}.attention.weights", head) for layer in range(3) for head in range(3)
    ]
    for score in found:
        layer = int(score.site.split(".")[1])
        expected = counted_by_hand(attentions[layer][:, score.head], tokens, [0, 0, 0])
        for name in ("entropy", "confidence", "previous", "first", "induction", "positional"):
            assert getattr(score, name) == pytest.approx(expected[name], abs=FP32), name
        assert score.alignment is None


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_padding_does_not_count(name: str) -> None:
    """A row padded on the left has the scores of the row alone, also with an id that stands in the text."""
    model = tiny(name)
    row = torch.tensor([[3, 5, 4, 3, 5, 6]])
    padded = torch.cat([torch.full((1, 4), 5), row], 1)
    real = torch.arange(10)[None] >= 4
    for alone, beside in zip(head_scores(model, row), head_scores(model, padded, mask=real), strict=True):
        for field in ("entropy", "confidence", "previous", "first", "induction", "positional", "distance"):
            assert getattr(beside, field) == pytest.approx(getattr(alone, field), abs=1e-9), field


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_family_has_scores(name: str) -> None:
    model = tiny(name)
    args = inputs(model.config)
    found = head_scores(model, *args)
    assert len(found) == sum(
        m.heads is not None and m.o_proj.in_features // m.d_head for m in model.modules() if hasattr(m, "o_proj")
    )
    for score in found:
        assert score.entropy is not None
        assert 0 <= score.entropy <= math.log(40)
        assert (score.previous is None) == score.site.endswith("cross.weights")
        assert score.induction is None or 0 <= score.induction <= 1


def test_one_token_has_no_token_before() -> None:
    scores = head_scores(tiny("gpt2"), torch.tensor([[5]]))
    assert scores[0].previous is None
    assert scores[0].positional is None
    assert scores[0].confidence == 1


def test_alignment_is_the_weight_on_the_pairs() -> None:
    model = tiny("original")
    source, target = inputs(model.config)
    source, target = source % 5, target % 5
    pairs = copied_tokens(source, target)
    found = {(s.site, s.head): s for s in head_scores(model, source, target, aligned=pairs)}
    site = "decoder.blocks.1.cross.weights"
    with ch.probe(model, site) as seen, torch.no_grad():
        model(source, target)
    for head in range(3):
        values = []
        for b in range(3):
            for t in range(10):  # the target does not hold what the last position predicts
                copies = [s for s in range(13) if source[b, s] == target[b, t + 1]]
                if copies:
                    values.append(sum(float(seen[site][b, head, t, s]) for s in copies))
        assert found[site, head].alignment == pytest.approx(sum(values) / len(values), abs=1e-9)
    assert found["decoder.blocks.0.attention.weights", 0].alignment is None
    with pytest.raises(ch.InputError, match=r"aligned has shape \(3, 11, 12\)"):
        head_scores(model, source, target, aligned=pairs[..., :12])


def test_heads_made_by_hand_are_found() -> None:
    model = designed_decoder((("previous", "first", "idle"), ("induction", "idle", "idle")))
    scores: dict[tuple[str, int], HeadScore] = {
        (score.site, score.head): score for score in head_scores(model, repeated_tokens(13, length=10))
    }
    previous, first = (scores["blocks.0.attention.weights", head] for head in (0, 1))
    induction, idle = (scores["blocks.1.attention.weights", head] for head in (0, 1))
    # softmax of 50 against nineteen zeros leaves 1e-20 elsewhere; at the first position there is no token before, and it attends
    # to itself: of ten repeated tokens one is found both there and in the right position
    assert previous.previous == pytest.approx(1)
    assert (previous.positional, previous.distance) == (1, -1)
    assert first.first == pytest.approx(1)
    assert induction.induction == pytest.approx((9 + 0.5) / 10)
    assert (induction.previous or 0) < 0.3
    # t equal keys: entropy log t
    assert idle.entropy == pytest.approx(sum(math.log(t) for t in range(1, 21)) / 20)
    assert (idle.induction or 0) < 0.1


def test_repeated_tokens_repeat_and_else_do_not() -> None:
    rows = repeated_tokens(53, length=17, batch=3, seed=4)
    assert torch.equal(rows[:, :17], rows[:, 17:])
    assert all(len(set(row)) == 17 for row in rows.tolist())
    assert torch.equal(rows, repeated_tokens(53, length=17, batch=3, seed=4))
    with pytest.raises(ch.InputError, match="40 different tokens can not be drawn from 7"):
        repeated_tokens(7, length=40)
