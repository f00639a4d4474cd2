"""`clearhead cost`: what a model takes, in a table, before anything is built. Only --measure, and angles of weights, load torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from clearhead.config import Config
from clearhead.errors import CheckpointError, ConfigError, InputError, did_you_mean

ModelOption = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A preset (clearhead presets), a run's or model's folder, or a config.json."),
]
Size = Annotated[str, typer.Option(metavar="SIZE", help="Memory of one device, such as 80GB or 80GiB.")]


def run(
    model: ModelOption = None,
    mode: Annotated[
        Literal["forward", "train", "decode"],
        typer.Option(help="One call, one training step, or one more token a row with a cache."),
    ] = "forward",
    batch: Annotated[int, typer.Option(min=1, help="Rows at once, on each device.")] = 1,
    length: Annotated[int | None, typer.Option(min=1, help="Tokens a row. Default: the model's longest.")] = None,
    source_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the source, in an encoder-decoder.")
    ] = None,
    precision: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Of the weights; in training, of what is computed. Default: bfloat16, on a CPU float32."),
    ] = None,
    quantize: Annotated[Literal["int8", "int4"] | None, typer.Option(help="Weights in 8 or 4 bits.")] = None,
    optimizer: Annotated[Literal["adamw", "muon", "sgd", "none"], typer.Option(help="For training.")] = "adamw",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Compute blocks again in the backward pass: less memory, more time.")
    ] = False,
    shards: Annotated[int, typer.Option(min=1, help="Devices that work together, each with a batch.")] = 1,
    parallel: Annotated[
        Literal["fsdp", "ddp"], typer.Option(help="They share weights and states (fsdp), or each holds all (ddp).")
    ] = "fsdp",
    change: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the config: n_layers=4.")
    ] = None,
    memory: Size = "80GB",
    rate: Annotated[str, typer.Option(metavar="RATE", help="Operations a second of one device.")] = "400TFLOP/s",
    bandwidth: Annotated[str, typer.Option(metavar="RATE", help="Bytes that one device reads a second.")] = "3.3TB/s",
    fit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The largest batch, and the largest length, in so much memory.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run it on this machine: forecast, measured, error.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw time and memory over the length (.png, .svg, .pdf).")
    ] = None,
    geometry: Annotated[
        bool, typer.Option("--geometry", help="How many almost-orthogonal directions fit, and a model's own angles.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="cpu or cuda. auto: cuda for a forecast, what is there for --measure.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the forecast as JSON.")] = False,
) -> None:
    """Say what a model takes: parameters, operations, memory and time, part by part."""
    from clearhead.cli import cost_tables as tables

    if geometry:
        tables.show_geometry(model, None if model is None else find_config(model, read_changes(change)))
        return
    if model is None:
        raise InputError("clearhead cost needs a model, such as gpt2; clearhead presets lists them")
    config = find_config(model, read_changes(change))
    if measure:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch loads: its profiler is chatty
        from clearhead.cli.arguments import find_device

        device = find_device(device)
    else:
        device = "cpu" if device == "cpu" else "cuda"
    asked: dict[str, Any] = dict(batch=batch, length=length, source_length=source_length, mode=mode)
    asked |= dict(precision=precision or ("float32" if device == "cpu" else "bfloat16"), quantize=quantize)
    asked |= dict(optimizer=optimizer, checkpointing=checkpointing, shards=shards, parallel=parallel, device=device)
    limits = tables.DeviceSpec.read(memory, rate, bandwidth)
    if plot is not None:
        tables.draw(plot, model, config, asked, limits, measured=measure)
    elif measure:
        tables.show_measured(model, config, asked)
    elif fit is not None:
        tables.show_fit(model, config, asked, fit)
    elif as_json:
        from clearhead.costs import cost

        typer.echo(json.dumps(asdict(cost(config, **asked)), indent=2))
    else:
        tables.show_forecast(model, config, asked, limits)


def read_changes(given: list[str] | None) -> dict[str, Any]:
    """FIELD=VALUE, where a value that is JSON is that, and else a text."""
    found: dict[str, Any] = {}
    for each in given or []:
        name, equals, value = each.partition("=")
        if not equals:
            raise InputError(f"--set {each!r} has no value; write it as n_layers=4")
        try:
            found[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            found[name.replace("-", "_")] = value
    return found


def find_config(name: str, changes: dict[str, Any]) -> Config:
    """The config of a preset, of a folder, or in a file. Our own are read without torch."""
    from clearhead.families import preset, presets

    if name in presets():
        return preset(name, **changes)
    path = Path(name)
    if not path.exists():
        if "/" in name or path.suffix:
            raise InputError(f"there is nothing at {name!r}; give a preset, a folder or a config.json")
        raise ConfigError(f"there is no preset or folder {name!r}; {did_you_mean(name, presets())}")
    config = _read(path)
    return Config.from_dict(config.to_dict() | changes) if changes else config


def _read(path: Path) -> Config:
    if path.is_dir() and not (path / "config.json").is_file() and (path / "recipe.toml").is_file():
        raise CheckpointError(
            f"{path} is a run that has not ended: it holds no config.json yet; name its preset instead"
        )
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json" and file.is_file():
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} can not be read as JSON ({error}); is the path right?") from None
        if isinstance(values, dict) and "model_type" not in values:
            return Config.from_dict(values["model"] if "clearhead" in values else values)
    from clearhead.checkpoint.loading import open_checkpoint

    # Other libraries' configs leave to the weights what they hold: these are looked at too.
    return open_checkpoint(file.parent if file.name == "config.json" else path).config
