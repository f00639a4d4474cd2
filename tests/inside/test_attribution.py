"""Readings against loops written out here, against transformers' hidden states and attentions, finite differences, and
models built by hand whose heads provably do what a score is to find."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from families.compare import tiny as theirs_tiny
from models.tiny import EVERY, assert_same, inputs, tiny
from torch import Tensor, nn

import clearhead as ch
from clearhead.inside import (
    HeadScore,
    attention_rollout,
    copied_tokens,
    entropy,
    head_scores,
    logit_attribution,
    logit_lens,
    neighbours,
    repeated_tokens,
    saliency,
)
from clearhead.models import Decoder, Model
from clearhead.quantization.integer import quantize

SCORED = [name for name in EVERY if tiny(name).config.head != "none"]
SUMS = [name for name in SCORED if tiny(name).config.norm_first and not tiny(name).config.head_transform]
FP32 = 1e-5  # transformers runs in float32: a few layers of sums of order 1


def of_transformers(kind: type, config: object, folder: Path) -> tuple[nn.Module, Model]:
    theirs = theirs_tiny(kind, config)
    theirs.set_attn_implementation("eager")
    theirs.save_pretrained(folder)
    return theirs, ch.load(folder).eval()


def gpt2s(folder: Path) -> tuple[nn.Module, Model]:
    sizes = dict(vocab_size=53, n_positions=19, n_layer=3, n_embd=21, n_head=3, bos_token_id=1, eos_token_id=2)
    return of_transformers(transformers.GPT2LMHeadModel, transformers.GPT2Config(**sizes), folder)


TOKENS = torch.randint(0, 53, (3, 11), generator=torch.Generator().manual_seed(5))


# The lens.


@pytest.mark.parametrize("name", SCORED)
def test_the_lens_ends_in_the_logits(name: str) -> None:
    model = tiny(name)
    args = inputs(model.config)
    lens = logit_lens(model, *args)
    with torch.no_grad():
        assert torch.equal(lens[-1], model(*args))
    assert len(lens) == (model.config.n_decoder_layers or model.config.n_layers) + 1


def test_the_lens_of_a_padded_batch_ends_in_the_logits() -> None:
    model = tiny("bert-classes", pool="mean")
    args, real = inputs(model.config), torch.arange(11) >= torch.tensor([[3], [0], [9]])
    with torch.no_grad():
        assert torch.equal(logit_lens(model, *args, mask=real)[-1], model(*args, mask=real))


def test_the_lens_as_transformers_would_see_it(tmp_path: Path) -> None:
    theirs, ours = gpt2s(tmp_path)
    with torch.no_grad():
        states = theirs(TOKENS, output_hidden_states=True).hidden_states
        # the last of theirs has already been through the last norm
        expected = [theirs.lm_head(theirs.transformer.ln_f(x)) for x in states[:-1]] + [theirs.lm_head(states[-1])]
    torch.testing.assert_close(logit_lens(ours, TOKENS), torch.stack(expected), rtol=0, atol=FP32)


def test_the_lens_of_a_post_norm_model_as_transformers_would_see_it(tmp_path: Path) -> None:
    sizes = dict(vocab_size=53, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37)
    theirs, ours = of_transformers(
        transformers.BertForMaskedLM, transformers.BertConfig(**sizes, max_position_embeddings=19), tmp_path
    )
    with torch.no_grad():
        states = theirs(TOKENS, output_hidden_states=True).hidden_states
        expected = torch.stack([theirs.cls(x) for x in states])
    torch.testing.assert_close(logit_lens(ours, TOKENS), expected, rtol=0, atol=FP32)


def test_the_lens_of_an_encoder_decoder_as_transformers_would_see_it(tmp_path: Path) -> None:
    sizes = dict(vocab_size=53, d_model=24, d_kv=7, d_ff=37, num_layers=2, num_heads=3, decoder_start_token_id=0)
    theirs, ours = of_transformers(transformers.T5ForConditionalGeneration, transformers.T5Config(**sizes), tmp_path)
    with torch.no_grad():
        states = theirs(TOKENS, decoder_input_ids=TOKENS[:, :7], output_hidden_states=True).decoder_hidden_states
        normed = [theirs.decoder.final_layer_norm(x) for x in states[:-1]] + [states[-1]]
        # a tied head of theirs divides by the root of the width
        expected = torch.stack([theirs.lm_head(x * 24**-0.5) for x in normed])
    torch.testing.assert_close(logit_lens(ours, TOKENS, TOKENS[:, :7]), expected, rtol=0, atol=FP32)


def test_a_model_without_a_head_has_no_lens() -> None:
    model = tiny("bert", head="none")
    for reading in (logit_lens, logit_attribution, saliency):
        with pytest.raises(ch.InputError, match=r"head='none'.*head='tokens' or 'classes'"):
            reading(model, *inputs(model.config))


# Attribution.


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_sum_to_the_logit(name: str, dtype: torch.dtype) -> None:
    model = tiny(name, dtype=dtype)
    args = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs(model.config))
    found = logit_attribution(model, *args)
    with torch.no_grad():
        assert torch.equal(found.logit, model(*args).amax(-1))
    # of order 10, in some models 100: float32 rounds at 1e-7 of that
    assert_same(found.total, found.logit, within=1e-9 if dtype == torch.float64 else 1e-6)


def test_every_family_that_can_be_summed_is() -> None:
    assert {"gpt2", "llama", "t5", "vit", "whisper", "mistral", "alibi"} <= set(SUMS)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_heads_part_is_its_slice_of_the_output_projection_through_a_frozen_norm(name: str) -> None:
    model = tiny(name)
    (tokens,) = inputs(model.config)
    wanted = torch.randint(0, 53, (3, 11))
    found = logit_attribution(model, tokens, tokens=wanted)
    with ch.probe(model) as seen:
        model(tokens)
    E, last = model.config.d_head, seen["blocks.1.residual"]
    weight = model.tokens.weight if model.head.weight is None else model.head.weight
    for head in range(model.config.n_heads):
        for b in range(3):
            for t in range(11):
                written = (
                    model.blocks[0].attention.o_proj.weight[:, head * E : (head + 1) * E]
                    @ (seen["blocks.0.attention.out"][b, head, t])
                )
                x = last[b, t]
                if name == "gpt2":
                    written = (written - written.mean()) / math.sqrt(((x - x.mean()) ** 2).mean() + model.norm.eps)
                else:
                    written = written / math.sqrt((x**2).mean() + model.norm.eps)
                expected = (written * model.norm.weight) @ weight[wanted[b, t]]
                assert found.parts[f"blocks.0.attention.{head}"][b, t] == pytest.approx(float(expected), abs=1e-9)


def test_against_another_token_is_the_difference() -> None:
    model = tiny("gpt2")
    (tokens,) = inputs(model.config)
    one, other = torch.full((3, 11), 7), torch.full((3, 11), 8)
    difference = logit_attribution(model, tokens, tokens=one, against=other)
    alone = [logit_attribution(model, tokens, tokens=ids) for ids in (one, other)]
    for name, part in difference.parts.items():
        assert_same(part, alone[0].parts[name] - alone[1].parts[name])
    with torch.no_grad():
        logits = model(tokens)
    assert_same(difference.total, logits[..., 7] - logits[..., 8])


def test_parts_of_a_class_sum_over_a_mean_of_states() -> None:
    model = tiny("vit", pool="mean")
    found = logit_attribution(model, *inputs(model.config), tokens=torch.tensor([0, 3, 6]))
    assert found.logit.shape == (3,)
    assert_same(found.total, found.logit)


def test_what_is_no_sum_is_refused() -> None:
    for name, message in (
        ("original", "norms its stream after each step"),
        ("esm", "head has a layer of its own"),
        ("vit", "pooled state that is no sum"),
    ):
        changes = {"esm": dict(head="tokens", head_transform=True), "vit": dict(pool="max")}.get(name, {})
        model = tiny(name, **changes)
        with pytest.raises(ch.InputError, match=message):
            logit_attribution(model, *inputs(model.config))
    model = tiny("gpt2")
    with pytest.raises(ch.InputError, match=r"ids of shape \(3, 11\), from 0 to 52"):
        logit_attribution(model, *inputs(model.config), tokens=torch.full((3, 11), 53))


# Heads.


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
    """One head's scores, one query at a time; weights (B, T, S), and where each row's real tokens begin."""
    sums: dict[str, list[float]] = {name: [] for name in ("entropy", "confidence", "previous", "first", "induction")}
    distances: Counter[int] = Counter()
    for b, map_ in enumerate(weights.tolist()):
        for t, row in enumerate(map_):
            if t < first[b]:
                continue
            sums["entropy"].append(-sum(w * math.log(w) for w in row if w > 0))
            sums["confidence"].append(max(row))
            if t > first[b]:
                sums["previous"].append(row[t - 1])
                sums["first"].append(row[first[b]])
                distances[row.index(max(row)) - t] += 1
            if tokens is not None:
                after = [row[s] for s in range(1, t) if tokens[b, s - 1] == tokens[b, t]]
                if after:
                    sums["induction"].append(sum(after))
    scores: dict[str, float | int] = {name: sum(values) / len(values) for name, values in sums.items() if values}
    best = max(distances.values())
    return scores | {"positional": best / distances.total(), "most": best}


@pytest.mark.parametrize("strip", [2**22, 4 * 3 * 3 * 11, 1])
def test_scores_as_counted_by_hand_from_transformers_attentions(
    tmp_path: Path, strip: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["clearhead.inside.head_scores"], "STRIP", strip)
    theirs, ours = gpt2s(tmp_path)
    tokens = TOKENS % 7  # so that some come again
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
    """A row padded on the left scores as the row alone."""
    model = tiny(name)
    row = (TOKENS[:1] % 7)[:, :6]
    padded = torch.cat([torch.full((1, 4), 9), row], 1)
    real = torch.arange(10)[None] >= 4
    for alone, beside in zip(head_scores(model, row), head_scores(model, padded, mask=real), strict=True):
        for field in ("entropy", "confidence", "previous", "first", "positional", "distance"):
            assert getattr(beside, field) == pytest.approx(getattr(alone, field), abs=1e-9), field


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
            for t in range(10):  # what the last position writes is not in the target
                copies = [s for s in range(13) if source[b, s] == target[b, t + 1]]
                if copies:
                    values.append(sum(float(seen[site][b, head, t, s]) for s in copies))
        assert found[site, head].alignment == pytest.approx(sum(values) / len(values), abs=1e-9)
    assert found["decoder.blocks.0.attention.weights", 0].alignment is None
    with pytest.raises(ch.InputError, match=r"aligned has shape \(3, 11, 12\)"):
        head_scores(model, source, target, aligned=pairs[..., :12])


def by_design() -> Decoder:
    """Two layers, weights set by hand, no norm: layer 0 writes each token's predecessor beside it (head 0) and looks at the
    first token (head 1); layer 1's head 0 looks for places whose predecessor is this token. Its head 1 looks nowhere in
    particular. The stream is [token | position | predecessor], each one-hot."""
    V, P = 13, 20
    D, E = 2 * V + P, 20
    config = ch.preset(
        "gpt2",
        n_layers=2,
        d_model=D,
        n_heads=2,
        d_head=E,
        d_ff=3,
        vocab_size=V,
        max_len=P,
        norm="none",
        dropout=0.0,
        attention_dropout=0.0,
        attention_scale=1.0,
    )
    model = ch.build(config).eval()
    token, position, before = slice(0, V), slice(V, V + P), slice(V + P, D)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.tokens.weight[:, token] = torch.eye(V)
        model.positions.weight[:, position] = torch.eye(P)
        q, k, v = model.blocks[0].attention.qkv.weight.split(2 * E)
        q[:P, position] = 50 * torch.eye(P).roll(-1, 0)  # at t it asks for t - 1
        k[:P, position] = torch.eye(P)
        v[:V, token] = torch.eye(V)
        model.blocks[0].attention.o_proj.weight[before, :V] = torch.eye(V)
        q[E, position] = 50  # head 1: whatever the position, the first
        k[E, position.start] = 1
        q, k, _ = model.blocks[1].attention.qkv.weight.split(2 * E)
        q[:V, token] = 50 * torch.eye(V)
        k[:V, before] = torch.eye(V)
    assert isinstance(model, Decoder)
    return model


def test_heads_made_by_hand_are_found() -> None:
    model = by_design()
    scores: dict[tuple[str, int], HeadScore] = {
        (score.site, score.head): score for score in head_scores(model, repeated_tokens(13, length=10))
    }
    previous, first = (scores["blocks.0.attention.weights", head] for head in (0, 1))
    induction, idle = (scores["blocks.1.attention.weights", head] for head in (0, 1))
    # softmax of 50 against nineteen zeros leaves 1e-20 elsewhere; at the first place there is no token before, and it looks
    # at itself: of ten repeated tokens one is found both there and in the right place
    assert previous.previous == pytest.approx(1)
    assert (previous.positional, previous.distance) == (1, -1)
    assert first.first == pytest.approx(1)
    assert induction.induction == pytest.approx((9 + 0.5) / 10)
    assert (induction.previous or 0) < 0.3
    # t keys alike: entropy log t
    assert idle.entropy == pytest.approx(sum(math.log(t) for t in range(1, 21)) / 20)
    assert (idle.induction or 0) < 0.1


def test_repeated_tokens_repeat_and_else_do_not() -> None:
    rows = repeated_tokens(53, length=17, batch=3, seed=4)
    assert torch.equal(rows[:, :17], rows[:, 17:])
    assert all(len(set(row)) == 17 for row in rows.tolist())
    assert torch.equal(rows, repeated_tokens(53, length=17, batch=3, seed=4))
    with pytest.raises(ch.InputError, match="40 different tokens can not be drawn from 7"):
        repeated_tokens(7, length=40)


# Saliency.


@pytest.mark.parametrize("name", SCORED)
def test_saliency_is_the_slope_as_embeddings_grow(name: str) -> None:
    """f(x (1 + e)) for each token alone, by differences; the sum of gradient times input is its slope at e = 0."""
    model = tiny(name)
    args = inputs(model.config, batch=2, length=5, source=4)
    found = saliency(model, *args, position=3)
    with torch.no_grad():
        out = model(*args)
    chosen = (out[:, 3] if out.ndim == 3 else out).argmax(-1)

    def logit(at: int, place: int, grow: float) -> Tensor:
        calls = 0

        def hook(_: nn.Module, __: object, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls - 1 != at:
                return x
            x = x.clone()
            x[:, place] *= 1 + grow
            return x

        modules = {model.tokens, getattr(model, "source", None)} - {None}
        handles = [module.register_forward_hook(hook) for module in modules]
        with torch.no_grad():
            out = model(*args)
        for handle in handles:
            handle.remove()
        return (out[:, 3] if out.ndim == 3 else out).gather(1, chosen[:, None])[:, 0]

    assert len(found) == len(args)
    for at, scores in enumerate(found):
        for place in range(scores.shape[1]):
            slope = (logit(at, place, 1e-6) - logit(at, place, -1e-6)) / 2e-6
            # differences of float64 logits of order 10, over 2e-6
            torch.testing.assert_close(scores[:, place], slope, rtol=1e-5, atol=1e-6)


def test_saliency_of_another_token_and_its_mistakes() -> None:
    model = tiny("gpt2")
    token = torch.tensor([3, 4, 5])
    (scores,) = saliency(model, TOKENS, position=4, token=token)
    assert not scores[:, 5:].any()  # no token after the position asked for can matter
    assert scores[:, :5].all()
    with pytest.raises(ch.InputError, match="position=11 is outside of 11 tokens"):
        saliency(model, TOKENS, position=11)
    with torch.no_grad():  # as callers who only run models often have it
        assert torch.equal(saliency(model, TOKENS, position=4, token=token)[0], scores)
    assert all(parameter.grad is None for parameter in model.parameters())


# Neighbours.


def test_neighbours_by_hand() -> None:
    model = tiny("bert")
    table = model.tokens.weight.detach()

    def cosine(a: Tensor, b: Tensor) -> float:
        return float(a @ b / math.sqrt(float(a @ a) * float(b @ b)))

    expected = sorted(((cosine(table[7], table[id]), id) for id in range(53) if id != 7), reverse=True)[:5]
    found = neighbours(model, [7], n=5)
    assert [id for id, _ in found] == [id for _, id in expected]
    assert [value for _, value in found] == pytest.approx([value for value, _ in expected], abs=1e-6)


def test_king_minus_man_plus_woman() -> None:
    royal, male, female, noise = torch.eye(6)[0], torch.eye(6)[1], torch.eye(6)[2], torch.eye(6)[3:]
    words = ["king", "queen", "man", "woman", "apple", "river"]
    table = torch.stack([royal + male, royal + female, male, female, noise[0], noise[1]])
    king, man, woman = (words.index(word) for word in ("king", "man", "woman"))
    assert words[neighbours(table, [king, woman], [man], n=1)[0][0]] == "queen"
    assert len(neighbours(table, [king], n=99)) == 5


def test_neighbours_mistakes_are_told() -> None:
    with pytest.raises(ch.InputError, match=r"each from 0 to 52; got \[53\]"):
        neighbours(tiny("gpt2"), [53])
    with pytest.raises(ch.InputError, match="reads pictures"):
        neighbours(tiny("vit"), [1])


# All of them.


def test_readings_of_a_quantised_model() -> None:
    model = quantize(
        ch.build(ch.preset("gpt2", n_layers=2, d_model=64, n_heads=4, vocab_size=53, max_len=31)).eval(), "int8"
    )
    found = logit_attribution(model, TOKENS)
    # of the same rounded weights: float32 sums in another order
    torch.testing.assert_close(found.total, found.logit, rtol=0, atol=1e-4)
    assert len(neighbours(model, [7], n=5)) == 5
    assert len(head_scores(model, TOKENS)) == 8


def test_readings_leave_no_trace() -> None:
    """Dropout is off while they are taken, and on again after; hooks are gone, after an error too."""
    model = tiny("gpt2", dropout=0.5).train()
    model.blocks[0].eval()
    lens = logit_lens(model, TOKENS)
    assert torch.equal(lens, logit_lens(model, TOKENS))
    logit_attribution(model, TOKENS)
    head_scores(model, TOKENS)
    attention_rollout(model, TOKENS)
    saliency(model, TOKENS)
    for reading in (logit_lens, logit_attribution, saliency, head_scores):
        with pytest.raises(ch.InputError):
            reading(model, torch.full((1, 3), 53))
    assert model.training
    assert model.blocks[1].training
    assert not model.blocks[0].training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
