"""`clearhead explore --ablate`: what a model loses without each of its heads, and what each head takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.cli.ablation_batches import AblationBatch, AblationInput, encode_sources, make_batches
from clearhead.cli.arguments import load_tokenizer_of
from clearhead.cli.console import Form, plain_table, progress_bar, wide_console, write_rows
from clearhead.config import Config
from clearhead.costs.units import spell_seconds
from clearhead.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.data import Tokenizer
    from clearhead.inside import Sweep
    from clearhead.models import Model

SHOWN = 25  # heads at each end of a table; --csv and --json have them all
DIGITS = {"loss": 4, "logit": 4, "bleu": 2, "chrf": 2, "exact": 4}
TITLES = {"loss": "Δ loss", "logit": "Δ logit", "bleu": "Δ BLEU", "chrf": "Δ chrF", "exact": "Δ exact"}


def print_ablation(model: Model, path: Path, given: AblationInput, *, form: Form = "table") -> None:
    """A row for each head: how the metrics change without it, its parameters and its time."""
    from clearhead.inside import head_seconds
    from clearhead.inside.pruning import parameters_of_head

    check_input(model, given)
    tokenizer = load_tokenizer_of(path)
    batches = make_batches(model, tokenizer, given)
    result = run_sweeps(model, batches, given.heads)
    deltas = {(effect.place, effect.head): dict(effect.delta) for effect in result.effects}
    base = dict(result.base)
    if given.bleu:
        translations = sweep_translations(model, tokenizer, given)
        base |= translations.base
        for effect in translations.effects:
            deltas[effect.place, effect.head] |= effect.delta
    largest = max(batches, key=lambda batch: batch.targets.numel())
    seconds = head_seconds(model, *largest.inputs, **largest.options)
    parameters = parameters_of_head(model.config)
    rows: list[dict[str, Any]] = [
        {"place": place, "head": head, **deltas[place, head], "parameters": parameters, "seconds": seconds[place]}
        for place, head in sorted(deltas, key=lambda key: -deltas[key]["loss"])
    ]
    if form == "table":
        show_table(rows, base, result.n_targets, largest, model.config)
    else:
        write_rows(rows, form, base)


def check_input(model: Model, given: AblationInput) -> None:
    """Refuse texts, targets and options that do not fit the model."""
    from clearhead.models import EncoderDecoder

    if model.config.inputs != "tokens":
        raise InputError(
            f"--ablate takes texts, and this model reads {model.config.inputs}; use clearhead.inside.sweep in Python"
        )
    if not given.texts:
        raise InputError("--ablate needs a text: write one after the model, or name a file with one a line")
    if given.target is not None and not isinstance(model, EncoderDecoder):
        raise InputError(
            f"--target is for encoder-decoders; this model is of shape {model.config.shape!r}; leave it out"
        )
    if given.targets is not None and len(given.targets) != len(given.texts):
        raise InputError(
            f"there are {len(given.texts)} texts but {len(given.targets)} targets; give one for each, in the same order"
        )
    if given.bleu and (given.target is None or not isinstance(model, EncoderDecoder)):
        raise InputError("--bleu compares translations with --target; give a translator, texts and their targets")


def run_sweeps(model: Model, batches: Sequence[AblationBatch], heads: str) -> Sweep:
    """The ablation of all batches, added up."""
    from clearhead.inside import sweep
    from clearhead.inside.ablation_sweep import attentions_of

    total: Sweep | None = None
    with progress_bar("without each head", len(batches) * len(attentions_of(model, heads))) as step:
        for batch in batches:
            one = sweep(model, *batch.inputs, targets=batch.targets, sites=heads, progress=step, **batch.options)
            total = one if total is None else total + one
    assert total is not None
    return total


def sweep_translations(model: Model, tokenizer: Tokenizer, given: AblationInput) -> Sweep:
    """BLEU and chrF of greedy translations without each head."""
    from clearhead.generation import translate
    from clearhead.inside import sweep_by
    from clearhead.inside.ablation_sweep import attentions_of, n_heads_of
    from clearhead.models import EncoderDecoder
    from clearhead.training.tasks.translation import score

    assert isinstance(model, EncoderDecoder)
    references = given.targets or []
    sources = encode_sources(model, tokenizer, given.texts)

    def measure(model: Model) -> Mapping[str, float]:
        assert isinstance(model, EncoderDecoder)
        scores = score([tokenizer.decode(ids) for ids in translate(model, sources, beams=1)], references)
        if "bleu" not in scores:
            raise MissingExtraError("--bleu needs sacrebleu, which is missing; pip install 'clearhead[eval]'")
        return {name: scores[name] for name in ("bleu", "chrf")}

    n_heads = sum(map(n_heads_of, attentions_of(model, given.heads).values()))
    with progress_bar("translating without each head", n_heads) as step:
        return sweep_by(model, measure, sites=given.heads, progress=step)


def show_table(
    rows: list[dict[str, Any]], base: Mapping[str, float], n_targets: int, timed: AblationBatch, config: Config
) -> None:
    """The heads with the largest and the smallest effect, and notes on how the numbers were measured."""
    metrics = [name for name in TITLES if name in base]
    console = wide_console()
    console.print(head_table(rows, metrics))
    whole = ", ".join(f"{TITLES[name].removeprefix('Δ ')} {base[name]:.{DIGITS[name]}f}" for name in metrics)
    shape = " and ".join(f"{len(x)} x {x.shape[1]}" for x in timed.inputs)
    notes = [f"The whole model: {whole}, over {n_targets:,} targets."]
    notes.append(
        f"Time: measured, of one call with {shape} tokens; half of the heads of a kind pruned, in turns with the whole model."
    )
    if config.n_kv_heads != config.n_heads:
        group = config.n_heads // config.n_kv_heads
        notes.append(
            f"Heads share keys and values by {group}, and are pruned by {group}; of these, each head's share is shown."
        )
    if len(rows) > 2 * SHOWN + 1:
        notes.append(f"{len(rows) - 2 * SHOWN:,} of {len(rows):,} heads are left out here.")
    console.print("\n" + "\n".join(notes))


def head_table(rows: list[dict[str, Any]], metrics: list[str]) -> Table:
    table = plain_table("attention", "head", *(TITLES[name] for name in metrics), "parameters", "time")
    is_short = len(rows) <= 2 * SHOWN + 1
    for number, row in enumerate(rows if is_short else rows[:SHOWN] + rows[-SHOWN:]):
        if number == SHOWN and not is_short:
            table.add_row("…", *[""] * (len(metrics) + 3))
        numbers = [f"{row[name]:+.{DIGITS[name]}f}" for name in metrics]
        seconds = "in the noise" if row["seconds"] is None else spell_seconds(row["seconds"])
        table.add_row(row["place"], str(row["head"]), *numbers, f"{row['parameters']:,}", seconds)
    return table
