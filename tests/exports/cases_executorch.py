"""ExecuTorch, run by its own runtime: a decoder, an encoder, a ViT, a trained encoder-decoder. Run by test_executorch.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import clearhead as ch
from clearhead.errors import CheckpointError
from clearhead.exports import executorch_export, export
from tests.exports.models import sound, tokenizer
from tests.training.tiny_runs import make_recipe

# ExecuTorch 1.5 with torch 2.13: its passes use what torch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def test_a_decoder_with_a_cache(tmp_path: Path) -> None:
    model = sound("llama")
    found = export(model, tmp_path / "out", to="executorch", tokenizer=tokenizer())
    assert found is not None
    assert found.runtime.startswith("executorch ")
    assert (found.n_tokens, found.n_equal) == (36, 36)
    facts = json.loads((tmp_path / "out" / "graphs.json").read_text())
    assert facts["longest"] == {"length": 64, "past": 63, "whole": 64, "source": 64}
    assert facts["graphs"]["model"]["inputs"][:4] == ["tokens", "mask", "past.0.k", "past.0.v"]
    assert ch.load_tokenizer(tmp_path / "out").encode("four") == tokenizer().encode("four")
    # The longest text that memory was planned for, in two pieces.
    runner = executorch_export.runner(tmp_path / "out", model)
    tokens, state = torch.randint(0, 304, (1, 64)), runner.begin([], 1)
    parts = [runner.step(part, state)[0] for part in tokens.split([40, 24], 1)]
    with torch.no_grad():
        # float32, two layers: only the order of summation differs
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=0, atol=1e-4)


def test_a_translator_of_our_own_design_that_we_trained(tmp_path: Path) -> None:
    recipe = make_recipe("translate", tmp_path / "data", model=dict(qk_norm=True, norm_first=True), steps=30)
    folder = ch.train(recipe, tmp_path / "run").folder
    found = export(ch.load(folder), tmp_path / "out", to="executorch", tokenizer=ch.load_tokenizer(folder))
    assert found is not None
    assert (found.n_tokens, found.n_equal) == (36, 36)
    assert sorted(file.name for file in (tmp_path / "out").glob("*.pte")) == ["decoder.pte", "encoder.pte"]


def test_an_encoder_with_padding(tmp_path: Path) -> None:
    model = sound("bert-classes")
    assert export(model, tmp_path / "out", to="executorch") is not None
    runner = executorch_export.runner(tmp_path / "out", model)
    tokens, real = torch.randint(0, 304, (2, 9)), torch.arange(9) < torch.tensor([[9], [4]])
    logits = runner.run("model", {"tokens": tokens, "mask": real})[0]
    with torch.no_grad():
        alone = model(tokens[1:, :4])[0]
    # float32, two layers: only the order of summation differs
    torch.testing.assert_close(logits[1], alone, rtol=0, atol=1e-4)


def test_a_wrong_program_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = executorch_export.lower

    def lower(graph: executorch_export.Graph, limits: dict[str, int]) -> bytes:
        with torch.no_grad():
            graph.module.model.norm.weight.mul_(1.01)
        return right(graph, limits)

    assert export(sound("vit"), tmp_path / "right", to="executorch") is not None
    monkeypatch.setattr(executorch_export, "lower", lower)
    with pytest.raises(CheckpointError, match=r"executorch .* computes something else"):
        export(sound("vit"), tmp_path / "out", to="executorch")
    assert [each.name for each in tmp_path.iterdir()] == ["right"]
