"""`clearhead cost`: what a model takes, in a table, before anything is built.

Only --measure, and --geometry of a model's own weights, import torch.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from clearhead.cli.arguments import Quantize, find_device
from clearhead.config import Config
from clearhead.errors import CheckpointError, ConfigError, InputError, did_you_mean

ModelOption = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A preset (clearhead presets), a run's or model's folder, or a config.json."),
]
Size = Annotated[str, typer.Option(metavar="SIZE", help="Memory of one device, such as 80GB or 80GiB.")]
Change = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a field of the config: n_layers=4.")
]


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
        typer.Option(help="Of the weights; in training, of the computation. Default: bfloat16; on a CPU float32."),
    ] = None,
    quantize: Quantize = None,
    optimizer: Annotated[Literal["adamw", "muon", "sgd", "none"], typer.Option(help="For training.")] = "adamw",
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Compute blocks again in the backward pass: less memory, more time.")
    ] = False,
    shards: Annotated[int, typer.Option(min=1, help="Devices that work together, each with a batch.")] = 1,
    parallel: Annotated[
        Literal["fsdp", "ddp"], typer.Option(help="Devices share weights and states (fsdp), or each has all (ddp).")
    ] = "fsdp",
    change: Change = None,
    memory: Size = "80GB",
    rate: Annotated[str, typer.Option(metavar="RATE", help="Operations a second of one device.")] = "400TFLOP/s",
    bandwidth: Annotated[str, typer.Option(metavar="RATE", help="Bytes that one device reads a second.")] = "3.3TB/s",
    fit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The largest batch, and the largest length, in this much memory.")
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
        str, typer.Option(help="cpu or cuda. auto: cuda for a forecast, the best there is for --measure.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Say what a model takes: parameters, operations, memory and time, part by part."""
    from clearhead.cli import cost_tables as tables

    if as_json and plot is not None:
        raise InputError("--json is for tables of numbers; --plot has none; leave one out")
    if geometry:
        from clearhead.cli.geometry_tables import show_geometry

        show_geometry(model, None if model is None else find_config(model, read_changes(change)), as_json=as_json)
        return
    if model is None:
        raise InputError("clearhead cost needs a model, such as gpt2; clearhead presets lists them")
    config = find_config(model, read_changes(change))
    device = pick_device(device, measure=measure)
    workload: dict[str, Any] = dict(batch=batch, length=length, source_length=source_length, mode=mode)
    workload |= dict(precision=precision or ("float32" if device == "cpu" else "bfloat16"), quantize=quantize)
    workload |= dict(optimizer=optimizer, checkpointing=checkpointing, shards=shards, parallel=parallel, device=device)
    case, spec = tables.Case(model, config, workload), tables.DeviceSpec.read(memory, rate, bandwidth)
    if plot is not None:
        from clearhead.cli.cost_plot import plot_over_length

        plot_over_length(plot, case, spec, measured=measure)
    elif measure:
        tables.show_measured(case, as_json=as_json)
    elif fit is not None:
        tables.show_fit(case, fit, as_json=as_json)
    elif as_json:
        typer.echo(json.dumps(asdict(case.forecast()), indent=2))
    else:
        tables.show_forecast(case, spec)


def pick_device(name: str, *, measure: bool) -> str:
    """A device of this machine for a measurement; "cpu" or "cuda" for a forecast, which needs no such device."""
    if not measure:
        return "cpu" if name == "cpu" else "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported: its profiler prints many messages
    return find_device(name)


def read_changes(settings: list[str] | None) -> dict[str, Any]:
    """Each FIELD=VALUE; a value is parsed as JSON, and is a string if it is not JSON."""
    changes: dict[str, Any] = {}
    for setting in settings or []:
        name, equals, value = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting!r} has no value; write it as n_layers=4")
        try:
            changes[name.replace("-", "_")] = json.loads(value)
        except ValueError:
            changes[name.replace("-", "_")] = value
    return changes


def find_config(name: str, changes: dict[str, Any]) -> Config:
    """The config of a preset, of a folder, or in a file. Our own configs are read without importing torch."""
    from clearhead.families import preset, presets

    if name in presets():
        return preset(name, **changes)
    path = Path(name)
    if not path.exists():
        if "/" in name or path.suffix:
            raise InputError(f"there is nothing at {name!r}; give a preset, a folder or a config.json")
        raise ConfigError(f"there is no preset or folder {name!r}; {did_you_mean(name, presets())}")
    config = read_config(path)
    return Config.from_dict(config.to_dict() | changes) if changes else config


def read_config(path: Path) -> Config:
    """The config of a model's folder, or of a config.json."""
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

    # Other libraries' configs do not say everything: the names of the weights are needed too.
    return open_checkpoint(file.parent if file.name == "config.json" else path).config
