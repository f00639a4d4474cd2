"""`clearhead evaluate`: how good a model is on files of yours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.arguments import (
    Calibrate,
    Device,
    ModelName,
    Quantize,
    check_calibrate,
    find_device,
    find_model,
    read_calibration,
)
from clearhead.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from clearhead.config import Config
    from clearhead.training.recipe import Recipe

TASKS = {"decoder": "language", "encoder-decoder": "translate"}


def run(
    model: ModelName,
    files: Annotated[
        list[str] | None,
        typer.Argument(help="Texts, a table of texts and labels or of pairs, or a folder of pictures by class."),
    ] = None,
    source: Annotated[list[str] | None, typer.Option(help="For a translator: texts to translate, a line each.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="For a translator: what they should become.")] = None,
    beams: Annotated[
        int | None, typer.Option(min=1, help="For a translator: texts kept at each step.  [default: 4]")
    ] = None,
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
    calibrate: Calibrate = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: Device = "auto",
) -> None:
    """Measure a model: perplexity and bits per byte of texts, BLEU and chrF of translations, accuracy of labels."""
    from rich.console import Console

    from clearhead.checkpoint.loading import open_checkpoint
    from clearhead.training.display import Display
    from clearhead.training.evaluation import evaluate_checkpoint
    from clearhead.training.metric_format import spell_metrics

    check_calibrate(quantize, calibrate)
    path = find_model(model)
    config = open_checkpoint(path).config
    task = find_task(config)
    if task == "translate" and not (files or (source and target)):
        raise InputError(f"{model!r} translates; give --source and --target, or a table of pairs")
    if task != "translate" and not files:
        raise InputError(f"{model!r} is measured on files, and none was named; name them after the model")
    if task != "translate" and beams is not None:
        raise InputError(f"--beams {beams} is for a translator; {model!r} is measured as {task!r}; leave it out")
    recipe = evaluation_recipe(path, config, task, length=length, beams=beams or 4, device=find_device(device))
    recipe = recipe.with_files(files=files or [], source=source or [], target=target or []).with_set(set_ or [])
    change = quantizer(quantize, read_calibration(calibrate, path)) if quantize else None
    # Notes on the data go where the progress goes: standard output holds the result alone.
    with Display(Console(stderr=True, highlight=False)) as display:
        row = evaluate_checkpoint(recipe, display)
        quantized = only_floats(evaluate_checkpoint(recipe, display, change)) if change else None
    metrics = only_floats(row)
    if as_json:
        typer.echo(json.dumps(metrics if quantized is None else {**metrics, quantize: quantized}))
    elif quantize is None or quantized is None:
        typer.echo(spell_metrics(row))
    else:
        print_comparison(metrics, quantized, quantize)


def evaluation_recipe(path: Path, config: Config, task: str, *, length: int | None, beams: int, device: str) -> Recipe:
    """A recipe that starts from the model at `path`, for its evaluation only."""
    from clearhead.training.recipe import Recipe

    longest = min(config.max_len, config.max_source_len) if task == "translate" else config.max_len
    if length is not None and length > longest:
        raise InputError(f"--length {length} is more than the model reads at once; give {longest} or less")
    limit = length or min(1024, longest)
    model: dict[str, Any] = {"from": str(path.absolute())}
    if task == "classify":
        model["labels"] = list(config.labels)
    train = dict(batch_tokens=4 * limit, beams=beams, device=device, score_rows=1, samples=3)
    return Recipe.from_tables({"task": task, "model": model, "data": {"length": limit}, "train": train})


def only_floats(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, float)}


def quantizer(kind: str, calibrate: list[list[int]] | None = None) -> Callable[[nn.Module], object]:
    """A function that quantises a model in place, to "int8" or "int4"."""
    from clearhead.quantization.integer import quantize

    return lambda model: quantize(model, kind, calibrate=calibrate)


def print_comparison(metrics: dict[str, float], quantized: dict[str, float], kind: str) -> None:
    """The metrics of the model as it is, of the quantised one, and the relative change."""
    from clearhead.training.metric_format import METRIC_NAMES, PERCENT, spell_metrics

    typer.echo(f"as it is  {spell_metrics(metrics)}\n{kind:<9} {spell_metrics(quantized)}")
    # Of a metric that is itself a percentage, a relative change in percent would mislead.
    plain = {name: value for name, value in metrics.items() if name not in PERCENT and value}
    changes = (f"{METRIC_NAMES.get(name, name)} {quantized[name] / value - 1:+.2%}" for name, value in plain.items())
    typer.echo(f"change    {', '.join(changes)}")


def find_task(config: Config) -> str:
    """The training task that fits a model: what it is measured by."""
    if config.shape != "encoder":
        return TASKS[config.shape]
    if config.head == "none":
        raise InputError(
            "this encoder ends in states, with nothing to measure; evaluate one with a head for tokens or classes"
        )
    return "classify" if config.head == "classes" else "mask"
