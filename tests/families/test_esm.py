"""ESM-2: checkpoints with each kind of head, loaded, compared, saved; token dropout and rounded frequencies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    EsmConfig,
    EsmForMaskedLM,
    EsmForSequenceClassification,
    EsmForTokenClassification,
    EsmModel,
)
from transformers.models.esm import modeling_esm

import clearhead as ch
from clearhead.checkpoint import load, save
from clearhead.models.encoder import drop

from .compare import (
    FP32,
    FP64,
    assert_near,
    assert_same_weights,
    positions_of,
    refusal,
    saved,
    sides,
    there_and_back,
    tiny,
    tokens,
)

MASK = 32
SIZES: dict[str, Any] = dict(
    vocab_size=33, hidden_size=30, num_hidden_layers=2, num_attention_heads=3, intermediate_size=37
)
SIZES |= dict(max_position_embeddings=41, position_embedding_type="rotary", token_dropout=True, mask_token_id=MASK)
SIZES |= dict(pad_token_id=1, emb_layer_norm_before=False, layer_norm_eps=1e-5, num_labels=5)
ENDS = {EsmModel: "last_hidden_state", EsmForMaskedLM: "logits", EsmForSequenceClassification: "logits"}


def make(kind: type[Any] = EsmForMaskedLM, **changes: Any) -> Any:
    return tiny(kind, EsmConfig(**SIZES | changes))


def masked(real: Tensor | None = None) -> Tensor:
    """Proteins with mask tokens, a different share in each row, and padding tokens as padding."""
    x = tokens(MASK, low=4)
    x[0, [2, 5, 9]] = MASK
    x[1, 4] = MASK
    return x if real is None else torch.where(real, x, 1)


def compare(theirs: Any, x: Tensor, real: Tensor | None = None, *, within: float = FP32, **options: Any) -> Any:
    given = {} if real is None else dict(attention_mask=real, position_ids=positions_of(real))
    end = ENDS[type(theirs)]
    seen = slice(None) if real is None or type(theirs) is EsmForSequenceClassification else real
    return there_and_back(
        theirs, lambda m: getattr(m(x, **given), end)[seen], lambda m: m(x, real)[seen], within=within, **options
    )


@st.composite
def configs(draw: st.DrawFn) -> EsmConfig:
    n_heads = draw(st.sampled_from([1, 2, 3, 5]))
    drawn = dict(
        num_attention_heads=n_heads,
        hidden_size=n_heads * draw(st.sampled_from([8, 10, 14])),
        num_hidden_layers=draw(st.integers(1, 3)),
        token_dropout=draw(st.booleans()),
        emb_layer_norm_before=draw(st.booleans()),
        layer_norm_eps=draw(st.sampled_from([1e-12, 1e-5])),
        rope_theta=draw(st.sampled_from([1e4, 33.0])),
        num_labels=draw(st.sampled_from([1, 2, 7])),
        tie_word_embeddings=draw(st.booleans()),
    )
    return EsmConfig(**SIZES | drawn)


@pytest.mark.slow
@given(kind=st.sampled_from(list(ENDS)), config=configs(), seed=st.integers(0, 9))
@settings(max_examples=15)
def test_any_esm(kind: type[Any], config: EsmConfig, seed: int) -> None:
    compare(tiny(kind, config, seed=seed), masked())


def test_without_a_pooler() -> None:
    bare = tiny(lambda c: EsmModel(c, add_pooling_layer=False), EsmConfig(**SIZES))
    assert not compare(bare, masked(), add_pooling_layer=False).config.pooler


@torch.no_grad()
def test_the_pooler(tmp_path: Path) -> None:
    theirs, x = make(EsmModel), masked()
    ours = load(saved(theirs, tmp_path))
    assert_near(ours.pooled(ours(x)), theirs(x).pooler_output)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EsmModel, EsmForMaskedLM])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(kind: type[Any], side: str) -> None:
    """Only masks among the real tokens are counted."""
    real = sides(3, 11)[side]
    compare(make(kind), masked(real), real)


def test_classes_of_a_padded_batch() -> None:
    """Padding on the right only: transformers takes the state at index 0, also if it is padding."""
    real = sides(3, 11)["right"]
    compare(make(EsmForSequenceClassification), masked(real), real)


def turn_exactly(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """transformers' rotation without its conversion to float32."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + modeling_esm.rotate_half(q) * sin, k * cos + modeling_esm.rotate_half(k) * sin


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDS)
def test_float64(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers rotates in float32 in every model; without that it agrees to the tenth digit.

    The share of masks, which it also has in float32, is a quarter here: exact.
    """
    x = masked()[:, :8]
    x[0, [2, 5]], x[0, 4], x[1, 6], x[2, [0, 7]] = MASK, 5, MASK, MASK
    theirs = make(kind).double()
    theirs.base_model.rotary_embeddings.inv_freq = (
        theirs.base_model.rotary_embeddings.inv_freq.float()
    )  # as they load it
    compare(theirs, x, within=FP32)
    monkeypatch.setattr(modeling_esm, "apply_rotary_pos_emb", turn_exactly)
    compare(theirs, x, within=FP64)


@torch.no_grad()
def test_a_row_of_masks_alone_is_no_nan(tmp_path: Path) -> None:
    ours, x = load(saved(make(), tmp_path)), masked()
    x[1] = MASK
    assert ours(x).isfinite().all()
    assert torch.equal(ours(x)[0], ours(masked())[0])


def test_token_dropout_keeps_the_sum_of_training() -> None:
    """The factor is 0.88 / (1 - share): 1 with 12 % masked, 0.88 with none."""
    x, dropped = torch.ones(2, 25, 3), torch.zeros(2, 25, dtype=torch.bool)
    dropped[0, [1, 7, 20]] = True
    out = drop(x, dropped)
    torch.testing.assert_close(out[0, ~dropped[0]], torch.ones(22, 3))
    assert not out[0, dropped[0]].any()
    torch.testing.assert_close(out[1], torch.full((25, 3), 0.88))
    assert drop(x.bfloat16(), dropped).dtype == torch.bfloat16


# What the files have besides weights.


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
@torch.no_grad()
def test_frequencies_are_those_that_are_stored(tmp_path: Path, precision: str) -> None:
    """Meta's ESM-2 was trained with float16 frequencies; exact ones would give other outputs."""
    theirs = make()
    theirs.esm.rotary_embeddings.inv_freq.copy_(theirs.esm.rotary_embeddings.inv_freq.to(getattr(torch, precision)))
    x = tokens(MASK, low=4, length=41)
    ours = compare(theirs, x)
    assert ours.config.rotary_precision == precision
    exact = ch.build(ch.Config.from_dict({**ours.config.to_dict(), "rotary_precision": "float32"}))
    exact.load_state_dict(ours.state_dict())
    assert float((exact.eval()(x) - ours(x)).abs().max()) > 100 * FP32


def test_the_first_files(tmp_path: Path) -> None:
    """facebook/esm2: frequencies in each layer, an unused table of positions, norms' weight and bias; the contact head is kept."""
    theirs = make()
    inv_freq = theirs.esm.rotary_embeddings.inv_freq.half().float()
    state = {key: value for key, value in theirs.state_dict().items() if "inv_freq" not in key}
    state |= {f"esm.encoder.layer.{i}.attention.self.rotary_embeddings.inv_freq": inv_freq.clone() for i in range(2)}
    state |= {
        "esm.embeddings.position_ids": torch.arange(41)[None],
        "esm.embeddings.position_embeddings.weight": torch.ones(41, 30),
    }
    folder = saved(theirs, tmp_path / "old")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    ours = load(folder)
    assert ours.config.rotary_precision == "float16"
    theirs.esm.rotary_embeddings.inv_freq.copy_(inv_freq)
    assert_near(ours(masked()).detach(), theirs(masked()).logits.detach())
    back, report = EsmForMaskedLM.from_pretrained(save(ours, tmp_path / "hf", format="hf"), output_loading_info=True)
    assert not any(report.values()), report
    assert_same_weights(back, theirs)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_model_of_ours_goes_to_transformers(tmp_path: Path, precision: str) -> None:
    """With the tensors that only their layout has: the rounded frequencies, and a contact head."""
    sizes = dict(n_layers=2, d_model=30, n_heads=3, d_ff=37, max_len=41, rotary_precision=precision, init_std=0.2)
    for kind, end in (
        (EsmModel, dict(pooler=True)),
        (EsmForMaskedLM, dict(head="tokens", head_transform=True, head_bias="learned", tie_embeddings=True)),
        (EsmForSequenceClassification, dict(head="classes", n_classes=5, pooler=True)),
    ):
        model = ch.build(ch.preset("esm2-8m", **sizes | end)).eval()
        theirs, report = kind.from_pretrained(
            save(model, tmp_path / kind.__name__, format="hf"), output_loading_info=True
        )
        assert not any(report.values()), report
        x = tokens(MASK, low=4, length=41)
        assert_near(model(x).detach(), getattr(theirs.eval()(x), ENDS[kind]).detach())


def test_frequencies_of_another_base_are_refused(tmp_path: Path) -> None:
    assert "rope_theta" in refusal(saved(make(), tmp_path, rope_theta=500.0))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(position_embedding_type="absolute"), "position_embedding_type"),
        (dict(position_embedding_type=None), "position_embedding_type"),
        (dict(is_folding_model=True), "is_folding_model"),
        (dict(is_decoder=True), "is_decoder"),
        (dict(mask_token_id=None), "mask_token_id"),
        (dict(mask_token_id=33), "dropped_token"),
        (dict(quantization_config=dict(bits=4)), "quantization_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_fields(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    assert named in refusal(saved(make(), tmp_path, **changes))


def test_other_heads_are_refused(tmp_path: Path) -> None:
    assert "classifier.weight" in refusal(saved(make(EsmForTokenClassification), tmp_path))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(pool="mean"), "pool"),
        (dict(feedforward="relu"), "feedforward"),
        (dict(head="classes", n_classes=3), "pooler"),
        (dict(head="tokens"), "head_transform"),
        (dict(n_segments=2), "n_segments"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_to_write(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    model = ch.build(ch.preset("esm2-8m", **dict(n_layers=1, d_model=30, n_heads=3, max_len=41) | changes))
    with pytest.raises(ch.CheckpointError, match=f"{named}=.*format='clearhead'"):
        save(model, tmp_path / "hf", format="hf")


def test_a_mask_token_must_be_a_token() -> None:
    with pytest.raises(ch.ConfigError, match=r"dropped_token=32 .*vocab_size=20"):
        ch.preset("esm2-8m", vocab_size=20)
    with pytest.raises(ch.ConfigError, match="dropped_token=3 is for encoders"):
        ch.preset("gpt2", dropped_token=3)
