"""What the tests of encoder-decoders share, in addition to `compare`: plain greedy decoding, and old file formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from clearhead.models import EncoderDecoder


def aligned(model: Any) -> Any:
    """Their model with its weights copied to memory of its own.

    transformers maps the file, where a tensor may be unaligned; torch then uses other kernels, which round differently.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone()
    return model


def writes(make: Callable[[int], Any], **inputs: Any) -> tuple[Any, Tensor]:
    """The first model, by seed, that does not repeat itself, and ten tokens that it generates."""
    for seed in range(30):
        theirs = make(seed)
        text = theirs.generate(**inputs, max_new_tokens=10, min_new_tokens=10, do_sample=False, num_beams=1)[:, -10:]
        if len(text.unique()) > 4:
            return theirs, text
    raise AssertionError("every model repeats a few tokens: change the weights")


@torch.no_grad()
def greedy(model: EncoderDecoder, source: Tensor, mask: Tensor | None = None, *, steps: int = 10) -> Tensor:
    """`steps` tokens, one by one with the cache, by the model's generation defaults; eos only where it is forced.

    The same as transformers' generate with max_new_tokens = min_new_tokens = `steps`.
    """
    defaults = model.generation
    assert defaults.decoder_start is not None
    start = [defaults.decoder_start, *(token for token in defaults.forced_start if token is not None)]
    cache = model.new_cache(batch=len(source), max_len=len(start) + steps)
    logits = model(source, torch.tensor([start] * len(source)), mask, cache=cache)[:, -1]
    written: list[Tensor] = []
    for step in range(steps):
        never = {*defaults.suppress, *defaults.eos, *(defaults.begin_suppress if step == 0 else ())}
        logits[:, sorted(never)] = -torch.inf
        chosen = logits.argmax(-1)
        if step == steps - 1 and defaults.forced_eos is not None:
            chosen = torch.full_like(chosen, defaults.forced_eos)
        written.append(chosen)
        logits = model(None, chosen[:, None], cache=cache)[:, -1]
    return torch.stack(written, 1)


def to_bin(folder: Path, **more: Tensor) -> None:
    """A saved model's weights as an old pytorch_model.bin, which also has tied and computed tensors."""
    state = load_file(folder / "model.safetensors")
    torch.save({**state, **more}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
