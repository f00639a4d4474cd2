"""`clearhead train`: from files, or a recipe, to a model."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clearhead.errors import ConfigError, InputError

if TYPE_CHECKING:
    from clearhead.training import Recipe

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TASK|RECIPE.toml] [FILES]...",
        help="What to learn: language, translate, mask or classify, or a recipe's file; then texts, tables, or for pictures "
        "a folder with a folder for each class.",
    ),
]


def run(
    what: Files = None,
    source: Annotated[list[str] | None, typer.Option(help="translate: texts to translate from, a line each.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="translate: what their lines become.")] = None,
    valid: Annotated[list[str] | None, typer.Option(help="Held-out files. Without: a share of the data.")] = None,
    valid_source: Annotated[list[str] | None, typer.Option(help="translate: held-out source.")] = None,
    valid_target: Annotated[list[str] | None, typer.Option(help="translate: held-out target.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="PART.FIELD=VALUE", help="Change any field, e.g. train.steps=500."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. Without: runs/TASK-1, -2 ...")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    lora: Annotated[
        str | None, typer.Option(metavar="rank=8[,alpha=16]", help="Learn only low-rank additions to the weights.")
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="MODEL", help="Start from this model: fine-tune it.")
    ] = None,
    bad_bytes: Annotated[str | None, typer.Option(help="Text that is no UTF-8: error, replace or drop.")] = None,
    too_long: Annotated[str | None, typer.Option(help="Texts over data.length tokens: error, drop or cut.")] = None,
    empty: Annotated[str | None, typer.Option(help="Empty lines: drop, error or keep.")] = None,
    unequal: Annotated[
        str | None, typer.Option(help="Source and target of different line counts: error or cut.")
    ] = None,
    show_recipe: Annotated[
        bool, typer.Option("--show-recipe", help="Print the recipe with every field, and stop.")
    ] = False,
) -> None:
    """Train a model on your own texts, pairs, labels or pictures; resumable to the bit.

    \b
    clearhead train language data/*.txt
    clearhead train translate --source a.en --target a.de
    clearhead train classify reviews.csv
    clearhead train classify images/
    clearhead train --resume runs/translate-1
    """
    from clearhead.training.folder import read_run
    from clearhead.training.recipe import find_recipe

    settings = list(set_ or [])
    policies = dict(bad_bytes=bad_bytes, too_long=too_long, empty=empty, unequal=unequal)
    settings += [f"data.{name}={value}" for name, value in policies.items() if value is not None]
    settings += read_lora(lora) if lora else []
    if resume is not None:
        if what or source or target:
            raise InputError(f"--resume {resume} goes on with the data it began with; got {what}; leave them out")
        recipe, out = read_run(resume).with_set(settings), resume
    else:
        if not what:
            raise InputError("nothing to learn was named; try: clearhead train language data/*.txt")
        recipe = find_recipe(recipe_name(what))
        files = dict(files=what[1:], source=source, target=target)
        files |= dict(valid=valid, valid_source=valid_source, valid_target=valid_target)
        recipe = recipe.with_files(**{name: names or [] for name, names in files.items()})
        recipe = with_start(recipe, start, gentle=not what[0].endswith(".toml"), lora=lora is not None).with_set(
            settings
        )
    if show_recipe:
        typer.echo(recipe.to_toml(), nl=False)
        return
    train_and_show(recipe, out, resume=resume is not None)


def recipe_name(what: list[str]) -> str:
    """The recipe that the first words mean: pictures are classified by another model than texts."""
    is_folder = len(what) > 1 and Path(what[1]).is_dir()
    has_folders = is_folder and any(path.is_dir() for path in Path(what[1]).iterdir())
    return "pictures" if what[0] == "classify" and has_folders else what[0]


def with_start(recipe: Recipe, start: str | None, *, gentle: bool, lora: bool) -> Recipe:
    """The recipe with a model to start from: its sizes and its dropout are then the model's.

    `gentle`: with the small steps that keep what the model knows, in place of those that a new one learns with.
    """
    from dataclasses import replace

    from clearhead.cli.arguments import find_model

    if start is None:
        return recipe
    train = recipe.train
    if gentle:
        small = dict(optimizer="adamw", schedule="cosine", weight_decay=0.01, lr=1e-3 if lora else 1e-4)
        train = replace(train, **small)  # type: ignore[arg-type]
    kept = {name: value for name, value in recipe.model.items() if name == "pool"}
    return replace(recipe, model={"from": str(find_model(start).absolute()), **kept}, train=train)


def read_lora(text: str) -> list[str]:
    """--lora rank=8,alpha=16 as settings."""
    settings: list[str] = []
    for pair in text.split(","):
        name, equals, value = pair.partition("=")
        if name not in ("rank", "alpha") or not equals:
            raise ConfigError(f"--lora {text!r} is not understood; write rank=8, or rank=8,alpha=16")
        settings.append(f"train.lora_{name}={value}")
    return settings


def train_and_show(recipe: Recipe, out: Path | None, *, resume: bool = False) -> dict[str, float]:
    """Train, with a bar; say where the result is, or how to go on."""
    from clearhead.cli.training_display import Display
    from clearhead.training import train

    with Display() as display:
        result = train(recipe, out, resume=resume, show=display)
        if result.is_complete:
            display.finish(result)
        else:
            display.interrupted(result)
    code = 0 if result.is_complete else 130
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # Python's own end takes apart what gloo's threads still hold: about one run in thirty then aborted (torch 2.13).
        sys.stdout.flush()
        os._exit(code)
    if code:
        raise typer.Exit(code)
    return result.metrics
