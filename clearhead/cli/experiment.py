"""`clearhead experiment`: the experiments of the book, measured on this machine."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from clearhead.cli.console import plain_table, wide_console
from clearhead.errors import InputError
from clearhead.experiments.catalogue import CATALOGUE, find_entry

if TYPE_CHECKING:
    from clearhead.experiments.running import Report

FOLDER = Path("experiments")
COLOURS = {"agrees": "green", "contradicts": "bold red", "not told apart": "yellow"}


def run(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", show_default="list them", help="An experiment to run.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Repeat with so many seeds; a difference must then show in all of them.")
    ] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds, to see that it runs; proves nothing.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Larger sizes, longer texts, more steps: minutes to hours.")
    ] = False,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text of yours, for experiments that read one.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", show_default="experiments/NAME", help="Where page, figure and numbers are written."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Measure what the chapters of the book claim: one question each, in under a minute, with a table, a figure and a page."""
    if name is None:
        if seeds != 1 or quick or full or text or out:
            raise typer.BadParameter("options are for one experiment; name it, or give none to list them")
        return show(as_json)
    if quick and full:
        raise typer.BadParameter("--quick and --full contradict each other; leave one out")
    entry = find_entry(name)
    importlib.import_module("clearhead.experiments.figure")  # a missing matplotlib is told before any work
    from clearhead.experiments import running

    folder = out or FOLDER / entry.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} can not be made: {error}; name another folder with --out") from None
    with wide_console(stderr=True).status(f"measuring: {entry.question}"):
        report = running.run(entry, size="quick" if quick else "full" if full else "usual", n_seeds=seeds, text=text)
    running.write(report, folder)
    if as_json:
        return typer.echo(json.dumps(asdict(report), indent=1))
    print_report(report)
    typer.echo(f"\nwrote {folder / 'page.md'}, figure.svg and result.json")
    return None


def show(as_json: bool) -> None:
    if as_json:
        return typer.echo(json.dumps([asdict(entry) for entry in CATALOGUE], indent=1))
    table = plain_table("experiment", "chapter", "question", n_left=3)
    table.columns[2].no_wrap = False
    for entry in CATALOGUE:
        table.add_row(entry.name, entry.chapter, entry.question)
    wide_console().print(table)
    return typer.echo(f"next: clearhead experiment {CATALOGUE[0].name}")


def print_report(report: Report) -> None:
    from clearhead.experiments.page import spell_cell
    from clearhead.experiments.running import measured_on

    console = wide_console()
    for table in report.result.tables:
        console.print(f"\n[bold]{escape(table.title)}[/]")
        drawn = plain_table(*table.columns)
        for row in table.rows:
            drawn.add_row(*(escape(spell_cell(cell)) for cell in row))
        console.print(drawn)
    console.print()
    for finding in report.result.findings:
        mark = f"[{COLOURS[finding.verdict]}]{finding.verdict}[/]"
        console.print(f"{mark}: {escape(finding.claim)} {escape(finding.measured)}", soft_wrap=True)
    console.print(f"\n{escape(measured_on(report))}", soft_wrap=True, style="dim")
