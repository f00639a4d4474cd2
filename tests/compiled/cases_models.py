"""compiled = eager for every family, in one graph, forward and backward."""

from __future__ import annotations

import pytest
import torch
from models.tiny import FAMILIES, assert_same, inputs, run, tiny


@pytest.fixture(autouse=True)
def forget() -> None:
    """Each test compiles for itself: torch remembers sizes it has seen, and makes those that change symbolic."""
    torch._dynamo.reset()


@pytest.mark.parametrize("name", FAMILIES)
def test_compiled_is_eager(name: str) -> None:
    eager, compiled = (tiny(name, n_layers=1, dtype=torch.float32) for _ in range(2))
    args = inputs(eager.config)
    graph = torch.compile(compiled, fullgraph=True)  # a break in the graph is an error
    answers = run(eager, *args), run(graph, *args)
    # float32; the compiler fuses and reorders sums, 2^-24 each, a hundred of them
    assert_same(answers[1], answers[0], within=1e-5)
    for answer in answers:
        answer.square().mean().backward()
    for (site, theirs), ours in zip(eager.named_parameters(), compiled.parameters(), strict=True):
        if theirs.grad is None:  # BERT's pooler, Whisper's fixed positions
            assert ours.grad is None, site
        else:
            assert ours.grad is not None, site
            assert_same(ours.grad, theirs.grad, within=1e-5)


# Below, the graph is what is tested, not the code made of it: aot_eager is enough, and quick.


def test_one_graph_with_padding_and_a_window() -> None:
    model = tiny("mistral")
    (tokens,) = inputs(model.config)
    real = torch.arange(11) >= torch.tensor([[3], [0], [9]])
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(graph(tokens, real)[real], model(tokens, real)[real])


def test_one_graph_with_a_sparse_pattern() -> None:
    model = tiny("gpt2", sparsity="block=2, window=2, n_global=1, n_random=1")
    (tokens,) = inputs(model.config)
    real = torch.arange(11) >= torch.tensor([[3], [0], [9]])
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(graph(tokens, real)[real], model(tokens, real)[real])


def test_one_graph_with_masks_on_both_sides() -> None:
    model = tiny("t5")
    source, target = inputs(model.config)
    source_real, real = (
        torch.arange(13) < torch.tensor([[3], [13], [9]]),
        torch.arange(11) < torch.tensor([[11], [2], [7]]),
    )
    graph = torch.compile(model, fullgraph=True, backend="aot_eager")
    ours, theirs = (call(source, target, source_real, target_mask=real) for call in (graph, model))
    assert_same(ours[real], theirs[real])


def test_one_graph_with_checkpointing() -> None:
    eager, compiled = (tiny("gpt2") for _ in range(2))
    (tokens,) = inputs(eager.config)
    graph = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    answers = eager(tokens), graph(tokens, checkpointing=True)
    assert_same(answers[1], answers[0])
    for answer in answers:
        answer.square().mean().backward()
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        assert_same(ours.grad, theirs.grad)


@pytest.mark.parametrize("name", ["mistral", "bert", "t5"])
def test_sizes_may_be_symbols(name: str) -> None:
    """As after a batch of another size: torch then traces with symbols, some of a call's sizes and not others."""
    model = tiny(name, n_layers=1)
    args = inputs(model.config)
    reals = [torch.arange(x.shape[1]) >= torch.arange(3)[:, None] for x in args]
    masks = dict(mask=reals[0], target_mask=reals[1]) if len(args) == 2 else dict(mask=reals[0])
    expected = model(*args, **masks)[reals[-1]]
    for symbolic in (args, reals):
        torch._dynamo.reset()
        graph = torch.compile(model, fullgraph=True, backend="aot_eager")
        copies = {id(x): x.clone() for x in (*args, *reals)}
        for x in symbolic:
            torch._dynamo.maybe_mark_dynamic(copies[id(x)], 0)
            torch._dynamo.maybe_mark_dynamic(copies[id(x)], 1)
        ours = graph(*(copies[id(x)] for x in args), **{name: copies[id(x)] for name, x in masks.items()})
        assert_same(ours[reals[-1]], expected)
