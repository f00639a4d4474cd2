"""A recipe: a training run in one TOML file with three tables (model, data, train). Without torch.

    task = "translate"
    [model]
    preset = "transformer-base"     # or from = "a/checkpoint"; every other name is a field of Config
    [data]
    source = ["train.en"]
    [train]
    steps = 5000

`--set train.steps=500` replaces one field. The run folder holds the recipe with all fields.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from clearhead.config import Config
from clearhead.errors import ConfigError, InputError, did_you_mean
from clearhead.families import preset, presets
from clearhead.training.recipe_checks import check_files, check_growth, check_lora, check_preset, check_values
from clearhead.training.recipe_fields import Data, Train, explain, spell

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

TASKS = ("language", "translate", "mask", "classify")
TOKENIZER = ("data.tokenizer", "data.vocab_size", "data.split_digits")  # they describe a tokenizer that is trained
SHIPPED = Path(__file__).parent / "recipes"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    task: Literal["language", "translate", "mask", "classify"]
    model: Mapping[str, Any] = field(default_factory=dict)  # `preset` or `from`, and fields of Config
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"there is no task {self.task!r}; {did_you_mean(str(self.task), TASKS)}")
        _check_model(self.task, self.model)
        check_values(self)
        check_growth(self)
        check_files(self)
        check_lora(self)

    @classmethod
    def read(cls, text: str, *, name: str = "the recipe") -> Recipe:
        """The recipe in a TOML text."""
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{name} is no TOML ({error}); mend that line") from None
        return cls.from_tables(tables, name=name)

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], *, name: str = "the recipe") -> Recipe:
        for key in tables:
            if key not in ("task", "model", "data", "train"):
                raise ConfigError(
                    f"{name} has no part {key!r}; {did_you_mean(key, ('task', 'model', 'data', 'train'))}"
                )
        if "task" not in tables:
            raise ConfigError(f"{name} does not say its task; write task = one of: {', '.join(TASKS)}")
        return cls(
            task=tables["task"],
            model=dict(_table("model", tables.get("model", {}))),
            data=_make(Data, "data", tables.get("data", {})),
            train=_make(Train, "train", tables.get("train", {})),
        )

    def tables(self) -> dict[str, Any]:
        return {"task": self.task, "model": dict(self.model), "data": asdict(self.data), "train": asdict(self.train)}

    def to_toml(self, *, explained: bool = False) -> str:
        """The recipe as TOML; `explained`: with the meaning of each field as a comment."""
        lines = [f"task = {_toml(self.task)}" + f"  # one of: {', '.join(TASKS)}" * explained]
        for part in ("model", "data", "train"):
            lines += ["", f"[{part}]"]
            for name, value in self.tables()[part].items():
                line, meaning = f"{name} = {_toml(value)}", explain(part, name) if explained else ""
                lines.append(f"{line:<32}  # {meaning}" if meaning else line)
        return "\n".join(lines) + "\n"

    def with_set(self, settings: Iterable[str]) -> Recipe:
        """The recipe with fields replaced: "train.steps=500", "model.n_layers=4", "data.files=['a.txt']".

        "model.preset=gpt2" replaces the whole [model] table; other fields of the model set beside it are changes to the preset.
        """
        tables, model, given = self.tables(), dict[str, Any](), list[str]()
        for setting in settings:
            path, equals, value = setting.partition("=")
            part, dot, name = path.strip().partition(".")
            if not (equals and dot and part in ("model", "data", "train")):
                raise ConfigError(f"--set {setting!r} is not understood; write part.field=value, e.g. train.steps=500")
            # Checked here too, so that the message can name the right table of the field.
            known = {"data": _names(Data), "train": _names(Train), "model": _model_names()}
            if name not in known[part]:
                everywhere = [f"{part}.{name}" for part, names in known.items() for name in names]
                elsewhere = [each for each in everywhere if each.endswith(f".{name}")]
                raise ConfigError(
                    f"a recipe has no field {part}.{name}; {did_you_mean(f'{part}.{name}', elsewhere or everywhere)}"
                )
            (model if part == "model" else tables[part])[name] = _value(value.strip())
            given.append(f"{part}.{name}")
        tables["model"] = _set_model(self.task, tables["model"], model)
        if "from" in tables["model"] and (ignored := [name for name in given if name in TOKENIZER]):
            raise ConfigError(
                f"{ignored[0]} is of a tokenizer to be trained, but a model that is started from keeps its own; got "
                f"model.from={tables['model']['from']!r}; leave {ignored[0]} or model.from out"
            )
        return Recipe.from_tables(tables)

    def with_files(self, **files: Iterable[str]) -> Recipe:
        """The recipe with these files, as absolute paths, so that a run can be resumed from any folder.

        To translate, `files` and `valid` are tables of pairs, which are sources without targets.
        """
        lists = {name: [names] if isinstance(names, str) else names for name, names in files.items()}
        given = {name: tuple(_absolute(file) for file in names) for name, names in lists.items() if names}
        for name, pairs in (("files", "source"), ("valid", "valid_source")) if self.task == "translate" else ():
            if name in given and pairs not in given:
                given[pairs] = given.pop(name)
        return replace(self, data=replace(self.data, **given))


def find_recipe(name: str) -> Recipe:
    """A shipped recipe by its name, or one from a file."""
    shipped = sorted(path.stem for path in SHIPPED.glob("*.toml"))
    path = SHIPPED / f"{name}.toml" if name in shipped else Path(name)
    if path.suffix != ".toml":
        if path.exists():
            raise ConfigError(f"{name!r} is no task; name the task before the data: clearhead train language {name}")
        raise ConfigError(f"there is no recipe {name!r}, and no .toml file of that name; {did_you_mean(name, shipped)}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the recipe {name!r} can not be read ({error}); is the path right?") from None
    return Recipe.read(text, name=path.name)


def _absolute(file: str) -> str:
    return file if file.startswith("hf:") else str(Path(file).absolute())


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def _model_names() -> list[str]:
    return ["preset", "from", *_names(Config)]


def _set_model(task: str, old: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The [model] table with fields replaced. A preset replaces all of it but `from`, with which it is refused.

    A translator whose two stacks are of equal depth keeps them so.
    """
    if "preset" in given:
        old = {name: value for name, value in old.items() if name == "from"}
    new = {**old, **given}
    if task == "translate" and "n_layers" in given and "n_decoder_layers" not in given and "from" not in new:
        start = asdict(preset(new["preset"])) if "preset" in new else {}
        n_layers, n_decoder_layers = ({**start, **old}.get(name, 0) for name in ("n_layers", "n_decoder_layers"))
        if n_decoder_layers == n_layers:
            new["n_decoder_layers"] = given["n_layers"]
    return new


def _check_model(task: str, model: Mapping[str, Any]) -> None:
    for name in model:
        if name not in _model_names():
            raise ConfigError(f"a recipe has no field model.{name}; {did_you_mean(name, _model_names())}")
    if "preset" in model and "from" in model:
        raise ConfigError(
            f"model.preset={model['preset']!r} and model.from={model['from']!r} both say where to start; leave one out"
        )
    if model.get("preset") in presets():  # an unknown one is refused when its config is made
        check_preset(task, preset(model["preset"]))


def _make(kind: type, part: str, values: Any) -> Any:
    hints = get_type_hints(kind)
    for name in _table(part, values):
        if name not in hints:
            raise ConfigError(f"a recipe has no field {part}.{name}; {did_you_mean(name, hints)}")
    return kind(**{name: _typed(f"{part}.{name}", value, hints[name]) for name, value in values.items()})


def _table(part: str, values: Any) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(f"[{part}] is a table of fields; got {values!r:.60}; write [{part}] and a field a line")
    return values


def _typed(name: str, value: Any, kind: Any) -> Any:
    """The value converted to the field's type, or an error that names the field."""
    if get_origin(kind) is Literal:
        if not any(value == each and type(value) is type(each) for each in get_args(kind)):
            near = did_you_mean(str(value), map(spell, get_args(kind)))
            quoted = isinstance(value, str) and any(value == spell(each) for each in get_args(kind))
            raise ConfigError(f"{name}={value!r} is not known; {f'write {value} without quotes' if quoted else near}")
        return value
    if get_origin(kind) is tuple:
        if isinstance(value, str):
            value = [value]  # one file needs no brackets
        inner = get_args(kind)[0]
        count = None if get_args(kind)[-1] is ... else len(get_args(kind))
        if not isinstance(value, list | tuple) or not all(_is(item, inner) for item in value):
            raise ConfigError(f"{name}={value!r} is no list of {inner.__name__}; write [...]")
        if count is not None and len(value) != count:
            raise ConfigError(f"{name}={value!r} has {len(value)} values; give {count}")
        return tuple(inner(item) for item in value)
    if not _is(value, kind):
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; give a value of type {kind.__name__}")
    return kind(value)


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _value(text: str) -> Any:
    """The value of a TOML expression; anything else is a string, as in --set train.schedule=cosine."""
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
            raise ConfigError(f"{value!r} is no Unicode, and a recipe can not hold it; rename the file")
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
