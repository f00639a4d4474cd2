"""Models with a sparse pattern: trained, saved, generated from, looked into; and the kernel that skips what the pattern leaves out.

That cached is whole, batched is alone and no future leaks holds for any config that drawn.py draws, sparse ones among them.
Flex agrees in tests/layers/test_attend.py, for any mask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import clearhead as ch
from clearhead import kernels
from clearhead.kernels import tiles
from clearhead.layers.attention import attend, lower
from clearhead.layers.masks import Mask, causal, documents, padding, sparse
from clearhead.layers.positions import Bias
from clearhead.layers.relative_positions import Alibi, RelativeBuckets
from clearhead.sparsity import Pattern
from tests.layers.drawn import patterns

SMALL: dict[str, Any] = dict(n_layers=2, d_model=32, n_heads=4, d_ff=37, vocab_size=53, dropout=0.0)
BIGBIRD = "block=4, window=2, n_global=1, n_random=2"
B, H, K, E = 2, 6, 3, 5
# float64, numbers near 1, up to a hundred terms a sum.
TIGHT = dict(rtol=0, atol=1e-12)


@pytest.fixture(autouse=True)
def skips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips from the first key on, in tiles of 8 x 8."""
    monkeypatch.setitem(kernels.sparse_strips.limits.SPARSE_KEYS, "cpu", 1)
    monkeypatch.setattr(tiles, "BLOCK", 8)


def outcome(mask: Mask, qkv: list[Tensor], grad: Tensor, kernel: str, bias: Bias | None) -> list[Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in qkv)
    out = attend(q, k, v, lower(mask, bias, T=q.shape[2], S=k.shape[2], like=q, kernel=kernel), kernel=kernel)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


def masks(pattern: Pattern, S: int) -> dict[str, Mask]:
    real = torch.ones(B, S).bool()
    real[0, : S // 3] = False
    real[1, S - 5 :] = False
    real[1, 3:5] = False
    ids = torch.stack([torch.arange(S) // 13, torch.arange(S) // 29])
    one = sparse(pattern)
    plain = {"alone": one, "causal": one & causal(), "padding": one & padding(real), "documents": one & documents(ids)}
    return {**plain, "all": one & causal() & padding(real) & documents(ids), "two": one & sparse("window=9")}


@pytest.mark.slow
@settings(max_examples=12)
@given(pattern=patterns(), S=st.integers(30, 60), T=st.integers(1, 60), kind=st.integers(0, 5), alibi=st.booleans())
def test_strips_are_the_equation_and_so_are_their_gradients(
    pattern: Pattern, S: int, T: int, kind: int, alibi: bool
) -> None:
    T, mask = min(T, S), list(masks(pattern, S).values())[kind]
    bias = Alibi(n_heads=H) if alibi else None
    qkv = [torch.randn(B, h, n, E, dtype=torch.float64) for h, n in ((H, T), (K, S), (K, S))]
    grad = torch.randn(B, H, T, E, dtype=torch.float64)
    assert lower(mask, bias, T=T, S=S, like=qkv[0]).kernel == "sparse"
    found, expected = (outcome(mask, qkv, grad, kernel, bias) for kernel in ("fused", "explicit"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def test_strips_say_no_to_what_they_do_not_compute() -> None:
    mask, like = sparse("window=3"), torch.zeros(1, 1, 40, 4)
    learned = RelativeBuckets(n_heads=H, n_buckets=8, max_distance=13, both_ways=True)
    sizes: dict[str, Any] = dict(T=40, S=40, like=like)
    assert lower(mask, None, **sizes).kernel == "sparse"
    assert lower(mask, learned, **sizes).kernel == "fused"  # no gradient for a bias
    with torch.no_grad():
        assert lower(mask, learned, **sizes).kernel == "sparse"
    assert lower(mask, None, **sizes, dropout=0.1).kernel == "fused"
    assert lower(mask, None, **sizes, kernel="explicit").kernel == "explicit"
    assert lower(mask, None, T=40, S=40, like=like.to("meta")).kernel == "fused"


def test_pruned_heads_keep_their_own_bias() -> None:
    config = ch.Config(shape="decoder", positions="alibi", max_len=40, sparsity="window=3", **SMALL)
    model = ch.build(config, seed=1).double().eval()
    smaller = ch.build(ch.Config.from_dict({**config.to_dict(), "pruned_heads": ("blocks.0.attention.1",)}), seed=1)
    smaller, tokens = smaller.double().eval(), torch.randint(0, 53, (2, 31))
    explicit = ch.build(ch.Config.from_dict({**smaller.config.to_dict(), "kernel": "explicit"})).double().eval()
    explicit.load_state_dict(smaller.state_dict())
    torch.testing.assert_close(smaller(tokens), explicit(tokens), **TIGHT)
    assert not torch.equal(smaller(tokens), model(tokens))


def test_memory_and_work_follow_the_tiles_kept() -> None:
    """Operations on scores, and the largest tensor of any: not T x T, and not T x what a strip sees."""
    T = 128
    q, k, v = (torch.randn(1, 2, T, 4, requires_grad=True) for _ in range(3))
    how = lower(causal() & sparse("block=8, window=2, n_random=1"), None, T=T, S=T, like=q)
    seen = [sum(run.stop - run.start for run in strip.runs) for strip in how.strips]
    assert len(seen) == T // 8
    assert max(seen) == 3 * 8
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        attend(q, k, v, how).sum().backward()
    largest = max(event.self_cpu_memory_usage for event in watched.key_averages() if event.count <= 4)
    assert largest <= 8 * q.numel() * q.element_size()


@pytest.mark.parametrize("shape", ["decoder", "encoder", "encoder-decoder"])
def test_every_shape_takes_a_pattern(shape: str, tmp_path: Path) -> None:
    """It changes the answer, is that of the plain equation, trains, and is saved."""
    config = ch.Config(shape=shape, max_len=40, sparsity=BIGBIRD, head="tokens", **SMALL)
    dense, explicit = (
        ch.Config.from_dict({**config.to_dict(), **change}) for change in ({"sparsity": ""}, {"kernel": "explicit"})
    )
    model, tokens = ch.build(config, seed=1), torch.randint(0, 53, (2, 37))
    inputs = (tokens, tokens) if shape == "encoder-decoder" else (tokens,)
    others = [ch.build(each, seed=1) for each in (dense, explicit)]
    assert (model(*inputs) - others[0](*inputs)).abs().max() > 1e-4
    torch.testing.assert_close(model(*inputs), others[1](*inputs), rtol=0, atol=1e-5)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), list[float]()
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(model(*inputs).flatten(0, 1), tokens.flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    ch.save(model, tmp_path / "model")
    loaded = ch.load(tmp_path / "model")
    assert loaded.config.sparsity == BIGBIRD
    assert torch.equal(loaded.eval()(*inputs), model.eval()(*inputs))


@pytest.mark.parametrize("name", ["gpt2", "smollm2-135m", "t5-small"])
def test_the_engine_writes_what_the_plain_forward_does(name: str) -> None:
    sizes = SMALL | dict(max_len=64) | ({"n_kv_heads": 2} if name.startswith("smollm") else {})
    config = ch.preset(name, **sizes, sparsity="block=2, window=1, n_global=1, n_random=1", kernel="explicit")
    model = ch.build(config, seed=3).eval()
    fused = ch.build(ch.Config.from_dict({**config.to_dict(), "kernel": "auto"}), seed=3).eval()
    prompts, n = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 9, 7], [2, 7, 18], [28]], 20
    if isinstance(fused, ch.EncoderDecoder):
        fused.generation = ch.Generation(decoder_start=0, eos=(1,))
        written = ch.translate(fused, prompts, beams=1, max_new_tokens=n)
    else:
        written = ch.generate(fused, prompts, max_new_tokens=n, temperature=0)
    with torch.no_grad():
        for prompt, text in zip(prompts, written, strict=True):
            ids = [0] if isinstance(fused, ch.EncoderDecoder) else list(prompt)
            for token in text:
                inputs = [torch.tensor([prompt])] if isinstance(fused, ch.EncoderDecoder) else []
                logits = model(*inputs, torch.tensor([ids]))[0, -1]
                assert logits.max() - logits[token] < 1e-4
                ids.append(int(token))


def test_a_probe_sees_the_weights_and_zeros_where_the_pattern_forbids() -> None:
    config = ch.Config(shape="decoder", max_len=64, sparsity=BIGBIRD, **SMALL)
    model, tokens = ch.build(config, seed=1).eval(), torch.randint(0, 53, (2, 50))
    with ch.probe(model, "blocks.*.attention.*") as seen:
        model(tokens)
    (pattern,) = config.patterns
    at = torch.arange(50)
    allowed = (pattern.keeps(at[:, None], at)).tril()
    for layer in range(2):
        weights = seen[f"blocks.{layer}.attention.weights"]
        assert ((weights > 0) == allowed).all()
        scores = seen[f"blocks.{layer}.attention.scores"].masked_fill(~allowed, float("-inf"))
        torch.testing.assert_close(weights, scores.softmax(-1), rtol=0, atol=1e-6)
        q, k, v = (seen[f"blocks.{layer}.attention.{part}"] for part in "qkv")
        out = attend(q, k, v, causal() & sparse(BIGBIRD))
        torch.testing.assert_close(weights @ v, out, rtol=0, atol=1e-6)


def test_the_cost_counts_the_pairs_kept() -> None:
    config = ch.preset("gpt2", sparsity="block=64, window=2, n_global=1, n_random=3")
    dense = ch.preset("gpt2")
    (pattern,) = config.patterns
    at = torch.arange(1000)
    n_kept = int(pattern.keeps(at[:, None], at).tril().sum())
    saved = ch.cost(dense, batch=2, length=1000).useful_flops - ch.cost(config, batch=2, length=1000).useful_flops
    assert saved == 2 * 2 * 2 * config.n_layers * config.d_model * (1000 * 1001 // 2 - n_kept)
    assert ch.cost(config, batch=2, length=1000).flops == ch.cost(dense, batch=2, length=1000).flops


def test_other_layouts_and_a_second_window_are_refused(tmp_path: Path) -> None:
    model = ch.build(ch.preset("gpt2", **SMALL, max_len=31, sparsity="window=3"))
    with pytest.raises(ch.ClearheadError, match=r"layout of any family has no place for sparsity='window=3'"):
        ch.save(model, tmp_path / "theirs", format="hf")
    with pytest.raises(ch.ClearheadError, match=r"has a window of its own; got window=5 beside it; leave one out"):
        ch.preset("gpt2", window=5, sparsity="window=3")
    with pytest.raises(ch.ClearheadError, match=r"no 'windows'; got 'windows=3'; did you mean 'window'"):
        ch.preset("gpt2", sparsity="windows=3")
    assert ch.preset("gpt2", sparsity="n_global=1 block=2").sparsity == "block=2, window=1, n_global=1"


@pytest.mark.parametrize(
    ("texts", "side"),
    [
        (["window=257, n_global=16"], 128),  # side by side: few, wide tiles
        (["block=256, window=2, n_random=1"], 128),
        (["block=64, window=2, n_random=1"], 64),
        (["block=192, window=2, n_random=1"], 64),
        (["block=8, stride=9"], 32),
        (["stride=9"], 128),  # every tile holds some pair
        (["block=64, n_random=1", "block=16, n_random=1"], 32),
    ],
)
def test_tiles_are_no_wider_than_scattered_blocks(texts: list[str], side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "BLOCK", 128)
    assert kernels.strip_side([Pattern.parse(text) for text in texts]) == side
    T, like = 512, torch.zeros(1, 1, 512, 4)
    how = lower(sparse(texts[0]) if len(texts) == 1 else sparse(texts[0]) & sparse(texts[1]), None, T=T, S=T, like=like)
    assert {strip.rows.stop - strip.rows.start for strip in how.strips} == {side}
