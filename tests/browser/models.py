"""Tiny models of every shape for one server, and one built by hand whose attention is known beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import clearhead as ch

TEXTS = ["the cat sat on the mat", "a dog ran over the hill", "hello there, how are you?"] * 9
LETTERS = "abcdefghijkl"  # all different, so that a token names its position
WIDE = 16  # of a hand-built head, and its longest text


def make_models(folder: Path) -> dict[str, Path]:
    special = ["<s>", "</s>", "<pad>", "<mask>"]
    tokenizer = ch.train_tokenizer(texts=TEXTS, kind="bpe", vocab_size=350, special=special)
    sizes: dict[str, Any] = dict(
        n_layers=3, d_model=32, n_heads=4, d_ff=64, vocab_size=tokenizer.vocab_size, max_len=97
    )
    configs = {
        "gpt": ch.preset("gpt2", **sizes),
        "classes": ch.preset("bert-base", **sizes, head="classes", labels=("no", "yes", "maybe")),
        "masked": ch.preset("bert-base", **sizes, head="tokens"),
        "states": ch.preset("minilm-l6", **sizes),
        "translator": ch.preset("transformer-base", **sizes),
        "long": ch.preset("gpt2", **{**sizes, "n_layers": 12, "n_heads": 12, "d_model": 48, "max_len": 1024}),
        "deep": ch.preset("gpt2", **{**sizes, "n_layers": 30, "n_heads": 8, "d_model": 16, "d_ff": 16}),
        "digits": ch.preset(
            "vit-b-16",
            **dict(n_layers=2, d_model=32, n_heads=4, d_ff=64, image_size=8, patch_size=2, n_channels=1),
            n_classes=10,
            labels=tuple("0123456789"),
        ),
    }
    assert tokenizer.eos is not None
    places: dict[str, Path] = {}
    for name, config in configs.items():
        model: Any = ch.build(config, seed=5)
        with torch.no_grad():
            for (
                weight
            ) in model.parameters():  # larger weights than at initialisation, so that a head can change the output
                weight.mul_(5 if weight.ndim > 1 else 1)
        if name != "digits":
            model.generation = ch.Generation(bos=tokenizer.bos, eos=(tokenizer.eos,), decoder_start=tokenizer.bos)
        places[name] = ch.save(model, folder / name)
        if name != "digits":
            tokenizer.save(places[name])
    places["pattern"] = make_pattern(folder / "pattern")
    return places


def make_pattern(folder: Path) -> Path:
    """A decoder of one layer whose four heads attend to the token before, to the first, to all equally, and to both the token
    before and itself: each position is one of WIDE directions, and queries are built to match the wanted directions."""
    tokenizer = ch.train_tokenizer(texts=[LETTERS], kind="chars", vocab_size=20, special=["<unk>"], add_bos=False)
    config = ch.preset("gpt2", n_layers=1, d_model=4 * WIDE, n_heads=4, vocab_size=tokenizer.vocab_size, max_len=WIDE)
    model: Any = ch.build(config, seed=5)
    here = torch.eye(WIDE)
    before = here.roll(1, 1)  # column i attends to position i - 1, and the first to itself
    before[:, 0] = here[:, 0]
    first = torch.zeros(WIDE, WIDE)
    first[0] = 1
    with torch.no_grad():
        attention = model.blocks[0].attention
        model.tokens.weight.mul_(1e-4)
        model.positions.weight.zero_()
        model.positions.weight[:, : 2 * WIDE] = torch.cat([here, -here], 1)  # of mean 0, so that the norm only scales
        attention.qkv.weight.zero_()
        attention.qkv.bias.zero_()
        for head, wanted in enumerate([before, first, torch.zeros(WIDE, WIDE), before + here]):
            rows = slice(head * WIDE, (head + 1) * WIDE)
            attention.qkv.weight[rows, :WIDE] = 4 * wanted
            attention.qkv.weight[4 * WIDE :][rows, :WIDE] = 4 * here
    place = ch.save(model, folder)
    tokenizer.save(place)
    return place


def known_pattern(n: int) -> torch.Tensor:
    """The attention that the hand-built heads must show."""
    weights = torch.zeros(4, n, n)
    for i in range(n):
        weights[0, i, max(0, i - 1)] = 1
        weights[1, i, 0] = 1
        weights[2, i, : i + 1] = 1 / (i + 1)
        weights[3, i, [max(0, i - 1), i]] = 0.5 if i else 1
    return weights
