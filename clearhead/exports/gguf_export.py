"""llama.cpp's GGUF file, with the tokenizer inside; verified by llama.cpp itself, through llama-cpp-python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.checkpoint import load
from clearhead.checkpoint.gguf import ARCHITECTURES, names
from clearhead.checkpoint.tensor_names import expand, write_all
from clearhead.config import Config
from clearhead.data import Tokenizer
from clearhead.errors import CheckpointError
from clearhead.exports.gguf_vocabulary import vocabulary
from clearhead.exports.hugging_face import SAMPLES
from clearhead.exports.verification import LENGTH, Verification, require, version_of
from clearhead.exports.verification import verify as compare
from clearhead.families import llama
from clearhead.laws.decoding_laws import NEW
from clearhead.layers.positions import Rotary
from clearhead.models import Model

TYPES = ("F16", "F32", "Q8_0", "Q4_0")
BLOCK = 32  # weights of a row that share a scale in Q8_0 and Q4_0
# llama.cpp brings the inputs of a product to the weights' kind: 16 bits, or 8. Compared with the same weights in float32.
BOUNDS = {"F32": 1e-4, "F16": 1e-2, "Q8_0": 0.1, "Q4_0": 0.1}

# The fields that a file says, and those that matter in training only.
SAID = {
    *(
        "d_model",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "d_head",
        "d_ff",
        "vocab_size",
        "max_len",
        "max_source_len",
        "norm_eps",
    ),
    *("attention_bias", "tie_embeddings", "rotary_base", "rotary_scaling", "rotary_factor"),
    *("rotary_low", "rotary_high", "rotary_original_len"),
}
SILENT = {"family", "dropout", "attention_dropout", "kernel", "init", "init_std", "init_residual"}


def architecture(config: Config) -> str:
    return "llama" if config.attention_bias == "" else "qwen2"


def refuse(model: Model, tokenizer: Tokenizer | None, kind: str, verifying: bool) -> None:
    config = model.config
    said = {name: value for name, value in config.to_dict().items() if name in SAID}
    held = Config.from_dict({"family": "llama", **llama.BASE, **said}) if config.shape == "decoder" else None
    if held is None:
        raise CheckpointError(
            f"GGUF is written for decoders; this model has shape={config.shape!r}; export to onnx or hf"
        )
    ours, theirs = config.to_dict(), held.to_dict()
    wrong = [f"{name}={ours[name]!r}" for name in ours if name not in SILENT and ours[name] != theirs[name]]
    if wrong or config.attention_bias not in ("", "qkv"):
        wrong = wrong or [f"attention_bias={config.attention_bias!r}"]
        raise CheckpointError(
            f"GGUF is written for LLaMA and Qwen2, which have no place for {', '.join(wrong[:5])}; export to onnx"
        )
    widths = {"d_model": config.d_model, "d_ff": config.d_ff, "n_heads * d_head": config.n_heads * config.d_head}
    odd = [f"{name}={width}" for name, width in widths.items() if kind.startswith("Q") and width % BLOCK]
    if odd:
        raise CheckpointError(
            f"{kind} holds rows of whole blocks of {BLOCK}; got {', '.join(odd)}; use --type F16 or F32"
        )
    if tokenizer is None:
        raise CheckpointError(
            "a GGUF file holds its tokenizer, and this model came without one; put tokenizer.json beside it"
        )
    vocabulary(tokenizer, config.vocab_size)
    if verifying:
        require("llama-cpp-python", "llama_cpp", "gguf", extra="llamacpp")


def write(model: Model, tokenizer: Tokenizer | None, file: Path, kind: str) -> None:
    import gguf

    assert tokenizer is not None
    config = model.config
    arch = architecture(config)
    writer = gguf.GGUFWriter(file, arch)
    writer.add_string("general.name", file.stem)
    writer.add_file_type({"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7}[kind])
    for key, value in metadata(config).items():
        add(writer, f"{arch}.{key}", value)
    for key, value in vocabulary(tokenizer, config.vocab_size).items():
        add(writer, f"tokenizer.{key}", value)
    tensors = write_all(model.state_dict(), expand(names(ARCHITECTURES[arch]), config))
    for name, tensor in {**tensors, **frequencies(config)}.items():
        chosen = gguf.GGMLQuantizationType[type_of(name, tensor, kind)]
        packed = gguf.quants.quantize(np.ascontiguousarray(tensor.detach().float().cpu().numpy()), chosen)
        writer.add_tensor(name, packed, raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def type_of(name: str, tensor: Tensor, kind: str) -> str:
    """Norms and biases stay in float32; beside 4 bits, embedding and head have 8."""
    if tensor.ndim == 1:
        return "F32"
    return "Q8_0" if kind == "Q4_0" and name in ("token_embd.weight", "output.weight") else kind


def metadata(config: Config) -> dict[str, int | float | str]:
    """What follows "<architecture>."."""
    facts: dict[str, int | float | str] = {
        "context_length": config.max_len,
        "embedding_length": config.d_model,
        "block_count": config.n_layers,
        "feed_forward_length": config.d_ff,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.n_kv_heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "attention.key_length": config.d_head,
        "attention.value_length": config.d_head,
        "rope.dimension_count": config.d_head,
        "rope.freq_base": config.rotary_base,
        "vocab_size": config.vocab_size,
    }
    if config.rotary_scaling == "linear":
        facts |= {"rope.scaling.type": "linear", "rope.scaling.factor": config.rotary_factor}
    return facts


def frequencies(config: Config) -> dict[str, Tensor]:
    """LLaMA 3's scaling: a divisor for each frequency."""
    if config.rotary_scaling != "llama3":
        return {}
    cpu, given = torch.device("cpu"), dict(d_head=config.d_head, base=config.rotary_base)
    scaled = Rotary(
        **given,  # type: ignore[arg-type]
        scaling="llama3",
        factor=config.rotary_factor,
        low=config.rotary_low,
        high=config.rotary_high,
        original_len=config.rotary_original_len,
    )
    return {"rope_freqs.weight": Rotary(**given).frequencies(cpu) / scaled.frequencies(cpu)}  # type: ignore[arg-type]


def add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


class LlamaCpp:
    """llama.cpp with keys and values in float32."""

    def __init__(self, file: Path) -> None:
        from llama_cpp import Llama  # pyright: ignore[reportMissingImports]  # an extra of its own

        self.llama: Any = Llama(
            str(file), n_ctx=LENGTH + NEW, logits_all=True, verbose=False, type_k=0, type_v=0, flash_attn=False
        )

    def logits(self, ids: list[int]) -> Tensor:
        """After each of these tokens, which follow those read before."""
        start = self.llama.n_tokens
        self.llama.eval(ids)
        return torch.tensor(np.array(self.llama.scores[start : start + len(ids)]))

    def outputs(self, args: Sequence[Tensor]) -> Tensor:
        found: list[Tensor] = []
        for row in args[0].tolist():
            self.llama.reset()
            found.append(self.logits(row))
        return torch.stack(found)

    def write(self, source: Sequence[Tensor], prompt: list[int], n: int) -> list[int]:
        self.llama.reset()
        piece, written = prompt, list[int]()
        for _ in range(n):
            piece = [int(self.logits(piece)[-1].argmax())]
            written += piece
        return written


def verify(model: Model, tokenizer: Tokenizer | None, file: Path, kind: str) -> Verification:
    """llama.cpp against the model, or where weights are rounded against what the file holds; and its tokens of a few texts."""
    assert tokenizer is not None
    runtime = LlamaCpp(file)
    for text in SAMPLES:
        ours = tokenizer.encode(text, special=False)
        theirs = runtime.llama.tokenize(text.encode(), add_bos=False, special=False)
        if ours != theirs:
            raise CheckpointError(
                f"llama.cpp cuts {text!r} into other tokens: {theirs[:8]}, ours {ours[:8]}; nothing was left behind; export to hf"
            )
    why = f"llama.cpp multiplies in the kind of the weights, {kind}"
    return compare(
        model if kind == "F32" else load(file), runtime, version_of("llama-cpp-python"), at_least=BOUNDS[kind], why=why
    )
