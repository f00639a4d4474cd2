"""`clearhead train`: from files or a recipe to a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from clearhead.errors import ConfigError, InputError

if TYPE_CHECKING:
    from clearhead.training import Recipe, Result

Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TASK|RECIPE.toml] [FILES]...",
        help="What to learn: language, translate, mask or classify, or a recipe's file; then texts, tables, or for pictures "
        "a folder with a folder for each class.",
    ),
]


def run(
    what: Files = None,
    source: Annotated[list[str] | None, typer.Option(help="translate: texts to translate from, a line each.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="translate: what their lines become.")] = None,
    valid: Annotated[list[str] | None, typer.Option(help="Held-out files. Without: a share of the data.")] = None,
    valid_source: Annotated[list[str] | None, typer.Option(help="translate: held-out source.")] = None,
    valid_target: Annotated[list[str] | None, typer.Option(help="translate: held-out target.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="PART.FIELD=VALUE", help="Change any field, e.g. train.steps=500."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. Without: runs/TASK-1, -2 ...")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="rank=8[,alpha=16]", help="With --from: learn only low-rank additions to the weights."),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="MODEL", help="Start from this model: fine-tune it.")
    ] = None,
    bad_bytes: Annotated[str | None, typer.Option(help="Text that is no UTF-8: error, replace or drop.")] = None,
    too_long: Annotated[str | None, typer.Option(help="Texts over data.length tokens: error, drop or cut.")] = None,
    empty: Annotated[str | None, typer.Option(help="Empty lines: drop, error or keep.")] = None,
    unequal: Annotated[
        str | None, typer.Option(help="Source and target of different line counts: error or cut.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0.1, help="On a CPU: sizes and steps that are not set are chosen for about so long. Default: 8."
        ),
    ] = None,
    show_recipe: Annotated[
        bool,
        typer.Option("--show-recipe", help="Print the recipe: every field, its meaning and its choices. Then stop."),
    ] = False,
) -> None:
    """Train a model on your own texts, pairs, labels or pictures; resumable to the bit."""
    settings = list(set_ or [])
    policies = dict(bad_bytes=bad_bytes, too_long=too_long, empty=empty, unequal=unequal)
    settings += [f"data.{name}={value}" for name, value in policies.items() if value is not None]
    settings += read_lora(lora) if lora else []
    files = dict(source=source, target=target, valid=valid, valid_source=valid_source, valid_target=valid_target)
    if resume is not None:
        from clearhead.training.run_folder import read_run

        refuse_changes(resume, what, {**files, "from": start, "out": out, "minutes": minutes})
        recipe, out = read_run(resume), resume
    else:
        recipe = with_start(new_recipe(what, files), start, what, lora=bool(lora))
    recipe = recipe.with_set(settings)
    notes = []
    if resume is None:
        if not show_recipe:
            check_start(recipe, out)
        given = {setting.partition("=")[0].strip() for setting in settings}
        recipe, notes = adapt(recipe, given, minutes, is_own=bool(what and what[0].endswith(".toml")))
    if show_recipe:
        typer.echo("".join(f"# {note}\n" for note in notes) + recipe.to_toml(explained=True), nl=False)
        return
    result = train_and_show(recipe, out, resume=resume is not None, notes=notes)
    show_next(result)


def check_start(recipe: Recipe, out: Path | None) -> None:
    """Refuse a run without data, or in a folder that is taken, before the machine is measured for it."""
    from clearhead.training.recipe_checks import check_has_files
    from clearhead.training.run_folder import check_folder

    check_has_files(recipe)
    if out is not None:
        check_folder(out, resume=False)


def adapt(recipe: Recipe, given: set[str], minutes: float | None, *, is_own: bool) -> tuple[Recipe, list[str]]:
    """The recipe for this machine: its threads, and, unless it is the user's own, sizes and steps that end in minutes. And why."""
    from dataclasses import replace

    from clearhead.training.distributed import choose_device
    from clearhead.training.sizing import fit_to_machine
    from clearhead.training.threads import choose_threads, num_threads

    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if minutes is not None and (is_own or several):
        why = "a recipe's file says its sizes and steps" if is_own else "several processes train what the recipe says"
        raise InputError(f"--minutes {minutes:g} has no effect: {why}; leave it out, and set train.steps")
    if several:
        return recipe, []
    notes: list[str] = []
    if choose_device(recipe.train.device).type == "cpu" and not recipe.train.threads:
        threads, why = choose_threads()
        recipe = replace(recipe, train=replace(recipe.train, threads=threads))
        notes += [why] if why else []
    if not is_own:
        with num_threads(recipe.train.threads):
            recipe, why = fit_to_machine(recipe, given, minutes)
        notes += [why] if why else []
    return recipe, notes


def refuse_changes(run: Path, what: list[str] | None, options: Mapping[str, object]) -> None:
    """Refuse what a run that is resumed can not change: its data, its start and its folder."""
    given = [*(what or []), *(f"--{name.replace('_', '-')}" for name, value in options.items() if value)]
    if given:
        raise InputError(
            f"--resume {run} goes on with the data it began with, in the same folder; got {' '.join(given):.80}; leave that out, "
            f"or start a new run"
        )


def new_recipe(what: list[str] | None, files: dict[str, list[str] | None]) -> Recipe:
    """The recipe of a task or a .toml file, with the user's files."""
    from clearhead.training.recipe import find_recipe

    if not what:
        raise InputError("nothing to learn was named; try: clearhead train language data/*.txt")
    recipe = find_recipe(recipe_name(what))
    return recipe.with_files(files=what[1:], **{name: names or [] for name, names in files.items()})


def recipe_name(what: list[str]) -> str:
    """The name of the recipe: for images it is another than for texts, though both are the task "classify"."""
    is_folder = len(what) > 1 and Path(what[1]).is_dir()
    has_folders = is_folder and any(path.is_dir() for path in Path(what[1]).iterdir())
    return "pictures" if what[0] == "classify" and has_folders else what[0]


def with_start(recipe: Recipe, start: str | None, what: list[str] | None, *, lora: bool) -> Recipe:
    """The recipe with a model to start from, which then also gives the sizes and the dropout.

    Unless the user gave a recipe file of their own, the optimizer's settings become those for fine-tuning: a smaller learning
    rate, so that the model keeps what it knows.
    """
    from dataclasses import replace

    from clearhead.cli.arguments import find_model

    if start is None:
        return recipe
    train = recipe.train
    if not (what and what[0].endswith(".toml")):
        small = dict(optimizer="adamw", schedule="cosine", weight_decay=0.01, lr=1e-3 if lora else 1e-4)
        train = replace(train, **small)  # type: ignore[arg-type]
    kept = {name: value for name, value in recipe.model.items() if name == "pool"}
    return replace(recipe, model={"from": str(find_model(start).absolute()), **kept}, train=train)


def read_lora(texts: list[str]) -> list[str]:
    """The settings that --lora rank=8,alpha=16 stands for; it may also be given once for each."""
    found: dict[str, str] = {}
    for pair in ",".join(texts).split(","):
        name, equals, value = pair.partition("=")
        if name not in ("rank", "alpha") or not equals or name in found:
            raise ConfigError(f"--lora {','.join(texts)!r} is not understood; write rank=8, or rank=8,alpha=16")
        found[name] = value
    if found.get("rank", "0").strip() == "0":
        raise ConfigError(f"--lora {','.join(texts)!r} has no rank, and would train all weights; write rank=8,alpha=16")
    return [f"train.lora_{name}={value}" for name, value in found.items()]


def train_and_show(recipe: Recipe, out: Path | None, *, resume: bool = False, notes: Sequence[str] = ()) -> Result:
    """Train with a progress bar, then print where the result is, or how to resume."""
    from clearhead.training import train
    from clearhead.training.display import Display

    try:
        with Display() as display:
            for note in notes:
                display.note(note)
            result = train(recipe, out, resume=resume, show=display)
            display.report(result)
    except KeyboardInterrupt:
        print("clearhead: stopped at once; checkpoints that were written are whole", file=sys.stderr)
        end_now(130)
    if not result.is_complete or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        end_now(0 if result.is_complete else 130)
    return result


def show_next(result: Result) -> None:
    from clearhead.training.display import next_commands

    for number, command in enumerate(next_commands(result)):
        typer.echo(f"{'next' if number == 0 else '':<7} clearhead {command}")


def end_now(code: int) -> NoReturn:
    """Python's own end takes seconds after torch, and may find a tokenizer still being trained.

    With several processes it destroys objects that gloo's threads still use: about one run in thirty aborted (torch 2.13).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
