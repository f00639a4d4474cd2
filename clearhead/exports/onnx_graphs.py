"""The modules that become ONNX graphs: a model's forward with a KV cache as plain tensors in and out.

A decoder is one graph. An encoder-decoder is two: the encoder, which ends in the keys and values of the decoder's cross-attention,
and the decoder, which begins with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.layers.masks import Mask, padding, positions_of
from clearhead.models import Decoder, Encoder, EncoderDecoder, Model

# The names of the axes that may have any length.
BATCH, LENGTH, PAST, WHOLE, SOURCE = "batch", "length", "past", "whole", "source"
Axes = dict[int, str]


class PastLayer:
    """One layer's keys and values of the tokens before, as tensors that grow."""

    def __init__(self, k: Tensor, v: Tensor, cross: tuple[Tensor, Tensor] | None = None) -> None:
        self.k, self.v, self.cross = k, v, cross

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.k, self.v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        return self.k, self.v


class PastCache:
    """A cache of such layers. Positions are tensors, so that one graph serves every length. `real`: of all tokens so far."""

    def __init__(
        self, layers: Sequence[PastLayer], real: Tensor | None = None, memory_mask: Mask | None = None
    ) -> None:
        self.layers, self.real, self.memory_mask = layers, real, memory_mask
        self.length = layers[0].k.shape[2]

    def check(self, batch: int, T: int) -> None: ...

    def place(self, T: int, real: Tensor | None) -> tuple[Tensor, Mask]:
        if self.real is None:
            keys = torch.arange(self.length + T)[None]
        else:
            keys = positions_of(self.real)
        queries = keys[:, self.length :]
        return queries, Mask(queries=queries, keys=keys)

    def advance(self, queries: Tensor) -> None: ...


@dataclass(frozen=True)
class Graph:
    """A module, its arguments as an example, the names of inputs and outputs, and the axes that may have any length."""

    module: nn.Module
    args: tuple[Tensor | list[Tensor], ...]
    inputs: list[str]
    outputs: list[str]
    dynamic_shapes: tuple[Axes | list[Axes], ...]


class DecoderGraph(nn.Module):
    """tokens, mask of all tokens so far, past keys and values -> logits, present keys and values."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
        layers = [PastLayer(k, v) for k, v in zip(past[::2], past[1::2], strict=True)]
        logits = self.model(tokens, cache=PastCache(layers, mask))
        return logits, *(each for layer in layers for each in (layer.k, layer.v))


class EncoderGraph(nn.Module):
    """tokens and mask, or images -> states, or what the head makes of them."""

    def __init__(self, model: Encoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.model(tokens, mask)


class SourceGraph(nn.Module):
    """A source and its mask -> keys and values of each cross-attention."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: Tensor, mask: Tensor | None = None) -> tuple[Tensor, ...]:
        memory = self.model.encode(source, mask)
        crosses = [block.cross for block in self.model.decoder.layers if block.cross is not None]
        pairs = [cross.read_source(memory, None) for cross in crosses]
        return tuple(each for pair in pairs for each in pair if isinstance(each, Tensor))


class TargetGraph(nn.Module):
    """target tokens, past keys and values, the source's keys, values and mask -> logits, present keys and values."""

    def __init__(self, model: EncoderDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, past: list[Tensor], cross: list[Tensor], mask: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        pairs = zip(past[::2], past[1::2], cross[::2], cross[1::2], strict=True)
        layers = [PastLayer(k, v, (ck, cv)) for k, v, ck, cv in pairs]
        memory_mask = Mask() if mask is None else padding(mask)
        logits = self.model.decode(tokens, None, cache=PastCache(layers, memory_mask=memory_mask))
        return logits, *(each for layer in layers for each in (layer.k, layer.v))


def graphs_of(model: Model) -> dict[str, Graph]:
    """The graphs by the names of their files."""
    if isinstance(model, Encoder):
        return {"model": encoder_graph(model)}
    if isinstance(model, Decoder):
        return {"model": decoder_graph(model)}
    return {"encoder": source_graph(model), "decoder": target_graph(model)}


def example(n: int, vocab_size: int) -> Tensor:
    return torch.arange(2 * n).remainder(vocab_size).unflatten(0, (2, n))


def keys_and_values(model: Decoder | EncoderDecoder, length: int, *, cross: bool = False) -> list[Tensor]:
    """Random keys and values of every layer; of an attention that lost heads, as many as it has."""
    stack = model if isinstance(model, Decoder) else model.decoder
    attentions = [block.cross if cross else block.attention for block in stack.layers]
    return [
        torch.randn(2, each.n_kv_heads, length, each.d_head) for each in attentions if each is not None for _ in "kv"
    ]


def names(prefix: str, n_layers: int) -> list[str]:
    return [f"{prefix}.{i}.{each}" for i in range(n_layers) for each in "kv"]


def decoder_graph(model: Decoder) -> Graph:
    n, T, P = model.config.n_layers, 5, 3
    past = keys_and_values(model, P)
    return Graph(
        DecoderGraph(model),
        (example(T, model.config.vocab_size), torch.ones(2, P + T, dtype=torch.bool), past),
        ["tokens", "mask", *names("past", n)],
        ["logits", *names("present", n)],
        ({0: BATCH, 1: LENGTH}, {0: BATCH, 1: WHOLE}, [{0: BATCH, 2: PAST} for _ in past]),
    )


def encoder_graph(model: Encoder) -> Graph:
    config = model.config
    output = {"tokens": "logits", "classes": "logits", "none": "states"}[config.head]
    if config.inputs == "patches":
        images = torch.randn(2, config.n_channels, config.image_size, config.image_size)
        return Graph(EncoderGraph(model), (images,), ["images"], [output], ({0: BATCH},))
    tokens = example(5, config.vocab_size)
    axes = {0: BATCH, 1: LENGTH}
    return Graph(EncoderGraph(model), (tokens, all_real(tokens)), ["tokens", "mask"], [output], (axes, axes))


def source_graph(model: EncoderDecoder) -> Graph:
    config = model.config
    outputs = names("cross", config.n_decoder_layers)
    if config.inputs == "frames":
        frames = torch.randn(2, config.n_mels, 2 * config.max_source_len)
        return Graph(SourceGraph(model), (frames,), ["frames"], outputs, ({0: BATCH},))
    tokens = example(5, config.source_vocab_size or config.vocab_size)
    axes = {0: BATCH, 1: SOURCE}
    return Graph(SourceGraph(model), (tokens, all_real(tokens)), ["tokens", "mask"], outputs, (axes, axes))


def target_graph(model: EncoderDecoder) -> Graph:
    config = model.config
    n, is_sound = config.n_decoder_layers, config.inputs == "frames"
    S = config.max_source_len if is_sound else 7
    past, cross = keys_and_values(model, 3), keys_and_values(model, S, cross=True)
    tokens, mask = example(5, config.vocab_size), torch.ones(2, S, dtype=torch.bool)
    cross_axes = {0: BATCH} if is_sound else {0: BATCH, 2: SOURCE}
    axes = ({0: BATCH, 1: LENGTH}, [{0: BATCH, 2: PAST} for _ in past], [cross_axes for _ in cross])
    inputs, outputs = ["tokens", *names("past", n), *names("cross", n)], ["logits", *names("present", n)]
    if is_sound:
        return Graph(TargetGraph(model), (tokens, past, cross), inputs, outputs, axes)
    return Graph(
        TargetGraph(model), (tokens, past, cross, mask), [*inputs, "mask"], outputs, (*axes, {0: BATCH, 1: SOURCE})
    )


def all_real(tokens: Tensor) -> Tensor:
    return torch.ones(tokens.shape, dtype=torch.bool)
