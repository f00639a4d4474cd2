"""Explorers of tiny models of every shape, and their inputs and weights computed without the explorer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import clearhead as ch
from clearhead.data import Tokenizer
from clearhead.explorer import Explorer
from clearhead.explorer.wire_format import unpack
from clearhead.inside import probe

TEXTS = ["the cat sat on the mat", "a dog ran over the hill", "hello there, how are you?"] * 9
TEXT = "the cat sat on the mat. the cat"


KINDS = ("decoder", "rotary", "encoder", "masked", "classes", "pair", "t5", "whisper", "vit", "picture")
SPECIAL = ("<s>", "</s>", "<pad>", "<mask>")
SOUND = ("<|endoftext|>", "<|startoftranscript|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>")


def make_tokenizer(special: Sequence[str] = SPECIAL) -> Tokenizer:
    return ch.train_tokenizer(texts=TEXTS, kind="bpe", vocab_size=350, special=list(special))


def make_explorer(kind: str) -> Explorer:
    """One of KINDS."""
    tokenizer = make_tokenizer(SOUND if kind == "whisper" else SPECIAL)
    sizes: dict[str, Any] = dict(
        n_layers=3, d_model=24, n_heads=3, d_ff=31, vocab_size=tokenizer.vocab_size, max_len=97
    )
    picture = dict(
        n_layers=2, d_model=24, n_heads=3, d_ff=31, head="classes", n_classes=3, labels=("no", "yes", "maybe")
    )
    configs: dict[str, Any] = {
        "decoder": lambda: ch.preset("gpt2", **sizes),
        "rotary": lambda: ch.preset("llama-7b", **{**sizes, "n_heads": 4, "d_model": 32}, n_kv_heads=2),
        "encoder": lambda: ch.preset("minilm-l6", **sizes),
        "masked": lambda: ch.preset("bert-base", **sizes, head="tokens"),
        "classes": lambda: ch.preset("bert-base", **sizes, head="classes", labels=("no", "yes")),
        "pair": lambda: ch.preset("transformer-base", **sizes),
        "t5": lambda: ch.preset("t5-small", **sizes, d_head=8),
        "whisper": lambda: ch.preset("whisper-tiny", **sizes, max_source_len=40),
        "vit": lambda: ch.preset("vit-b-16", **picture, image_size=8, patch_size=2, n_channels=1),
        "picture": lambda: ch.preset("vit-b-16", **picture, image_size=32, patch_size=8),
    }
    model: Any = ch.build(configs[kind](), seed=3)
    if kind != "whisper":
        model.generation = ch.Generation(bos=tokenizer.bos, eos=(tokenizer.eos,), decoder_start=tokenizer.bos)
    return Explorer(model.eval(), None if kind in ("vit", "picture") else tokenizer, name=kind)


def make_run(explorer: Explorer, text: str = TEXT, **more: Any) -> dict[str, Any]:
    is_text = explorer.model.config.inputs == "tokens"
    more = {"target": "the cat", **more} if explorer.model.config.inputs == "frames" else more
    start = {"model": explorer.name, "text": text if is_text else "sample:3", "target": None, "second": None}
    return {**start, "changes": [], **more}


def ask(explorer: Explorer, name: str, **params: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return unpack(explorer.answer(name, params))


def inputs_of(explorer: Explorer, run: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """The model's inputs, rebuilt from the answer to `read`."""
    reply, _ = ask(explorer, "read", run=run)
    source = explorer.inputs.read(run["text"]).tensor
    if source.is_floating_point():
        inputs: tuple[torch.Tensor, ...] = (source,)
    else:
        inputs = (torch.tensor([reply["source"]["ids"]]),)
        assert torch.equal(inputs[0], source)
    return inputs if reply["target"] is None else (*inputs, torch.tensor([reply["target"]["ids"]]))


def weights_of(explorer: Explorer, run: Mapping[str, Any], site: str) -> torch.Tensor:
    with torch.no_grad(), probe(explorer.model, f"{site}.weights") as seen:
        explorer.model(*inputs_of(explorer, run))
    return seen[f"{site}.weights"][0]
