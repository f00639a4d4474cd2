"""Small .gguf files, written by the `gguf` package from transformers' models, as llama.cpp's converter does it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from transformers import PreTrainedModel

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def permute(x: np.ndarray, n_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to LLaMA's q and k: rotary pairs become neighbours."""
    return x.reshape(n_heads, 2, x.shape[0] // n_heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def tensors_of(model: PreTrainedModel, architecture: str = "llama") -> dict[str, np.ndarray]:
    config: Any = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        x = tensor.float().numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            part, kind = rest.rsplit(".", 1)
            if NAMES[part] in heads and architecture == "llama":
                x = permute(x, heads[NAMES[part]])
            found[f"blk.{layer}.{NAMES[part]}.{kind}"] = x
        else:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            found[f"{top[name.rsplit('.', 1)[0]]}.weight"] = x
    if config.tie_word_embeddings:
        found.pop("output.weight", None)
    return found


def metadata_of(model: PreTrainedModel, architecture: str = "llama") -> dict[str, Any]:
    config: Any = model.config
    own = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    return {f"{architecture}.{key}": value for key, value in own.items()}


def write(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any],
    *,
    architecture: str = "llama",
    kinds: Mapping[str, str] | None = None,
) -> Path:
    """A file of these tensors, each as float32 or in the quantisation that `kinds` gives for its name."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if value is None:
            continue
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
    for name, x in tensors.items():
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "F32")]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(x), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
