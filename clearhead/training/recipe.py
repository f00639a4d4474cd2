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
from clearhead.training.recipe_checks import check_files, check_lora, check_preset, check_values

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

TASKS = ("language", "translate", "mask", "classify")
TOKENIZER = ("data.tokenizer", "data.vocab_size", "data.split_digits")  # they describe a tokenizer that is trained
SHIPPED = Path(__file__).parent / "recipes"


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data, and how it is read."""

    files: tuple[str, ...] = ()  # texts or tables; for pictures one folder with a subfolder for each class
    source: tuple[str, ...] = ()  # translate: line n of the source belongs to line n of the target
    target: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()  # held-out files; without any, valid_share of the data is held out
    valid_source: tuple[str, ...] = ()
    valid_target: tuple[str, ...] = ()
    valid_share: float = 0.05
    embedded: Literal["", "dates", "code", "digits"] = ""  # data that needs no file
    columns: tuple[str, ...] = ()  # the columns of a table; () is (text), (source, target) or (text, label)
    documents: Literal["file", "line", "paragraph"] = "file"  # what one document is, in a text file
    tokenizer: str = "bpe"  # a kind to train (bpe, unigram, wordpiece, bytes, chars), or the path of one
    vocab_size: int = 8192
    split_digits: bool = False  # a trained tokenizer has one token for each digit and none for longer numbers
    lowercase: bool = False
    length: int = 256  # tokens of a window (language, mask), else the longest text, source or target
    bad_bytes: Literal["error", "replace", "drop"] = "error"  # bytes that are not UTF-8
    empty: Literal["error", "drop", "keep"] = "drop"  # empty lines and texts
    too_long: Literal["error", "drop", "cut"] = "error"  # texts of more than `length` tokens
    unequal: Literal["error", "cut"] = "error"  # a source and a target of different line counts
    leave_out: float = 0.0  # texts to classify: the share of tokens dropped in training, others each time
    shift: int = 0  # pictures are shifted by up to so many pixels, at random
    flip: bool = False  # pictures are mirrored half of the time
    cache: str = ""  # the folder for tokenised data; "" is `data` beside the run's folder


@dataclass(frozen=True, kw_only=True)
class Train:
    """How the model is trained."""

    steps: int = 1000
    batch_tokens: int = 4096  # of one step: with padding, of all processes and accumulated parts together
    accumulate: int = 1  # gradient accumulation: a step's batch is computed in so many parts, to fit in memory
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of the blocks, AdamW for the rest
    lr: float = 1e-3  # AdamW's; 0 with schedule noam is the paper's
    muon_lr: float = 0.02
    weight_decay: float = 0.1  # of matrices only
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.95  # Muon's
    schedule: Literal["constant", "cosine", "noam", "wsd"] = "cosine"
    warmup: int = 100
    decay: float = 0.2  # wsd: the share of steps in which the rate falls, at the end
    min_lr: float = 0.0  # the last rate of cosine and wsd, as a share of the highest
    clip: float = 1.0  # the largest norm of the gradients; 0: no clipping
    max_skips: int = (
        10  # so many steps in a row whose gradient is NaN or infinite change nothing; one more ends the run
    )
    label_smoothing: float = 0.0
    mask_share: float = 0.15  # mask: the share of tokens to predict
    average: int = 0  # the result is the mean of so many last checkpoints (section 6.1 of the paper); 0: no averaging
    keep: Literal["best", "last"] = "best"  # without averaging: which weights are the result
    best: Literal["loss", "accuracy", "bleu", "chrf", "exact"] = "loss"  # the metric that decides which are best
    patience: int = 0  # stop after so many evaluations without a better one; 0: never
    lora_rank: int = 0  # 0: train all weights; n: LoRA of rank n for the matrices of the blocks
    lora_alpha: float = 16.0
    precision: Literal["auto", "float32", "bfloat16", "fp8"] = (
        "auto"  # of products; auto: bfloat16 on a GPU that has it; fp8: bfloat16 with the blocks' products in 8 bits
    )
    stream: Literal["float32", "bfloat16"] = (
        "float32"  # what blocks hand on, where products are bfloat16; less memory, less exact
    )
    compile: bool = False
    record: bool = True  # on a GPU, if batches have one shape, or few: replay the step as a CUDA graph
    checkpointing: bool = False  # activation checkpointing: less memory, a third more time
    deterministic: bool = False  # on a GPU: only kernels that sum in a fixed order
    parallel: Literal["ddp", "fsdp"] = "ddp"  # with several processes: copies of the model, or shards
    device: str = "auto"
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 200
    evaluate_rows: int = 0  # at most so many held-out rows; 0: all
    checkpoint_every: int = 200
    samples: int = 5  # held-out examples shown at each evaluation
    score_rows: int = 200  # translate: held-out rows decoded for BLEU, chrF and exact matches; 0: none
    beams: int = 1  # translate: for decoding with the result; during training decoding is greedy
    tensorboard: bool = True  # if it is installed


@dataclass(frozen=True, kw_only=True)
class Recipe:
    task: Literal["language", "translate", "mask", "classify"]
    model: Mapping[str, Any] = field(default_factory=dict)  # `preset` or `from`, and fields of Config
    data: Data = Data()
    train: Train = Train()

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"there is no task {self.task!r}; {did_you_mean(str(self.task), TASKS)}")
        _check_model(self.task, self.model)
        check_values(self)
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

    def to_toml(self) -> str:
        lines = [f"task = {_toml(self.task)}"]
        for name in ("model", "data", "train"):
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {_toml(value)}" for key, value in self.tables()[name].items()]
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
        """The recipe with these files, as absolute paths, so that a run can be resumed from any folder."""
        given = {name: tuple(_absolute(file) for file in names) for name, names in files.items() if names}
        return replace(self, data=replace(self.data, **given))


def find_recipe(name: str) -> Recipe:
    """A shipped recipe by its name, or one from a file."""
    shipped = sorted(path.stem for path in SHIPPED.glob("*.toml"))
    path = SHIPPED / f"{name}.toml" if name in shipped else Path(name)
    if path.suffix != ".toml":
        raise ConfigError(f"there is no recipe {name!r}; {did_you_mean(name, shipped)}, or name a .toml file")
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
        if value not in get_args(kind):
            raise ConfigError(f"{name}={value!r} is not known; {did_you_mean(str(value), map(str, get_args(kind)))}")
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
