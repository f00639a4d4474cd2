"""Every family against Hugging Face transformers: the largest difference of outputs, there and back.

    .venv/bin/python benchmarks/correctness/families.py            prints the table
    .venv/bin/python benchmarks/correctness/families.py --docs     and writes docs/families.md

Tiny random models are made and saved by transformers, loaded by clearhead and compared; then saved by clearhead, loaded by
transformers and compared again. Outputs are of order 1. In float64 what is left is where transformers itself rounds to float32.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers as hf
from torch import Tensor

import clearhead as ch

TOKENS = torch.arange(4, 30).reshape(2, 13)
TARGET = torch.arange(5, 19).reshape(2, 7)
PICTURES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SOUND = torch.randn(2, 80, 60, generator=torch.Generator().manual_seed(0))

BERT = dict(hidden_size=36, num_hidden_layers=3, num_attention_heads=3, intermediate_size=53, vocab_size=97)
LLAMA = dict(**BERT, num_key_value_heads=1)
SEQ2SEQ = dict(d_model=36, encoder_layers=2, decoder_layers=3, encoder_attention_heads=3, decoder_attention_heads=3,
               encoder_ffn_dim=53, decoder_ffn_dim=53, vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=2,
               decoder_start_token_id=3)  # fmt: skip
T5 = dict(d_model=36, num_layers=2, num_decoder_layers=3, num_heads=3, d_kv=8, d_ff=53, vocab_size=97)
VIT = dict(
    hidden_size=36, num_hidden_layers=3, num_attention_heads=3, intermediate_size=53, image_size=32, patch_size=8
)
WHISPER = dict(
    **SEQ2SEQ, max_source_positions=30, max_target_positions=20, suppress_tokens=None, begin_suppress_tokens=None
)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16,
              rope_theta=10_000.0)  # fmt: skip

VARIANTS: list[tuple[str, Any, Any]] = [
    ("GPT-2", hf.GPT2LMHeadModel, hf.GPT2Config(n_embd=36, n_layer=3, n_head=3, vocab_size=97, n_positions=31)),
    ("LLaMA", hf.LlamaForCausalLM, hf.LlamaConfig(**LLAMA)),
    ("LLaMA, tied, biases", hf.LlamaForCausalLM, hf.LlamaConfig(**LLAMA, attention_bias=True, tie_word_embeddings=True)),
    ("LLaMA 3, scaled rotary", hf.LlamaForCausalLM, hf.LlamaConfig(**LLAMA, rope_parameters=LLAMA3)),
    ("Mistral, window 5", hf.MistralForCausalLM, hf.MistralConfig(**LLAMA, sliding_window=5)),
    ("Qwen2", hf.Qwen2ForCausalLM, hf.Qwen2Config(**LLAMA)),
    ("Qwen3", hf.Qwen3ForCausalLM, hf.Qwen3Config(**LLAMA)),
    ("Apertus", hf.ApertusForCausalLM, hf.ApertusConfig(**LLAMA, hidden_act="gelu")),
    ("Arcee", hf.ArceeForCausalLM, hf.ArceeConfig(**LLAMA)),
    ("BERT", hf.BertModel, hf.BertConfig(**BERT)),
    ("BERT, masked LM", hf.BertForMaskedLM, hf.BertConfig(**BERT)),
    ("BERT, classes", hf.BertForSequenceClassification, hf.BertConfig(**BERT, num_labels=5)),
    ("ESM-2, masked LM", hf.EsmForMaskedLM, hf.EsmConfig(
        **BERT, position_embedding_type="rotary", token_dropout=True, mask_token_id=7, pad_token_id=1,
        emb_layer_norm_before=False, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)),
    ("ViT, classes", hf.ViTForImageClassification, hf.ViTConfig(**VIT, num_labels=5)),
    ("ViT", hf.ViTModel, hf.ViTConfig(**VIT)),
    ("T5 1.0", hf.T5ForConditionalGeneration, hf.T5Config(**T5)),
    ("T5 1.1", hf.T5ForConditionalGeneration, hf.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    ("Marian", hf.MarianMTModel, hf.MarianConfig(
        **SEQ2SEQ, max_position_embeddings=31, activation_function="swish", scale_embedding=True)),
    ("Whisper", hf.WhisperForConditionalGeneration, hf.WhisperConfig(**WHISPER)),
]  # fmt: skip


def theirs_out(model: Any, config: Any) -> Tensor:
    kind = config.model_type
    dtype = next(model.parameters()).dtype
    if kind == "vit":
        out = model(PICTURES.to(dtype))
    elif kind == "whisper":
        out = model(input_features=SOUND.to(dtype), decoder_input_ids=TARGET)
    elif config.is_encoder_decoder:
        out = model(input_ids=TOKENS, decoder_input_ids=TARGET)
    else:
        out = model(input_ids=TOKENS)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def ours_out(model: Any) -> Tensor:
    dtype = next(model.parameters()).dtype
    first = {"tokens": TOKENS, "patches": PICTURES.to(dtype), "frames": SOUND.to(dtype)}[model.config.inputs]
    return model(first, TARGET) if model.config.shape == "encoder-decoder" else model(first)


@torch.no_grad()
def compare(make: Callable[[Any], Any], config: Any, dtype: torch.dtype) -> tuple[float, float]:
    """The largest difference of outputs: theirs loaded by us, and ours loaded by them."""
    torch.manual_seed(0)
    theirs = make(config).to(dtype).eval()
    for name, parameter in theirs.named_parameters():
        if "embed_positions" not in name:  # Whisper's and Marian's are fixed
            parameter.normal_(std=0.25 if parameter.ndim > 1 else 0.1).add_(
                float(parameter.ndim == 1 and "norm" in name.lower())
            )
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        wanted = theirs_out(theirs, config)
        ours = ch.load(folder)
        there = (ours_out(ours) - wanted).abs().max().item() / wanted.std().item()
        ch.save(ours, Path(folder) / "back", format="hf")
        again, info = make.from_pretrained(Path(folder) / "back", output_loading_info=True, dtype=dtype)  # type: ignore[attr-defined]
        lost = {kind: keys for kind, keys in info.items() if keys}
        assert not lost, lost
        back = (theirs_out(again.eval(), config) - wanted).abs().max().item() / wanted.std().item()
    return there, back


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare every family with Hugging Face transformers.")
    parser.add_argument("--docs", action="store_true", help="write docs/families.md")
    options = parser.parse_args()
    hf.logging.set_verbosity_error()
    hf.utils.logging.disable_progress_bar()
    lines = ["| model | float32 | float64 | saved by us, float32 |", "|---|---|---|---|"]
    for name, make, config in VARIANTS:
        single, back = compare(make, config, torch.float32)
        double, _ = compare(make, config, torch.float64)
        lines.append(f"| {name} | {single:.1e} | {double:.1e} | {back:.1e} |")
        print(lines[-1], flush=True)
    if options.docs:
        page = Path(__file__).resolve().parents[2] / "docs" / "families.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(
            PAGE.format(table="\n".join(lines), hf=hf.__version__, torch=torch.__version__), encoding="utf-8"
        )
        print(f"written: {page}")


PAGE = """# Families against an independent implementation

The largest difference between the output of clearhead and of Hugging Face transformers {hf}, divided by the output's standard
deviation, for tiny random models with torch {torch} on a CPU. In the first two columns the model was saved by transformers and
loaded by clearhead. In the last column it was saved by clearhead with `format="hf"` and loaded by transformers; no key was missing,
unexpected or of another shape. A difference above 1e-8 in float64 means that transformers computes a part in float32 (its RMS norms
and rotary tables do so).

Made by `.venv/bin/python benchmarks/correctness/families.py --docs`; the tests compare many more configurations.

{table}

## Which fields of config.json are accepted

A field passes if the family reads it, if no value of it changes what a model computes, or if its value means "not used". Any
other field is refused by name; null means "not set". The lists are in `clearhead/families/allowed_fields.py` and in each family's
`FIELDS`. The files of sentence-transformers (modules.json and those beside it) are read by the same rule: pooling and normalising
are honoured for BERT and for T5 encoders. Default prompts, shortened vectors, and lower case that the tokenizer does not make are
refused.
"""

if __name__ == "__main__":
    main()
