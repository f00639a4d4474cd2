"""Train a model of two layers on repeated random tokens until a head completes repetitions, and find that head.

    python benchmarks/quality/induction.py runs/induction     about a minute on one core; ch.load reads the folder

Each row repeats with a period of its own, so that counting back a fixed distance does not help: the model has to look for
where its token came before, and at what came after it. That takes two heads in two layers (Olsson et al. 2022).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead as ch
from clearhead.inside import head_scores, repeated_tokens
from clearhead.models import Decoder

VOCAB, LENGTH = 64, 64


def draw(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows that repeat themselves, and which of their tokens can be known from those before."""
    periods = torch.randint(8, LENGTH // 2 + 1, (rows, 1), generator=generator)
    at = torch.arange(LENGTH)
    fresh = torch.stack([torch.randperm(VOCAB, generator=generator)[: LENGTH // 2] for _ in range(rows)])
    return fresh.gather(1, at % periods), at >= periods


def learn(model: Decoder, *, steps: int, rows: int = 64, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.perf_counter()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 50, 2 * (1 - step / (steps + 1)))
        tokens, known = draw(rows, generator)
        logits = model(tokens[:, :-1])
        # Asked only for what can be known: with the rest in the loss, too, heads take several times as long to form.
        loss = F.cross_entropy(logits[known[:, 1:]], tokens[:, 1:][known[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:,}: loss {loss:.4f}, {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--positions", default="learned", choices=["learned", "sinusoidal", "rotary", "alibi", "t5"])
    options = parser.parse_args()
    sizes = dict(n_layers=2, d_model=64, n_heads=4, d_ff=64, vocab_size=VOCAB, max_len=2 * LENGTH, dropout=0.0)
    model = ch.build(ch.preset("gpt2", **sizes, attention_dropout=0.0, positions=options.positions))
    assert isinstance(model, Decoder)
    learn(model, steps=options.steps)
    ch.save(model, options.out)
    scores = head_scores(model, repeated_tokens(VOCAB, length=LENGTH // 2))
    for name in ("previous", "induction"):
        best = max(scores, key=lambda score: getattr(score, name))
        print(f"{name}: {getattr(best, name):.2f}, head {best.head} of {best.site}")


if __name__ == "__main__":
    main()
