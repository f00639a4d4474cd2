"""`probe`: it records what the model computed, and leaves no trace.

The references are written out here, from q, k and the equations; they share no code with the kernels.
"""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from models.tiny import EVERY, assert_same, inputs, run, tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead as ch
from clearhead.engine.engine import Engine
from clearhead.engine.request import Request
from clearhead.inside.probe import Seen
from clearhead.inside.sites import sites
from clearhead.layers.masks import causal
from clearhead.models import Model

WEIGHTS = "blocks.1.attention.weights"


def look(model: Model, *patterns: str, args: tuple[Tensor, ...] | None = None, **kwargs: object):
    with ch.probe(model, *patterns) as seen, torch.no_grad():
        run(model, *(inputs(model.config) if args is None else args), **kwargs)
    return seen


def by_hand(q: Tensor, k: Tensor, allowed: Tensor, *, scale: float | None = None, bias: Tensor | None = None) -> Tensor:
    """softmax(q k^T * scale + bias) over the allowed keys, head by head; zeros where none is."""
    B, H, T, E = q.shape
    group = H // k.shape[1]
    scale = 1 / math.sqrt(E) if scale is None else scale
    out = torch.zeros(B, H, T, k.shape[2], dtype=q.dtype)
    for h in range(H):
        scores = scale * torch.einsum("bte,bse->bts", q[:, h], k[:, h // group])
        if bias is not None:
            scores = scores + bias[h]
        powers = torch.where(allowed, (scores - scores.amax(-1, keepdim=True)).exp(), 0.0)
        total = powers.sum(-1, keepdim=True)
        out[:, h] = torch.where(total > 0, powers / total.clamp(min=1e-300), 0.0)
    return out


def past(T: int, window: int = 99) -> Tensor:
    at = torch.arange(T)
    return ((at[:, None] >= at) & (at[:, None] - at < window)).expand(3, T, T)


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama-3.1", "qwen2"])
def test_weights_are_the_softmax_of_q_and_k(name: str) -> None:
    """Grouped-query heads and rotary positions (already in q and k) included."""
    seen = look(tiny(name), "blocks.1.attention.*")
    q, k = seen["blocks.1.attention.q"], seen["blocks.1.attention.k"]
    assert_same(seen[WEIGHTS], by_hand(q, k, past(11)))


def test_rotary_turns_q_and_k_before_they_are_seen() -> None:
    """Pair (i, i + E/2) of head h at position t is turned by t / base^(2i/E)."""
    model = tiny("llama", n_layers=1)
    (tokens,) = inputs(model.config)
    seen = look(model, "blocks.0.attention.q")
    block, E = model.blocks[0], model.config.d_head
    plain = block.attention.qkv(block.attention_norm(model.tokens(tokens)))[0].unflatten(-1, (-1, E)).transpose(1, 2)
    at = torch.arange(11, dtype=torch.float64)[:, None] / 10_000 ** (torch.arange(0, E, 2, dtype=torch.float64) / E)
    a, b = plain[..., : E // 2], plain[..., E // 2 :]
    turned = torch.cat([a * at.cos() - b * at.sin(), b * at.cos() + a * at.sin()], -1)
    # angles are float32's, up to 10 of them: good to 10 x 2^-24
    assert_same(seen["blocks.0.attention.q"], turned.detach(), within=1e-6)


def test_weights_with_alibi() -> None:
    model = tiny("alibi", n_heads=4)
    seen = look(model, "blocks.1.attention.*")
    at = torch.arange(11)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
    bias = -slopes[:, None, None] * (at[:, None] - at).abs()
    expected = by_hand(seen["blocks.1.attention.q"], seen["blocks.1.attention.k"], past(11), bias=bias)
    assert_same(seen[WEIGHTS], expected)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_weights_with_t5s_buckets(stack: str) -> None:
    """Scores unscaled, a learned bias for each head and bucket; up to distance 7 (both ways) or 15, one bucket a distance."""
    model = tiny("t5")
    seen = look(model, f"{stack}.blocks.1.attention.*", args=inputs(model.config, source=7))
    q, k = (seen[f"{stack}.blocks.1.attention.{part}"] for part in "qk")
    at = torch.arange(q.shape[2])
    distance = at - at[:, None]  # key minus query
    bucket = distance.abs() + 16 * (distance > 0) if stack == "encoder" else (-distance).clamp(min=0)
    bias = getattr(model, stack).positions.weight.detach()[bucket].movedim(-1, 0)
    allowed = past(11) if stack == "decoder" else torch.ones(3, 7, 7, dtype=torch.bool)
    assert_same(seen[f"{stack}.{WEIGHTS}"], by_hand(q, k, allowed, scale=1.0, bias=bias))


def test_weights_in_a_window() -> None:
    seen = look(tiny("mistral"), "blocks.1.attention.*")
    q, k = seen["blocks.1.attention.q"], seen["blocks.1.attention.k"]
    assert_same(seen[WEIGHTS], by_hand(q, k, past(11, window=5)))


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_weights_with_padding(name: str) -> None:
    real = torch.arange(11) >= torch.tensor([[3], [0], [9]])
    seen = look(tiny(name), "blocks.1.attention.*", mask=real)
    allowed = real[:, None, :] & (past(11) if name == "gpt2" else True)
    weights = seen[WEIGHTS]
    expected = by_hand(seen["blocks.1.attention.q"], seen["blocks.1.attention.k"], allowed.expand(3, 11, 11))
    for b in range(3):  # a padding token's weights do not matter, but they are numbers
        assert_same(weights[b][:, real[b]], expected[b][:, real[b]])
    assert weights.isfinite().all()
    assert not weights.transpose(1, 3)[~real].any()  # no weight on padding


def test_weights_of_an_encoder_decoder_look_at_the_source() -> None:
    model = tiny("marian")
    real = torch.arange(13) < torch.tensor([[13], [5], [7]])
    seen = look(model, "decoder.blocks.1.cross.*", mask=real)
    q, k = seen["decoder.blocks.1.cross.q"], seen["decoder.blocks.1.cross.k"]
    weights = seen["decoder.blocks.1.cross.weights"]
    assert weights.shape == (3, 3, 11, 13)
    assert_same(weights, by_hand(q, k, real[:, None].expand(3, 11, 13)))


@pytest.mark.parametrize("name", ["gpt2", "mistral", "alibi", "t5"])
def test_weights_with_a_cache_are_the_last_rows_of_all(name: str) -> None:
    model = tiny(name)
    *source, tokens = inputs(model.config)
    site = f"decoder.{WEIGHTS}" if source else WEIGHTS
    whole = look(model, site)[site]
    cache = model.new_cache(batch=3, max_len=11)
    with torch.no_grad():
        run(model, *source, tokens[:, :4], cache=cache)
        with ch.probe(model, site) as seen:
            run(model, *(None for _ in source), tokens[:, 4:], cache=cache)
    assert_same(seen[site], whole[:, :, 4:])


def test_what_was_seen_stays_seen_when_the_cache_moves_on() -> None:
    """A window's cache overwrites old keys; weights read afterwards are still those of the probed call."""
    for name in ("gpt2", "mistral"):
        model = tiny(name)
        (tokens,) = inputs(model.config)
        cache = model.new_cache(batch=3, max_len=11)
        with torch.no_grad():
            model(tokens[:, :6], cache=cache)
            with ch.probe(model, WEIGHTS) as seen:
                model(tokens[:, 6:7], cache=cache)
            before = seen[WEIGHTS].clone()
            model(tokens[:, 7:8], cache=cache)
            assert torch.equal(seen[WEIGHTS], before), name


def test_out_is_weights_times_v() -> None:
    seen = look(tiny("llama"), "blocks.0.attention.*")
    v = seen["blocks.0.attention.v"].repeat_interleave(3, 1)  # 6 query heads, 2 key heads
    assert_same(seen["blocks.0.attention.out"], seen["blocks.0.attention.weights"] @ v)


def test_scores_are_what_the_softmax_takes() -> None:
    for name in ("gpt2", "alibi"):
        seen = look(tiny(name), "blocks.0.attention.*")
        hidden = seen["blocks.0.attention.scores"].masked_fill(~past(11)[:, None], -math.inf)
        assert_same(hidden.softmax(-1), seen["blocks.0.attention.weights"])


@pytest.mark.slow
def test_shapes_are_as_declared() -> None:
    for name in EVERY:
        model = tiny(name)
        c = model.config
        args = inputs(c)
        with ch.probe(model) as seen, torch.no_grad():
            run(model, *args)
        for site, shape in sites(model).items():
            # Self-attention has as many keys as queries; the source has 13.
            pictures, source = c.inputs == "patches", "encoder." in site
            T = c.max_len if pictures else 13 if source else 11
            sizes = dict(B=3, H=c.n_heads, K=c.n_kv_heads, T=T, S=13 if ".cross." in site else T)
            sizes |= dict(D=c.d_model, E=c.d_head, F=c.d_ff)
            assert tuple(seen[site].shape) == tuple(sizes[letter] for letter in shape[1:-1].split(", ")), site


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_some_heads_and_rows_are_a_part_of_all(name: str) -> None:
    """Chosen when they are read, or already in the probe."""
    model = tiny(name)
    args = inputs(model.config)
    with ch.probe(model) as whole, torch.no_grad():
        run(model, *args)
    H = model.config.n_heads
    group = H // model.config.n_kv_heads
    for head, rows in ((H - 1, -2), ([0, H - 1], slice(2, 7, 2))):
        heads = [head] if isinstance(head, int) else head
        at = slice(-2, -1) if isinstance(rows, int) else rows
        with ch.probe(model, head=head, rows=rows) as few, torch.no_grad():
            run(model, *args)
        for site, shape in sites(model).items():
            expected = whole[site]
            if "H" in shape:
                assert_same(whole.rows(site, rows, head=head), expected[:, heads, at], within=1e-12)
                expected = expected[:, heads, at]
            elif "K" in shape:
                expected = expected[:, sorted({h // group for h in heads})]
            else:
                assert torch.equal(whole.rows(site, rows), expected[:, at])
                expected = expected[:, at]
            assert_same(few[site], expected, within=1e-12)
            if "H" in shape:
                assert_same(few.rows(site, -1, head=H - 1), expected[:, -1:, -1:], within=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in EVERY if tiny(name).config.inputs != "patches"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_explicit_kernel_computes_with_these_weights(name: str, side: str) -> None:
    """float32, padded: the probed weights of the fused kernel times v equal the explicit kernel's head outputs."""
    fused, explicit = (tiny(name, dtype=torch.float32, kernel=kernel) for kernel in ("fused", "explicit"))
    args = inputs(fused.config)
    lengths, at = torch.tensor([[11], [7], [5]]), torch.arange(11 if len(args) == 1 else 13)
    real = at < lengths if side == "right" else at >= len(at) - lengths
    with ch.probe(fused, "*.weights") as seen, torch.no_grad():
        run(fused, *args, mask=real)
    with ch.probe(explicit, "*.v", "*.out") as theirs, torch.no_grad():
        run(explicit, *args, mask=real)
    for site in seen:
        place = site.removesuffix(".weights")
        v, out = theirs[f"{place}.v"], theirs[f"{place}.out"]
        by_hand = seen[site] @ v.repeat_interleave(out.shape[1] // v.shape[1], 1)
        if len(args) == 1 or place.startswith("encoder."):
            by_hand, out = by_hand.transpose(1, 2)[real], out.transpose(1, 2)[real]
        assert_same(by_hand, out, within=1e-5)  # float32, two layers of sums of at most 37 terms


@pytest.mark.parametrize("part", ["weights", "scores"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "alibi", "bert"])
def test_rows_are_a_slice_of_all(name: str, part: str) -> None:
    site = f"blocks.1.attention.{part}"
    real = torch.arange(11) >= torch.tensor([[3], [0], [9]])
    seen = look(tiny(name), site, mask=real)
    for rows in (slice(5, 6), slice(0, 11), slice(2, 9, 3), slice(-3, None)):
        assert_same(seen.rows(site, rows), seen[site][:, :, rows])


def held_by(seen: Seen) -> int:
    """Bytes of all storages that a probe keeps alive."""
    tensors = [*seen.tensors.values()]
    for kept in seen.attention.values():
        tensors += [kept.q, kept.k, *(x for x in vars(kept.mask).values() if isinstance(x, Tensor))]
        tensors += [kept.bias] if isinstance(kept.bias, Tensor) else []
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


class Most(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that is made, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.bytes = max(self.bytes, out.numel() * out.element_size())
        return out


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n_layers"), [("gpt2", 12), ("alibi", 2)])
def test_one_row_of_one_head_at_32768_tokens(name: str, n_layers: int) -> None:
    """One row of one head of every layer: only that head's keys are kept, and only rows are computed, no T x T tensor."""
    T, E = 32_768, 2
    # A window only keeps the forward pass short: the row is computed, and masked, over all keys.
    sizes = dict(n_layers=n_layers, d_model=4, n_heads=2, n_kv_heads=2, d_head=E, d_ff=5, max_len=T, window=512)
    model = tiny(name, dtype=torch.float32, **sizes)
    tokens = torch.randint(0, 53, (1, T))
    with ch.probe(model, "*.weights", head=1, rows=-1) as seen, torch.no_grad():
        model(tokens)
    assert held_by(seen) <= n_layers * 4 * (T * E + E)
    with Most() as most:
        row = seen["blocks.1.attention.weights"]
    assert row.shape == (1, 1, 1, T)
    assert float(row.sum()) == pytest.approx(1, abs=1e-4)
    assert most.bytes <= 8 * 2 * T  # distances are int64; ALiBi's row is computed for both heads


def test_hidden_and_residual() -> None:
    model = tiny("gpt2")
    (tokens,) = inputs(model.config)
    seen = look(model, "*.hidden", "*.residual")
    stream = seen["blocks.0.residual"]
    block = model.blocks[1]
    x = stream + block.attention(block.attention_norm(stream), causal())
    hidden = nn.functional.gelu(block.feedforward.up(block.feedforward_norm(x)), approximate="tanh")
    assert_same(seen["blocks.1.feedforward.hidden"], hidden.detach())
    assert_same(seen["blocks.1.residual"], (x + block.feedforward.down(hidden)).detach())
    assert_same(model.project(model.norm(seen["blocks.1.residual"])), model(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_looking_changes_nothing_and_sees_every_site(name: str) -> None:
    model = tiny(name)
    args = inputs(model.config)
    before = run(model, *args)
    with ch.probe(model) as seen:
        during = run(model, *args)
    assert torch.equal(during, before)
    assert torch.equal(run(model, *args), before)
    assert list(seen) == list(sites(model))
    assert len(seen) == len(sites(model))
    for site in seen:
        assert not seen[site].requires_grad
        assert seen[site].isfinite().all()


def test_gradients_flow_while_looking() -> None:
    plain, looked = tiny("gpt2"), tiny("gpt2")
    (tokens,) = inputs(plain.config)
    plain(tokens).square().sum().backward()
    with ch.probe(looked):
        looked(tokens).square().sum().backward()
    for ours, theirs in zip(looked.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def test_nothing_stays_attached() -> None:
    model = tiny("gpt2")
    with ch.probe(model):
        assert hooks(model) > 0
    assert hooks(model) == 0


def state(model: nn.Module) -> dict[str, object]:
    """The state of all modules, by identity: each module's attributes, without its tables of modules and tensors."""
    return {
        f"{name}.{key}": list(value) if isinstance(value, dict) else id(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    } | {f"{name} is": type(module).forward for name, module in model.named_modules()}


@pytest.mark.parametrize("name", ["gpt2", "original"])
def test_a_model_that_was_probed_runs_the_same_code(name: str) -> None:
    """The same operators in the same order, and no attribute of any module has changed."""
    model = tiny(name)
    args = inputs(model.config)

    def operators() -> list[str]:
        with torch.no_grad(), Recorded() as seen:
            run(model, *args)
        return seen.names

    before, called = state(model), operators()
    with ch.probe(model) as seen, torch.no_grad():
        run(model, *args)
    assert len(seen) > 0
    assert state(model) == before
    assert operators() == called


class Recorded(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def fail() -> None:
    raise ZeroDivisionError


def test_nothing_stays_attached_after_an_error() -> None:
    model = tiny("gpt2")
    with pytest.raises(ZeroDivisionError), ch.probe(model):
        fail()
    assert hooks(model) == 0
    with pytest.raises(ch.InputError), ch.probe(model):
        model(torch.full((1, 3), 53))
    assert hooks(model) == 0
    with pytest.raises(ch.InputError), ch.probe(model, "blocks.0.residual", "no such site"):
        pass
    assert hooks(model) == 0


def test_two_probes_at_once_each_see_their_own() -> None:
    model = tiny("gpt2")
    (tokens,) = inputs(model.config)
    with ch.probe(model, "blocks.0.residual") as one, ch.probe(model, "*.weights") as two:
        model(tokens)
    assert list(one) == ["blocks.0.residual"]
    assert list(two) == ["blocks.0.attention.weights", "blocks.1.attention.weights"]
    assert hooks(model) == 0


def test_the_last_call_is_what_is_seen() -> None:
    model = tiny("gpt2")
    (tokens,) = inputs(model.config)
    with ch.probe(model, WEIGHTS) as seen:
        model(tokens[:, :5])
        model(tokens)
    assert seen[WEIGHTS].shape == (3, 3, 11, 11)


def test_sites_have_names_of_their_places() -> None:
    assert list(sites(tiny("gpt2", n_layers=1))) == [
        "embedding",
        "blocks.0.attention.q",
        "blocks.0.attention.k",
        "blocks.0.attention.v",
        "blocks.0.attention.scores",
        "blocks.0.attention.weights",
        "blocks.0.attention.out",
        "blocks.0.feedforward.hidden",
        "blocks.0.residual",
    ]
    both = sites(tiny("original", n_layers=1))
    assert {"encoder.blocks.0.attention.weights", "decoder.blocks.0.cross.weights", "decoder.blocks.0.residual"} <= set(
        both
    )


def test_patterns() -> None:
    model = tiny("original")
    with ch.probe(model, "decoder.blocks.*.cross.weights", "decoder.blocks.1.*.weights") as seen:
        pass
    assert sorted(seen) == [f"decoder.blocks.{site}.weights" for site in ("0.cross", "1.attention", "1.cross")]


def test_a_pattern_that_matches_nothing() -> None:
    message = re.escape("no site matches 'blocks.0.atention.weights'; did you mean 'blocks.0.attention.weights'?")
    with pytest.raises(ch.InputError, match=message), ch.probe(tiny("gpt2"), "blocks.0.atention.weights"):
        pass


@pytest.mark.usefixtures("unchecked")
def test_patterns_are_texts() -> None:
    wrong: Any = ["embedding", "blocks.0.residual"]
    with pytest.raises(ch.InputError, match=r"a site is a text; got \['embedding', .*probe\(model, 'a', 'b'\)"):
        ch.probe(tiny("gpt2"), wrong).__enter__()


def test_a_pattern_for_a_later_block_is_answered_with_its_own_neighbour() -> None:
    model = tiny("gpt2", n_layers=7)
    with (
        pytest.raises(ch.InputError, match=r"did you mean 'blocks\.6\.feedforward\.hidden'"),
        ch.probe(model, "blocks.6.feedforward.hiden"),
    ):
        pass


def test_a_site_that_was_not_probed() -> None:
    seen = look(tiny("gpt2"), "blocks.0.attention.weights")
    with pytest.raises(
        ch.InputError,
        match=r"'blocks\.0\.attention\.weight' was not probed; did you mean 'blocks\.0\.attention\.weights'",
    ):
        seen["blocks.0.attention.weight"]


def test_a_site_that_was_not_reached() -> None:
    model = tiny("original")
    source, _ = inputs(model.config)
    with ch.probe(model) as seen:
        model.encode(source)
    seen["encoder.blocks.0.residual"]
    for site in ("decoder.blocks.0.cross.weights", "decoder.blocks.0.residual"):
        with pytest.raises(
            ch.InputError, match=rf"'{re.escape(site)}' was not reached; call the model inside the `with`"
        ):
            seen[site]


def test_heads_that_were_not_kept_or_are_not_there() -> None:
    model = tiny("gpt2")
    with ch.probe(model, WEIGHTS, "*.out", "*.residual", head=[0, 2]) as seen:
        model(*inputs(model.config))
    for site in (WEIGHTS, "blocks.0.attention.out"):
        with pytest.raises(ch.InputError, match=r"the heads 0, 2 are there; got head=1"):
            seen.rows(site, head=1)
    with pytest.raises(ch.InputError, match=r"'blocks\.0\.residual' has no heads, but head=0 was asked for"):
        seen.rows("blocks.0.residual", head=0)
    with pytest.raises(ch.InputError, match=r"has heads 0 \.\. 2; got head=3"), ch.probe(model, WEIGHTS, head=3):
        model(*inputs(model.config))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rows", [[3], (1, 2), 1.5, "3", slice(5, 2, -1)])
def test_rows_are_one_number_or_a_slice(rows: Any) -> None:
    model = tiny("gpt2")
    message = r"rows= is one row's number or a slice.*; got .*; write rows=5"
    with pytest.raises(ch.InputError, match=message), ch.probe(model, WEIGHTS, rows=rows):
        pass
    seen = look(model, WEIGHTS)
    with pytest.raises(ch.InputError, match=r"rows= is one row's number or a slice"):
        seen.rows(WEIGHTS, rows)
    assert torch.equal(seen.rows(WEIGHTS, torch.tensor(3)), seen.rows(WEIGHTS, 3))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "alibi", "mistral", "t5", "marian"])
def test_during_generation(name: str) -> None:
    """Keys in an engine's blocks: the row of the last generated token equals that of a call with the whole text."""
    model = tiny(name, dtype=torch.float32, max_len=64)
    *source, tokens = inputs(model.config)
    stack = "decoder." if source else ""
    prompt, given = tokens[0, :7], source[0][:1] if source else None
    patterns = [f"{stack}blocks.*.weights"]
    engine = Engine(model, max_tokens=512)
    ticket = engine.submit(
        Request(prompt=prompt.tolist(), source=given[0].tolist() if source else None, max_new_tokens=23, eos=())
    )
    with ch.probe(model, *patterns) as seen:
        while engine.is_busy:
            engine.step()
    text = torch.tensor([[*prompt.tolist(), *ticket.ids[:-1]]])
    with ch.probe(model, *patterns) as whole, torch.no_grad():
        run(model, *([given] if source else []), text)
    for site in seen:
        expected = whole.rows(site, -1)
        ours = seen[site][..., : expected.shape[-1]]
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)  # float32, other kernels
        assert not seen[site][..., expected.shape[-1] :].any()  # the rest of the last block is empty
