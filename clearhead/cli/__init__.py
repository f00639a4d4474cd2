"""The command line: one thin file per command, imported when it is called. torch is imported only by commands that compute.

An error that a user can cause is printed in one line and exits with 1 (`--debug` shows the traceback); wrong usage exits with 2.
"""

from __future__ import annotations

import gc
import os
import sys
from typing import Annotated

import typer

from clearhead.cli.command_list import CommandList
from clearhead.cli.option_names import spell_options
from clearhead.errors import ClearheadError
from clearhead.version import __version__

app = typer.Typer(
    name="clearhead",
    cls=CommandList,
    help="The Transformer as one library: build, train, run, serve and look inside.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"clearhead {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="On an error, show the whole traceback.")] = False,
) -> None:
    if debug:
        os.environ["CLEARHEAD_DEBUG"] = "1"


def main() -> None:
    """The entry point of `clearhead`."""
    # Importing torch makes half a million objects that stay; with the default threshold, garbage collection takes 10% of the start.
    gc.set_threshold(50_000)
    try:
        app()
    except ClearheadError as error:
        if os.environ.get("CLEARHEAD_DEBUG"):
            raise
        # In one piece: print writes the line's end apart, and several processes may share a terminal.
        sys.stderr.write(f"clearhead: {spell_options(str(error))}\n")
        sys.exit(1)
    except KeyboardInterrupt:
        print("clearhead: stopped", file=sys.stderr)
        sys.exit(130)
