"""`clearhead presets`: every named size in one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.console import plain_table, wide_console, write_rows
from clearhead.config import Config
from clearhead.costs.parameters import count_parameters
from clearhead.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from rich.table import Table


def run(
    family: Annotated[str | None, typer.Argument(help="Only this family's sizes, e.g. llama.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the sizes as JSON.")] = False,
) -> None:
    """Show every named size: name, family, shape, layers, width, heads, parameters."""
    from clearhead.families import FAMILIES, preset, presets

    if family is not None and family not in FAMILIES:
        raise ConfigError(f"there is no family {family!r}; {did_you_mean(family, FAMILIES)}")
    configs = {name: preset(name) for name in presets()}
    configs = {name: config for name, config in configs.items() if family in (None, config.family)}
    if as_json:
        write_rows([preset_row(name, config) for name, config in configs.items()], "json")
    else:
        wide_console().print(preset_table(configs))


def preset_row(name: str, config: Config) -> dict[str, Any]:
    fields = ("family", "shape", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "vocab_size", "max_len")
    total = sum(count_parameters(config).values())
    return {"name": name, **{field: getattr(config, field) for field in fields}, "parameters": total}


def preset_table(configs: dict[str, Config]) -> Table:
    """A row for each config, with space between families."""
    table = plain_table("name", "family", "shape", "layers", "width", "heads", "parameters", n_left=3, gap=1)
    family = None
    for name, config in configs.items():
        if family not in (None, config.family):
            table.add_section()
        family = config.family
        shared = config.n_kv_heads != config.n_heads
        heads = f"{config.n_heads}/{config.n_kv_heads}" if shared else str(config.n_heads)
        total = sum(count_parameters(config).values())
        table.add_row(name, config.family, config.shape, config.depth, str(config.d_model), heads, f"{total:,}")
    return table
