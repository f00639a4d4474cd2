"""Model size and steps for a first run: so that it ends in minutes, by this machine's measured speed and the size of the data."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from clearhead.config import Config
from clearhead.costs.forecast import cost
from clearhead.costs.measurement import Workload, repeat_step
from clearhead.data.corpora import expand_files
from clearhead.errors import ConfigError
from clearhead.training.distributed import choose_device
from clearhead.training.initialization import guess_config
from clearhead.training.recipe import Recipe
from clearhead.training.schedules import mean_batch, spell_batch

MINUTES = 8.0  # of a run on a CPU, unless the user says otherwise
SHARE = 0.8  # of the time, for steps; the rest is for data, evaluations and checkpoints
TOKENS_A_PARAMETER = 1  # a larger model that sees fewer would learn less in the same time
MOST_EPOCHS = 20
ENOUGH_STEPS = 400  # below it batches are made smaller, down to SMALL_BATCH
SMALL_BATCH = 2048
# A language model with rotary positions that starts from random weights first sees windows of a quarter of their length, at least
# SHORTEST tokens: a lower loss from the same tokens and steps (docs/training.md, Optimizers).
LENGTH_DOUBLINGS, SHORTEST = 2, 16
BYTES_A_TOKEN = 3.5  # of a tokenizer with some thousand entries
PACKED = (".gz", ".parquet")  # files that hold about four times their size
LADDER = ((6, 384, 6), (4, 256, 4), (4, 192, 3), (4, 128, 2), (3, 96, 2), (2, 64, 2))  # n_layers, d_model, n_heads
SIZES = ("model.n_layers", "model.d_model", "model.n_heads")
REFERENCE = Config(shape="decoder", n_layers=4, d_model=128, n_heads=2, vocab_size=2048, max_len=128, norm_first=True)


def fit(recipe: Recipe, given: Collection[str], rate: float, n_tokens: float, minutes: float) -> Recipe:
    """The recipe with a smaller model and fewer steps where it would take more than `minutes`, but no field of `given` changed.

    `rate`: FLOP/s in training. `n_tokens`: of the training data, as far as it is known.
    """
    budget = SHARE * 60 * minutes * rate
    sizes = _sizes(recipe, given)
    sized = next((each for each in sizes if _learns_enough(each, given, budget, n_tokens)), sizes[-1])
    t, flops = sized.train, _flops_a_token(sized)
    if "train.steps" in given:
        return sized
    mean = mean_batch(t)  # of a step's tokens, as a share of `batch`
    tokens = min(budget / flops, t.steps * t.batch_tokens * mean, MOST_EPOCHS * n_tokens)
    batch, smallest = t.batch_tokens, max(SMALL_BATCH, sized.data.length << t.batch_doublings)
    while "train.batch_tokens" not in given and tokens / (batch * mean) < ENOUGH_STEPS and batch >= 2 * smallest:
        batch //= 2
    steps = max(1, min(_round(tokens / (batch * mean)), math.ceil(t.steps * t.batch_tokens / batch)))
    often = math.ceil(steps / 10)
    chosen = dict(steps=steps, batch_tokens=batch, evaluate_every=often, checkpoint_every=often)
    chosen["warmup"] = min(t.warmup, often)
    if _may_start_short(sized):
        chosen["length_doublings"] = LENGTH_DOUBLINGS
    kept = {name: value for name, value in chosen.items() if f"train.{name}" not in given}
    return replace(sized, train=replace(t, **kept))


def _may_start_short(recipe: Recipe) -> bool:
    """Whether what was measured applies: not to other tasks, positions that are learnt, a preset or a model from a checkpoint."""
    length = recipe.data.length
    whole = length % 2**LENGTH_DOUBLINGS == 0 and length >> LENGTH_DOUBLINGS >= SHORTEST
    return recipe.task == "language" and recipe.model.get("positions") == "rotary" and whole


def _sizes(recipe: Recipe, given: Collection[str]) -> list[Recipe]:
    """The recipe with its own size, and with each smaller one of the ladder; its own alone, if the user chose it."""
    own = recipe.model.get("d_model")
    if own is None or {*SIZES, "model.preset"} & set(given):
        return [recipe]
    found = [recipe]
    for n_layers, d_model, n_heads in LADDER:
        if d_model < own:
            n_layers = min(n_layers, recipe.model["n_layers"])
            model = {**recipe.model, "n_layers": n_layers, "d_model": d_model, "n_heads": n_heads}
            model |= {"n_decoder_layers": n_layers} if "n_decoder_layers" in model else {}
            model |= {"d_ff": 4 * d_model} if "d_ff" in model and "model.d_ff" not in given else {}
            found.append(replace(recipe, model=model))
    return found


def _learns_enough(recipe: Recipe, given: Collection[str], budget: float, n_tokens: float) -> bool:
    """Whether a model of this size sees enough tokens in the time that there is; all of them, if the steps are given."""
    t = recipe.train
    seen, wanted = budget / _flops_a_token(recipe), t.steps * t.batch_tokens * mean_batch(t)
    if "train.steps" not in given:
        n_params = cost(guess_config(recipe), batch=1, length=_length(recipe), mode="train").params
        seen, wanted = min(seen, MOST_EPOCHS * n_tokens), min(wanted, float(TOKENS_A_PARAMETER * n_params))
    return seen >= wanted


def _length(recipe: Recipe) -> int | None:
    return None if guess_config(recipe).inputs == "patches" else recipe.data.length


def _flops_a_token(recipe: Recipe) -> float:
    config = guess_config(recipe)
    length = _length(recipe)
    tokens = (length or config.max_len) * (2 if config.shape == "encoder-decoder" else 1)
    return cost(config, batch=1, length=length, mode="train").useful_flops / tokens


def _round(n: float) -> int:
    """Two digits are enough: 1234.5 becomes 1200."""
    scale = 10 ** max(0, int(math.log10(max(n, 1))) - 1)
    return int(n // scale * scale)


def count_tokens(recipe: Recipe) -> float:
    """About how many tokens the training data has, by the size of its files; infinity where that is not known."""
    d, config = recipe.data, guess_config(recipe)
    if config.inputs == "patches":
        pictures = [each for folder in d.files for each in Path(folder).rglob("*") if each.is_file()]
        return float(config.max_len * len(pictures)) or math.inf
    files = expand_files((*d.files, *d.source, *d.target)) if (d.files or d.source) else []
    if not files or any(str(file).startswith("hf:") for file in files):
        return math.inf
    inside = [each for file in files for each in (file.rglob("*") if file.is_dir() else [file])]
    n_bytes = sum(each.stat().st_size * (4 if each.suffix in PACKED else 1) for each in inside)
    return n_bytes / (1 if d.tokenizer in ("bytes", "chars") else BYTES_A_TOKEN)


def measure_rate() -> float:
    """FLOP/s of training on this CPU: of a small model, which reaches less of the peak than a large one."""
    work = Workload(config=REFERENCE, batch=8, length=128, mode="train")
    step = repeat_step(work)
    step()
    seconds: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    flops = cost(REFERENCE, batch=8, length=128, mode="train").useful_flops
    return flops / statistics.median(seconds)


def fit_to_machine(recipe: Recipe, given: Collection[str], minutes: float | None) -> tuple[Recipe, str]:
    """`fit` for this machine, and a sentence about it. On a GPU the recipe stays as it is, and where the user chose all."""
    chosen = {"train.steps", "train.batch_tokens", *({"model.d_model"} if "d_model" in recipe.model else ())}
    if chosen <= set(given):
        if minutes is not None:
            raise ConfigError(
                f"--minutes {minutes:g} has nothing to choose: {', '.join(sorted(chosen))} are set; leave one out"
            )
        return recipe, ""
    device = choose_device(recipe.train.device)
    if device.type != "cpu" and minutes is None:
        return recipe, ""
    if device.type != "cpu":
        raise ConfigError(
            f"--minutes {minutes:g} is for a CPU; got the device {str(device)!r}; set train.steps instead"
        )
    n_tokens, rate = count_tokens(recipe), measure_rate()
    fitted = fit(recipe, given, rate, n_tokens, minutes or MINUTES)
    return fitted, explain_fit(recipe, fitted, rate, n_tokens, minutes or MINUTES)


def explain_fit(before: Recipe, after: Recipe, rate: float, n_tokens: float, minutes: float) -> str:
    """What was chosen, why, and how to ask for more; nothing if nothing changed."""
    if before == after:
        return ""
    config, t = guess_config(after), after.train
    data = "" if math.isinf(n_tokens) else f" and about {n_tokens:,.0f} tokens of data"
    expected = t.steps * t.batch_tokens * mean_batch(t) * _flops_a_token(after) / rate / SHARE / 60
    shape = f"{config.depth} layers of width {config.d_model}, {t.steps:,} steps of {spell_batch(t)} tokens"
    if t.length_doublings != before.train.length_doublings:
        shape += f" in windows of {after.data.length >> t.length_doublings:,} to {after.data.length:,}"
    own = f"the recipe has {guess_config(before).d_model} and {before.train.steps:,}"
    return (
        f"chosen for this machine ({rate / 1e9:,.1f} GFLOP/s in training){data}: {shape}, about {max(1, expected):.0f} min; "
        f"for more: --minutes {10 * minutes:g}, or --set model.d_model=... and train.steps=... ({own})"
    )
