"""What a recipe may not say: values out of range, files that its task does not read, settings without effect. Without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from clearhead.config import Config
from clearhead.errors import ConfigError
from clearhead.families import preset, presets

if TYPE_CHECKING:
    from clearhead.training.recipe import Recipe

# The tasks that can learn from each embedded data set.
EMBEDDED = {"dates": ("translate",), "code": ("language", "mask"), "digits": ("classify",)}


def check_values(recipe: Recipe) -> None:
    """Refuse numbers out of their range."""
    data, train = recipe.data, recipe.train
    least = {
        "train": dict(
            steps=1, batch_tokens=1, accumulate=1, warmup=0, average=0, patience=0, lora_rank=0, log_every=1, seed=0
        )
        | dict(evaluate_every=1, checkpoint_every=1, samples=0, score_rows=0, beams=1, evaluate_rows=-1, threads=0)
        | dict(max_skips=0, batch_doublings=0, length_doublings=0),
        "data": dict(vocab_size=1, length=2, shift=0),
    }
    for part, table in (("train", train), ("data", data)):
        for name, low in least[part].items():
            if getattr(table, name) < low:
                raise ConfigError(f"{part}.{name}={getattr(table, name)} is too small; nearest valid: {low}")
    shares = {
        "train.label_smoothing": train.label_smoothing,
        "data.valid_share": data.valid_share,
        "data.leave_out": data.leave_out,
    }
    shares |= {"train.min_lr": train.min_lr, "train.decay": train.decay, "train.mask_share": train.mask_share}
    shares |= {
        "train.muon_beta2": train.muon_beta2,
        "train.momentum": train.momentum,
        "train.betas[0]": train.betas[0],
        "train.betas[1]": train.betas[1],
    }
    for name, value in shares.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name}={value} is no share; give a number from 0 up to, but not, 1")
    for name in ("lr", "muon_lr", "weight_decay", "clip", "lora_alpha"):
        if not 0 <= getattr(train, name) < float("inf"):
            raise ConfigError(
                f"train.{name}={getattr(train, name)} is below 0 or no number; {getattr(type(train), name)} is usual"
            )
    for name in ("muon_iteration", "muon_beta2") if train.optimizer != "muon" else ():
        if getattr(train, name) != getattr(type(train), name):
            raise ConfigError(
                f"train.{name}={getattr(train, name)!r} is Muon's, and has no effect with optimizer={train.optimizer!r}; leave it "
                f"out, or set train.optimizer=muon"
            )
    if train.cautious_decay and not train.weight_decay:
        raise ConfigError(
            "train.cautious_decay=true has no effect with weight_decay=0.0; set train.weight_decay, or leave it out"
        )
    if train.lr == 0 and train.schedule != "noam":
        raise ConfigError(
            f"train.lr=0 is for schedule='noam'; got schedule={train.schedule!r}; give a rate such as 0.001"
        )
    if train.best in ("bleu", "chrf", "exact") and (recipe.task != "translate" or not train.score_rows):
        raise ConfigError(
            f"train.best={train.best!r} is measured by task='translate' with score_rows above 0; got task={recipe.task!r}, "
            f"score_rows={train.score_rows}; choose loss or accuracy"
        )

    if recipe.task in ("language", "mask") and train.batch_tokens < data.length:
        raise ConfigError(
            f"train.batch_tokens={train.batch_tokens} is less than one window of data.length={data.length} tokens; raise "
            f"train.batch_tokens to {data.length} or more, or lower data.length"
        )


def check_growth(recipe: Recipe) -> None:
    """Refuse schedules of batch and length where there are none, and those that do not divide batch or window."""
    data, train = recipe.data, recipe.train
    for name in ("batch_doublings", "length_doublings"):
        if (value := getattr(train, name)) and recipe.task not in ("language", "mask"):
            raise ConfigError(
                f"train.{name}={value} has no effect: the batches of task={recipe.task!r} have rows of many lengths; leave it out, "
                f"or train language or mask"
            )
    if not train.batch_doublings and not train.length_doublings:
        if train.growth != type(train).growth:
            raise ConfigError(
                f"train.growth={train.growth} has no effect while nothing grows; set train.batch_doublings or "
                f"train.length_doublings, or leave it out"
            )
        return
    if not 0 < train.growth < 1:
        raise ConfigError(
            f"train.growth={train.growth} is not above 0 and below 1: the share of steps over which batch and length double; "
            f"{type(train).growth} is usual"
        )
    shortest = data.length >> train.length_doublings
    if shortest < 2 or shortest << train.length_doublings != data.length:
        most = max(n for n in range(data.length.bit_length() - 1) if data.length % 2**n == 0)
        raise ConfigError(
            f"windows of data.length={data.length} can not be halved train.length_doublings={train.length_doublings} times into "
            f"whole ones of 2 tokens or more; nearest valid: {most}"
        )
    if train.batch_tokens >> train.batch_doublings < data.length:
        raise ConfigError(
            f"train.batch_tokens={train.batch_tokens} halved train.batch_doublings={train.batch_doublings} times is less than one "
            f"window of data.length={data.length} tokens; nearest valid: {(train.batch_tokens // data.length).bit_length() - 1}"
        )


def check_files(recipe: Recipe) -> None:
    """Refuse files that the task would not read."""
    task, data = recipe.task, recipe.data
    pairs = ("source", "target", "valid_source", "valid_target")
    unread, read = (("files", "valid"), pairs) if task == "translate" else (pairs, ("files", "valid"))
    for name in unread:
        if found := getattr(data, name):
            raise ConfigError(
                f"the task {task!r} does not read data.{name}; got {', '.join(found):.80}; it reads "
                + ", ".join(f"data.{each}" for each in read)
                + f": {_spell_flag(name)} is {'not for it' if task == 'translate' else 'for translate'}"
            )
    if data.valid_target and not data.valid_source:
        raise ConfigError(
            f"held-out targets have no sources; got data.valid_target={', '.join(data.valid_target):.80}; name "
            f"data.valid_source (--valid-source) too"
        )


def check_has_files(recipe: Recipe) -> None:
    """Refuse a recipe without data to learn from."""
    data = recipe.data
    if recipe.task in EMBEDDED.get(data.embedded, ()):
        return
    if recipe.task != "translate":
        needed = () if data.files else ("files",)
    elif not data.source:
        needed = ("source",)
    else:  # a table holds both sides
        sides = (("target", data.source, data.target), ("valid_target", data.valid_source, data.valid_target))
        needed = [name for name, source, target in sides if not target and any(map(_is_text, source))]
    for name in needed:
        flags = (
            "files" if name == "files" else f"--{name.replace('_', '-')}, or a table of pairs (.csv, .tsv, .jsonl ...),"
        )
        raise ConfigError(
            f"the task {recipe.task!r} learns from data.{name}, and there is none; name {flags} on the command line, or set it in "
            f"the recipe"
        )


def _is_text(file: str) -> bool:
    from clearhead.data.corpus_files import find_kind

    return find_kind(Path(file)) == "text"


def _spell_flag(name: str) -> str:
    return "a file after the task" if name == "files" else f"--{name.replace('_', '-')}"


def check_lora(recipe: Recipe) -> None:
    """Refuse LoRA without a model to add to, and its settings without LoRA."""
    rank, alpha = recipe.train.lora_rank, recipe.train.lora_alpha
    if rank and "from" not in recipe.model:
        raise ConfigError(
            f"LoRA adds to the weights of a trained model, and random ones would stay frozen; got train.lora_rank={rank} without "
            f"model.from; name a model with --from"
        )
    if not rank and alpha != type(recipe.train).lora_alpha:
        raise ConfigError(
            f"train.lora_alpha={alpha} has no effect without LoRA; got train.lora_rank=0; set a rank: --lora rank=8,alpha={alpha}"
        )


def check_preset(task: str, config: Config) -> None:
    """Refuse a preset of another shape or other inputs than the task's."""
    shape = {"language": "decoder", "translate": "encoder-decoder"}.get(task, "encoder")
    inputs = ("tokens", "patches") if task == "classify" else ("tokens",)
    if config.shape == shape and config.inputs in inputs:
        return
    fitting = [name for name in presets() if (known := preset(name)).shape == shape and known.inputs in inputs]
    raise ConfigError(
        f"the preset is no model for the task {task!r}, which needs shape={shape!r} and inputs={' or '.join(map(repr, inputs))}; "
        f"got shape={config.shape!r}, inputs={config.inputs!r}; choose one of: {', '.join(fitting)}"
    )
