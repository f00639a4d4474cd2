"""Exercise patching: which part of a run makes the difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.families import preset
from clearhead.inside import intervene, patch, probe
from clearhead.lessons.exercise import Exercise, Function, Mistake, drawn_ids
from clearhead.models import Decoder, build


def patching(
    model: Decoder, clean: Int[Tensor, "1 T"], corrupted: Int[Tensor, "1 T"], token: int
) -> Float[Tensor, "layers T"]:
    """Activation patching: in a run of the corrupted text, put back one state of the clean run, and see what it brings back.

    For each layer and each position t: run `corrupted` with the residual stream after that block, at t, replaced by that of the
    clean run. Read the logit of `token` at the last position.

    Equation: effect = (patched logit - corrupted logit) / (clean logit - corrupted logit)

    0: that state makes no difference. 1: it brings everything back. Either tool will do: ch.probe with clearhead.inside's
    intervene and patch (sites "blocks.3.residual"), or torch's hooks on model.blocks[3].

    The law: these numbers; after the last block only the last position counts, and there the effect is 1.
    """
    raise NotImplementedError("one clean run keeps the states; then one corrupted run for each layer and position")


@torch.no_grad()
def answer(model: Decoder, clean: Tensor, corrupted: Tensor, token: int) -> Tensor:
    with probe(model, "blocks.*.residual") as seen:
        high = model(clean)[0, -1, token]
    low = model(corrupted)[0, -1, token]
    effects = torch.zeros(len(seen), clean.shape[1])
    for layer in range(len(seen)):
        for t in range(clean.shape[1]):
            with intervene(model, patch(f"blocks.{layer}.residual", seen, positions=[t])):
                effects[layer, t] = (model(corrupted)[0, -1, token] - low) / (high - low)
    return effects


Write = Callable[[Tensor, Tensor, int], Tensor]  # a block's output, the other run's, t: what goes on


def write_one(here: Tensor, other: Tensor, t: int) -> Tensor:
    here = here.clone()
    here[:, t] = other[:, t]
    return here


@torch.no_grad()
def by_hooks(
    model: Decoder,
    clean: Tensor,
    corrupted: Tensor,
    token: int,
    *,
    write: Write = write_one,
    forward: bool = True,
    read: Callable[[Tensor, int], Tensor] = lambda logits, t: logits[0, -1],
    scale: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda now, high, low: (now - low) / (high - low),
    site: Callable[[Any], Any] = lambda block: block,
) -> Tensor:
    """With torch's hooks: what the reference does, and what the mistakes change of it."""
    states: dict[int, Tensor] = {}
    source, goal = (clean, corrupted) if forward else (corrupted, clean)
    hooks = [
        site(block).register_forward_hook(lambda _m, _i, out, n=n: states.__setitem__(n, out))
        for n, block in enumerate(model.blocks)
    ]
    model(source)
    for hook in hooks:
        hook.remove()
    effects = torch.zeros(len(model.blocks), clean.shape[1])
    high, low = (model(tokens)[0, -1, token] for tokens in (clean, corrupted))
    for layer, block in enumerate(model.blocks):
        for t in range(clean.shape[1]):
            hook = site(block).register_forward_hook(lambda _m, _i, out, n=layer, t=t: write(out, states[n], t))
            now = read(model(goal), t)[token]
            hook.remove()
            effects[layer, t] = scale(now, high, low)
    return effects


def reference(model: Decoder, clean: Tensor, corrupted: Tensor, token: int) -> Tensor:
    return by_hooks(model, clean, corrupted, token)


def variant(**changes: Any) -> Function:
    def function(model: Decoder, clean: Tensor, corrupted: Tensor, token: int) -> Tensor:
        return by_hooks(model, clean, corrupted, token, **changes)

    return function


def last_state_is_all(function: Function) -> str | None:
    model, clean, corrupted, token = cases()["one token differs"]
    last = function(model, clean, corrupted, token)[-1]
    if abs(float(last[-1]) - 1) > 1e-3 or float(last[:-1].abs().max()) > 1e-3:
        return f"after the last block the effects are {[round(float(x), 3) for x in last]}; expected zeros and, at the end, 1"
    return None


def leaves_no_hook(function: Function) -> str | None:
    model, clean, corrupted, token = cases()["one token differs"]
    with torch.no_grad():
        before = model(corrupted)
        function(model, clean, corrupted, token)
        change = float((model(corrupted) - before).abs().max())
    return (
        f"after your function the model computes something else, by {change:.3g}: remove the hooks" if change else None
    )


def cases() -> dict[str, tuple[Decoder, Tensor, Tensor, int]]:
    sizes = dict(n_layers=2, d_model=24, n_heads=2, d_ff=32, vocab_size=31, max_len=11)
    model = build(preset("gpt2", **sizes, init_std=0.3), seed=1).eval()
    assert isinstance(model, Decoder)
    clean = drawn_ids(1, 5, below=31)
    one, two = clean.clone(), clean.clone()
    one[0, 2] = (one[0, 2] + 5) % 31
    two[0, [1, 3]] = (two[0, [1, 3]] + 9) % 31
    return {"one token differs": (model, clean, one, 5), "two tokens differ": (model, clean, two, 11)}


EXERCISE = Exercise(
    stub=patching,
    answer=answer,
    reference=reference,
    cases=cases,
    laws={
        "after the last block only the last position counts": last_state_is_all,
        "the model is left as it was": leaves_no_hook,
    },
    mistakes=(
        Mistake(
            "the direction is reversed: states of the corrupted run are put into the clean one",
            variant(forward=False),
        ),
        Mistake(
            "the effect is not divided by clean minus corrupted: it is in logits, not a share",
            variant(scale=lambda now, high, low: now - low),
        ),
        Mistake(
            "the effect is measured from the clean run: subtract the corrupted logit",
            variant(scale=lambda now, high, low: (now - high) / (high - low)),
        ),
        Mistake(
            "all positions are patched at once, so that every effect of a layer is 1: patch position t alone",
            variant(write=lambda here, other, t: other),
        ),
        Mistake(
            "the logit is read at the patched position; it is that of the last one",
            variant(read=lambda logits, t: logits[0, t]),
        ),
        Mistake(
            "the attention's output is patched, not the residual stream after the block",
            variant(site=lambda block: block.attention),
        ),
    ),
    hints=(
        'One run of `clean` under a probe of "blocks.*.residual" keeps every state; two logits are the scale.',
        "from clearhead.inside import intervene, patch; with intervene(model, patch(site, seen, positions=[t])): model(corrupted)",
        "Two loops, layers and positions; (patched - corrupted) / (clean - corrupted), logits of `token` at the last position.",
    ),
    proves="you can say which state of a run makes the difference, and how much of it",
    sources=(patch, intervene),
)
