"""Whole stacks against torch.nn's Transformer: the same weights, the same states, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.models import Model

from .tiny import assert_same, built

# Of torch's Transformer: MHA with d_head = d_model / n_heads, biases everywhere, no positions.
FIELDS = dict(d_model=22, n_heads=2, d_ff=37, n_layers=3, vocab_size=53, max_len=31, positions="none")


def copy_attention(theirs: nn.MultiheadAttention, ours: dict[str, Tensor], site: str) -> None:
    for kind in ("weight", "bias"):
        whole = torch.cat([ours[f"{site}.{part}_proj.{kind}"] for part in "qkv"])
        getattr(theirs, f"in_proj_{kind}").copy_(whole)
        getattr(theirs.out_proj, kind).copy_(ours[f"{site}.o_proj.{kind}"])


def copy_stack(
    theirs: nn.TransformerEncoder | nn.TransformerDecoder, ours: dict[str, Tensor], prefix: str = ""
) -> None:
    steps = (
        ["attention", "cross", "feedforward"]
        if isinstance(theirs, nn.TransformerDecoder)
        else ["attention", "feedforward"]
    )
    with torch.no_grad():
        for i, layer in enumerate(theirs.layers):
            block = f"{prefix}blocks.{i}"
            copy_attention(layer.self_attn, ours, f"{block}.attention")
            if "cross" in steps:
                copy_attention(layer.multihead_attn, ours, f"{block}.cross")
            for n, step in enumerate(steps, 1):
                getattr(layer, f"norm{n}").weight.copy_(ours[f"{block}.{step}_norm.weight"])
                getattr(layer, f"norm{n}").bias.copy_(ours[f"{block}.{step}_norm.bias"])
            for name, linear in (("up", layer.linear1), ("down", layer.linear2)):
                linear.weight.copy_(ours[f"{block}.feedforward.{name}.weight"])
                linear.bias.copy_(ours[f"{block}.feedforward.{name}.bias"])
        if theirs.norm is not None:
            theirs.norm.weight.copy_(ours[f"{prefix}norm.weight"])
            theirs.norm.bias.copy_(ours[f"{prefix}norm.bias"])


def layer_arguments(model: Model) -> dict[str, object]:
    config = model.config
    return dict(
        d_model=config.d_model,
        nhead=config.n_heads,
        dim_feedforward=config.d_ff,
        dropout=0.0,
        activation=config.feedforward,
        norm_first=config.norm_first,
        batch_first=True,
        dtype=torch.float64,
    )


def last_norm(model: Model) -> nn.LayerNorm | None:
    return nn.LayerNorm(model.config.d_model, dtype=torch.float64) if model.config.norm_first else None


def torch_encoder(model: Model, prefix: str = "") -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(**layer_arguments(model))
    theirs = nn.TransformerEncoder(layer, model.config.n_layers, last_norm(model), enable_nested_tensor=False)
    copy_stack(theirs, model.state_dict(), prefix)
    return theirs


def torch_decoder(model: Model) -> nn.TransformerDecoder:
    layer = nn.TransformerDecoderLayer(**layer_arguments(model))
    theirs = nn.TransformerDecoder(layer, model.config.n_decoder_layers, last_norm(model))
    copy_stack(theirs, model.state_dict(), "decoder.")
    return theirs


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("feedforward", ["relu", "gelu"])
def test_encoder_is_torchs(norm_first: bool, feedforward: str) -> None:
    model = built(ch.Config(shape="encoder", norm_first=norm_first, feedforward=feedforward, **FIELDS))
    tokens = torch.randint(0, 53, (3, 11))
    real = torch.arange(11) < torch.tensor([[5], [11], [2]])
    expected = torch_encoder(model)(model.tokens(tokens), src_key_padding_mask=~real)
    assert_same(model(tokens, real)[real], expected[real])


@pytest.mark.parametrize("norm_first", [False, True])
def test_decoder_is_torchs_encoder_with_a_causal_mask(norm_first: bool) -> None:
    model = built(ch.Config(shape="decoder", norm_first=norm_first, feedforward="gelu", **FIELDS))
    tokens = torch.randint(0, 53, (3, 11))
    future = torch.ones(11, 11, dtype=torch.bool).triu(1)
    assert_same(model.states(tokens), torch_encoder(model)(model.tokens(tokens), mask=future))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("feedforward", ["relu", "gelu"])
def test_encoder_decoder_is_torchs(norm_first: bool, feedforward: str) -> None:
    fields = FIELDS | dict(n_decoder_layers=2)
    model = built(ch.Config(shape="encoder-decoder", norm_first=norm_first, feedforward=feedforward, **fields))
    source, target = torch.randint(0, 53, (3, 13)), torch.randint(0, 53, (3, 11))
    real = torch.arange(13) < torch.tensor([[5], [13], [2]])
    memory = torch_encoder(model, "encoder.")(model.tokens(source), src_key_padding_mask=~real)
    states = torch_decoder(model)(
        model.tokens(target),
        memory,
        tgt_mask=torch.ones(11, 11, dtype=torch.bool).triu(1),
        memory_key_padding_mask=~real,
    )
    assert_same(model(source, target, real), states @ model.head.weight.T)


def test_the_paper_is_torchs_transformer_with_scaled_embeddings_and_sinusoids() -> None:
    """transformer-base in small: section 3.4's sqrt(d_model), section 3.5's formula, one shared matrix."""
    fields = dict(n_layers=2, d_model=22, n_heads=2, d_ff=37, vocab_size=53, max_len=31, dropout=0.0)
    model = built(ch.preset("transformer-base", **fields))
    source, target = torch.randint(0, 53, (3, 13)), torch.randint(0, 53, (3, 11))

    def enter(tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], dtype=torch.float64)
        table = torch.empty(tokens.shape[1], 22, dtype=torch.float64)
        for i in range(11):
            table[:, 2 * i] = torch.sin(at / 10_000 ** (2 * i / 22))
            table[:, 2 * i + 1] = torch.cos(at / 10_000 ** (2 * i / 22))
        return model.tokens.weight[tokens] * 22**0.5 + table

    future = torch.ones(11, 11, dtype=torch.bool).triu(1)
    states = torch_decoder(model)(enter(target), torch_encoder(model, "encoder.")(enter(source)), tgt_mask=future)
    # the table is handed over in float32, 2^-24 of numbers up to 1; five layers carry that on
    assert_same(model(source, target), states @ model.tokens.weight.T, within=1e-6)
