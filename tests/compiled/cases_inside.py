"""Looking into a compiled model: it runs uncompiled as long as it is looked at, and its graphs are as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models.tiny import inputs, tiny

import clearhead as ch
from clearhead.inside import intervene, sites, zero
from clearhead.models import Model

SITE = "blocks.1.attention.weights"


def whole(model: Model) -> object:
    return torch.compile(model)


def in_place(model: Model) -> object:
    model.compile()
    return model


def by_block(model: Model) -> object:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block)
    return model


@pytest.mark.parametrize("compile", [whole, in_place, by_block])
@torch.no_grad()
def test_a_compiled_model_is_seen_and_changed(compile: Callable[[Model], object]) -> None:
    model = tiny("gpt2", dtype=torch.float32)
    args = inputs(model.config)
    with ch.probe(model) as expected:
        model(*args)
    with intervene(model, zero("blocks.0.attention.out", head=1)):
        without = model(*args)
    known = sites(model)
    compiled = compile(model)
    plain = compiled(*args)
    assert sites(compiled) == known
    for _ in range(2):
        with ch.probe(compiled) as seen:
            compiled(*args)
        for site in seen:
            torch.testing.assert_close(seen[site], expected[site], rtol=0, atol=1e-5)
        with intervene(compiled, zero("blocks.0.attention.out", head=1)):
            changed = compiled(*args)
        torch.testing.assert_close(changed, without, rtol=0, atol=1e-5)
        assert torch.equal(compiled(*args), plain)
    with pytest.raises(ZeroDivisionError), ch.probe(compiled):
        raise ZeroDivisionError
    assert torch.equal(compiled(*args), plain)


@torch.no_grad()
def test_a_function_around_a_model_keeps_its_graph_and_says_so() -> None:
    model = tiny("gpt2", dtype=torch.float32)
    args = inputs(model.config)
    compiled = torch.compile(lambda *x: 2 * model(*x))
    compiled(*args)
    with ch.probe(model, SITE) as seen:
        compiled(*args)
    with pytest.raises(ch.InputError, match=f"'{SITE}' was not reached"):
        seen[SITE]
    with (
        pytest.raises(ch.InputError, match="so nothing was changed; call the model inside"),
        intervene(model, zero("blocks.0.residual")),
    ):
        compiled(*args)
