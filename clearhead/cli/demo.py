"""`clearhead demo`: the core at work, on nothing but what is installed."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from clearhead.cli.console import wide_console

SENTENCE = ["the", "cat", "sat", "on", "the", "mat", "because", "it", "was", "very", "tired"]


def run() -> None:
    """Build every family from the one core, run it, and draw what attention looks at."""
    console = wide_console()
    _families(console)
    _pictures(console)
    console.print(
        "Every named size: [bold]clearhead presets[/]. From Python: [bold]import clearhead as ch[/] (see the README)."
    )


def _families(console: Console) -> None:
    import torch

    from clearhead.costs.parameters import count_parameters
    from clearhead.families import PAGES, preset
    from clearhead.models import build

    title = "One core, nine families (ms: one pass of a model this shape, but tiny)"
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for heading in ("family", "size", "positions", "norm", "feed-forward"):
        table.add_column(heading, no_wrap=True)
    for heading in ("parameters", "ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    with console.status("building nine models"):
        for family, page in PAGES.items():
            name = next(iter(page.SIZES))
            config = preset(name)
            tiny = build(preset(name, n_layers=2, d_model=64, n_heads=4, d_head=16, d_ff=128))
            tokens = torch.randint(0, 33, (2, 16))
            pictures, sound = torch.rand(2, 3, 224, 224), torch.rand(2, 80, 200)
            inputs = {"tokens": (tokens,), "patches": (pictures,), "frames": (sound,)}[config.inputs]
            inputs = (*inputs, tokens) if config.shape == "encoder-decoder" else inputs
            with torch.no_grad():
                tiny.eval()(*inputs)  # the first pass also sets up threads and memory
                start = time.perf_counter()
                tiny(*inputs)
            took = 1000 * (time.perf_counter() - start)
            order = ", first" if config.norm_first else ", last"
            table.add_row(
                family,
                name,
                config.positions,
                config.norm + order,
                ("gated " if config.gated else "") + config.feedforward,
                f"{sum(count_parameters(config).values()):,}",
                f"{took:.0f}",
            )
    console.print(table)
    console.print()


def _pictures(console: Console) -> None:
    import torch
    from rich.columns import Columns

    from clearhead.families import preset
    from clearhead.inside import probe
    from clearhead.inside.pictures import heat_map
    from clearhead.models import build

    words = sorted(set(SENTENCE))
    tokens = torch.tensor([[words.index(word) for word in SENTENCE]])
    small = dict(n_layers=1, d_model=64, n_heads=4, d_head=16, d_ff=128, vocab_size=len(words), init_std=0.1)
    views = {
        "gpt2: only the past": (preset("gpt2", **small), 0),
        "mistral: a window of 4": (preset("mistral-7b", **small, n_kv_heads=2, window=4), 0),
        "alibi: nearer is louder": (preset("gpt2", **small, positions="alibi"), 0),
        "bert: both ways": (preset("bert-base", **small), 1),
    }
    console.print(
        "What each word may look at, and how strongly (random weights: the shapes are the masks' and positions')."
    )
    pictures = []
    for title, (config, head) in views.items():
        model = build(config).eval()
        with probe(model, "blocks.0.attention.weights") as seen, torch.no_grad():
            model(tokens)
        pictures.append(heat_map(seen["blocks.0.attention.weights"][0, head], SENTENCE, title=title))
    console.print(Columns(pictures, padding=(0, 3)))
