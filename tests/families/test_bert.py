"""BERT and MiniLM: checkpoints with each kind of head, loaded, compared, saved; folders of sentence-transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
)

import clearhead as ch
from clearhead.checkpoint import load, save

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

SIZES: dict[str, Any] = dict(vocab_size=53, hidden_size=21, num_hidden_layers=2, num_attention_heads=3)
SIZES |= dict(intermediate_size=37, max_position_embeddings=19, num_labels=5)
ENDS = {
    BertModel: "last_hidden_state",
    BertForMaskedLM: "logits",
    BertForPreTraining: "prediction_logits",
    BertForSequenceClassification: "logits",
}
SEGMENTS = tokens(2, seed=3)


def make(kind: type[Any] = BertModel, **changes: Any) -> Any:
    return tiny(kind, BertConfig(**SIZES | changes))


def compare(theirs: Any, x: Tensor, real: Tensor | None = None, *, within: float = FP32, **options: Any) -> Any:
    """Both ways, with two segments; the states of padding are not compared."""
    given = {} if real is None else dict(attention_mask=real, position_ids=positions_of(real))
    end = ENDS[type(theirs)]
    seen = slice(None) if real is None or type(theirs) is BertForSequenceClassification else real
    return there_and_back(
        theirs,
        lambda m: getattr(m(x, token_type_ids=SEGMENTS, **given), end)[seen],
        lambda m: m(x, real, segments=SEGMENTS)[seen],
        within=within,
        **options,
    )


@st.composite
def configs(draw: st.DrawFn) -> BertConfig:
    n_heads = draw(st.sampled_from([1, 2, 3, 5]))
    drawn = dict(
        num_attention_heads=n_heads,
        hidden_size=n_heads * draw(st.sampled_from([7, 8, 11])),
        num_hidden_layers=draw(st.integers(1, 3)),
        hidden_act=draw(st.sampled_from(["gelu", "gelu_new", "relu", "silu"])),
        layer_norm_eps=draw(st.sampled_from([1e-12, 1e-5])),
        type_vocab_size=draw(st.sampled_from([2, 3])),
        num_labels=draw(st.sampled_from([1, 2, 7])),
        tie_word_embeddings=draw(st.booleans()),
    )
    return BertConfig(**SIZES | drawn)


@pytest.mark.slow
@given(kind=st.sampled_from(list(ENDS)), config=configs(), seed=st.integers(0, 9))
@settings(max_examples=15)
def test_any_bert(kind: type[Any], config: BertConfig, seed: int) -> None:
    compare(tiny(kind, config, seed=seed), tokens())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENDS)
def test_float64(kind: type[Any]) -> None:
    compare(make(kind).double(), tokens(), within=FP64)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(kind: type[Any], side: str) -> None:
    compare(make(kind), tokens(), sides(3, 11)[side])


def test_classes_of_a_padded_batch() -> None:
    """Padding on the right only: transformers takes the state at index 0, also if it is padding."""
    compare(make(BertForSequenceClassification), tokens(), sides(3, 11)["right"])


def test_without_a_pooler() -> None:
    config = BertConfig(**SIZES)
    bare = tiny(lambda c: BertModel(c, add_pooling_layer=False), config)
    assert not compare(bare, tokens(), add_pooling_layer=False).config.pooler


@torch.no_grad()
def test_the_pooler(tmp_path: Path) -> None:
    theirs, x, real = make(), tokens(), sides(3, 11)["right"]
    ours = load(saved(theirs, tmp_path))
    assert_near(ours.pooled(ours(x, real), real), theirs(x, attention_mask=real).pooler_output)


def test_labels_are_saved(tmp_path: Path) -> None:
    names = ("bad", "so-so", "good")
    theirs = make(BertForSequenceClassification, num_labels=3, id2label=dict(enumerate(names)))
    ours = load(saved(theirs, tmp_path / "theirs"))
    assert ours.config.labels == names
    for layout in ("hf", "clearhead"):
        assert load(save(ours, tmp_path / layout, format=layout)).config == ours.config
    assert BertForSequenceClassification.from_pretrained(tmp_path / "hf").config.id2label == dict(enumerate(names))


def test_the_first_files(tmp_path: Path) -> None:
    """bert-base-uncased as it was first converted from Google's weights: gamma and beta, position_ids, all pre-training heads."""
    theirs = make(BertForPreTraining)
    state = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for key, value in theirs.state_dict().items()
    }
    state["bert.embeddings.position_ids"] = torch.arange(19)[None]
    folder = saved(theirs, tmp_path / "old", architectures=["BertForMaskedLM"])
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    ours = load(folder)
    assert_near(ours(tokens()).detach(), theirs(tokens()).prediction_logits.detach())
    assert sorted(ours.extras) == [
        "bert.pooler.dense.bias",
        "bert.pooler.dense.weight",
        "cls.seq_relationship.bias",
        "cls.seq_relationship.weight",
    ]
    # Weights that we do not compute with are kept: after our layout and back, next-sentence predictions are the same.
    again = load(save(ours, tmp_path / "ours"))
    back = BertForPreTraining.from_pretrained(save(again, tmp_path / "hf", format="hf")).eval()
    assert_same_weights(back, theirs)


# Sentence embeddings.

MEAN: dict[str, Any] = dict(pooling_mode_cls_token=False, pooling_mode_mean_tokens=True, include_prompt=True)
FIRST: dict[str, Any] = dict(pooling_mode="cls", include_prompt=True)


def embedder(folder: Path, pooling: dict[str, Any], *more: str, path: str = "1_Pooling") -> Any:
    """A folder as sentence-transformers saves it. Returns the model inside."""
    theirs = make()
    saved(theirs, folder)
    kinds = {"": "Transformer", path: "Pooling", **{f"{n}_{kind}": kind for n, kind in enumerate(more, 2)}}
    modules = [
        dict(idx=n, name=str(n), path=at, type=f"sentence_transformers.models.{kinds[at]}")
        for n, at in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(dict(word_embedding_dimension=21, **pooling)))
    return theirs


@pytest.mark.parametrize("pooling", [MEAN, FIRST], ids=["mean", "first"])
@pytest.mark.parametrize("normed", [True, False])
@torch.no_grad()
def test_sentence_embeddings(tmp_path: Path, pooling: dict[str, Any], normed: bool) -> None:
    theirs = embedder(tmp_path / "theirs", pooling, *(["Normalize"] if normed else []))
    ours, x, real = load(tmp_path / "theirs"), tokens(), sides(3, 11)["right"]
    states = theirs(x, attention_mask=real).last_hidden_state
    expected = states[:, 0] if pooling is FIRST else (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    expected = F.normalize(expected, dim=-1) if normed else expected
    answer = ours.pooled(ours(x, real), real)
    assert_near(answer, expected)
    assert "pooler.dense.weight" in ours.extras  # BERT's own pooler is not used, but kept

    save(ours, tmp_path / "hf", format="hf")
    back, report = BertModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report
    assert_same_weights(back, theirs)
    save(ours, tmp_path / "ours")
    for written in ("hf", "ours"):
        again = load(tmp_path / written)
        assert again.config == ours.config
        assert_near(again.pooled(again(x, real), real), answer)


def test_another_model_in_the_same_folder_leaves_no_modules(tmp_path: Path) -> None:
    embedder(tmp_path / "theirs", MEAN)
    save(load(tmp_path / "theirs"), tmp_path / "out", format="hf")
    assert (tmp_path / "out" / "1_Pooling" / "config.json").is_file()
    save(load(saved(make(), tmp_path / "plain")), tmp_path / "out", format="hf")
    assert load(tmp_path / "out").config.pooler


@pytest.mark.parametrize(
    ("pooling", "more", "named"),
    [
        (dict(pooling_mode_weightedmean_tokens=True), (), "weightedmean_tokens"),
        (dict(pooling_mode_cls_token=True, pooling_mode_mean_tokens=True), (), "mean_tokens"),
        (dict(pooling_mode="lasttoken"), (), "lasttoken"),
        (MEAN, ("Dense",), "Dense"),
    ],
)
def test_other_embeddings_are_refused(
    tmp_path: Path, pooling: dict[str, Any], more: tuple[str, ...], named: str
) -> None:
    embedder(tmp_path, pooling, *more)
    assert named in refusal(tmp_path)


def test_broken_modules_are_refused(tmp_path: Path) -> None:
    embedder(tmp_path, MEAN, path="../1_Pooling")
    assert "../1_Pooling" in refusal(tmp_path)
    for garbage in ("{}", "[3]", "[{}]", '[{"type": 3, "path": ""}]', "["):
        (tmp_path / "modules.json").write_text(garbage)
        assert "modules.json" in refusal(tmp_path)


# Refusals.


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(position_embedding_type="relative_key"), "position_embedding_type"),
        (dict(is_decoder=True), "is_decoder"),
        (dict(add_cross_attention=True), "add_cross_attention"),
        (dict(hidden_act="mish"), "hidden_act"),
        (dict(quantization_config=dict(bits=4)), "quantization_config"),
        (dict(num_attention_heads=None), "num_attention_heads"),
        (dict(num_attention_heads=4), "n_heads=4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_fields(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    assert named in refusal(saved(make(), tmp_path, **changes))


def test_other_heads_are_refused(tmp_path: Path) -> None:
    assert "BertForTokenClassification" in refusal(saved(make(BertForTokenClassification), tmp_path / "ner"))
    assert "qa_outputs.weight" in refusal(saved(make(BertForQuestionAnswering), tmp_path / "qa"))
    theirs = make(BertForSequenceClassification)
    assert "classifier.weight" in refusal(saved(theirs, tmp_path / "classes", id2label={"0": "no", "1": "yes"}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(embedding_norm=False), "embedding_norm"),
        (dict(n_segments=0), "n_segments"),
        (dict(pool="mean"), "pool"),
        (dict(head="classes", n_classes=3, pooler=False), "pooler"),
        (dict(head="tokens"), "head_transform"),
        (dict(norm_first=True), "norm_first"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_to_write(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    model = ch.build(
        ch.preset("bert-base", **dict(n_layers=1, d_model=21, n_heads=3, vocab_size=53, max_len=19) | changes)
    )
    with pytest.raises(ch.CheckpointError, match=f"{named}=.*format='clearhead'"):
        save(model, tmp_path / "hf", format="hf")


MASKED: dict[str, Any] = dict(head="tokens", head_transform=True, head_bias="learned", pooler=False)


def test_a_model_of_ours_goes_to_transformers(tmp_path: Path) -> None:
    sizes = dict(n_layers=2, d_model=21, n_heads=3, d_ff=37, vocab_size=53, max_len=19)
    for kind, end in (
        (BertModel, {}),
        (BertForMaskedLM, MASKED | dict(tie_embeddings=True)),
        (BertForMaskedLM, MASKED),
        (BertForSequenceClassification, dict(head="classes", n_classes=5)),
    ):
        model = ch.build(ch.preset("bert-base", **sizes | end)).eval()
        theirs, report = kind.from_pretrained(
            save(model, tmp_path / kind.__name__, format="hf"), output_loading_info=True
        )
        assert not any(report.values()), report
        difference = getattr(theirs.eval()(tokens()), ENDS[kind]) - model(tokens())
        assert float(difference.detach().abs().max()) < FP32
