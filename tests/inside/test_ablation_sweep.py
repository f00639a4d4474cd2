"""`sweep`: all heads at once give the same numbers as the heads one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from models.tiny import EVERY, inputs, run, tiny
from torch import Tensor

import clearhead as ch
from clearhead.inside import intervene, zero
from clearhead.inside.ablation_sweep import Sweep, attentions_of, sweep, sweep_by
from clearhead.models import Model


def figures(model: Model, targets: Tensor, args: tuple[Tensor, ...], **options: object) -> dict[str, float]:
    with torch.no_grad():
        logits = run(model, *args, **options)
    logits, right = logits.flatten(0, -2), targets.flatten()
    counted = right != -100
    picked = logits[counted].gather(1, right[counted][:, None])
    return {"loss": float(F.cross_entropy(logits, right)), "logit": float(picked.mean())}


def one_by_one(model: Model, targets: Tensor, args: tuple[Tensor, ...], **options: object) -> Sweep:
    return sweep_by(model, lambda m: figures(m, targets, args, **options))


def assert_same(ours: Sweep, theirs: Sweep, within: float) -> None:
    assert [(e.place, e.head) for e in ours.effects] == [(e.place, e.head) for e in theirs.effects]
    assert ours.base == pytest.approx(theirs.base, abs=within)
    for one, other in zip(ours.effects, theirs.effects, strict=True):
        assert one.delta == pytest.approx(other.delta, abs=within), (one.place, one.head)
    assert max(abs(effect.delta["loss"]) for effect in ours.effects) > 100 * within


def right(model: Model, args: tuple[Tensor, ...], some: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    if model.config.head == "classes":
        return torch.randint(0, model.config.n_classes, (3,), generator=generator)
    targets = torch.randint(0, model.config.vocab_size, args[-1].shape, generator=generator)
    targets[0, :2] = -100
    return targets


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVERY if tiny(name).config.head != "none"])
# float32: sums in another order at 1e-7 each, grown by two layers of order 1
@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_all_at_once_is_one_by_one(name: str, dtype: torch.dtype, within: float) -> None:
    model = tiny(name, dtype=dtype)
    args = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs(model.config))
    targets = right(model, args)
    ours = sweep(model, *args, targets=targets)
    assert_same(ours, one_by_one(model, targets, args), within)
    assert ours.n_targets == (3 if model.config.head == "classes" else 31)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "mistral", "bert-mlm", "bert-classes", "t5", "marian"])
def test_with_padding(name: str) -> None:
    model = tiny(name)
    args = inputs(model.config)
    real = torch.arange(args[0].shape[1]) >= torch.tensor([[3], [0], [4]])
    targets = right(model, args)
    if model.config.head == "tokens" and model.config.shape != "encoder-decoder":
        targets = targets.masked_fill(~real, -100)
    assert_same(sweep(model, *args, targets=targets, mask=real), one_by_one(model, targets, args, mask=real), 1e-9)


@pytest.mark.slow
def test_with_the_targets_padding_and_a_window_of_memory() -> None:
    model = tiny("marian")
    args, options = inputs(model.config), dict(target_mask=torch.arange(11) < torch.tensor([[11], [5], [7]]))
    targets = right(model, args).masked_fill(~options["target_mask"], -100)
    whole = sweep(model, *args, targets=targets, **options)
    assert_same(whole, one_by_one(model, targets, args, **options), 1e-9)
    few = sweep(model, *args, targets=targets, max_tokens=1, **options)  # one head at a time
    assert_same(few, whole, 1e-9)


def test_one_row() -> None:
    model = tiny("llama")
    args = (inputs(model.config)[0][:1],)
    targets = right(model, args)
    assert_same(sweep(model, *args, targets=targets), one_by_one(model, targets, args), 1e-9)


def test_some_attentions() -> None:
    model = tiny("original")
    args = inputs(model.config)
    found = sweep(model, *args, targets=right(model, args), sites="decoder.blocks.*.cross")
    places = [f"decoder.blocks.{i}.cross" for i in range(2)]
    assert [(e.place, e.head) for e in found.effects] == [(place, head) for place in places for head in range(3)]
    assert len(attentions_of(model)) == 6
    with pytest.raises(
        ch.InputError, match=r"no attention matches 'decoder\.block\.0\.cross'; did you mean 'decoder\.blocks"
    ):
        sweep(model, *args, targets=right(model, args), sites="decoder.block.0.cross")


def test_two_texts_are_one_batch() -> None:
    model = tiny("gpt2")
    (tokens,) = inputs(model.config)
    targets = right(model, (tokens,))
    parts = [sweep(model, tokens[rows], targets=targets[rows]) for rows in (slice(0, 1), slice(1, 3))]
    assert_same(parts[0] + parts[1], sweep(model, tokens, targets=targets), 1e-9)
    assert (parts[0] + parts[1]).n_targets == 31


def test_any_figure() -> None:
    """Any measure; here, how often a token is the likeliest."""
    model = tiny("gpt2")
    args = inputs(model.config)

    def measure(model: Model) -> dict[str, float]:
        return {"share": float((run(model, *args).argmax(-1) < 20).double().mean())}

    found = sweep_by(model, measure, sites="blocks.1.*")
    with intervene(model, zero("blocks.1.attention.out", head=2)):
        expected = measure(model)["share"]
    assert found.effects[2].delta["share"] == pytest.approx(expected - found.base["share"])
    assert len(found.effects) == 3


def test_nothing_stays_behind() -> None:
    model = tiny("gpt2", dropout=0.5).train()
    args = inputs(model.config)
    targets = right(model, args)
    assert sweep(model, *args, targets=targets) == sweep(model, *args, targets=targets)
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_can_not_be() -> None:
    model = tiny("gpt2")
    args = inputs(model.config)
    with pytest.raises(
        ch.InputError, match=r"3 rows of 11 tokens, but the targets are of shape \(3, 5\); give one for each token"
    ):
        sweep(model, *args, targets=right(model, args)[:, :5])
    with pytest.raises(ch.InputError, match=r"none of the 33 targets counts"):
        sweep(model, *args, targets=torch.full((3, 11), -100))
    cache = model.new_cache(batch=3, max_len=11)
    with pytest.raises(ch.InputError, match=r"without the tokens that a cache holds; .* give the whole text"):
        sweep(model, *args, targets=right(model, args), cache=cache)
    bare = tiny("bert")
    with pytest.raises(ch.InputError, match="head='none'"):
        sweep(bare, *inputs(bare.config), targets=torch.zeros(3, 11, dtype=torch.int64))
