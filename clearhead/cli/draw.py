"""`clearhead draw`: a model's parts, from its config: in the terminal, or as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from clearhead.cli.arguments import check_output
from clearhead.cli.console import write_rows
from clearhead.cli.cost import Change, find_config, read_changes


def run(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A preset (clearhead presets), a run's or model's folder, a config.json."),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Write the drawing: it opens in a browser.")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens for which operations are counted. Default: the model's longest.")
    ] = None,
    source_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of the source, in an encoder-decoder.")
    ] = None,
    change: Change = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the parts as JSON.")] = False,
) -> None:
    """Draw a model from its config: every part with its size, parameters and operations. Nothing is loaded or built."""
    check_output("--out", out)
    config = find_config(model, read_changes(change))
    from clearhead.costs import draw

    drawing = draw(config, length=length, source_length=source_length)
    if out is not None:
        drawing.save(out)
        typer.echo(f"wrote {out}", err=as_json)
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "stack": part.stack,
                "part": part.name,
                "size": part.words,
                "layers": part.n,
                "parameters": part.params,
                "operations": part.flops,
            }
            for part in drawing.parts
        ]
        return write_rows(rows, "json")
    typer.echo(f"{drawing}\n{sum(part.params for part in drawing.parts):,} parameters; read from the bottom up")
    return None
