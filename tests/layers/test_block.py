"""Multi-head attention and blocks against torch.nn's, and against compositions of tested parts."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from clearhead.layers.attention import Lowered, MultiHeadAttention, attend, lower
from clearhead.layers.block import Block, FeedForward
from clearhead.layers.cache import LayerCache
from clearhead.layers.linear import make_norm
from clearhead.layers.masks import Mask, causal, padding
from clearhead.layers.positions import Rotary, rotate
from clearhead.layers.relative_positions import Alibi, RelativeBuckets

# Batch, queries, keys, heads, model width (3 heads of 5), feed-forward width.
B, T, S, H, D, F = 2, 7, 11, 3, 15, 13

# float64 against float64, a few layers of sums of a dozen terms: errors are near 1e-15
TIGHT = dict(rtol=0, atol=1e-12)

REAL = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])
REAL_MEMORY = torch.tensor([[True] * 11, [True] * 3 + [False] * 8])


def randomise(module: nn.Module) -> nn.Module:
    """float64, and no parameter at zero or one, where a forgotten bias or norm would not show."""
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def torch_attention(theirs: nn.MultiheadAttention) -> dict[str, Tensor]:
    """torch's weights under our names."""
    state = {"o_proj.weight": theirs.out_proj.weight, "o_proj.bias": theirs.out_proj.bias}
    for kind, whole in (("weight", theirs.in_proj_weight), ("bias", theirs.in_proj_bias)):
        state |= {f"{name}_proj.{kind}": part for name, part in zip("qkv", whole.chunk(3), strict=True)}
    return state


def torch_block(theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> dict[str, Tensor]:
    modules = {"feedforward.up": theirs.linear1, "feedforward.down": theirs.linear2, "attention_norm": theirs.norm1}
    if isinstance(theirs, nn.TransformerDecoderLayer):
        modules |= {"cross_norm": theirs.norm2, "feedforward_norm": theirs.norm3}
    else:
        modules |= {"feedforward_norm": theirs.norm2}
    state = {f"{name}.{key}": value for name, module in modules.items() for key, value in module.state_dict().items()}
    state |= {f"attention.{key}": value for key, value in torch_attention(theirs.self_attn).items()}
    if isinstance(theirs, nn.TransformerDecoderLayer):
        state |= {f"cross.{key}": value for key, value in torch_attention(theirs.multihead_attn).items()}
    return state


def future() -> Tensor:
    """torch's convention: True = may not attend."""
    return torch.ones(T, T).triu(1).bool()


def same_with_gradient(ours: Tensor, theirs: Tensor, x: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, **TIGHT)
    weight = torch.randn_like(ours)
    grads = [torch.autograd.grad(out, x, weight)[0] for out in (ours, theirs)]
    torch.testing.assert_close(*grads, **TIGHT)


@pytest.mark.parametrize("kernel", ["explicit", "fused"])
@pytest.mark.parametrize(
    ("mask", "theirs"),
    [
        (None, dict()),
        (causal(), dict(attn_mask=future())),
        (padding(REAL), dict(key_padding_mask=~REAL)),
        (causal() & padding(REAL), dict(attn_mask=future(), key_padding_mask=~REAL)),
    ],
    ids=["none", "causal", "padding", "both"],
)
def test_self_attention_is_torchs(kernel: str, mask: Mask | None, theirs: dict[str, Tensor]) -> None:
    reference = randomise(nn.MultiheadAttention(D, H, batch_first=True))
    attention = MultiHeadAttention(d_model=D, n_heads=H, kernel=kernel).double()
    attention.load_state_dict(torch_attention(reference))
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    ours, expected = attention(x, mask), reference(x, x, x, need_weights=False, **theirs)[0]
    if mask is not None and mask.keys is not None and mask.causal:
        ours, expected = ours[REAL], expected[REAL]  # with both masks, what padding itself sees is another convention
    same_with_gradient(ours, expected, x)


@pytest.mark.parametrize("kernel", ["explicit", "fused"])
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention_is_torchs(kernel: str, padded: bool) -> None:
    reference = randomise(nn.MultiheadAttention(D, H, batch_first=True))
    attention = MultiHeadAttention(d_model=D, n_heads=H, cross=True, kernel=kernel).double()
    attention.load_state_dict(torch_attention(reference))
    x, memory = (torch.randn(B, n, D, dtype=torch.float64, requires_grad=True) for n in (T, S))
    ours = attention(x, padding(REAL_MEMORY) if padded else None, memory=memory)
    dead = ~REAL_MEMORY if padded else None
    expected = reference(x, memory, memory, need_weights=False, key_padding_mask=dead)[0]
    same_with_gradient(ours, expected, x)
    same_with_gradient(attention(x, memory=memory), reference(x, memory, memory, need_weights=False)[0], memory)


@pytest.mark.parametrize("n_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("bias", ["", "qv", "qkvo"])
def test_attention_is_its_parts(n_kv_heads: int, qk_norm: bool, rotary: bool, bias: str) -> None:
    """Project, split, norm, turn, attend, join, project: heads shared or not, narrower than d_model / n_heads or not."""
    heads, width = 6, 4
    attention = MultiHeadAttention(
        d_model=D, n_heads=heads, n_kv_heads=n_kv_heads, d_head=width, bias=bias, qk_norm=qk_norm, scale=0.3
    )
    state = randomise(attention).state_dict()
    x = torch.randn(B, T, D, dtype=torch.float64)
    angles = Rotary(d_head=width).angles(torch.arange(T)) if rotary else None

    def project(name: str, x: Tensor) -> Tensor:
        return nn.functional.linear(x, state[f"{name}_proj.weight"], state.get(f"{name}_proj.bias"))

    q, k, v = (project(name, x).reshape(B, T, -1, width).transpose(1, 2) for name in "qkv")
    if qk_norm:
        q = q / (q.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state["q_norm.weight"]
        k = k / (k.square().mean(-1, keepdim=True) + 1e-5).sqrt() * state["k_norm.weight"]
    if angles is not None:
        q, k = rotate(q, angles), rotate(k, angles)
    shared = [t.repeat_interleave(heads // n_kv_heads, 1) for t in (k, v)]
    out = attend(q, *shared, causal(), scale=0.3, kernel="explicit")
    expected = project("o", out.transpose(1, 2).reshape(B, T, -1))
    torch.testing.assert_close(attention(x, causal(), angles=angles), expected, **TIGHT)
    assert {name for name in state if name.endswith("bias")} == {f"{letter}_proj.bias" for letter in bias}


@pytest.mark.parametrize("kind", [Alibi(n_heads=H), RelativeBuckets(n_heads=H).double()], ids=["alibi", "t5"])
def test_attention_passes_the_bias_on(kind: Alibi | RelativeBuckets) -> None:
    x = torch.randn(B, T, D, dtype=torch.float64)
    explicit, fused = (
        randomise(MultiHeadAttention(d_model=D, n_heads=H, kernel=kernel)) for kernel in ("explicit", "fused")
    )
    fused.load_state_dict(explicit.state_dict())

    def lowered(kernel: str) -> Lowered:
        return lower(causal(), kind, T=T, S=T, like=x, kernel=kernel)

    with_bias, without = explicit(x, lowered("explicit")), explicit(x, causal())
    # the two kernels, each by its own way of lowering the bias; a mask lowered for another kernel is lowered anew
    for kernel in ("fused", "explicit"):
        torch.testing.assert_close(fused(x, lowered(kernel)), with_bias, **TIGHT)
    assert not torch.equal(with_bias[:, 1:], without[:, 1:])
    assert torch.equal(with_bias[:, 0], without[:, 0])  # one key, one weight


def test_attention_drops_weights_in_training_only() -> None:
    attention = randomise(MultiHeadAttention(d_model=D, n_heads=H, dropout=0.5))
    x = torch.randn(B, T, D, dtype=torch.float64)
    attention.eval()
    assert torch.equal(attention(x), attention(x))
    assert not torch.equal(attention.train()(x), attention(x))


def test_memory_is_read_once() -> None:
    """After the first call the cache holds the keys and values of the memory, which is not needed again."""
    attention = randomise(MultiHeadAttention(d_model=D, n_heads=H, cross=True))
    x, memory = torch.randn(B, T, D, dtype=torch.float64), torch.randn(B, S, D, dtype=torch.float64)
    cache = LayerCache(*(torch.zeros(B, H, 1, D // H, dtype=torch.float64) for _ in "kv"))
    whole = attention(x, memory=memory)
    first = attention(x[:, :3], memory=memory, cache=cache)
    rest = attention(x[:, 3:], cache=cache)
    torch.testing.assert_close(torch.cat([first, rest], 1), whole, **TIGHT)


def make_block(*, cross: bool, norm_first: bool, activation: str = "relu", dropout: float = 0.0) -> Block:
    return Block(
        attention=MultiHeadAttention(d_model=D, n_heads=H),
        cross=MultiHeadAttention(d_model=D, n_heads=H, cross=True) if cross else None,
        feedforward=FeedForward(d_model=D, d_ff=F, activation=activation),
        norm=functools.partial(make_norm, "layer", D, eps=1e-3),
        norm_first=norm_first,
        dropout=dropout,
    ).double()


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_block_is_torchs_encoder_layer(norm_first: bool, activation: str) -> None:
    reference = nn.TransformerEncoderLayer(
        D, H, F, activation=activation, layer_norm_eps=1e-3, batch_first=True, norm_first=norm_first
    )
    randomise(reference).eval()
    block = make_block(cross=False, norm_first=norm_first, activation=activation).eval()
    block.load_state_dict(torch_block(reference))
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    same_with_gradient(block(x, padding(REAL)), reference(x, src_key_padding_mask=~REAL), x)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_block_is_torchs_decoder_layer(norm_first: bool, activation: str) -> None:
    reference = nn.TransformerDecoderLayer(
        D, H, F, activation=activation, layer_norm_eps=1e-3, batch_first=True, norm_first=norm_first
    )
    randomise(reference).eval()
    block = make_block(cross=True, norm_first=norm_first, activation=activation).eval()
    block.load_state_dict(torch_block(reference))
    x, memory = (torch.randn(B, n, D, dtype=torch.float64, requires_grad=True) for n in (T, S))
    ours = block(x, causal(), memory=memory, memory_mask=padding(REAL_MEMORY))
    theirs = reference(x, memory, tgt_mask=future(), tgt_is_causal=True, memory_key_padding_mask=~REAL_MEMORY)
    same_with_gradient(ours, theirs, x)
    ours = block(x, causal(), memory=memory, memory_mask=padding(REAL_MEMORY))
    theirs = reference(x, memory, tgt_mask=future(), tgt_is_causal=True, memory_key_padding_mask=~REAL_MEMORY)
    same_with_gradient(ours, theirs, memory)


@pytest.mark.parametrize("cross", [False, True])
def test_dropout_falls_on_what_is_added(cross: bool) -> None:
    """With everything dropped, pre-norm leaves the stream as it is, and post-norm just norms it; eval drops nothing."""
    x, memory = torch.randn(B, T, D, dtype=torch.float64), torch.randn(B, S, D, dtype=torch.float64)
    pre = make_block(cross=cross, norm_first=True, dropout=1.0)
    assert torch.equal(pre(x, memory=memory), x)
    post = make_block(cross=cross, norm_first=False, dropout=1.0)
    normed = post.attention_norm(x)
    normed = post.cross_norm(normed) if post.cross_norm is not None else normed
    assert torch.equal(post(x, memory=memory), post.feedforward_norm(normed))
    assert not torch.equal(pre.eval()(x, memory=memory), x)


def test_no_future_token_changes_a_past_output() -> None:
    """Bit for bit, and the changed token does change its own."""
    block = make_block(cross=False, norm_first=True).eval()
    x = torch.randn(B, T, D, dtype=torch.float64)
    changed = x.clone()
    changed[:, 4] += 1
    before, after = block(x, causal()), block(changed, causal())
    assert torch.equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


def test_saved_names_are_plain() -> None:
    block = make_block(cross=True, norm_first=True)
    modules = {name.rsplit(".", 1)[0] for name in block.state_dict()}
    projections = {f"{part}.{letter}_proj" for part in ("attention", "cross") for letter in "qkvo"}
    norms = {"attention_norm", "cross_norm", "feedforward_norm"}
    assert modules == projections | norms | {"feedforward.up", "feedforward.down"}
