"""What layers do when nothing is asked for, as the paper has it; a cache of one layer; the keys that a strip reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.layers.block import FeedForward
from clearhead.layers.embedding import TokenHead
from clearhead.layers.masks import Mask
from clearhead.layers.strips import _reach


def test_a_feedforward_is_relu_with_biases() -> None:
    layer, x = FeedForward(d_model=3, d_ff=5), torch.randn(2, 7, 3)
    expected = F.relu(x @ layer.up.weight.T + layer.up.bias) @ layer.down.weight.T + layer.down.bias
    # float32: only the order of summation differs
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-6)


def test_a_head_does_not_scale() -> None:
    head, x = TokenHead(d_model=3, vocab_size=5), torch.randn(2, 7, 3)
    # float32: only the order of summation differs
    torch.testing.assert_close(head(x), x @ head.weight.T, rtol=0, atol=1e-6)


def test_a_cache_of_one_layer() -> None:
    model = ch.build(ch.preset("gpt2", n_layers=1, d_model=12, n_heads=3, d_ff=20, vocab_size=31, max_len=17)).eval()
    tokens = torch.randint(0, 31, (2, 11))
    cache = model.new_cache(batch=2, max_len=11)
    with torch.no_grad():
        parts = [model(part, cache=cache) for part in tokens.split(4, 1)]
        # float32, one layer: only the order of summation differs
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=0, atol=1e-5)


def test_a_strip_reads_only_keys_in_reach() -> None:
    assert _reach(Mask(window=3), slice(10, 14), 50, 50) == slice(8, 16)
    assert _reach(Mask(window=3, causal=True), slice(10, 14), 50, 50) == slice(8, 14)
    assert _reach(Mask(causal=True), slice(10, 14), 50, 50) == slice(0, 14)
    assert _reach(Mask(window=3), slice(48, 50), 50, 50) == slice(46, 50)
