"""What `clearhead explore` prints instead of a page: the sites of a model, and what it loses without each of its heads."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from clearhead.cli.ablation_batches import AblationBatch, AblationInput, encode_sources, make_examples
from clearhead.cli.console import wide_console
from clearhead.cli.cost_tables import plain_table
from clearhead.config import Config
from clearhead.costs.fit import spell_seconds
from clearhead.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from clearhead.data import Tokenizer
    from clearhead.inside import Sweep
    from clearhead.models import Model

Form = Literal["table", "csv", "json"]

SHOWN = 25  # heads at each end of a table; --csv and --json have them all
DIGITS = {"loss": 4, "logit": 4, "bleu": 2, "chrf": 2, "exact": 4}
TITLES = {"loss": "Δ loss", "logit": "Δ logit", "bleu": "Δ BLEU", "chrf": "Δ chrF", "exact": "Δ exact"}


def print_sites(model: Model, pattern: str = "", *, form: Form = "table") -> None:
    """The places where one can look, with their shapes; layers that are alike share a line, unless a pattern is given."""
    from clearhead.inside import sites
    from clearhead.inside.probe import find_sites

    known = sites(model)
    shapes = {site: _spell_shape(site, known[site], model.config) for site in find_sites(pattern or "*", list(known))}
    if form != "table":
        _write([{"site": site, "shape": known[site], "here": here} for site, here in shapes.items()], form)
        return
    lines = {site: (known[site], here) for site, here in shapes.items()} if pattern else _alike(known, shapes)
    console, table = wide_console(), plain_table("site", "shape", "in this model")
    for column in table.columns:
        column.justify = "left"
    for site, (shape, here) in lines.items():
        table.add_row(site, shape, here)
    console.print(table, highlight=False)
    legend = "B batch, T queries, S keys, H heads, K key heads, E width of a head, F feed-forward width, D width"
    console.print(f"\n{len(shapes)} sites. {legend}.", highlight=False)


def _alike(known: Mapping[str, str], shapes: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """One pattern for what all layers have alike; sites by name where pruning made them unequal."""
    groups: dict[str, list[str]] = {}
    for site in shapes:
        groups.setdefault(".".join("*" if part.isdigit() else part for part in site.split(".")), []).append(site)
    lines: dict[str, tuple[str, str]] = {}
    for pattern, members in groups.items():
        if len({shapes[site] for site in members}) == 1:
            lines[pattern] = known[members[0]], shapes[members[0]]
        else:
            lines |= {site: (known[site], shapes[site]) for site in members}
    return lines


def _spell_shape(site: str, shape: str, config: Config) -> str:
    place = site.rpartition(".")[0]
    heads = len(config.kept_heads(place))
    sizes = {"H": heads, "K": heads * config.n_kv_heads // config.n_heads, "E": config.d_head}
    sizes |= {"F": config.d_ff, "D": config.d_model}
    return "(" + ", ".join(str(sizes.get(axis, axis)) for axis in shape.strip("()").split(", ")) + ")"


def print_ablation(
    model: Model,
    place: Path,
    text: str,
    *,
    target: str | None = None,
    heads: str = "*",
    form: Form = "table",
    bleu: bool = False,
) -> None:
    """What the model loses without each of its heads, and what each head takes.

    `text` and `target` are texts, or files with one a line; `heads` is a pattern of attentions ("decoder.*.cross").
    """
    from clearhead.data import load_tokenizer
    from clearhead.inside import head_seconds
    from clearhead.inside.pruning import parameters_of_head

    asked = AblationInput(text, target, heads, bleu)
    _check(model, asked)
    tokenizer = load_tokenizer(place if place.is_dir() else place.parent)
    examples = make_examples(model, tokenizer, asked)
    found = run_sweeps(model, examples, heads)
    deltas = {(effect.place, effect.head): dict(effect.delta) for effect in found.effects}
    base = dict(found.base)
    if bleu:
        more = sweep_translations(model, tokenizer, asked)
        base |= more.base
        for effect in more.effects:
            deltas[effect.place, effect.head] |= effect.delta
    largest = max(examples, key=lambda some: some.targets.numel())
    seconds = head_seconds(model, *largest.inputs, **largest.options)
    parameters = parameters_of_head(model.config)
    order = sorted(deltas, key=lambda key: -deltas[key]["loss"])
    rows: list[dict[str, Any]] = [
        {"place": at, "head": head, **deltas[at, head], "parameters": parameters, "seconds": seconds[at]}
        for at, head in order
    ]
    if form == "table":
        _show(rows, base, found.n_targets, largest, model.config)
    else:
        _write(rows, form, base)


def _check(model: Model, asked: AblationInput) -> None:
    from clearhead.models import EncoderDecoder

    if model.config.inputs != "tokens":
        raise InputError(
            f"--ablate takes texts, and this model reads {model.config.inputs}; use clearhead.inside.sweep in Python"
        )
    if not asked.texts:
        raise InputError("--ablate needs a text: write one after the model, or name a file with one a line")
    if asked.target is not None and not isinstance(model, EncoderDecoder):
        raise InputError(
            f"--target is for encoder-decoders; this model is of shape {model.config.shape!r}; leave it out"
        )
    if asked.targets is not None and len(asked.targets) != len(asked.texts):
        raise InputError(
            f"there are {len(asked.texts)} texts but {len(asked.targets)} targets; give one for each, in the same order"
        )
    if asked.bleu and (asked.target is None or not isinstance(model, EncoderDecoder)):
        raise InputError("--bleu compares translations with --target; give a translator, texts and their targets")


def run_sweeps(model: Model, examples: Sequence[AblationBatch], heads: str) -> Sweep:
    """All batches as one, with a bar for the attentions done."""
    from clearhead.inside import sweep
    from clearhead.inside.ablation_sweep import attentions_of

    total: Sweep | None = None
    with _bar("without each head", len(examples) * len(attentions_of(model, heads))) as step:
        for some in examples:
            one = sweep(model, *some.inputs, targets=some.targets, sites=heads, progress=step, **some.options)
            total = one if total is None else total + one
    assert total is not None
    return total


def sweep_translations(model: Model, tokenizer: Tokenizer, asked: AblationInput) -> Sweep:
    """BLEU and chrF of what it writes, greedily, without each head."""
    from clearhead.generation import translate
    from clearhead.inside import sweep_by
    from clearhead.inside.ablation_sweep import attentions_of, n_heads_of
    from clearhead.models import EncoderDecoder
    from clearhead.training.tasks.translate import score

    assert isinstance(model, EncoderDecoder)
    wanted = asked.targets or []
    sources = encode_sources(model, tokenizer, asked.texts)

    def measure(model: Model) -> Mapping[str, float]:
        assert isinstance(model, EncoderDecoder)
        figures = score([tokenizer.decode(ids) for ids in translate(model, sources, beams=1)], wanted)
        if "bleu" not in figures:
            raise MissingExtraError("--bleu needs sacrebleu, which is missing; pip install sacrebleu")
        return {name: figures[name] for name in ("bleu", "chrf")}

    n_heads = sum(map(n_heads_of, attentions_of(model, asked.heads).values()))
    with _bar("translating without each head", n_heads) as step:
        return sweep_by(model, measure, sites=asked.heads, progress=step)


@contextmanager
def _bar(title: str, total: int) -> Generator[Callable[[], None]]:
    """A bar on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, redirect_stdout=False, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def _write(rows: list[dict[str, Any]], form: Form, base: Mapping[str, float] | None = None) -> None:
    if form == "json":
        typer.echo(json.dumps(rows if base is None else {"base": dict(base), "heads": rows}, indent=2))
        return
    table = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)


def _show(
    rows: list[dict[str, Any]], base: Mapping[str, float], n_targets: int, timed: AblationBatch, config: Config
) -> None:
    figures = [name for name in TITLES if name in base]
    console = wide_console()
    table = plain_table("attention", "head", *(TITLES[name] for name in figures), "parameters", "time")

    def add(row: Mapping[str, Any]) -> None:
        numbers = [f"{row[name]:+.{DIGITS[name]}f}" for name in figures]
        seconds = "in the noise" if row["seconds"] is None else spell_seconds(row["seconds"])
        table.add_row(row["place"], str(row["head"]), *numbers, f"{row['parameters']:,}", seconds)

    if len(rows) <= 2 * SHOWN + 1:
        for row in rows:
            add(row)
    else:
        for row in rows[:SHOWN]:
            add(row)
        table.add_row("…", *[""] * (len(figures) + 3))
        for row in rows[-SHOWN:]:
            add(row)
    console.print(table, highlight=False)
    whole = ", ".join(f"{TITLES[name].removeprefix('Δ ')} {base[name]:.{DIGITS[name]}f}" for name in figures)
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
    console.print("\n" + "\n".join(notes), highlight=False)
