"""The pages of *Look up* that are made from the package itself: commands, the public names, recipe and model fields, presets."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from dataclasses import MISSING, Field, fields
from typing import Any, cast, get_type_hints

import typer

import clearhead as ch
from clearhead.cli import app
from clearhead.cli.command_list import SUMMARIES, load_command
from clearhead.cli.examples import EXAMPLES
from clearhead.cli.presets import preset_row
from clearhead.config import Config
from clearhead.training.recipe import SHIPPED
from clearhead.training.recipe_fields import Data, Train, explain

GROUPS = {
    "Models": ("preset", "presets", "build", "Config", "Decoder", "Encoder", "EncoderDecoder"),
    "Files": ("load", "save", "load_tokenizer", "train_tokenizer"),
    "Use": ("generate", "translate", "Generation"),
    "Look inside": ("probe", "cost", "draw"),
    "Train": ("train", "Recipe", "find_recipe"),
    "Errors": ("ClearheadError", "ConfigError", "InputError", "CheckpointError", "MissingExtraError"),
}


def cell(text: object) -> str:
    """Text in a table's cell. In code a bar needs no backslash, and would show it."""
    parts = re.split("(`[^`]*`)", re.sub(r"\s+", " ", str(text)))
    return "".join(part if part.startswith("`") else part.replace("|", "\\|") for part in parts).strip()


def table(header: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell(one) for one in line) + " |" for line in lines)


def commands() -> str:
    parts = [
        "# Commands",
        "Every command with its arguments and options, from the program itself: `clearhead COMMAND --help` says the same. "
        "A MODEL is a run folder, a folder of Hugging Face, a `.gguf` file, or what else `ch.load` takes. "
        "An error that you can mend ends with exit code 1 and one line; wrong usage with 2.",
        options(typer.main.get_command(app)),
    ]
    for name in SUMMARIES:
        command = load_command(name)
        parts += describe(f"clearhead {name}", command)
        if name in EXAMPLES:
            parts.append("```console\n" + "\n".join(EXAMPLES[name]) + "\n```")
        for below, one in getattr(command, "commands", {}).items():
            parts += describe(f"clearhead {name} {below}", one, level=3)
    return "\n\n".join(filter(None, parts)) + "\n"


def describe(name: str, command: Any, level: int = 2) -> list[str]:
    help_text = inspect.cleandoc(command.help or "").partition("\b")[0].strip()
    return [f"{'#' * level} {name}", help_text, options(command)]


def options(command: Any) -> str:
    """A table of arguments and options, in the words of the program's own help."""
    context = typer.Context(command)
    records = [record for parameter in command.params if (record := parameter.get_help_record(context))]
    rows = [(f"`{spelled}`", meaning.replace("[", "\\[")) for spelled, meaning in records]  # [x>=1] is no link
    return table(("argument or option", "meaning"), rows)


def python() -> str:
    """The public names; mkdocstrings fills in signatures and docstrings."""
    named = {name for names in GROUPS.values() for name in names}
    if odd := named ^ (set(ch.__all__) - {"__version__"}):
        raise ValueError(f"GROUPS in book/reference.py and clearhead.__all__ differ in {sorted(odd)}")
    parts = [
        "# Python",
        "All public names of `import clearhead as ch`. Rooms such as `clearhead.inside` have more; the guides show them.",
    ]
    for title, names in GROUPS.items():
        objects = [getattr(ch, name) for name in names]
        parts += [f"## {title}", *(f"::: {one.__module__}.{one.__qualname__}" for one in objects)]
    return "\n\n".join(parts) + "\n"


def field_table(kind: type, part: str) -> str:
    """Every field of a dataclass: name, type, default, and its meaning or the comment beside it."""
    hints, comments = get_type_hints(kind), field_comments(kind)
    rows = [
        (
            f"`{one.name}`",
            f"`{words_of(hints[one.name])}`",
            default_of(one),
            explain(part, one.name) or comments.get(one.name, ""),
        )
        for one in fields(kind)
    ]
    return table(("field", "type", "default", "meaning"), rows)


def field_comments(kind: type) -> dict[str, str]:
    """The comments behind a class's fields."""
    source = inspect.getsource(kind)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    body = cast(ast.ClassDef, ast.parse(source).body[0]).body
    named = {
        node.target.id: node for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return {
        name: " ".join(comments[line] for line in range(node.lineno, (node.end_lineno or 0) + 1) if line in comments)
        for name, node in named.items()
    }


def default_of(field: Field[Any]) -> str:
    value = field.default_factory() if callable(field.default_factory) else field.default
    return "needed" if value is MISSING else f"`{value!r}`"


def words_of(hint: Any) -> str:
    return inspect.formatannotation(hint).replace("typing.", "")


def recipe() -> str:
    shipped = ", ".join(f"`{path.stem}`" for path in sorted(SHIPPED.glob("*.toml")))
    return "\n\n".join(
        (
            "# Recipe fields",
            'A recipe is one TOML file: `task` (`"language"`, `"translate"`, `"mask"` or `"classify"`) and three tables. '
            "`--set train.steps=500` replaces a field on the command line. `[model]` has `preset` or `from`, and any of the "
            "[model fields](config.md).",
            f"Recipes in the package, by name: {shipped}. `clearhead train NAME --show-recipe` prints one.",
            "## `[data]`",
            field_table(Data, "data"),
            "## `[train]`",
            field_table(Train, "train"),
        )
    )


def config() -> str:
    return "\n\n".join(
        (
            "# Model fields",
            "The fields of `ch.Config`, and of `[model]` in a recipe. `ch.preset(name, field=value)` changes any of them. "
            "A size of 0 is derived from the others.",
            field_table(Config, "model"),
        )
    )


def presets() -> str:
    rows = [preset_row(name, ch.preset(name)) for name in ch.presets()]
    cells = [tuple(f"{value:,}" if isinstance(value, int) else value for value in row.values()) for row in rows]
    about = (
        "Every named size: `ch.preset(name)`, or `preset = name` in a recipe. Parameters are counted in closed form."
    )
    return "\n\n".join(("# Presets", about, table(tuple(rows[0]), cells)))


PAGES = {"commands": commands, "python": python, "recipe": recipe, "config": config, "presets": presets}
