"""`export`: verified by the target's own program; refused before writing what a format can not hold; nothing left of a failure."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, normalizers
from typer.testing import CliRunner

import clearhead as ch
from clearhead.cli import app
from clearhead.data import Tokenizer
from clearhead.data.sentencepiece import Piece, build_core
from clearhead.data.tokenizer_parts import byte_level_bpe
from clearhead.errors import CheckpointError, InputError, MissingExtraError
from clearhead.exports import (
    TARGETS,
    ctranslate2_export,
    export,
    gguf_export,
    hugging_face,
    onnx_export,
    verification,
)
from clearhead.exports.gguf_vocabulary import vocabulary
from clearhead.models import Model
from clearhead.quantization.integer import quantize
from tests.exports.models import TEXT, sound, tokenizer
from tests.training.tiny_runs import make_recipe

MODULES = {"gguf": "llama_cpp", "ctranslate2": "ctranslate2"}


def needs(to: str) -> None:
    pytest.importorskip(MODULES[to], reason=f"no {MODULES[to]} to run what is exported to {to}")


def assert_empty(folder: Path) -> None:
    assert list(folder.iterdir()) == [], "something was left behind"


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "original"])
def test_hf(name: str, tmp_path: Path) -> None:
    model, words = sound(name), None if name == "vit" else tokenizer()
    found = export(model, tmp_path / "out", to="hf", tokenizer=words)
    assert found is not None
    assert found.runtime.startswith("transformers ")
    assert found.error <= found.allowed < 1e-3
    writes = model.config.shape != "encoder"
    assert (found.n_tokens, found.n_equal) == ((36, 36) if writes else (0, 0))
    assert found.nbytes == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "tokenizer.json").exists() == (words is not None)
    ch.load(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("kind", gguf_export.TYPES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "llama-3.1"])
def test_gguf(name: str, kind: str, tmp_path: Path) -> None:
    needs("gguf")
    model, file = sound(name), tmp_path / "m.gguf"
    found = export(model, file, to="gguf", tokenizer=tokenizer(), type=kind)
    assert found is not None
    assert found.runtime.startswith("llama-cpp-python ")
    assert found.error <= found.allowed == gguf_export.BOUNDS[kind]
    assert found.n_equal >= (36 if kind == "F32" else 30)
    back = ch.load(file)
    if kind == "F32":
        assert all(torch.equal(back.state_dict()[key], x) for key, x in model.state_dict().items())
    inside = ch.load_tokenizer(file)
    assert inside.encode(TEXT) == tokenizer().encode(TEXT)
    assert inside.decode(inside.encode("four cats")) == "four cats"


def test_gguf_without_its_program(tmp_path: Path) -> None:
    """The file is written and reads back; llama.cpp need not be here for that."""
    model = sound("llama")
    assert export(model, tmp_path / "m.gguf", to="gguf", tokenizer=tokenizer(), type="Q4_0", verify=False) is None
    back = ch.load(tmp_path / "m.gguf")
    weight = model.state_dict()["blocks.0.attention.q_proj.weight"]
    # 4 bits: sixteen steps over the range of a block
    assert (
        float((back.state_dict()["blocks.0.attention.q_proj.weight"] - weight).abs().max())
        < float(weight.abs().max()) / 7
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "qwen3", "bert", "marian", "t5"])
def test_ctranslate2(name: str, kind: str, tmp_path: Path) -> None:
    needs("ctranslate2")
    found = export(sound(name), tmp_path / "out", to="ctranslate2", tokenizer=tokenizer(), type=kind)
    assert found is not None
    assert found.runtime.startswith("ctranslate2 ")
    assert found.error <= found.allowed
    assert found.n_equal >= found.n_tokens * (1.0 if kind == "float32" else 0.8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama-3.1", dict(rotary_original_len=32)),
        ("llama", dict(d_head=32, feedforward="gelu")),
        ("t5-v1.1", {}),
        ("t5", dict(d_head=32, head_scale=False)),
    ],
)
def test_what_ctranslate2s_loaders_leave_out(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    needs("ctranslate2")
    found = export(sound(name, **fields), tmp_path / "out", to="ctranslate2", tokenizer=tokenizer())
    assert found is not None
    assert (found.n_tokens, found.n_equal) == (36, 36)


@pytest.mark.slow
def test_a_mistake_below_the_limit_of_few_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LLaMA 3's scaling left out moves the logits by 1%, and int8 may move them by 15%: float32 is verified first."""
    needs("ctranslate2")
    monkeypatch.setattr(ctranslate2_export, "complete", lambda *_: None)
    with pytest.raises(CheckpointError, match=r"ctranslate2 .* computes something else .* 1\.\de-02 .*\(rounding: "):
        export(sound("llama-3.1"), tmp_path / "out", to="ctranslate2", tokenizer=tokenizer(), type="int8")
    assert_empty(tmp_path)


def test_few_bits_are_verified_with_all_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []
    found = verification.Verification("a program", 0.0, 0.0, "", 0, 0)

    def write(_model: Any, _tokenizer: Any, file: Path, kind: str) -> None:
        assert not file.exists()
        file.write_text(kind)

    def verify(_model: Any, _tokenizer: Any, file: Path, kind: str) -> verification.Verification:
        seen.append((kind, file.read_text()))
        return found

    monkeypatch.setitem(TARGETS, "onnx", replace(TARGETS["onnx"], refuse=lambda *_: None, write=write, verify=verify))
    export(sound("gpt2"), tmp_path / "out", to="onnx", type="int8")
    assert seen == [("float32", "float32"), ("int8", "int8")]
    assert (tmp_path / "out").read_text() == "int8"


@pytest.mark.slow
def test_a_sentence_encoder_in_ctranslate2(tmp_path: Path) -> None:
    """Without a pooler: the file has none, either."""
    needs("ctranslate2")
    found = export(sound("bert", pooler=False), tmp_path / "out", to="ctranslate2", tokenizer=tokenizer())
    assert found is not None
    assert found.error <= found.allowed
    assert b"pooler" not in (tmp_path / "out" / "model.bin").read_bytes()
    export(sound("bert"), tmp_path / "pooled", to="ctranslate2", tokenizer=tokenizer())
    assert b"pooler_dense" in (tmp_path / "pooled" / "model.bin").read_bytes()


@pytest.mark.slow
def test_a_translator_that_we_trained(tmp_path: Path) -> None:
    """The original Transformer goes to transformers and CTranslate2; one of our own design is refused by both, for its fields."""
    needs("ctranslate2")
    fields: dict[str, Any] = dict(norm="layer", positions="sinusoidal", family="original", embedding_scale=True)
    fields |= dict(feedforward="relu", tie_embeddings=True, norm_first=False)
    recipe = make_recipe("translate", tmp_path / "data", model=fields, steps=30)
    folder = ch.train(recipe, tmp_path / "run").folder
    model, words = ch.load(folder), ch.load_tokenizer(folder)
    for to in ("hf", "ctranslate2"):
        found = export(model, tmp_path / to, to=to, tokenizer=words)
        assert found is not None
        assert (found.n_tokens, found.n_equal) == (36, 36)
    own = ch.load(ch.train(make_recipe("translate", tmp_path / "data", steps=2), tmp_path / "own").folder)
    for to in ("hf", "ctranslate2"):
        with pytest.raises(
            CheckpointError,
            match=r"no layout of transformers can hold this model; .* positions='rotary'.*; export to onnx",
        ):
            export(own, tmp_path / "x", to=to, tokenizer=words)
    assert not (tmp_path / "x").exists()


def change(model: Model) -> Model:
    with torch.no_grad():
        model.blocks[0].feedforward.down.weight[3, 5] += 1  # type: ignore[index]
    return model


def test_a_wrong_export_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = hugging_face.save
    monkeypatch.setattr(hugging_face, "save", lambda _, *args, **named: right(change(sound("llama")), *args, **named))
    with pytest.raises(CheckpointError, match=r"transformers .* computes something else .* nothing was left behind"):
        export(sound("llama"), tmp_path / "out", to="hf")
    assert_empty(tmp_path)


def test_another_text_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = hugging_face.Transformers.write

    def write(runtime: Any, *args: Any) -> list[int]:
        ids = right(runtime, *args)
        return [*ids[:5], (ids[5] + 1) % 304, *ids[6:]]

    monkeypatch.setattr(hugging_face.Transformers, "write", write)
    with pytest.raises(
        CheckpointError, match=r"writes another text from this export: token 5 of text 0 is \d+, which we score"
    ):
        export(sound("gpt2"), tmp_path / "out", to="hf")
    assert_empty(tmp_path)


def test_other_tokens_are_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = ch.train_tokenizer(texts=["x y z " * 40], kind="bpe", vocab_size=262)
    right = type(other).save
    monkeypatch.setattr(type(other), "save", lambda _, folder: right(other, folder))
    with pytest.raises(CheckpointError, match=r"transformers cuts .* into other tokens"):
        export(sound("gpt2"), tmp_path / "out", to="hf", tokenizer=tokenizer())
    assert_empty(tmp_path)


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("clearhead.exports.exporting.sync_all", fail)
    with pytest.raises(
        CheckpointError, match=r"could not be written \(No space left on device\); nothing was left behind"
    ):
        export(sound("gpt2"), tmp_path / "out", to="hf", verify=False)
    assert_empty(tmp_path)


REFUSED: dict[str, tuple[str, dict[str, Any], str, str | None]] = {
    "GGUF is written for LLaMA and Qwen2, which have no place for positions='learned', norm='layer'": (
        "gpt2",
        {},
        "gguf",
        None,
    ),
    "GGUF is written for decoders; this model has shape='encoder'": ("bert", {}, "gguf", None),
    "which have no place for qk_norm=True; export to onnx": ("llama", {"qk_norm": True}, "gguf", None),
    "no place for window=5": ("mistral", {"n_kv_heads": 2}, "gguf", None),
    "attention_bias='q'": ("llama", {"attention_bias": "q"}, "gguf", None),
    "Q8_0 holds rows of whole blocks of 32; got d_ff=97; use --type F16 or F32": (
        "llama",
        {"d_ff": 97},
        "gguf",
        "Q8_0",
    ),
    "the tokenizer has 300 ids, the model vocab_size=290": ("llama", {"vocab_size": 290}, "gguf", None),
    "CTranslate2 is written for bert, gpt2, llama, marian, qwen2, qwen3, t5; transformers holds this model as 'esm'": (
        "esm",
        {},
        "ctranslate2",
        None,
    ),
    "models without windows; got window=5": ("mistral", {"n_kv_heads": 2}, "ctranslate2", None),
    "CTranslate2's encoder ends in states, with or without a pooler; got head='classes'": (
        "bert-classes",
        {},
        "ctranslate2",
        None,
    ),
    "CTranslate2 has relu, gelu, gelu_tanh, silu; got feedforward='relu2'": (
        "gpt2",
        {"feedforward": "relu2"},
        "ctranslate2",
        None,
    ),
    "ExecuTorch lacks an operator that draws random blocks; got sparsity='block=4, window=1, n_random=1'": (
        "llama",
        {"sparsity": "block=4, n_random=1"},
        "executorch",
        None,
    ),
    "GPT-2's layout has no place for positions='alibi'": ("alibi", {}, "hf", None),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_format_can_not_hold(words: str, tmp_path: Path) -> None:
    name, fields, to, kind = REFUSED[words]
    with pytest.raises(CheckpointError) as error:
        export(sound(name, **fields), tmp_path / "out", to=to, tokenizer=tokenizer(), type=kind)
    assert words in str(error.value)
    assert_empty(tmp_path)


def test_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a GGUF file holds its tokenizer"):
        export(sound("llama"), tmp_path / "out", to="gguf")
    with pytest.raises(CheckpointError, match="CTranslate2 calls tokens by their text"):
        export(sound("llama"), tmp_path / "out", to="ctranslate2")


def test_a_tokenizer_that_llama_cpp_has_not(tmp_path: Path) -> None:
    for kind, words in {
        "chars": "cut words as gpt-2, smollm, llama-bpe, qwen2 do",
        "wordpiece": "type 'WordPiece'",
    }.items():
        own = ch.train_tokenizer(texts=[TEXT], kind=kind, vocab_size=300)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError) as error:
            export(sound("llama"), tmp_path / "out", to="gguf", tokenizer=own)
        assert words in str(error.value)
    assert_empty(tmp_path)


def test_rules_that_llama_cpp_has_not() -> None:
    """It would leave them out without a word, and few texts show it."""
    pieces = [
        Piece("<unk>", 0, 2),
        *(Piece(f"<0x{byte:02X}>", 0, 6) for byte in range(256)),
        Piece("▁", -1),
        Piece("a", -2),
    ]
    for wrong in (normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace("a", "b")):
        core = build_core(pieces)
        vocabulary(Tokenizer(core, {"unk": 0}), len(pieces))
        core.normalizer = normalizers.Sequence([wrong, core.normalizer])
        with pytest.raises(
            CheckpointError, match=rf"changes nothing in a text but its spaces; .*{type(wrong).__name__}"
        ):
            vocabulary(Tokenizer(core, {"unk": 0}), len(pieces))
    core = byte_level_bpe({"a": 0, "b": 1, "ab": 2}, [("a", "b")], "gpt-2")
    vocabulary(Tokenizer(core, {}), 3)
    for flag in ("single_word", "lstrip", "rstrip"):
        other = byte_level_bpe({"a": 0, "b": 1, "ab": 2}, [("a", "b")], "gpt-2")
        other.add_tokens([AddedToken("<x>", **{flag: True})])
        with pytest.raises(CheckpointError, match=rf"no place for the rules of an added token; '<x>' has {flag}"):
            vocabulary(Tokenizer(other, {}), 4)
    core.model.ignore_merges = True  # type: ignore[attr-defined]
    with pytest.raises(
        CheckpointError, match=r"as gpt-2 does, llama.cpp has ignore_merges=False .* ignore_merges=True"
    ):
        vocabulary(Tokenizer(core, {}), 3)


def test_wrong_arguments(tmp_path: Path) -> None:
    model = sound("gpt2")
    with pytest.raises(InputError, match=r"to='gguff' is no format to export to; did you mean 'gguf'"):
        export(model, tmp_path / "x", to="gguff")
    with pytest.raises(InputError, match=r"type='Q8' is none that gguf holds"):
        export(model, tmp_path / "x", to="gguf", type="Q8")
    with pytest.raises(InputError, match="is there already; an export takes a new name"):
        export(model, tmp_path, to="hf")
    with pytest.raises(InputError, match="there is no folder"):
        export(model, tmp_path / "a" / "b", to="hf")
    with pytest.raises(CheckpointError, match="a quantised model is for running and is not exported"):
        export(quantize(model, "int8"), tmp_path / "x", to="hf")


@pytest.mark.parametrize("to", TARGETS)
def test_a_missing_program_is_named(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        MissingExtraError, match=r"which is not installed; pip install 'clearhead\[(export|executorch|llamacpp)\]'"
    ):
        export(sound("llama"), tmp_path / "out", to=to, tokenizer=tokenizer())
    assert_empty(tmp_path)


def test_the_command(tmp_path: Path) -> None:
    ch.save(sound("gpt2"), tmp_path / "m")
    tokenizer().save(tmp_path / "m")
    out = tmp_path / "there"

    def call(*words: object) -> Any:
        return CliRunner().invoke(
            app, ["export", str(tmp_path / "m"), "--out", *map(str, words)], catch_exceptions=False
        )

    done = call(out, "--to", "hf")
    assert done.exit_code == 0
    assert "verified by transformers" in done.output
    assert "36 of 36 greedy tokens equal" in done.output
    row = json.loads(call(tmp_path / "json", "--to", "hf", "--json").stdout)
    assert row["verified"]
    assert row["error"] <= row["allowed"]
    unverified = call(tmp_path / "un", "--to", "hf", "--no-verify", "--json")
    assert json.loads(unverified.stdout) == {"path": str(tmp_path / "un"), "verified": False}
    assert "is NOT verified: no program of hf has run it" in unverified.stderr


def test_rules_of_generation_that_a_format_lacks(tmp_path: Path) -> None:
    model = sound("llama")
    model.generation = ch.Generation(bos=1, eos=(2, 5), suppress=(3,))
    ch.save(model, tmp_path / "m")
    tokenizer().save(tmp_path / "m")
    for to, words in {"gguf": "gguf has no place for suppress=(3,), eos=(2, 5) but the first;", "hf": ""}.items():
        args = ["export", str(tmp_path / "m"), "--to", to, "--out", str(tmp_path / to), "--no-verify"]
        told = CliRunner().invoke(app, args, catch_exceptions=False).stderr
        assert words in told
        assert ("has no place" in told) == bool(words)


def test_limits_of_verification() -> None:
    """Whatever a type's own limit is, a model that rounding takes further may go that far, and no other."""
    model = sound("gpt2")

    class Off:
        def outputs(self, args: Any) -> torch.Tensor:
            out = model(*args)
            return out + 0.05 * out.abs().max()

        def write(self, source: Any, prompt: list[int], n: int) -> list[int]:
            ids = list(prompt)
            for _ in range(n):
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
            return ids[len(prompt) :]

    with torch.no_grad():
        found = verification.verify(model, Off(), "a program", at_least=0.06, why="coarse")
        assert (found.reason, found.n_equal) == ("coarse", 36)
        with pytest.raises(
            CheckpointError, match=r"a program computes something else .* 5\.0e-02 .* allowed 4\.0e-02 \(coarse\)"
        ):
            verification.verify(model, Off(), "a program", at_least=0.04, why="coarse")


def test_opset_is_stated() -> None:
    assert onnx_export.OPSET == 18
