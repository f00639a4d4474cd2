"""`clearhead learn`: exercises that grade themselves."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.markup import escape

from clearhead.cli.console import plain_table, wide_console
from clearhead.errors import InputError
from clearhead.lessons.catalogue import CATALOGUE, Entry, find_entry, load_exercise, next_entry
from clearhead.lessons.progress import FOLDER, state_of

if TYPE_CHECKING:
    from clearhead.lessons.workbook import Trial

STYLES = {"not begun": "dim", "begun": "yellow", "solved": "green"}
VERBS = {"not begun": "start", "begun": "check"}
MARKS = {"pass": "[green]holds[/]", "fail": "[bold red]fails[/]", "error": "[bold red]error[/]"}

app = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})
Name = Annotated[str, typer.Argument(metavar="NAME", help="An exercise: clearhead learn lists them.")]
In = Annotated[
    Path | None, typer.Option("--in", metavar="DIR", show_default="exercises", help="The folder of your files.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


@app.callback(invoke_without_command=True)
def show(context: typer.Context, folder: In = None, as_json: AsJson = False) -> None:
    """Learn by writing a Transformer's parts yourself: exercises from softmax to a whole decoder, graded by laws."""
    if context.invoked_subcommand is not None:
        if folder is not None or as_json:
            raise typer.BadParameter(f"put --in and --json after `learn {context.invoked_subcommand}`")
        return
    rows = [asdict(entry) | {"state": state_of(folder or FOLDER, entry.name)} for entry in CATALOGUE]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = plain_table("exercise", "", "chapter", "teaches", n_left=4)
    table.columns[3].no_wrap = False
    for row in rows:
        table.add_row(row["name"], f"[{STYLES[row['state']]}]{row['state']}[/]", row["chapter"], row["teaches"])
    console = wide_console()
    console.print(table)
    solved = sum(row["state"] == "solved" for row in rows)
    following = next((f"{VERBS[row['state']]} {row['name']}" for row in rows if row["state"] != "solved"), None)
    console.print(f"{solved} of {len(rows)} solved" + (f"; next: clearhead learn {following}" if following else ""))


@app.command()
def start(
    name: Name,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write it to.")] = FOLDER,
) -> None:
    """Write a file with the function's signature, its shapes, equation and law. A file of yours is never overwritten."""
    entry = known(name)
    from clearhead.lessons.workbook import start

    try:
        file = start(load_exercise(name), entry, out)
    except InputError as error:
        refuse(error)
    place = "" if out == FOLDER else f" --in {out}"
    typer.echo(f"wrote {file}: fill in the function, then: clearhead learn check {name}{place}")


@app.command()
def check(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", show_default="all begun", help="Exercises, or paths of files."),
    ] = None,
    folder: In = None,
    as_json: AsJson = False,
) -> None:
    """Run the laws against your function, and say what fails and why; exits with 1 if a law fails, 2 if there is no file."""
    from clearhead.lessons.workbook import check

    trials: list[Trial] = []
    for entry, file in chosen(names or [], folder):
        with wide_console(stderr=True).status(f"checking {entry.name}"):
            trials.append(check(entry, file))
        if not as_json:
            report(trials[-1], entry)
    if as_json:
        typer.echo(json.dumps([asdict(trial) for trial in trials], indent=2))
    if not all(trial.passed for trial in trials):
        raise typer.Exit(1)


@app.command()
def hint(
    name: Name, number: Annotated[int, typer.Argument(metavar="[NUMBER]", help="1 for the first.", min=1)] = 1
) -> None:
    """Print a hint; the next one says more."""
    known(name)
    hints = load_exercise(name).hints
    if number > len(hints):
        refuse(InputError(f"{name} has {len(hints)} hints; got {number}; the rest: clearhead learn solution {name}"))
    typer.echo(f"hint {number} of {len(hints)}: {hints[number - 1]}")
    following = f"hint {name} {number + 1}" if number < len(hints) else f"solution {name}"
    typer.echo(f"for more: clearhead learn {following}")


@app.command()
def solution(name: Name) -> None:
    """Show how this library does it: its own lines, and a function that passes."""
    known(name)
    from clearhead.lessons.solutions import solution_of

    for title, lines in solution_of(load_exercise(name)):
        typer.echo(f"# {title}\n{lines}\n")


def known(name: str) -> Entry:
    """The exercise of this name; a typo is wrong usage."""
    try:
        return find_entry(name)
    except InputError as error:
        refuse(error)


def refuse(error: InputError) -> NoReturn:
    """Nothing was graded or written: exit 2, so that 1 means a function that fails."""
    typer.echo(f"clearhead: {error}", err=True)
    raise typer.Exit(2)


def chosen(names: list[str], folder: Path | None) -> list[tuple[Entry, Path]]:
    """The exercises to check and their files: those named, or all that are begun."""
    place = folder or FOLDER
    if not names:
        begun = [entry for entry in CATALOGUE if state_of(place, entry.name) != "not begun"]
        if not begun:
            refuse(
                InputError(f"there is no exercise in {place}; begin with: clearhead learn start {CATALOGUE[0].name}")
            )
        return [(entry, place / f"{entry.name}.py") for entry in begun]
    found: list[tuple[Entry, Path]] = []
    for name in names:
        is_path = name.endswith(".py")
        entry = known(Path(name).stem if is_path else name)
        file = Path(name) if is_path else place / f"{entry.name}.py"
        if not file.is_file():
            out = "" if file.parent == FOLDER else f" --out {file.parent}"
            refuse(InputError(f"there is no file {file}; begin with: clearhead learn start {entry.name}{out}"))
        found.append((entry, file))
    return found


def report(trial: Trial, entry: Entry) -> None:
    """Print what was found: every law, the likely mistake, and what to do next."""
    console, n_held = wide_console(), sum(finding["outcome"] == "pass" for finding in trial.findings)
    if trial.printed:
        console.print(f"your code printed:\n{trial.printed.rstrip()}\n", markup=False)
    for finding in trial.findings:
        detail = f": {finding['detail']}" if finding["detail"] else ""
        console.print(f"{MARKS[finding['outcome']]}  {escape(finding['words'])}{escape(detail)}", soft_wrap=True)
    if trial.trace is not None:
        console.print("\n".join(f"       {line}" for line in trial.trace.splitlines()), markup=False, soft_wrap=True)
    if trial.passed:
        console.print(
            f"{entry.name}: all {n_held} hold. Proven: {load_exercise(entry.name).proves}.", style="bold", markup=False
        )
        following = next_entry(entry.name)
        text = (
            f"next: clearhead learn start {following.name} ({following.teaches})"
            if following
            else "that was the last one"
        )
        console.print(f"{text}; ours: clearhead learn solution {entry.name}", markup=False, soft_wrap=True)
        return
    if trial.diagnosis is not None and all(trial.diagnosis != finding["detail"] for finding in trial.findings):
        console.print(f"Likely mistake: {trial.diagnosis}.", style="bold", markup=False, soft_wrap=True)
    console.print(
        f"{entry.name}: {n_held} of {len(trial.findings)} hold; for a hint: clearhead learn hint {entry.name}"
    )
