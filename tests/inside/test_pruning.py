"""`prune`: the smaller model computes what the whole one does without those heads, and saves and loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models.tiny import EVERY, assert_same, inputs, run, tiny

import clearhead as ch
from clearhead.costs.parameters import count_parameters
from clearhead.engine.engine import Engine
from clearhead.engine.request import Request
from clearhead.inside import intervene, probe, zero
from clearhead.inside.pruning import parameters_of_head, prune, savings
from clearhead.models import Model


def lost(model: Model) -> dict[str, list[int]]:
    """Heads to prune, unevenly: in one attention the first and the last group, in the others one group or none."""
    config, places = model.config, model.config.attentions
    group = config.n_heads // config.n_kv_heads
    last = list(range(config.n_heads - group, config.n_heads))
    found = dict.fromkeys(places[1::3], last)
    if config.n_kv_heads > 2:
        found[places[-1]] = [*range(group), *last]
    return found


def ablated(model: Model, heads: dict[str, list[int]]):
    return intervene(model, *(zero(f"{place}.out", head=numbers) for place, numbers in heads.items()))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_pruned_is_ablated(name: str, tmp_path: Path) -> None:
    """Also after saving and loading; the number of parameters is that of the closed form."""
    model = tiny(name)
    args, heads = inputs(model.config), lost(model)
    before = run(model, *args)
    with ablated(model, heads):
        expected = run(model, *args)
    smaller = prune(model, heads)
    assert_same(run(smaller, *args), expected)
    assert torch.equal(run(model, *args), before)

    n, group = sum(map(len, heads.values())), model.config.n_heads // model.config.n_kv_heads
    gone = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in smaller.parameters())
    assert gone == pytest.approx(n * parameters_of_head(model.config), abs=n)  # grouped heads' shares are rounded
    assert gone >= n // group * 2 * model.config.d_head * model.config.d_model
    assert sum(count_parameters(smaller.config).values()) == sum(p.numel() for p in smaller.parameters())

    ch.save(smaller, tmp_path / "smaller")
    again = ch.load(tmp_path / "smaller")
    assert again.config == smaller.config
    assert torch.equal(run(again, *args), run(smaller, *args))


@pytest.mark.parametrize("name", ["gpt2", "mistral", "alibi", "t5", "whisper"])
@torch.no_grad()
def test_with_a_cache(name: str) -> None:
    model = tiny(name)
    smaller = prune(model, lost(model))
    *source, tokens = inputs(model.config)
    cache = smaller.new_cache(batch=3, max_len=11)
    parts = [
        run(smaller, *(x if i == 0 else None for x in source), piece, cache=cache)
        for i, piece in enumerate(tokens.split([4, 1, 6], 1))
    ]
    assert_same(torch.cat(parts, 1), run(smaller, *source, tokens))
    assert {layer.k.shape[1] for layer in cache.layers} != {model.config.n_kv_heads}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "alibi", "marian", "t5"])
def test_through_the_engine(name: str) -> None:
    model = tiny(name, dtype=torch.float32, max_len=64)
    *source, tokens = inputs(model.config)
    heads = lost(model)
    smaller = prune(model, heads)

    def write(model: Model) -> list[list[int]]:
        engine = Engine(model, max_tokens=512)
        tickets = [
            engine.submit(
                Request(
                    prompt=tokens[row, : 5 + row].tolist(),
                    source=source[0][row, : 9 + row].tolist() if source else None,
                    max_new_tokens=9,
                    eos=(),
                )
            )
            for row in range(3)
        ]
        while engine.is_busy:
            engine.step()
        return [ticket.ids for ticket in tickets]

    with ablated(model, heads):
        expected = write(model)
    assert write(smaller) == expected


@torch.no_grad()
def test_long_texts_keep_each_heads_own_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bias that is computed in strips."""
    from clearhead.layers import strips

    model = tiny("alibi")

    smaller, args = prune(model, {0: [1], 1: [0]}), inputs(model.config)
    expected = run(smaller, *args)
    monkeypatch.setattr(strips, "WRITTEN_OUT", 4)
    assert_same(run(smaller, *args), expected)


@torch.no_grad()
def test_twice_is_once() -> None:
    """Heads are numbered as they are now; the rest is the same, in the same order."""
    model = tiny("alibi", n_heads=5)
    once = prune(model, {0: [0, 3], 1: [2]})
    twice = prune(prune(model, {0: [0]}), {0: [2], 1: [2]})
    assert once.config == twice.config
    args = inputs(model.config)
    assert torch.equal(run(once, *args), run(twice, *args))


@torch.no_grad()
def test_it_is_looked_at_and_swept_as_any_model() -> None:
    model = tiny("alibi", n_heads=5)
    smaller, args = prune(model, {0: [0, 3]}), inputs(model.config)
    site = "blocks.0.attention.weights"
    with probe(model, site) as whole:
        run(model, *args)
    with probe(smaller, site) as seen:
        run(smaller, *args)
    assert_same(seen[site], whole[site][:, [1, 2, 4]])


def test_it_is_trained_as_any_model() -> None:
    smaller = prune(tiny("t5"), {"decoder.blocks.0.cross": [1]})
    run(smaller, *inputs(smaller.config)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in smaller.parameters())


def test_savings() -> None:
    model = tiny("gpt2", dtype=torch.float32)
    smaller = prune(model, {0: [0, 1]})
    found = savings(model, smaller, *inputs(model.config))
    assert found.parameters_before - found.parameters == 2 * parameters_of_head(model.config)
    assert min(found.seconds, found.seconds_before) > 0


@pytest.mark.parametrize(
    ("name", "heads", "error", "words"),
    [
        ("gpt2", {2: [0]}, ch.InputError, r"layers 0 \.\. 1; got 2"),
        ("gpt2", {0: [3]}, ch.InputError, r"'blocks\.0\.attention' has heads 0 \.\. 2; got 3"),
        (
            "gpt2",
            {"blocks.0.atention": [1]},
            ch.InputError,
            r"no attention .*; did you mean 'blocks\.0\.attention'",
        ),
        (
            "gpt2",
            {0: [0, 1, 2]},
            ch.ConfigError,
            r"leaves 'blocks\.0\.attention' none of its 3 heads; keep at least one",
        ),
        (
            "llama",
            {0: [0, 1]},
            ch.ConfigError,
            r"3 heads for each of keys and values, .* some of heads 0 \.\. 2; take all",
        ),
        ("t5", {0: [0]}, ch.InputError, r"several attentions; name one, such as 'decoder\.blocks\.0\.cross'"),
    ],
)
def test_what_can_not_be(name: str, heads: dict[int | str, list[int]], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        prune(tiny(name), heads)


def test_a_config_of_heads_that_are_not_there() -> None:
    with pytest.raises(ch.ConfigError, match=r"names 'blocks\.0\.attention\.3' which this model has not; did you mean"):
        tiny("gpt2", pruned_heads=("blocks.0.attention.3",))
    with pytest.raises(ch.ConfigError, match=r"names 'blocks\.0\.attention\.1' twice; name it once"):
        tiny("gpt2", pruned_heads=("blocks.0.attention.1", "blocks.0.attention.1"))


def test_transformers_has_no_such_models(tmp_path: Path) -> None:
    smaller = prune(tiny("gpt2"), {0: [1]})
    with pytest.raises(
        ch.CheckpointError,
        match=r"no layers of unequal heads, .*save with format='clearhead'",
    ):
        ch.save(smaller, tmp_path / "hf", format="hf")
