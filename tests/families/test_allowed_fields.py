"""The allow-list of config.json's fields: what transformers writes by default passes; what nobody knows is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from clearhead.checkpoint import load, save
from clearhead.errors import CheckpointError
from clearhead.families import FAMILIES, family_of
from clearhead.families.config_translation import Keys
from tests.families.compare import assert_near, refusal, saved, sides, tiny, tokens

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {}),
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "bert": ("BertConfig", {}),
    "esm": ("EsmConfig", dict(vocab_size=33, position_embedding_type="rotary")),
    "vit": ("ViTConfig", {}),
    "t5": ("T5Config", {}),
    "marian": ("MarianConfig", {}),
    "whisper": ("WhisperConfig", {}),
}
# Fields of published files that transformers' classes no longer have.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_ctx=1024, output_past=True, n_special=0, predict_special_tokens=True, task_specific_params={}),
    "llama": dict(pretraining_tp=1, is_llama_config=True, rope_interleaved=False, rope_scaling=None, mlp_bias=False),
    "mistral": dict(torch_dtype="bfloat16", rope_theta=10_000.0),
    "qwen2": dict(use_mrope=False, max_window_layers=21),
    "bert": dict(
        position_embedding_type="absolute", directionality="bidi", pooler_fc_size=768, gradient_checkpointing=False
    ),
    "esm": dict(is_folding_model=False, esmfold_config=None, vocab_list=None, classifier_dropout=None),
    "vit": dict(finetuning_task=None, torch_dtype="float32"),
    "t5": dict(n_positions=512, output_past=True, task_specific_params=dict(summarization=dict(num_beams=4))),
    "marian": dict(static_position_embeddings=True, normalize_before=False, add_bias_logits=False, num_hidden_layers=6),
    "whisper": dict(max_length=448, num_hidden_layers=4, forced_decoder_ids=[[1, 50259]]),
}


def read(kind: str, **changes: Any) -> dict[str, Any]:
    """Our fields of a default config of transformers, with changes, as it is written to disk."""
    name, fields = KINDS[kind]
    theirs: dict[str, Any] = json.loads(getattr(transformers, name)(**fields).to_json_string(use_diff=False))
    family = FAMILIES[family_of(kind) or ""]
    return family.read({**theirs, **changes}, Keys({}, lambda _: torch.zeros(0)))


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_and_published_fields_are_read(kind: str) -> None:
    assert read(kind, **PUBLISHED[kind]) == read(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_fields_are_refused_by_name(kind: str) -> None:
    assert read(kind, new_trick=None) == read(kind)
    for value in (0.5, True, False, "yes", [1], {"a": 1}):
        with pytest.raises(CheckpointError, match=r"new_trick=.* neither supported nor known to be harmless.*delete"):
            read(kind, new_trick=value)
    with pytest.raises(CheckpointError, match="add_cross_attention=True changes what the model computes"):
        read(kind, add_cross_attention=True)


@pytest.mark.parametrize("kind", KINDS)
def test_causality(kind: str) -> None:
    """transformers 5 lets a decoder see the future with is_causal=False."""
    causal = kind not in ("bert", "esm", "vit")
    assert read(kind, is_causal=causal) == read(kind)
    with pytest.raises(CheckpointError, match=rf"is_causal={not causal} changes what the model computes"):
        read(kind, is_causal=not causal)


def test_a_family_that_we_have_not_gets_no_false_friend(tmp_path: Path) -> None:
    folder = saved(tiny(transformers.GPT2LMHeadModel, gpt2()), tmp_path)
    for kind in ("bart", "gptj"):
        change(folder / "config.json", model_type=kind)
        message = refusal(folder)
        assert f"{kind!r} is not a family we have" in message
        assert "did you mean" not in message
        assert "supported: apertus, arcee, bert, deit, esm, gpt2" in message


# Folders of sentence-transformers.


def gpt2() -> Any:
    return transformers.GPT2Config(vocab_size=53, n_embd=22, n_layer=2, n_head=2, n_positions=31)


def bert() -> Any:
    return transformers.BertConfig(
        vocab_size=53, hidden_size=22, num_hidden_layers=2, num_attention_heads=2, intermediate_size=37
    )


def t5() -> Any:
    return transformers.T5Config(
        vocab_size=53, d_model=23, d_kv=5, num_heads=3, d_ff=37, num_layers=2, decoder_start_token_id=0
    )


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.is_file() else {}), **fields}))


def with_modules(folder: Path, *kinds: str, **pooling: Any) -> Path:
    """The folder as sentence-transformers saves it: these modules, and the fields of the pooling."""
    paths = ["", *(f"{n}_{kind}" for n, kind in enumerate(kinds[1:], 1))]
    rows = [
        dict(idx=n, name=str(n), path=p, type=f"sentence_transformers.models.{k}")
        for n, (p, k) in enumerate(zip(paths, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(rows))
    for path in paths[1:]:
        (folder / path).mkdir(exist_ok=True)
    change(folder / paths[1] / "config.json", **(pooling or dict(pooling_mode_mean_tokens=True)))
    return folder


MEAN = ("Transformer", "Pooling", "Normalize")


@torch.no_grad()
def test_sentence_t5(tmp_path: Path) -> None:
    theirs = tiny(transformers.T5EncoderModel, t5())
    plain = load(saved(theirs, tmp_path / "t5"))
    assert (plain.config.pool, plain.config.pool_normed) == ("first", False)
    ours, x, real = load(with_modules(tmp_path / "t5", *MEAN)), tokens(), sides(3, 11)["right"]
    states = theirs(x, attention_mask=real).last_hidden_state
    mean = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
    expected = torch.nn.functional.normalize(mean, dim=-1)
    assert_near(ours.pooled(ours(x, real), real), expected)
    for format in ("hf", "clearhead"):
        again = load(save(ours, tmp_path / format, format=format))
        assert again.config == ours.config
        assert again.config.pool_normed
        assert_near(again.pooled(again(x, real), real), expected)
    assert not (save(plain, tmp_path / "plain", format="hf") / "modules.json").exists()


def test_modules_that_do_not_fit_the_weights_are_refused(tmp_path: Path) -> None:
    masked = saved(tiny(transformers.BertForMaskedLM, bert()), tmp_path / "masked")
    assert load(masked).config.head == "tokens"
    assert "save the model as BertModel" in refusal(with_modules(masked, *MEAN))
    assert "'MLMTransformer' changes the embeddings" in refusal(with_modules(masked, "MLMTransformer", "SpladePooling"))
    assert "'SpladePooling' changes the embeddings" in refusal(with_modules(masked, "Transformer", "SpladePooling"))
    whole = saved(tiny(transformers.T5ForConditionalGeneration, t5()), tmp_path / "whole")
    assert "save the model as T5EncoderModel" in refusal(with_modules(whole, *MEAN))
    decoder = saved(tiny(transformers.GPT2LMHeadModel, gpt2()), tmp_path / "decoder")
    message = refusal(with_modules(decoder, *MEAN))
    assert "modules.json lists ['Transformer', 'Pooling', 'Normalize']" in message
    assert "model_type='gpt2'" in message


@pytest.mark.parametrize(
    ("file", "refused", "accepted"),
    [
        ("config_sentence_transformers.json", dict(default_prompt_name="query"), dict(default_prompt_name=None)),
        ("config_sentence_transformers.json", dict(truncate_dim=7), dict(prompts=dict(query="query: "))),
        ("config_sentence_transformers.json", dict(new_trick=1), dict(similarity_fn_name="cosine")),
        ("sentence_bert_config.json", dict(do_lower_case=True), dict(do_lower_case=False, max_seq_length=9)),
        ("sentence_bert_config.json", dict(new_trick=1), dict(transformer_task="feature-extraction")),
    ],
)
def test_side_files_of_embedders(tmp_path: Path, file: str, refused: dict[str, Any], accepted: dict[str, Any]) -> None:
    folder = with_modules(saved(tiny(transformers.BertModel, bert()), tmp_path), *MEAN)
    change(folder / file, **accepted)
    load(folder)
    change(folder / file, **refused)
    message = refusal(folder)
    assert f"{file}'s {next(iter(refused))}=" in message
    assert "changes the embeddings" in message


def test_lower_case_is_harmless_where_the_tokenizer_makes_it(tmp_path: Path) -> None:
    folder = with_modules(saved(tiny(transformers.BertModel, bert()), tmp_path), *MEAN)
    change(folder / "sentence_bert_config.json", do_lower_case=True)
    change(folder / "tokenizer_config.json", do_lower_case=True)
    load(folder)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(num_beams=4), "num_beams=4 .* pass beams=4 for it"),
        (dict(repetition_penalty=1.2), "repetition_penalty=1.2 .* pass repetition_penalty=1.2 for it"),
        (dict(no_repeat_ngram_size=3), "no_repeat_ngram_size=3 .* pass no_repeat_ngram=3 for it"),
        (
            dict(exponential_decay_length_penalty=[5, 1.1]),
            "exponential_decay_length_penalty=.* there is no option for it",
        ),
        (dict(renormalize_logits=True), "renormalize_logits=True .* there is no option for it"),
        (dict(min_length=5), "min_length=5 .* there is no option for it"),
        (dict(min_new_tokens=5), "min_new_tokens=5 .* pass min_new_tokens=5 for it"),
        (dict(bad_words_ids=[[3], [4, 5]]), r"bad_words_ids=\[\[4, 5\]\] .* there is no option for it"),
        (dict(sequence_bias=[[[3], -1.0]]), "sequence_bias=.* there is no option for it"),
        (dict(guidance_scale=1.5), "guidance_scale=1.5 .* there is no option for it"),
    ],
)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_what_a_checkpoint_asks_of_its_texts_is_said(
    tmp_path: Path, file: str, fields: dict[str, Any], words: str
) -> None:
    folder = saved(tiny(transformers.GPT2LMHeadModel, gpt2()), tmp_path)
    neutral = dict(num_beams=1, repetition_penalty=1.0, no_repeat_ngram_size=0, renormalize_logits=False)
    neutral |= dict(min_length=0, bad_words_ids=[[3]])
    change(folder / file, **neutral)
    load(folder)  # warnings are errors here
    change(folder / file, **fields)
    with pytest.warns(UserWarning, match=words) as said:
        load(folder)
    assert len(said) == 1
