"""`clearhead draw`: a model's parts, from its config: as a table in the terminal, or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead.cli.arguments import check_output
from clearhead.cli.console import plain_table, wide_console, write_rows
from clearhead.cli.cost import find_config


def run(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A preset (clearhead presets), a run's or model's folder, a config.json."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Write the drawing: it opens in a browser.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the parts as JSON.")] = False,
) -> None:
    """Draw a model from its config: every part with its size and parameters. Nothing is loaded or built."""
    check_output("--out", out)
    config = find_config(model, {})
    from clearhead.explorer.diagram import draw_model, parts_of

    parts = [part for stack in parts_of(config).values() for part in stack]
    if out is not None:
        out.write_text(draw_model(config), encoding="utf-8")
        typer.echo(f"wrote {out}", err=as_json)
    rows: list[dict[str, Any]] = [
        {"stack": part.stack, "part": part.name, "size": part.words, "layers": part.n, "parameters": part.params}
        for part in parts
    ]
    if as_json:
        return write_rows(rows, "json")
    table = plain_table("stack", "part", "size", "layers", "parameters", n_left=3)
    for row in reversed(rows):  # as in the drawing: the input is below
        table.add_row(*(f"{value:,}" if isinstance(value, int) else value for value in row.values()))
    wide_console().print(table)
    typer.echo(f"{sum(part.params for part in parts):,} parameters; read from the bottom up")
    return None
