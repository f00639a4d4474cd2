"""`clearhead demo`: a small model, trained in about two minutes on data that needs no download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from clearhead.cli.console import wide_console

# None of these strings is in the training data: the day is held out.
DATES = (
    "le 7 mars 1989",
    "am 7. März 1989",
    "Tuesday, March 7th, 1989",
    "1989年3月7日",
    "7 марта 1989 г.",
    "martes, 7 de marzo de 1989",
    "tiistaina 7. maaliskuuta 1989",
    "7 Μαρτίου 1989",
)
CODE = ("def read(self, path):\n    ", "import os\nimport ", "class Error(Exception):\n    ")


def run(
    name: Annotated[
        Literal["dates", "code", "digits"],
        typer.Argument(
            help="dates: an encoder-decoder reads dates in 33 languages; code: a language model of Python's own library; "
            "digits: a Vision Transformer reads handwriting."
        ),
    ] = "dates",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="PART.FIELD=VALUE", help="Change any field of the recipe."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. Without: runs/NAME-1, -2 ...")] = None,
) -> None:
    """Train a small model in about two minutes, on data that is always there, and look at what it learnt."""
    from clearhead.cli.train import adapt, show_next, train_and_show
    from clearhead.training.recipe import find_recipe
    from clearhead.training.run_folder import next_folder

    recipe, notes = adapt(find_recipe(name).with_set(set_ or []), set(), None, is_own=True)
    out = out or next_folder(name)
    result = train_and_show(recipe, out, notes=notes)
    if name == "dates":
        read_dates(out)
    elif name == "code":
        write_code(out)
    typer.echo()
    show_next(result)


def read_dates(folder: Path) -> None:
    """Print what the model makes of dates that were not in the training data, and the attention map of one of them."""
    from clearhead.checkpoint import load
    from clearhead.data import load_tokenizer
    from clearhead.generation import translate
    from clearhead.inside.heatmap import heat_map
    from clearhead.models import EncoderDecoder
    from clearhead.training.tasks.translation import draw_alignment

    console = wide_console()
    model, tokenizer = load(folder), load_tokenizer(folder)
    assert isinstance(model, EncoderDecoder)
    assert tokenizer.eos is not None
    assert tokenizer.bos is not None
    sources = [[*tokenizer.encode(text, special=False), tokenizer.eos] for text in DATES]
    console.print("\nA day it has never seen, in eight languages:", style="bold")
    for text, ids in zip(DATES, translate(model, sources, beams=1), strict=True):
        console.print(f"  {text}  ->  {tokenizer.decode(ids)}")
    alignment = draw_alignment(model, tokenizer, sources[5], tokenizer.bos)
    console.print(f"\nWhere it looked while it wrote {DATES[5]!r} (a line a token written):", style="bold")
    console.print(heat_map(alignment.weights, alignment.rows, alignment.columns))  # type: ignore[arg-type]
    console.print("A picture of attention is not an explanation; the report has it larger.")


def write_code(folder: Path) -> None:
    """Print what the model makes of some beginnings of Python code."""
    from clearhead.checkpoint import load
    from clearhead.data import load_tokenizer
    from clearhead.generation import generate
    from clearhead.models import Decoder

    console = wide_console()
    model, tokenizer = load(folder), load_tokenizer(folder)
    assert isinstance(model, Decoder)
    prompts = [tokenizer.encode(text, special=False) for text in CODE]
    written = generate(model, prompts, max_new_tokens=60, temperature=0.7, top_p=0.95, seed=1)
    for text, ids in zip(CODE, written, strict=True):
        console.print(f"\n{text}", style="bold", end="", markup=False)
        console.print(tokenizer.decode(ids), markup=False)
