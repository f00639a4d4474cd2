"""`clearhead evaluate`: how good a model is on files of yours."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.arguments import Device, ModelName, Quantize, find_device, find_model
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.cli.training_display import Display
    from clearhead.config import Config
    from clearhead.training.recipe import Recipe

TASKS = {"decoder": "language", "encoder-decoder": "translate"}


def run(
    model: ModelName,
    files: Annotated[
        list[str] | None, typer.Argument(help="Texts, a table of texts and labels, or a folder of pictures by class.")
    ] = None,
    source: Annotated[list[str] | None, typer.Option(help="For a translator: texts to translate, a line each.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="For a translator: what they should become.")] = None,
    beams: Annotated[int, typer.Option(min=1, help="For a translator: texts kept at each step.")] = 4,
    length: Annotated[
        int | None, typer.Option(min=2, help="Tokens read at once. Without: as many as the model takes, up to 1,024.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", metavar="PART.FIELD=VALUE", help="Any field of a recipe, e.g. data.documents=line."
        ),
    ] = None,
    quantize: Quantize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: Device = "auto",
) -> None:
    """Measure a model: perplexity and bits per byte of texts, BLEU and chrF of translations, accuracy of labels."""
    from clearhead.checkpoint.loading import open_checkpoint
    from clearhead.cli.training_display import NAMES, PERCENT, Display, spell_metrics
    from clearhead.training.evaluation import measure
    from clearhead.training.recipe import Recipe

    place = find_model(model)
    config = open_checkpoint(place).config
    task = find_task(config)
    if task == "translate" and not (source and target):
        raise InputError(f"{model!r} translates; give --source and --target; got files={files or []}")
    if task != "translate" and not files:
        raise InputError(f"{model!r} is measured on files, and none was named; name them after the model")
    limit = min(length or 1024, config.max_len, *([config.max_source_len] if task == "translate" else []))
    start: dict[str, Any] = {"from": str(place.absolute())}
    if task == "classify":
        start["labels"] = list(config.labels)
    recipe = Recipe.from_tables(
        {
            "task": task,
            "model": start,
            "data": {"length": limit},
            "train": {
                "batch_tokens": 4 * limit,
                "beams": beams,
                "device": find_device(device),
                "score_rows": 1,
                "samples": 3,
            },
        }
    )
    recipe = recipe.with_files(files=files or [], source=source or [], target=target or []).with_set(set_ or [])
    with Display() as display:
        row = measure(recipe, display)
        rounded = measure_rounded(recipe, display, quantize) if quantize else None
    figures = {name: value for name, value in row.items() if isinstance(value, float)}
    if as_json:
        typer.echo(json.dumps(figures if rounded is None else {**figures, quantize: rounded}))
    elif rounded is None:
        typer.echo(spell_metrics(row))
    else:
        typer.echo(f"as it is  {spell_metrics(figures)}\n{quantize:<9} {spell_metrics(rounded)}")
        # Of what is a share already, a share would mislead.
        plain = {name: value for name, value in figures.items() if name not in PERCENT and value}
        changes = (f"{NAMES.get(name, name)} {rounded[name] / value - 1:+.2%}" for name, value in plain.items())
        typer.echo(f"change    {', '.join(changes)}")


def measure_rounded(recipe: Recipe, display: Display, kind: str) -> dict[str, float]:
    """The same with weights of fewer bits."""
    from clearhead.quantization.integer import quantize
    from clearhead.training.evaluation import measure

    row = measure(recipe, display, lambda model: quantize(model, kind))
    return {name: value for name, value in row.items() if isinstance(value, float)}


def find_task(config: Config) -> str:
    """What a model was made for."""
    if config.shape != "encoder":
        return TASKS[config.shape]
    if config.head == "none":
        raise InputError(
            "this encoder ends in states, with nothing to measure; evaluate one with a head for tokens or classes"
        )
    return "classify" if config.head == "classes" else "mask"
