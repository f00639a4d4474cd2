"""Building: the same seed the same weights, no memory on the meta device, beginnings as each paper says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.layers.linear import FusedLinear

from .tiny import EVERY, FAMILIES, inputs, run, tiny_config

RANDOM = ["normal", "truncated", "xavier", "fan_in"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_seed_gives_the_same_weights(name: str) -> None:
    config = tiny_config(name)
    one, same, other = (ch.build(config, seed=seed).state_dict() for seed in (3, 3, 5))
    for site, weight in one.items():
        assert torch.equal(weight, same[site]), site
    drawn = [site for site, weight in one.items() if weight.unique().numel() > 2]  # not all zeros, not all ones
    drawn = [site for site in drawn if site != "encoder.positions.weight" or config.inputs != "frames"]
    assert drawn
    for site in drawn:
        assert not torch.equal(one[site], other[site]), site


def test_building_neither_reads_nor_moves_the_global_generator() -> None:
    config = tiny_config("gpt2")
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one = ch.build(config).tokens.weight
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(13)
    assert torch.equal(ch.build(config).tokens.weight, one)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_model_is_built_in_the_precision_asked_for(dtype: torch.dtype) -> None:
    model = ch.build(tiny_config("marian"), dtype=dtype)
    assert {x.dtype for x in [*model.parameters(), *model.buffers()]} == {dtype}


def test_a_model_has_torchs_default_precision() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert next(ch.build(tiny_config("gpt2")).parameters()).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("init", RANDOM)
@pytest.mark.parametrize("residual", ["same", "scaled", "zero"])
def test_nothing_is_left_unfilled(name: str, init: str, residual: str) -> None:
    """Every way to begin works for every family: what was not filled would be whatever the memory held."""
    model = ch.build(tiny_config(name, init=init, init_residual=residual))
    assert all(x.isfinite().all() for x in [*model.parameters(), *model.buffers()])
    assert max(float(x.detach().abs().max()) for x in model.parameters()) < 10
    assert run(model, *inputs(model.config)).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_family_runs_on_the_meta_device(name: str) -> None:
    config = tiny_config(name)
    model, here = ch.build(config, device="meta"), ch.build(config)
    assert all(x.is_meta for x in [*model.parameters(), *model.buffers()])
    batch = inputs(config)
    out = run(model, *(x.to("meta") for x in batch))
    assert out.is_meta
    assert out.shape == run(here, *batch).shape


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_a_meta_model_becomes_a_real_one_by_loading(name: str) -> None:
    """Which parameters are trained is part of the model, not of how its numbers came to be."""
    config = tiny_config(name)
    real = ch.build(config)
    filled = ch.build(config, device="meta").to_empty(device="cpu")
    filled.load_state_dict(real.state_dict())
    assert torch.equal(run(filled, *inputs(config)), run(real, *inputs(config)))
    assert {n: p.requires_grad for n, p in filled.named_parameters()} == {
        n: p.requires_grad for n, p in real.named_parameters()
    }


@pytest.mark.slow
def test_gpt3_costs_no_memory() -> None:
    model = ch.build(ch.preset("gpt3-175b"), device="meta")
    assert sum(p.numel() for p in model.parameters()) == 174_604_259_328
    assert model.config.d_model == 12_288
    assert model.config.d_head == 128
    logits = model(torch.zeros(1, 2048, dtype=torch.long, device="meta"))
    assert tuple(logits.shape) == (1, 2048, 50_257)


def test_a_state_dict_has_plain_names_and_loads_back() -> None:
    model = ch.build(tiny_config("llama"))
    state = model.state_dict()
    assert {"blocks.0.attention.q_proj.weight", "blocks.1.feedforward.gate.weight"} <= set(state)
    assert not [site for site in state if "qkv" in site or "gate_up" in site]
    other = ch.build(tiny_config("llama"), seed=1)
    other.load_state_dict(state)
    assert torch.equal(other(torch.arange(7)[None]), model(torch.arange(7)[None]))


def test_a_tied_head_is_the_embedding() -> None:
    tied, own = ch.build(tiny_config("gpt2")), ch.build(tiny_config("gpt2", tie_embeddings=False))
    assert "head.weight" not in tied.state_dict()
    assert own.head.weight.shape == own.tokens.weight.shape
    tokens = torch.arange(7)[None]
    assert torch.equal(tied(tokens), tied.states(tokens) @ tied.tokens.weight.T)


# How weights begin. A standard deviation measured on n numbers is itself off by 1 / sqrt(2 n); the smallest matrix below has
# 64 x 128 numbers: 0.8 %. Four times that.
WITHIN = 0.032
BIG = dict(n_layers=3, d_model=128, n_heads=4, d_head=16, d_ff=256, vocab_size=997, max_len=127)


def assert_std(x: Tensor, std: float, site: str = "") -> None:
    assert float(x.detach().std()) == pytest.approx(std, rel=WITHIN), site
    assert abs(float(x.detach().mean())) < 5 * std / math.sqrt(x.numel()), site


def matrices(model: nn.Module) -> dict[str, Tensor]:
    """Every matrix by its saved name (q, k and v apart), without the tables of embeddings and positions."""
    tables = ("tokens.weight", "positions.weight", "segments.weight")
    return {site: x for site, x in model.state_dict().items() if x.ndim > 1 and not site.endswith(tables)}


@pytest.mark.parametrize("name", ["gpt2", "llama", "esm", "marian", "whisper"])
def test_normal_beginnings(name: str) -> None:
    model = ch.build(ch.preset(tiny_names()[name], **BIG))
    for site, x in matrices(model).items():
        writes = site.endswith(("o_proj.weight", "down.weight")) and model.config.init_residual == "scaled"
        assert_std(x, 0.02 / math.sqrt(6) if writes else 0.02, site)  # GPT-2: 3 layers have 6 steps
    assert_std(model.tokens.weight, 0.02)


def tiny_names() -> dict[str, str]:
    return {"gpt2": "gpt2", "llama": "llama-7b", "esm": "esm2-8m", "marian": "opus-mt-en-de", "whisper": "whisper-tiny"}


def test_gpt2s_residual_projections_shrink_with_the_depth() -> None:
    assert ch.preset("gpt2").init_residual == "scaled"
    for depth in (1, 5):
        model = ch.build(ch.preset("gpt2", **BIG | dict(n_layers=depth)))
        assert_std(model.blocks[0].attention.o_proj.weight, 0.02 / math.sqrt(2 * depth))
        assert_std(model.blocks[0].feedforward.down.weight, 0.02 / math.sqrt(2 * depth))


def test_a_zero_residual_begins_as_the_identity() -> None:
    config = ch.preset("llama-7b", **BIG, init_residual="zero")
    model = ch.build(config, dtype=torch.float64)
    assert not any(block.attention.o_proj.weight.any() or block.feedforward.down.weight.any() for block in model.blocks)
    tokens = torch.randint(0, 997, (2, 13))
    assert torch.equal(model.states(tokens), model.norm(model.tokens(tokens)))


@pytest.mark.parametrize("name", ["bert-base", "vit-b-16"])
def test_truncated_beginnings(name: str) -> None:
    changes = BIG | (dict(vocab_size=0, max_len=0, image_size=64) if name == "vit-b-16" else {})
    model = ch.build(ch.preset(name, **changes))
    tables = [model.positions.weight] + ([model.tokens.weight] if name == "bert-base" else [])
    for x in [*matrices(model).values(), *tables]:
        assert_std(x, 0.02 * 0.8796)  # what cutting a normal distribution at two deviations leaves of its own
        assert float(x.detach().abs().max()) <= 0.04


def test_the_originals_beginnings() -> None:
    """Glorot's bound for each projection as if it stood alone; embeddings with variance 1 / d_model."""
    model = ch.build(ch.preset("transformer-base", **BIG))
    for site, x in matrices(model).items():
        bound = math.sqrt(6 / sum(x.shape))
        assert float(x.abs().max()) <= bound, site
        assert float(x.abs().max()) > 0.99 * bound, site
        assert_std(x, bound / math.sqrt(3), site)
    assert_std(model.tokens.weight, 1 / math.sqrt(128))


@pytest.mark.parametrize("name", ["t5-small", "t5-v1.1-small"])
def test_t5s_beginnings(name: str) -> None:
    model = ch.build(ch.preset(name, **BIG))
    for site, x in matrices(model).items():
        # queries carry the 1 / sqrt(d_head) that T5's scores leave out
        assert_std(x, 1 / math.sqrt(x.shape[1] * (16 if ".q_proj." in site else 1)), site)
    assert_std(model.tokens.weight, 1.0)
    for stack in (model.encoder, model.decoder):  # 32 x 4 numbers: 6 %, four times that
        assert float(stack.positions.weight.detach().std()) == pytest.approx(1 / math.sqrt(128), rel=0.25)


@pytest.mark.parametrize("name", FAMILIES)
def test_norms_begin_as_ones_and_biases_as_zeros(name: str) -> None:
    model = ch.build(tiny_config(name))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            assert (module.weight == 1).all()
        bias = getattr(module, "bias", None)
        if isinstance(module, nn.LayerNorm | nn.Linear | nn.Conv1d | nn.Conv2d | FusedLinear) and bias is not None:
            assert not bias.any()


def test_whispers_sound_positions_are_fixed_sinusoids() -> None:
    config = ch.preset("whisper-tiny", **BIG, max_source_len=101)
    model = ch.build(config, seed=3, dtype=torch.float64)
    table = model.encoder.positions.weight
    assert not table.requires_grad
    assert model.decoder.positions.weight.requires_grad
    for i in (0, 1, 31, 63):  # wavelengths from 2 pi to 10,000 times that, sines first
        angles = torch.arange(101, dtype=torch.float64) / 10_000 ** (i / 63)
        # the table is computed in float32, whose angles of up to 100 are good to 2^-24 of that
        torch.testing.assert_close(table[:, i].detach(), angles.sin(), rtol=0, atol=1e-5)
        torch.testing.assert_close(table[:, 64 + i].detach(), angles.cos(), rtol=0, atol=1e-5)


def test_whispers_sound_positions_are_fixed_on_the_meta_device_too() -> None:
    model = ch.build(ch.preset("whisper-tiny", **BIG), device="meta")
    assert not model.encoder.positions.weight.requires_grad
