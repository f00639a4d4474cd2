"""`check_model`: a sound model of every family passes; a model, kernel, mask, cache or file that is broken on purpose fails."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.errors import InputError
from clearhead.kernels import native
from clearhead.kernels.decode_step import DecodeStep
from clearhead.laws import LAWS, Finding, check_model, file_laws, perplexity_law, subject
from clearhead.layers import attention
from clearhead.layers.cache import LayerCache
from clearhead.layers.masks import Mask
from clearhead.limits import QUANTIZATIONS
from clearhead.models import Model, stack
from tests.models.tiny import EVERY, tiny

# Widths that every layout of transformers can hold.
FIELDS = dict(d_model=24, d_head=4, n_heads=6)
needs_native = pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))


def sound(name: str, **fields: Any) -> Model:
    return tiny(name, dtype=torch.float32, **FIELDS | fields)


def check(model: Model, laws: Collection[str] = LAWS, **options: Any) -> dict[str, Finding]:
    """The findings of these laws by their short names; torch can't compile under this test run's shape checks."""
    short = {law: name for name, (law, _) in LAWS.items()}
    found = check_model(model, length=11, skip={*LAWS.keys() - set(laws), "compiled"}, **options)
    return {short.get(each.law, each.law): each for each in found}


def failed(findings: dict[str, Finding]) -> set[str]:
    return {name for name, each in findings.items() if each.outcome == "fail"}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_family_passes(name: str) -> None:
    model = sound(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    findings = check(model)
    assert failed(findings) == set()
    passed = {key for key, each in findings.items() if each.outcome == "pass"}
    assert passed >= {"weights", "float32 = float64", "kernels", "fused", "batched", "saved"}
    assert ("transformers" in passed) == (name != "alibi")  # no layout of theirs holds that one
    assert ("padded" in passed) == (name != "vit")
    writes = model.config.shape != "encoder"
    assert ({"cached", "future", "paged", "greedy"} <= passed) == writes
    biased = model.config.positions in ("alibi", "t5")
    assert ("native" in passed) == (writes and not biased and native.is_there())
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items()), "the model was changed"


def test_a_finding_has_errors_layer_by_layer() -> None:
    laws = "kernels", "fused", "batched", "padded", "cached"
    findings = check(sound("gpt2", n_layers=3), laws)
    assert failed(findings) == set()
    for name in (*laws, "float32 = float64"):
        each = findings[name]
        assert list(each.layers) == ["blocks.0", "blocks.1", "blocks.2"]
        assert each.error is not None
        assert each.allowed is not None
        assert 0 <= each.error <= each.allowed < 1e-2 + 1e-9
    assert "rounding: 16 x" in findings["fused"].reason
    assert findings["compiled"].reason == "--skip compiled"


def break_kernel(patch: pytest.MonkeyPatch, _: Model) -> None:
    """A product of few rows that is off by a thousandth."""
    right = native.linear
    patch.setattr(native, "linear", lambda *args: right(*args) * 1.001)


def break_mask(_: pytest.MonkeyPatch, model: Model) -> None:
    """A decoder that sees the future."""
    model.causal, model.facts = False, Mask()  # type: ignore[assignment]


def break_window(patch: pytest.MonkeyPatch, _: Model) -> None:
    """A causal mask that reaches one token too far."""
    right = attention._fused

    def fused(q: Tensor, k: Tensor, v: Tensor, *args: Any, causal: bool = False) -> Tensor:
        if not causal:
            return right(q, k, v, *args)
        pairs = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pairs, enable_gqa=True)

    patch.setattr(attention, "_fused", fused)


def break_cache(patch: pytest.MonkeyPatch, _: Model) -> None:
    """A cache that forgets the first token once it has read four."""
    right = LayerCache.extend

    def extend(layer: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = right(layer, k, v)
        if layer.step.start >= 4:
            values = values.clone()
            values[:, :, 0] = 0
        return keys, values

    patch.setattr(LayerCache, "extend", extend)


def break_padding(patch: pytest.MonkeyPatch, _: Model) -> None:
    """Padding that is attended to."""
    right = stack.padding

    def padding(real: Tensor) -> Mask:
        return right(torch.ones_like(real))

    patch.setattr(stack, "padding", padding)


def break_scale(patch: pytest.MonkeyPatch, _: Model) -> None:
    """A fused kernel with another scale."""
    right = attention._fused
    patch.setattr(attention, "_fused", lambda q, *args, **named: right(q * 1.01, *args, **named))


def break_batch(_: pytest.MonkeyPatch, model: Model) -> None:
    """A layer that lets rows of a batch know each other."""
    model.blocks[1].register_forward_hook(lambda _, __, x: x + 0.01 * x.mean(0, keepdim=True))  # type: ignore[index]


def break_native_step(patch: pytest.MonkeyPatch, _: Model) -> None:
    right = DecodeStep.run
    patch.setattr(DecodeStep, "run", lambda *args: right(*args) + torch.linspace(0, 0.1, 53))


def break_weights(_: pytest.MonkeyPatch, model: Model) -> None:
    with torch.no_grad():
        model.blocks[1].feedforward.down.weight[3, 5] = torch.nan  # type: ignore[index]


# What is broken, and the laws that must notice. Others may notice too.
BREAKS: dict[str, tuple[Callable[[pytest.MonkeyPatch, Model], None], set[str]]] = {
    "mask": (break_mask, {"future", "cached", "paged", "greedy"}),
    "window": (break_window, {"future", "fused"}),
    "cache": (break_cache, {"cached", "greedy"}),
    "padding": (break_padding, {"padded"}),
    "scale": (break_scale, {"fused"}),
    "batch": (break_batch, {"batched"}),
    "weights": (break_weights, {"weights"}),
    "kernel": (break_kernel, {"kernels"}),
    "native step": (break_native_step, {"native"}),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_what_is_broken_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks, laws = BREAKS[broken]
    if laws & {"native", "kernels"} and not native.is_there():
        pytest.skip(str(native.why_not()))
    model = sound("gpt2")
    breaks(monkeypatch, model)
    assert failed(check(model, laws)) == laws


def test_the_first_layer_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    break_scale(monkeypatch, model := sound("gpt2", n_layers=3))
    assert check(model, ["fused"])["fused"].reason.startswith("first seen after blocks.0; allowed: rounding")
    monkeypatch.undo()
    break_batch(monkeypatch, model)
    batched = check(model, ["batched"])["batched"]
    assert "first seen after blocks.1" in batched.reason
    assert batched.layers["blocks.0"] < 1e-5 < batched.layers["blocks.1"]


def test_a_path_that_can_not_run_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def extend(*_: object) -> None:
        raise RuntimeError("no memory for keys")

    monkeypatch.setattr(LayerCache, "extend", extend)
    found = check(sound("gpt2"), ["cached"])["cached"]
    assert (found.outcome, found.reason) == ("fail", "RuntimeError: no memory for keys")


def test_a_file_that_loads_as_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(path: Path) -> Model:
        model = ch.load(path)
        with torch.no_grad():
            next(model.parameters())[0, 0] += 1e-6
        return model

    monkeypatch.setattr(file_laws, "load", load)
    found = check(sound("gpt2"), ["saved"])["saved"]
    assert found.outcome == "fail"
    assert "weights changed: positions.weight" in found.reason


def test_transformers_reads_the_users_own_folder(tmp_path: Path) -> None:
    """A model that is not what its folder says fails, and the first block that differs is named."""
    model = sound("gpt2", n_layers=3)
    ch.save(model, tmp_path, format="hf")
    laws = ["transformers"]
    assert check(model, laws, path=tmp_path)["transformers"].outcome == "pass"
    with torch.no_grad():
        model.blocks[1].feedforward.down.weight[3, 5] += 1  # type: ignore[index]
    found = check(model, laws, path=tmp_path)["transformers"]
    assert found.outcome == "fail"
    assert "first seen after blocks.1" in found.reason


def test_a_tensor_that_transformers_misses(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = sound("gpt2")
    ch.save(model, tmp_path, format="hf")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.ln_f.bias"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = check(model, ["transformers"], path=tmp_path)["transformers"]
    assert found.outcome == "fail"
    assert "transformer.ln_f.bias" in found.reason


def test_the_price_of_quantised_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sound("llama", d_model=64, d_head=16, n_heads=4, n_kv_heads=2, d_ff=64)
    text = [(7 * i * i + i) % 53 for i in range(200)]
    laws = tuple(QUANTIZATIONS)
    findings = check(model, laws, text=text)
    assert {findings[law].outcome for law in laws} == {"pass"}
    found = findings["int8"]
    assert found.reason.startswith("perplexity ")
    assert found.reason.endswith("on 200 tokens")
    right = perplexity_law.quantize

    def quantize(model: Any, kind: str) -> Any:
        model.head.weight.data.mul_(2)
        return right(model, kind)

    monkeypatch.setattr(perplexity_law, "quantize", quantize)
    assert failed(check(model, laws, text=text)) == set(laws)


def test_a_model_that_is_not_stable_in_float32() -> None:
    model = sound("gpt2")
    with torch.no_grad():
        model.positions.weight.add_(1e6)  # type: ignore[union-attr] - a mean that the norm takes away, with six digits
    findings = check(model, ["fused"])
    assert findings["float32 = float64"].outcome == "fail"
    assert "fixed" in findings["fused"].reason


def test_a_model_too_large_for_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "MOST_WEIGHTS", 100)
    findings = check(sound("gpt2"), ["fused", "cached"])
    assert findings["float32 = float64"].outcome == "skipped"
    assert findings["fused"].allowed == subject.FIXED
    assert failed(findings) == set()


def test_a_token_that_is_not_read_is_noticed() -> None:
    model = sound("gpt2")
    with torch.no_grad():
        model.tokens.weight[:] = model.tokens.weight[0]  # type: ignore[index]
    assert "does not read it" in check(model, ["future"])["future"].reason


@pytest.mark.parametrize("length", [1, 2])
def test_a_text_too_short_for_a_law_proves_nothing(length: int) -> None:
    skip = LAWS.keys() - {"cached", "future"}
    cached, future = [
        each for each in check_model(sound("gpt2"), length=length, skip=skip) if "--skip" not in each.reason
    ][2:]
    assert (cached.outcome, cached.reason) == (
        "skipped",
        f"a text of {length} tokens has no parts to compare; give a larger --length",
    )
    assert future.outcome == ("skipped" if length == 1 else "pass")


def test_wrong_options() -> None:
    with pytest.raises(InputError, match=r"no law 'cachd' to skip; did you mean 'cached'"):
        next(check_model(sound("gpt2"), skip=["cachd"]))
    with pytest.raises(InputError, match=r"length=0 is no number of tokens"):
        next(check_model(sound("gpt2"), length=0))
