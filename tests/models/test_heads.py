"""What stands at a model's ends, against its formula: embeddings, segments, pools, heads."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.layers.masks import causal, padding

from .tiny import assert_same, inputs, tiny

REAL = torch.arange(11) >= torch.tensor([[3], [0], [9]])


def test_the_original_scales_its_embedding_and_nothing_else() -> None:
    model = tiny("original")
    source, _ = inputs(model.config)
    assert_same(model.tokens(source), model.tokens.weight[source] * math.sqrt(22))
    (tokens,) = inputs(tiny("gpt2").config)
    assert torch.equal(tiny("gpt2").tokens(tokens), tiny("gpt2").tokens.weight[tokens])


def test_one_embedding_serves_source_target_and_head() -> None:
    model = tiny("original")
    source, target = inputs(model.config)
    assert model.source is None
    states = model.states(target, model.encode(source))
    assert_same(model(source, target), states @ model.tokens.weight.T)
    apart = tiny("original", source_vocab_size=59)
    assert apart.source.weight.shape == (59, 22)


def test_t5s_tied_head_scales_its_input_down() -> None:
    model = tiny("t5")
    source, target = inputs(model.config)
    states = model.states(target, model.encode(source))
    assert_same(model(source, target), states @ model.tokens.weight.T / math.sqrt(22))
    later = tiny("t5-v1.1")
    states = later.states(target, later.encode(source))
    assert_same(later(source, target), states @ later.head.weight.T)


def test_marians_bias_is_saved_but_not_trained() -> None:
    model = tiny("marian")
    source, target = inputs(model.config)
    assert "head.bias" in model.state_dict()
    assert "head.bias" not in dict(model.named_parameters())
    states = model.states(target, model.encode(source))
    assert_same(model(source, target), states @ model.tokens.weight.T + model.head.bias)


def test_berts_head_for_words() -> None:
    model = tiny("bert-mlm")
    (tokens,) = inputs(model.config)
    x = F.gelu(F.linear(model.states(tokens), model.head.dense.weight, model.head.dense.bias))
    x = F.layer_norm(x, (22,), model.head.norm.weight, model.head.norm.bias, eps=1e-12)
    assert_same(model(tokens), x @ model.tokens.weight.T + model.head.bias)


def test_segments_are_added_and_default_to_the_first() -> None:
    model = tiny("bert")
    (tokens,) = inputs(model.config)
    zeros = torch.zeros_like(tokens)
    assert torch.equal(model(tokens), model(tokens, segments=zeros))
    both = (torch.arange(11) >= 5).long().expand(3, 11)
    assert not torch.allclose(model(tokens), model(tokens, segments=both))
    swapped = tiny("bert")
    with torch.no_grad():
        swapped.segments.weight.copy_(model.segments.weight.flip(0))
    assert_same(swapped(tokens, segments=1 - both), model(tokens, segments=both))


def first_real(states: Tensor) -> Tensor:
    return torch.stack([states[0, 3], states[1, 0], states[2, 9]])


def test_berts_pooler() -> None:
    model = tiny("bert")
    (tokens,) = inputs(model.config)
    states = model(tokens, REAL)
    dense = model.pool.dense
    assert_same(model.pooled(states, REAL), torch.tanh(first_real(states) @ dense.weight.T + dense.bias))
    assert_same(model.pooled(states), torch.tanh(states[:, 0] @ dense.weight.T + dense.bias))
    assert torch.equal(model.pooled(states, padding(REAL)), model.pooled(states, REAL))


@pytest.mark.parametrize("normed", [False, True])
def test_the_mean_of_the_real_states(normed: bool) -> None:
    model = tiny("bert", pooler=False, pool="mean", pool_normed=normed)
    (tokens,) = inputs(model.config)
    states = model(tokens, REAL)
    expected = torch.stack([states[0, 3:].mean(0), states[1].mean(0), states[2, 9:].mean(0)])
    if normed:
        expected = expected / expected.norm(dim=-1, keepdim=True)
    assert_same(model.pooled(states, REAL), expected)


def test_classes_are_read_from_the_pooled_state() -> None:
    model = tiny("bert-classes")
    (tokens,) = inputs(model.config)
    pooled = model.pooled(model.states(tokens, REAL), REAL)
    assert_same(model(tokens, REAL), pooled @ model.head.weight.T + model.head.bias)


def test_a_picture_is_its_patches_and_a_class_token() -> None:
    """Patch (i, j) is the product of its pixels with the projection; the class is read from the first state."""
    model = tiny("vit")
    (pictures,) = inputs(model.config)
    entered = model.tokens(pictures)
    kernel, bias = model.tokens.projection.weight.flatten(1), model.tokens.projection.bias
    assert torch.equal(entered[:, 0], model.tokens.class_token.expand(3, -1))
    for n, (i, j) in enumerate((i, j) for i in range(3) for j in range(3)):
        patch = pictures[:, :, 5 * i : 5 * i + 5, 5 * j : 5 * j + 5].flatten(1)
        assert_same(entered[:, 1 + n], patch @ kernel.T + bias)
    states = model.states(pictures)
    assert_same(model(pictures), states[:, 0] @ model.head.weight.T + model.head.bias)


def test_a_mask_and_its_tensor_are_the_same() -> None:
    for name in ("gpt2", "bert", "esm"):
        model = tiny(name)
        (tokens,) = inputs(model.config)
        assert torch.equal(model(tokens, padding(REAL)), model(tokens, REAL))
    translator = tiny("original")
    source, target = inputs(translator.config, source=11)
    ours = translator(source, target, padding(REAL), target_mask=padding(REAL.flip(0)))
    assert torch.equal(ours, translator(source, target, REAL, target_mask=REAL.flip(0)))


def test_an_encoder_takes_more_masks() -> None:
    """A causal mask makes of an encoder what a decoder's states are."""
    plain = dict(positions="rotary", feedforward="gelu", rotary_precision="float32", dropped_token=-1)
    encoder, decoder = tiny("esm", **plain), tiny("gpt2", **plain)
    decoder.load_state_dict({k: v for k, v in encoder.state_dict().items() if k in decoder.state_dict()})
    (tokens,) = inputs(encoder.config)
    assert_same(encoder(tokens, causal()), decoder.states(tokens))


def test_a_decoder_has_an_encoder_of_its_own_depth() -> None:
    model = tiny("original", n_layers=3, n_decoder_layers=1)
    assert (len(model.encoder.blocks), len(model.decoder.blocks)) == (3, 1)
    assert len(model.new_cache(batch=2, max_len=5).layers) == 1
