"""The weights a probe computes are those of transformers' eager attention, for every family it has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, Qwen2Config

import clearhead as ch
from clearhead.checkpoint import load
from clearhead.inside import intervene, patch, zero
from tests.families import test_bert, test_esm, test_gpt2, test_llama, test_marian, test_t5, test_vit, test_whisper
from tests.families.compare import positions_of, sides, tokens

EAGER = dict(attn_implementation="eager")
X, SOURCE = tokens(), tokens(length=13, seed=3)
PIECES = test_vit.images()

# A model of transformers, and the inputs of both.
Case = tuple[Callable[[], Any], dict[str, Any], tuple[Tensor, ...]]
LANGUAGE: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: test_gpt2.gpt2(**EAGER),
    "llama": lambda: test_llama.make(**EAGER),
    "llama3": lambda: test_llama.make(rope_parameters=test_llama.LLAMA3, **EAGER),
    "mistral": lambda: test_llama.make(MistralConfig, sliding_window=4, **EAGER),
    "qwen2": lambda: test_llama.make(Qwen2Config, **EAGER),
    "bert": lambda: test_bert.make(**EAGER),
}
CASES: dict[str, Case] = {
    **{name: (make, dict(input_ids=X), (X,)) for name, make in LANGUAGE.items()},
    "esm": (lambda: test_esm.make(**EAGER), dict(input_ids=test_esm.masked()), (test_esm.masked(),)),
    "vit": (lambda: test_vit.make(**EAGER), dict(pixel_values=PIECES), (PIECES,)),
    "t5": (lambda: test_t5.t5(**EAGER), dict(input_ids=SOURCE, decoder_input_ids=X), (SOURCE, X)),
    "marian": (lambda: test_marian.marian(**EAGER), dict(input_ids=SOURCE, decoder_input_ids=X), (SOURCE, X)),
    "whisper": (
        lambda: test_whisper.whisper(**EAGER),
        dict(input_features=test_whisper.SOUND[:, :5].float(), decoder_input_ids=X),
        (test_whisper.SOUND[:, :5].float(), X),
    ),
}


def expected(answer: Any) -> dict[str, Tensor]:
    """Their attentions under our names."""
    names = {
        "attentions": "blocks.{}.attention.weights",
        "encoder_attentions": "encoder.blocks.{}.attention.weights",
        "decoder_attentions": "decoder.blocks.{}.attention.weights",
        "cross_attentions": "decoder.blocks.{}.cross.weights",
    }
    given = {name: getattr(answer, key) for key, name in names.items() if getattr(answer, key, None) is not None}
    return {name.format(i): weights for name, layers in given.items() for i, weights in enumerate(layers)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_weights_of_every_family(name: str, tmp_path: Path) -> None:
    make, asked, args = CASES[name]
    theirs = make()
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    with ch.probe(ours, "*.weights") as seen:
        ours(*args)
    reference = expected(theirs(**asked, output_attentions=True))
    assert set(seen) == set(reference)
    for site in seen:
        # float32, at most three layers of sums of at most 40 terms
        torch.testing.assert_close(seen[site], reference[site], rtol=0, atol=1e-5)
        for head in range(seen[site].shape[1]):
            torch.testing.assert_close(
                seen.rows(site, -1, head=head), reference[site][:, [head], -1:], rtol=0, atol=1e-5
            )


@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_weights_with_padding(name: str, side: str, tmp_path: Path) -> None:
    theirs, real = LANGUAGE[name](), sides(3, 11)[side]
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    with ch.probe(ours, "*.weights") as seen:
        ours(X, real)
    given = dict(attention_mask=real, position_ids=positions_of(real))
    reference = expected(theirs(X, output_attentions=True, **given))
    for site in seen:
        rows = seen[site].transpose(1, 2)[real], reference[site].transpose(1, 2)[real]
        torch.testing.assert_close(*rows, rtol=0, atol=1e-5)


@torch.no_grad()
def test_changes_are_those_of_hooks_on_their_modules(tmp_path: Path) -> None:
    """A head removed before their output projection, and a residual replaced after their block."""
    theirs = test_gpt2.gpt2(**EAGER)
    theirs.save_pretrained(tmp_path)
    ours, E = load(tmp_path), 7
    value = torch.randn(3, 11, 21)

    def take_away(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = args[0].clone()
        x[..., E : 2 * E] = 0
        return (x,)

    handle = theirs.transformer.h[1].attn.c_proj.register_forward_pre_hook(take_away)
    reference = theirs(X).logits
    handle.remove()
    with intervene(ours, zero("blocks.1.attention.out", head=1)):
        torch.testing.assert_close(ours(X), reference, rtol=0, atol=1e-5)

    def replace(_: Any, __: Any, out: Any) -> Any:
        return (value, *out[1:]) if isinstance(out, tuple) else value

    handle = theirs.transformer.h[0].register_forward_hook(replace)
    reference = theirs(X).logits
    handle.remove()
    with intervene(ours, patch("blocks.0.residual", value)):
        torch.testing.assert_close(ours(X), reference, rtol=0, atol=1e-5)
