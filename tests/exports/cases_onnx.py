"""ONNX, run by ONNX Runtime: one decoder, one encoder, one ViT, one encoder-decoder of our own training. Run by test_onnx.py."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch

import clearhead as ch
from clearhead.errors import CheckpointError
from clearhead.exports import export, onnx_export
from tests.exports.models import sound, tokenizer
from tests.training.tiny_runs import make_recipe


def test_a_decoder_with_a_cache(tmp_path: Path) -> None:
    model = sound("llama")
    found = export(model, tmp_path / "out", to="onnx", tokenizer=tokenizer())
    assert found is not None
    assert found.runtime.endswith("opset 18")
    assert (found.n_tokens, found.n_equal) == (36, 36)
    facts = json.loads((tmp_path / "out" / "graphs.json").read_text())
    assert (facts["opset"], facts["type"], facts["model"]["n_kv_heads"]) == (18, "float32", 2)
    assert facts["graphs"]["model"]["inputs"][:4] == ["tokens", "mask", "past.0.k", "past.0.v"]
    assert onnx.load(tmp_path / "out" / "model.onnx").opset_import[0].version == 18
    assert ch.load_tokenizer(tmp_path / "out").encode("four") == tokenizer().encode("four")
    # Rows of different lengths in one batch: padding on the left, and the mask says so.
    runtime = onnx_export.runner(tmp_path / "out", model)
    tokens, real = torch.randint(0, 304, (2, 9)), torch.arange(9) >= torch.tensor([[0], [4]])
    logits = runtime.run("model", {**runtime.begin([], 2), "tokens": tokens, "mask": real})[0]
    with torch.no_grad():
        alone = model(tokens[1:, 4:])[0]
    # float32, two layers: only the order of summation differs
    torch.testing.assert_close(logits[1, 4:], alone, rtol=0, atol=1e-4)


def test_a_translator_of_our_own_design_that_we_trained(tmp_path: Path) -> None:
    """Rotary positions, RMS norms, normed queries, as the demo's: no other format has a place for it."""
    recipe = make_recipe("translate", tmp_path / "data", model=dict(qk_norm=True, norm_first=True), steps=30)
    folder = ch.train(recipe, tmp_path / "run").folder
    model = ch.load(folder)
    found = export(model, tmp_path / "out", to="onnx", tokenizer=ch.load_tokenizer(folder))
    assert found is not None
    assert (found.n_tokens, found.n_equal) == (36, 36)
    assert sorted(file.name for file in (tmp_path / "out").glob("*.onnx")) == ["decoder.onnx", "encoder.onnx"]


def test_an_encoder(tmp_path: Path) -> None:
    model = sound("bert-classes")
    assert export(model, tmp_path / "out", to="onnx") is not None
    runtime = onnx_export.runner(tmp_path / "out", model)
    tokens, real = torch.randint(0, 304, (2, 9)), torch.arange(9) < torch.tensor([[9], [4]])
    logits = runtime.run("model", {"tokens": tokens, "mask": real})[0]
    with torch.no_grad():
        alone = model(tokens[1:, :4])[0]
    # float32, two layers: only the order of summation differs
    torch.testing.assert_close(logits[1], alone, rtol=0, atol=1e-4)


def test_a_vision_transformer_in_8_bits(tmp_path: Path) -> None:
    found = export(sound("vit"), tmp_path / "out", to="onnx", type="int8")
    assert found is not None
    assert found.reason == "inputs and weights of every product in 8 bits"
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["graphs.json", "model.onnx"]
    kinds = {node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node}
    assert "MatMulInteger" in kinds


def test_a_wrong_graph_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = onnx_export.write_graph

    def write_graph(graph: onnx_export.Graph, file: Path, *, external_data: bool) -> None:
        with torch.no_grad():
            graph.module.model.norm.weight.mul_(1.01)
        right(graph, file, external_data=external_data)

    monkeypatch.setattr(onnx_export, "write_graph", write_graph)
    with pytest.raises(CheckpointError, match=r"onnxruntime .* computes something else"):
        export(sound("vit"), tmp_path / "out", to="onnx")
    assert list(tmp_path.iterdir()) == []
