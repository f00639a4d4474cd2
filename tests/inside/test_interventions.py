"""`intervene`: its changes equal those of a model changed by hand, and nothing stays after the `with`.

The references edit weights, or are the runs that the values were taken from.
"""

from __future__ import annotations

import copy

import pytest
import torch
from models.tiny import EVERY, assert_same, inputs, run, tiny
from torch import Tensor, nn

import clearhead as ch
from clearhead.engine.engine import Engine
from clearhead.engine.request import Request
from clearhead.inside import Intervention, add, intervene, mean, patch, probe, scale, sites, zero
from clearhead.layers.block import Block
from clearhead.models import Model

OUT, RESIDUAL = "blocks.1.attention.out", "blocks.0.residual"
# Weights are recomputed by the equation; at all other sites the kernels' own numbers are changed.
PASSED = ["embedding", "*.embedding", "*.q", "*.k", "*.v", "*.out", "*.hidden", "*.residual"]


@torch.no_grad()
def changed(
    model: Model, *interventions: Intervention, args: tuple[Tensor, ...] | None = None, **kwargs: object
) -> Tensor:
    with intervene(model, *interventions):
        return run(model, *(inputs(model.config) if args is None else args), **kwargs)


@torch.no_grad()
def plain(model: Model, args: tuple[Tensor, ...] | None = None, **kwargs: object) -> Tensor:
    return run(model, *(inputs(model.config) if args is None else args), **kwargs)


def others(model: Model) -> tuple[Tensor, ...]:
    return inputs(model.config, seed=7)


def attentions(model: Model) -> dict[str, nn.Module]:
    places = [site.removesuffix(".out") for site in sites(model) if site.endswith(".out")]
    return {place: model.get_submodule(place) for place in places}


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_a_head_without_its_columns_of_the_output_projection(name: str) -> None:
    """Every attention of every family, grouped heads and cross-attention included."""
    model = tiny(name)
    for place, attention in attentions(model).items():
        by_hand = copy.deepcopy(model)
        E = attention.d_head
        by_hand.get_submodule(place).o_proj.weight.data[:, E : 2 * E] = 0
        assert_same(changed(model, zero(f"{place}.out", head=1)), plain(by_hand))
        assert not torch.allclose(plain(model), plain(by_hand))


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert"])
def test_a_scaled_head(name: str) -> None:
    model = tiny(name)
    place = list(attentions(model))[-1]
    by_hand = copy.deepcopy(model)
    attention = by_hand.get_submodule(place)
    attention.o_proj.weight.data[:, : 2 * attention.d_head] *= -1.5
    assert_same(changed(model, scale(f"{place}.out", -1.5, head=[0, 1])), plain(by_hand))


def test_a_head_at_its_mean() -> None:
    """The mean over rows and tokens is one vector, so that its effect is a bias."""
    model = tiny("gpt2")
    with probe(model, OUT) as seen:
        plain(model)
    average = seen[OUT][:, 2].mean((0, 1))
    by_hand = copy.deepcopy(model)
    projection, E = by_hand.blocks[1].attention.o_proj, model.config.d_head
    projection.bias.data += projection.weight.data[:, 2 * E :] @ average
    projection.weight.data[:, 2 * E :] = 0
    assert_same(changed(model, mean(OUT, head=2)), plain(by_hand))
    assert_same(changed(model, mean(OUT, seen, head=2)), plain(by_hand))
    one = tuple(x[:1] for x in inputs(model.config))  # the mean of another run, in a call of one row
    assert_same(changed(model, mean(OUT, seen[OUT], head=2), args=one), plain(by_hand, one))


def test_a_mean_is_of_real_tokens() -> None:
    model = tiny("gpt2")
    real = torch.arange(11) >= torch.tensor([[3], [0], [9]])
    with probe(model, OUT) as seen:
        plain(model, mask=real)
    by_hand = seen[OUT].transpose(1, 2)[real].mean(0)  # (H, E)
    value = by_hand[None, :, None].expand(3, -1, 11, -1)
    assert_same(changed(model, mean(OUT), mask=real)[real], changed(model, patch(OUT, value), mask=real)[real])


def test_a_steering_vector() -> None:
    """The same as a bias of the block's last projection."""
    model = tiny("gpt2")
    vector = torch.randn(model.config.d_model, dtype=torch.float64)
    by_hand = copy.deepcopy(model)
    by_hand.blocks[0].feedforward.down.bias.data += vector
    assert_same(changed(model, add(RESIDUAL, vector)), plain(by_hand))
    by_hand = copy.deepcopy(model)
    by_hand.positions.weight.data += vector
    assert_same(changed(model, add("embedding", vector)), plain(by_hand))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_patching_everything_reproduces_the_run(name: str) -> None:
    model = tiny(name)
    with probe(model) as seen:
        expected = plain(model, others(model))
    assert not torch.allclose(plain(model), expected)
    assert torch.equal(changed(model, patch("*.residual", seen)), expected)
    assert_same(changed(model, patch("*", seen)), expected)
    first = [site for site in sites(model) if site.endswith("embedding")]
    assert torch.equal(changed(model, *(patch(site, seen[site]) for site in first)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_patching_with_itself_changes_nothing(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, also at weights and scores, which are recomputed."""
    model = tiny(name, dtype=dtype)
    with probe(model) as seen:
        expected = plain(model)
    assert torch.equal(changed(model, patch("*", seen)), expected)
    for site in seen:
        assert torch.equal(changed(model, patch(site, seen[site])), expected), site


@pytest.mark.parametrize("name", ["gpt2", "llama", "alibi", "t5", "marian"])
@pytest.mark.parametrize("part", ["weights", "scores"])
def test_patched_weights_are_what_is_averaged_with(name: str, part: str) -> None:
    """The weights of another run times the values of this one, computed by hand."""
    model = tiny(name)
    place = list(attentions(model))[-1]
    with probe(model, f"{place}.*") as other:
        plain(model, others(model))
    with probe(model, f"{place}.v", f"{place}.out") as own:
        plain(model)
    with (
        intervene(model, patch(f"{place}.{part}", other[f"{place}.{part}"], head=1)),
        probe(model, f"{place}.out") as seen,
    ):
        plain(model)
    v = own[f"{place}.v"]
    by_hand = own[f"{place}.out"].clone()
    by_hand[:, 1] = other[f"{place}.weights"][:, 1] @ v[:, 1 * v.shape[1] // by_hand.shape[1]]
    assert_same(seen[f"{place}.out"], by_hand)


@pytest.mark.parametrize("site", [RESIDUAL, "blocks.0.feedforward.hidden", OUT, "blocks.1.attention.v"])
def test_rows_of_the_batch_are_their_own(site: str) -> None:
    model = tiny("llama")
    whole, expected = changed(model, scale(site, 3.0)), plain(model)
    for batch in (1, -2, [1], torch.tensor([False, True, False])):
        out = changed(model, scale(site, 3.0, batch=batch))
        assert_same(out[1], whole[1])
        assert_same(out[[0, 2]], expected[[0, 2]])
    each = changed(model, scale(site, torch.tensor([1.0, 3.0, 1.0])))
    assert_same(each[1], whole[1])
    assert_same(each[[0, 2]], expected[[0, 2]])
    vectors = torch.randn(3, 1, model.config.d_model, dtype=torch.float64)
    at_once = changed(model, add("blocks.0.residual", vectors))
    for row in range(3):
        assert_same(at_once[row], changed(model, add("blocks.0.residual", vectors[row, 0]))[row])


@pytest.mark.parametrize("positions", [4, [4], slice(4, 5), -7, slice(-7, -6), torch.arange(11).expand(3, 11) == 4])
def test_a_position(positions: object) -> None:
    model = tiny("gpt2")
    with probe(model, RESIDUAL) as seen:
        plain(model)
    value = seen[RESIDUAL].clone()
    value[:, 4] = 0
    assert torch.equal(changed(model, zero(RESIDUAL, positions=positions)), changed(model, patch(RESIDUAL, value)))


def test_positions_leave_padding_out() -> None:
    """A padded row changes like the same row without padding."""
    model = tiny("gpt2")
    (tokens,) = inputs(model.config)
    real = torch.arange(11) >= torch.tensor([[3], [0], [9]])
    for positions in (0, slice(0, 2), -1, [-2]):
        out = changed(model, zero(RESIDUAL, positions=positions), mask=real)
        for row in range(3):
            alone = changed(model, zero(RESIDUAL, positions=positions), args=(tokens[row : row + 1][:, real[row]],))
            assert_same(out[row][real[row]], alone[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mistral", "alibi", "t5", "whisper"])
def test_a_cache_changes_nothing(name: str) -> None:
    """In parts with a cache as in one call: positions include cached tokens, and a longer value is indexed by position."""
    model = tiny(name)
    *source, tokens = inputs(model.config)
    stack = "decoder." if source else ""
    with probe(model, f"{stack}{RESIDUAL}") as seen:
        plain(model, others(model))
    own = [
        zero(f"{stack}{OUT}", head=1),
        zero(f"{stack}blocks.1.attention.v", positions=[2, 5]),
        scale(f"{stack}blocks.0.attention.k", 0.5, batch=0),
        patch(f"{stack}{RESIDUAL}", seen, positions=slice(3, 8)),
        *([zero("decoder.blocks.0.cross.out", head=2)] if source else []),
    ]
    whole = changed(model, *own)
    cache = model.new_cache(batch=3, max_len=11)
    parts = []
    for i, piece in enumerate(tokens.split([4, 1, 1, 5], 1)):
        args = tuple(x if i == 0 else None for x in source)
        parts.append(changed(model, *own, args=(*args, piece), cache=cache))
    assert_same(torch.cat(parts, 1), whole)


def test_in_order() -> None:
    model = tiny("gpt2")
    vector = torch.randn(model.config.d_model, dtype=torch.float64)
    first_scaled = changed(model, scale(RESIDUAL, 3.0), add(RESIDUAL, vector))
    first_added = changed(model, add(RESIDUAL, vector), scale(RESIDUAL, 3.0))
    assert not torch.allclose(first_scaled, first_added)
    with intervene(model, scale(RESIDUAL, 3.0)):
        assert torch.equal(changed(model, add(RESIDUAL, vector)), first_scaled)
    assert_same(changed(model, scale(RESIDUAL, 3.0), scale(RESIDUAL, 1 / 3)), plain(model))


def test_a_probe_inside_sees_the_change_and_one_outside_what_was_before() -> None:
    model = tiny("gpt2")
    with probe(model, OUT) as before, intervene(model, zero(OUT, head=1)), probe(model, OUT) as after:
        plain(model)
    assert before[OUT][:, 1].abs().max() > 0.1
    assert not after[OUT][:, 1].any()
    assert torch.equal(before[OUT][:, [0, 2]], after[OUT][:, [0, 2]])


def test_gradients_flow_through_a_patch() -> None:
    """Gradients reach the value that was put in (for attribution), and nothing behind it."""
    model = tiny("gpt2")
    value = torch.zeros(3, 11, model.config.d_model, dtype=torch.float64, requires_grad=True)
    with intervene(model, patch(RESIDUAL, value)):
        model(*inputs(model.config)).square().sum().backward()
    assert value.grad is not None
    assert value.grad.abs().max() > 0
    assert model.tokens.weight.grad is not None  # the tied head's
    assert not model.blocks[0].attention.o_proj.weight.grad.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "marian"])
@pytest.mark.parametrize("site", ["blocks.1.attention.out", "blocks.1.attention.v"])
def test_through_the_engine(name: str, site: str) -> None:
    """In an engine, with keys in blocks: the texts equal those of a model changed by hand, not those of the unchanged one."""
    model = tiny(name, dtype=torch.float32, max_len=64)
    *source, tokens = inputs(model.config)
    place = f"{'decoder.' if source else ''}{site}"
    by_hand = copy.deepcopy(model)
    attention = by_hand.get_submodule(place.rpartition(".")[0])
    if site.endswith("out"):
        attention.o_proj.weight.data[:, : attention.d_head] = 0
    else:  # the first value head
        n, E = attention.qkv.weight.shape[0], attention.d_head
        at = n - list(attention.qkv.parts.values())[-1]
        attention.qkv.weight.data[at : at + E] = 0
        if attention.qkv.bias is not None:
            attention.qkv.bias.data[at : at + E] = 0

    def write(model: Model) -> list[list[int]]:
        engine = Engine(model, max_tokens=512)
        asked = [
            Request(
                prompt=tokens[row, : 5 + row].tolist(),
                source=source[0][row].tolist() if source else None,
                max_new_tokens=9,
                eos=(),
            )
            for row in range(3)
        ]
        tickets = [engine.submit(request) for request in asked]
        while engine.is_busy:
            engine.step()
        return [ticket.ids for ticket in tickets]

    with intervene(model, zero(place, head=0)):
        texts = write(model)
    assert texts == write(by_hand)
    assert texts != write(model)


def test_nothing_stays_attached() -> None:
    model = tiny("original")
    every = zero("*")
    with intervene(model, every):
        assert hooks(model) > 0
        plain(model)
    assert hooks(model) == 0
    with pytest.raises(ZeroDivisionError), intervene(model, every):
        raise ZeroDivisionError
    with pytest.raises(ch.InputError), intervene(model, zero("encoder.blocks.0.attention.out", head=3)):
        plain(model)
    with pytest.raises(ch.InputError), intervene(model, zero("blocks.0.residual"), zero("no such site")):
        pass
    assert hooks(model) == 0
    assert all(type(block).forward is Block.forward for block in model.modules() if isinstance(block, Block))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            zero("blocks.1.atention.out"),
            "no site matches 'blocks.1.atention.out'; did you mean 'blocks.1.attention.out'",
        ),
        (zero(OUT, head=3), r"has heads 0 \.\. 2; got head=3"),
        (zero(RESIDUAL, head=1), r"'blocks.0.residual' \(B, T, D\) has no heads, but got head=1"),
        (zero(RESIDUAL, batch=3), r"has rows 0 \.\. 2; got batch=3"),
        (zero(RESIDUAL, batch=torch.tensor([True])), r"has 3 rows, but batch= is of shape \(1,\)"),
        (
            zero(RESIDUAL, positions=torch.ones(3, 4, dtype=torch.bool)),
            r"has \(3, 11\) \(rows, tokens\), but positions=",
        ),
        (scale(RESIDUAL, torch.ones(2)), r"one number or one a row \(3\); got shape \(2,\)"),
        (add(RESIDUAL, torch.ones(5)), r"is \(3, 11, 22\) in this call, and a value of shape \(5,\) does not fit"),
    ],
)
def test_what_can_not_be(wrong: Intervention, words: str, unchecked: None) -> None:
    with pytest.raises(ch.InputError, match=words):
        changed(tiny("gpt2"), wrong)


def test_a_run_that_did_not_see_the_site() -> None:
    model = tiny("gpt2")
    with probe(model, RESIDUAL) as seen:
        plain(model)
    with pytest.raises(ch.InputError, match=r"of what matches 'blocks.1.attention.out' nothing was seen in the run"):
        changed(model, patch(OUT, seen))


def test_what_a_probe_kept_of_a_part_is_not_put_elsewhere() -> None:
    """One head's values would fit every head, and five rows the first five."""
    model = tiny("gpt2")
    args = inputs(model.config, seed=5)
    with probe(model, OUT, "*.k") as whole:
        plain(model, args)
    with probe(model, OUT, head=2) as one:
        plain(model, args)
    assert torch.equal(changed(model, patch(OUT, one, head=2)), changed(model, patch(OUT, whole, head=2)))
    for of in (patch(OUT, one), patch(OUT, one, head=1), mean(OUT, one), add(OUT, one, head=[1, 2])):
        with pytest.raises(
            ch.InputError, match=r"kept head=2 only, which are not the heads to change .*; name the same"
        ):
            changed(model, of)
    for rows in (slice(3, 8), -1):
        with probe(model, OUT, "*.k", rows=rows) as some:
            plain(model, args)
        for of in (patch(OUT, some), add(OUT, some)):
            with pytest.raises(ch.InputError, match=r"kept rows=slice\(.*\) only, whose places .* do"):
                changed(model, of)
        kept = whole[OUT][..., some.kept, :].mean((0, -2), keepdim=True)
        assert_same(changed(model, mean(OUT, some)), changed(model, patch(OUT, kept)))
        assert torch.equal(changed(model, patch("*.k", some)), changed(model, patch("*.k", whole)))  # keys are all kept


def test_a_change_that_no_call_passed() -> None:
    words = r"no call of the model passed 'blocks\.0\.residual', so nothing was changed"
    with pytest.raises(ch.InputError, match=words), intervene(tiny("gpt2"), zero(RESIDUAL)):
        pass
