"""Tiny versions of every family, inputs for them, and weights that hide nothing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import clearhead as ch
from clearhead.families import FAMILIES as FAMILY_MODULES
from clearhead.layers.attention import MultiHeadAttention
from clearhead.layers.embedding import TokenEmbedding
from clearhead.models import Model

# Distinct primes, so that swapped axes fail: widths that must be even (sinusoids, rotary pairs) are twice a prime.
SIZES = dict(n_layers=2, d_model=22, n_heads=3, d_head=10, d_ff=37, vocab_size=53, max_len=31, dropout=0.0)

# What a family's page would leave out of its tiny version: grouped heads, a window, a narrow vocabulary of sound.
OWN = {
    "llama": dict(n_heads=6, n_kv_heads=2),
    "qwen3": dict(n_heads=6, n_kv_heads=2),
    "vit": dict(image_size=15, patch_size=5, n_classes=7, vocab_size=0, max_len=0),
    "whisper": dict(max_source_len=29, n_mels=5),
}

FAMILIES = list(FAMILY_MODULES)

# One more of a family where a size of its own takes a path that the first does not.
VARIANTS = {
    "mistral": ("mistral-7b", dict(n_heads=6, n_kv_heads=2, window=5)),
    "qwen2": ("qwen2-0.5b", dict(n_heads=6, n_kv_heads=3)),
    "llama-3.1": ("llama-3.1-8b", dict(n_heads=6, n_kv_heads=2)),
    "t5-v1.1": ("t5-v1.1-small", {}),
    "bert-mlm": ("bert-base", dict(head="tokens", tie_embeddings=True, head_transform=True, head_bias="learned")),
    "bert-classes": ("bert-base", dict(head="classes", n_classes=7)),
    "alibi": ("gpt2", dict(positions="alibi")),
}
EVERY = [*FAMILIES, *VARIANTS]


def tiny_config(name: str, **changes: object) -> ch.Config:
    """A family's first published size, or a variant's, with everything small that can be small."""
    first, own = VARIANTS[name] if name in VARIANTS else (next(iter(FAMILY_MODULES[name].SIZES)), OWN.get(name, {}))
    return ch.preset(first, **SIZES | own | changes)


def tiny(name: str, *, dtype: torch.dtype = torch.float64, **changes: object) -> Model:
    return built(tiny_config(name, **changes), dtype=dtype)


def built(config: ch.Config, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Model:
    """A model in eval mode whose every number matters. float64: then only a real difference is larger than 1e-9."""
    model = ch.build(config, seed=seed, dtype=dtype)
    stir(model)
    return model.eval()


@torch.no_grad()
def stir(model: Model, seed: int = 1) -> None:
    """Weights as after training: no zero bias, no norm that does nothing, attention far from uniform.

    Fresh weights would hide mistakes: with a std of 0.02 every row of attention is nearly the mean.
    """
    generator = torch.Generator().manual_seed(seed)
    gain = 0.5 if model.config.norm == "none" else 1.5  # without a norm, nothing else stops the stream from growing
    for module in model.modules():
        for name, x in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            if isinstance(module, TokenEmbedding):
                x.copy_(noise / module.factor)
            elif x.ndim == 1:
                x.copy_((1.0 if name == "weight" else 0.0) + 0.3 * noise)
            elif name == "weight":
                x.copy_(gain * noise / math.sqrt(x[0].numel()))
            else:
                x.copy_(noise)
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and module.heads.scale is not None:
            # T5 does not divide its scores, and learns queries that are that much smaller.
            q = module.q_proj.weight if module.cross else module.qkv.weight[: module.o_proj.in_features]
            q /= module.heads.scale * math.sqrt(module.d_head)


def inputs(
    config: ch.Config, *, batch: int = 3, length: int = 11, source: int = 13, seed: int = 2
) -> tuple[Tensor, ...]:
    """What the model is called with: tokens, pictures, or a source and a target."""
    generator = torch.Generator().manual_seed(seed)

    def ids(vocab: int, n: int) -> Tensor:
        return torch.randint(0, vocab, (batch, n), generator=generator)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator, dtype=torch.float64)

    match config.inputs, config.shape:
        case "patches", _:
            return (numbers(config.n_channels, config.image_size, config.image_size),)
        case "frames", _:
            return numbers(config.n_mels, 2 * source), ids(config.vocab_size, length)
        case _, "encoder-decoder":
            return ids(config.source_vocab_size or config.vocab_size, source), ids(config.vocab_size, length)
    return (ids(config.vocab_size, length),)


def run(model: Model, *args: Tensor | None, **kwargs: object) -> Tensor:
    """The model's answer, pictures and sound brought to its precision."""
    dtype = next(model.parameters()).dtype
    return model(*(x.to(dtype) if x is not None and x.is_floating_point() else x for x in args), **kwargs)


def assert_same(ours: Tensor, theirs: Tensor, *, within: float = 1e-9) -> None:
    """Equal but for the order of summation.

    float64 keeps 16 digits; a few layers and sums of at most a few hundred terms lose fewer than five of them. The scale is
    the largest number's, since a small logit can be the difference of large ones.
    """
    scale = max([1.0, *theirs.detach().abs().flatten().tolist()])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=within * scale)
