"""Draws the pictures of docs/inside.md from trained models.

clearhead demo dates --out runs/dates
python benchmarks/quality/induction.py runs/induction
python benchmarks/quality/induction.py runs/t5 --positions t5 --steps 2000
python docs/pictures/draw.py runs/dates runs/induction runs/t5
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import clearhead as ch
from clearhead.inside import head_scores, logit_attribution, logit_lens, repeated_tokens
from clearhead.inside.figure_grid import PlotFigure
from clearhead.inside.plots import (
    plot_attribution,
    plot_heads,
    plot_lens,
    plot_seen,
)
from clearhead.inside.position_plots import plot_positions, standard_positions

HERE = Path(__file__).parent


def save(figure: PlotFigure, name: str, dpi: int = 110) -> None:
    figure.savefig(HERE / f"{name}.png", dpi=dpi, metadata={"Software": None})


def draw_dates(run: str) -> None:
    model, tokenizer = ch.load(run).eval(), ch.load_tokenizer(run)
    source = [*tokenizer.encode("martes, 7 de marzo de 1989", special=False), tokenizer.eos]
    (written,) = ch.translate(model, [source], beams=1)
    site = f"decoder.blocks.{model.config.n_decoder_layers - 1}.cross.weights"
    with ch.probe(model, site) as seen, torch.no_grad():
        model(torch.tensor([source]), torch.tensor([[tokenizer.bos, *written]]))
    rows, columns = ([tokenizer.decode([id]) or "</s>" for id in ids] for ids in ([*written, tokenizer.eos], source))
    save(plot_seen(seen, site, tokens=rows, columns=columns), "alignment")


def draw_induction(run: str) -> None:
    model = ch.load(run).eval()
    scores = head_scores(model, repeated_tokens(model.config.vocab_size, length=32))
    save(plot_heads(scores, "induction", title="Heads by induction, on random tokens said twice"), "heads")
    best = max(scores, key=lambda score: score.induction or 0)
    tokens = repeated_tokens(model.config.vocab_size, length=12, batch=1, seed=3)
    # The model was trained on ids without words. A letter for each id says what matters: which of them are the same.
    letters = {int(id): chr(ord("A") + n) for n, id in enumerate(dict.fromkeys(tokens[0].tolist()))}
    names = [letters[int(id)] for id in tokens[0]]
    with ch.probe(model, best.site) as seen, torch.no_grad():
        model(tokens)
    save(plot_seen(seen, best.site, head=best.head, tokens=names), "induction")
    save(plot_lens(logit_lens(model, tokens)[:, 0], names, lambda id: letters.get(id, "other")), "lens")
    save(plot_attribution(logit_attribution(model, tokens), position=17), "attribution")


def draw_positions(learned: str, t5: str) -> None:
    kinds = standard_positions()
    gallery = {
        "sinusoidal": kinds["sinusoidal"],
        "learned": ch.load(learned).positions,
        "rotary": kinds["rotary"],
        "alibi": kinds["alibi"],
        "t5": ch.load(t5).positions,
    }
    save(plot_positions(gallery), "positions", dpi=85)


if __name__ == "__main__":
    dates, induction, t5 = sys.argv[1:]
    draw_dates(dates)
    draw_induction(induction)
    draw_positions(induction, t5)
