"""`clearhead check`: whether a model of yours obeys every law, and whether a run of yours survives a kill."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clearhead.cli.arguments import find_model, load_tokenizer_of
from clearhead.cli.console import plain_table, wide_console
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.laws import Finding

STYLES = {"pass": "green", "fail": "bold red", "skipped": "yellow"}


def run(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model's folder or file, or its name on the hub.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="A text: inputs are cut from it, and the price of int8 and int4 is measured on it."),
    ] = None,
    length: Annotated[int | None, typer.Option(min=8, help="Tokens of each input.  [default: 48]")] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="LAW", help="Leave a law out, e.g. compiled, which takes longest.")
    ] = None,
    layers: Annotated[bool, typer.Option("--layers", help="Print the largest error after each block, too.")] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="Instead of a model: train by this recipe, kill it, resume it, compare."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="With --resume: steps before the kill.  [default: 20]")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="PART.FIELD=VALUE", help="With --resume: change a field of the recipe."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Prove on your own model that every way to compute it agrees; exits with 1 if a law is broken."""
    given = {"--text": text, "--length": length, "--skip": skip, "--layers": layers}
    if (model is None) == (resume is None):
        raise InputError(
            f"check takes a model or --resume RECIPE; got {'both' if model else 'neither'}; give one of them"
        )
    if model is None and (wrong := [name for name, value in given.items() if value]):
        raise InputError(f"{wrong[0]} is for a model; got --resume {resume}; leave one out")
    if resume is None and (steps is not None or set_):
        raise InputError(f"--steps and --set are for --resume; got the model {model!r}; leave them out")
    if model is not None:
        found = check_one(model, text, length or 48, skip or [])
    else:
        found = check_recipe(str(resume), steps or 20, set_ or [])
    findings = show(found, as_json=as_json, layers=layers)
    if any(finding.outcome == "fail" for finding in findings):
        raise typer.Exit(1)


def check_one(name: str, text: Path | None, length: int, skip: list[str]) -> Iterable[Finding]:
    from clearhead.checkpoint import load
    from clearhead.laws import check_model

    path = find_model(name)
    ids = [] if text is None else read_ids(path, text)
    return check_model(load(path), path=path, text=ids, length=length, skip=skip)


def read_ids(model: Path, text: Path) -> list[int]:
    """The ids of a text, without special tokens."""
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text {str(text)!r} can not be read ({error}); is it a text in UTF-8?") from None
    ids = load_tokenizer_of(model).encode(content[:100_000], special=False)
    if len(ids) < 2:
        raise InputError(f"--text {str(text)!r} holds {len(ids)} tokens; give a longer one")
    return ids


def check_recipe(name: str, steps: int, settings: list[str]) -> Iterable[Finding]:
    from clearhead.laws import check_resume
    from clearhead.training.recipe import find_recipe

    return [check_resume(find_recipe(name).with_set(settings), steps)]


def show(found: Iterable[Finding], *, as_json: bool, layers: bool) -> list[Finding]:
    """Print each finding; returns all."""
    from rich.console import Console

    console = wide_console()
    with Console(stderr=True).status("checking") as status:
        findings: list[Finding] = []
        for finding in found:
            status.update(f"checked: {finding.law}")
            findings.append(finding)
    counts = {outcome: sum(each.outcome == outcome for each in findings) for outcome in STYLES}
    if as_json:
        typer.echo(json.dumps({**counts, "laws": [plain(finding) for finding in findings]}, indent=2))
        return findings
    table = plain_table("law", "", "largest error", "allowed", "why", n_left=2)
    table.columns[4].justify, table.columns[4].no_wrap = "left", False
    for each in findings:
        outcome = f"[{STYLES[each.outcome]}]{each.outcome}[/]"
        table.add_row(each.law, outcome, spell(each.error), spell(each.allowed), each.reason.replace("[", "\\["))
        for name, error in each.layers.items() if layers else ():
            table.add_row(f"  after {name}", "", spell(error))
    console.print(table)
    console.print(", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count))
    return findings


def plain(finding: Finding) -> dict[str, Any]:
    """As JSON, which has no infinity."""
    values = {"law": finding.law, **asdict(finding)}
    values["layers"] = {name: error if math.isfinite(error) else None for name, error in finding.layers.items()}
    return {name: None if value == math.inf else value for name, value in values.items()}


def spell(error: float | None) -> str:
    return "" if error is None else "0" if error == 0 else f"{error:.1e}"
