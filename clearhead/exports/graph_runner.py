"""Runs a model's exported graphs: what a decode loop around ONNX Runtime or ExecuTorch does with their inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clearhead.exports.onnx_graphs import all_real, graphs_of, keys_and_values
from clearhead.models import Encoder, EncoderDecoder, Model

Feed = dict[str, Tensor]


class GraphRunner:
    """A `Runtime` (verification.py). `run(name, feed)` runs one graph: inputs by their names in, outputs in their order out."""

    def __init__(self, model: Model, run: Callable[[str, Feed], list[Tensor]]) -> None:
        self.model, self.run = model, run
        self.graphs = graphs_of(model)

    def outputs(self, args: Sequence[Tensor]) -> Tensor:
        if isinstance(self.model, Encoder):
            return self.run("model", source_feed(args[0], "images"))[0]
        return self.step(args[-1], self.begin(args[:-1], len(args[-1])))[0]

    def begin(self, source: Sequence[Tensor], batch: int) -> Feed:
        """Inputs before the first token: no past, and of an encoder-decoder what the encoder made of the source."""
        model = self.model
        assert not isinstance(model, Encoder)
        graph = self.graphs["decoder" if isinstance(model, EncoderDecoder) else "model"]
        past = [name for name in graph.inputs if name.startswith("past.")]
        state = {
            name: one[:1].repeat(batch, 1, 1, 1) for name, one in zip(past, keys_and_values(model, 0), strict=True)
        }
        if isinstance(model, EncoderDecoder):
            feed = source_feed(source[0], "frames")
            state |= dict(zip(self.graphs["encoder"].outputs, self.run("encoder", feed), strict=True))
            if "mask" in feed:
                state["mask"] = feed["mask"]
        return state

    def step(self, tokens: Tensor, state: Feed) -> list[Tensor]:
        """Logits after these tokens; the state then holds their keys and values."""
        feed = {**state, "tokens": tokens}
        is_pair = isinstance(self.model, EncoderDecoder)
        if not is_pair:
            feed["mask"] = torch.ones(len(tokens), state["past.0.k"].shape[2] + tokens.shape[1], dtype=torch.bool)
        out = self.run("decoder" if is_pair else "model", feed)
        state |= dict(zip([name for name in state if name.startswith("past.")], out[1:], strict=True))
        return out

    def write(self, source: Sequence[Tensor], prompt: list[int], n: int) -> list[int]:
        state, piece, written = self.begin(source, 1), prompt, list[int]()
        for _ in range(n):
            piece = [int(self.step(torch.tensor([piece]), state)[0][0, -1].argmax())]
            written += piece
        return written


def source_feed(source: Tensor, name: str) -> Feed:
    """Tokens with a mask; pictures or sound by their name."""
    return {name: source} if source.is_floating_point() else {"tokens": source, "mask": all_real(source)}
