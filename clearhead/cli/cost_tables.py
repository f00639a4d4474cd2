"""What `clearhead cost` shows: forecasts, measurements, what fits, and geometry."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from clearhead.cli.console import wide_console
from clearhead.config import Config
from clearhead.costs.fit import devices_needed, largest, parse_rate, parse_size, spell_count, spell_seconds
from clearhead.costs.forecast import Cost, cost
from clearhead.costs.operations import check_lengths
from clearhead.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from clearhead.costs.geometry import Angles

NAMES = {
    "embedding": "embedding",
    "projections": "attention: projections",
    "attention": "attention: T²",
    "feedforward": "feed-forward",
    "norm": "norms and stream",
    "head": "head",
}
COLUMNS = {
    "params": "parameters",
    "flops": "operations",
    "weight_bytes": "weights",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activation_bytes": "activations",
    "kv_cache_bytes": "cache",
    "peak_bytes": "peak memory",
}


@dataclass(frozen=True)
class DeviceSpec:
    """What a device has."""

    memory: int
    rate: float
    bandwidth: float

    @classmethod
    def read(cls, memory: str, rate: str, bandwidth: str) -> DeviceSpec:
        return cls(parse_size(memory), parse_rate(rate), parse_rate(bandwidth, "B/s"))


def plain_table(*columns: str) -> Table:
    """The first column to the left, numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def describe(name: str, config: Config, asked: dict[str, Any]) -> str:
    at = check_lengths(config, asked["length"], asked["source_length"])
    layers = f"{config.n_layers}+{config.n_decoder_layers}" if config.n_decoder_layers else str(config.n_layers)
    length = f"length {at.target:,}" + (f" from a source of {at.source:,}" if at.source else "")
    how = [asked["mode"], f"batch {asked['batch']:,}", length, asked["precision"]]
    how += [asked["quantize"]] * bool(asked["quantize"]) + ["checkpointing"] * asked["checkpointing"]
    how += [asked["optimizer"]] * (asked["mode"] == "train")
    how += [f"{asked['shards']} devices ({asked['parallel']})"] * (asked["shards"] > 1) + [f"on {asked['device']}"]
    return f"{name}: {config.shape}, {layers} layers of width {config.d_model:,}\n{', '.join(how)}"


def forecast(config: Config, asked: dict[str, Any], **more: Any) -> Cost:
    both: dict[str, Any] = {**asked, **more}
    return cost(config, **both)


def spell_bytes(n: int) -> str:
    return spell_count(n, "B")


def show_forecast(name: str, config: Config, asked: dict[str, Any], limits: DeviceSpec) -> None:
    report, console = forecast(config, asked), wide_console()
    console.print(describe(name, config, asked) + "\n", highlight=False)
    shown = [field for field in COLUMNS if getattr(report, field)]
    table = plain_table("part", *(COLUMNS[field] for field in shown))

    def row(title: str, numbers: dict[str, int]) -> list[str]:
        spelled = [
            f"{n:,}" if field == "params" else spell_count(n, "FLOP" if field == "flops" else "B")
            for field, n in numbers.items()
        ]
        return [title, *(text if numbers[field] else "" for field, text in zip(numbers, spelled, strict=True))]

    for part, title in NAMES.items():
        table.add_row(*row(title, {field: report.parts[field][part] for field in shown}))
    table.add_section()
    table.add_row(*row("all", {field: getattr(report, field) for field in shown}), style="bold")
    console.print(table, highlight=False)
    console.print()
    for line in (_devices(config, asked, limits), _time(config, report, asked, limits)):
        console.print(line, highlight=False)
    if asked["length"] and asked["length"] > config.max_len:
        console.print(f"note     {name} is made for {config.max_len:,} tokens", style="yellow", highlight=False)


def _devices(config: Config, asked: dict[str, Any], limits: DeviceSpec) -> str:
    one = spell_bytes(limits.memory)
    if asked["shards"] > 1:
        peak = forecast(config, asked).peak_bytes
        return f"memory   {peak / limits.memory:.0%} of each device's {one} (--memory)"
    needed = devices_needed(config, limits.memory, **asked)
    if needed is None:
        own = forecast(config, asked, shards=2**20)
        copies = ", bfloat16 copies of weights" if asked["precision"] == "bfloat16" else ""
        why = f"each holds {spell_bytes(own.peak_bytes)} of its own (activations{copies})"
        return f"memory   no number of devices of {one} is enough: {why}"
    how = " that share weights and states (fsdp)" if asked["mode"] == "train" and needed > 1 else ""
    return f"memory   {needed:,} {'device' if needed == 1 else 'devices'} of {one} (--memory){how}"


def _time(config: Config, report: Cost, asked: dict[str, Any], limits: DeviceSpec) -> str:
    seconds = report.seconds(limits.rate, limits.bandwidth)
    at = check_lengths(config, asked["length"], asked["source_length"])
    tokens = asked["batch"] * asked["shards"] * (1 if asked["mode"] == "decode" else at.target + at.source)
    if seconds > report.flops / limits.rate:
        bound = f"reading weights and cache at {spell_count(limits.bandwidth, 'B/s')} (--bandwidth)"
    else:
        bound = f"{spell_count(limits.rate, 'FLOP/s')} (--rate)"
    unit = "token/s" if config.inputs == "tokens" else "position/s"
    return f"time     {spell_seconds(seconds)}, {spell_count(tokens / seconds, unit)}: {bound}"


def show_fit(name: str, config: Config, asked: dict[str, Any], size: str) -> None:
    memory, console = parse_size(size), wide_console()
    console.print(describe(name, config, asked) + "\n", highlight=False)
    table = plain_table(f"in {spell_bytes(memory)}", "largest", "peak memory")
    at = check_lengths(config, asked["length"], asked["source_length"])
    rows = [("batch", f"batch at length {at.target:,}")]
    if config.inputs != "patches":
        rows.append(("length", f"length at batch {asked['batch']:,}"))
    for vary, title in rows:
        n = largest(config, memory, vary, **asked)
        grown = {vary: n} | (
            {"source_length": n} if vary == "length" and at.source and not asked["source_length"] else {}
        )
        peak = spell_bytes(forecast(config, asked, **grown).peak_bytes) if n else "does not fit"
        table.add_row(title, f"{n:,}", peak)
        if vary == "length" and n > config.max_len:
            table.add_row(f"  (the model is made for {config.max_len:,})", "", "")
    console.print(table, highlight=False)


def show_measured(name: str, config: Config, asked: dict[str, Any]) -> None:
    """Forecast beside measured. The time is foretold from one run at half the length."""
    from clearhead.costs.measurement import Calibration, measure

    work = _work(config, asked)
    console = wide_console()
    console.print(describe(name, config, asked) + "\n", highlight=False)
    shorter = work.shorter()
    short, found = measure(shorter, work, repeats=7)
    said = forecast(config, asked, chunked_loss=False)
    seconds = Calibration(shorter, short).seconds(work)
    table = plain_table("", "forecast", "measured", "error")
    for field, title in COLUMNS.items():
        foretold, real = getattr(said, field), getattr(found, field, None)
        if real:
            spell = spell_bytes if field.endswith("bytes") else "{:,}".format
            table.add_row(title, spell(foretold), spell(real), _error(foretold, real))
    table.add_row("time", spell_seconds(seconds), spell_seconds(found.seconds), _error(seconds, found.seconds))
    console.print(table, highlight=False)
    after = f"length {shorter.lengths.target:,}" if shorter.batch == work.batch else f"batch {shorter.batch}"
    console.print(
        f"\ntime is forecast from one run at {after}, which took {spell_seconds(short.seconds)}", highlight=False
    )


def _error(foretold: float | int, measured: float | int) -> str:
    return "exact" if foretold == measured else f"{foretold / measured - 1:+.1%}"


def _work(config: Config, asked: dict[str, Any]) -> Any:
    from clearhead.costs.measurement import Work

    if asked["shards"] > 1:
        raise InputError(f"--measure runs one device; got --shards {asked['shards']}; leave one of them out")
    return Work(config=config, **{name: value for name, value in asked.items() if name not in ("shards", "parallel")})


def draw(file: Path, name: str, config: Config, asked: dict[str, Any], limits: DeviceSpec, *, measured: bool) -> None:
    """Time and memory over the length: the forecast, and with `measured` what this machine took, with a + bT + cT^2 through it."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingExtraError("--plot needs matplotlib; pip install 'clearhead[plot]'") from None
    import numpy as np

    if file.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--plot {str(file)!r} has no ending that says its kind; give a .png, .svg or .pdf")
    if not file.parent.is_dir():
        raise InputError(f"--plot {str(file)!r}: there is no folder {str(file.parent)!r}; make it first")
    if config.inputs == "patches":
        raise InputError("pictures have one length, so there is nothing to draw over it; use --measure alone")
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    longest = check_lengths(config, asked["length"], asked["source_length"]).target
    lengths = sorted({max(2, longest * i // 8) for i in range(1, 9)})
    works = [asked | {"length": n} for n in lengths]
    said = [forecast(config, work, chunked_loss=not measured) for work in works]
    seconds, label = [report.seconds(limits.rate, limits.bandwidth) for report in said], "forecast"
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    dots: dict[str, list[float]] = {}
    if measured:
        from clearhead.costs.measurement import Calibration, measure

        runs = [_work(config, work) for work in works]
        found = measure(*runs, repeats=9)  # the fastest of each: a busy machine bends curves
        middle = len(runs) // 2 - 1
        calibration = Calibration(runs[middle], found[middle])
        seconds, label = [calibration.seconds(run) for run in runs], f"forecast from T = {lengths[middle]:,}"
        dots = {"time": [run.seconds for run in found], "memory": [run.peak_bytes / 1e9 for run in found]}
    lines = {"time": seconds, "memory": [report.peak_bytes / 1e9 for report in said]}
    fine = np.linspace(lengths[0], lengths[-1], 200)
    for axis, (what, unit) in zip(axes, (("time", "s"), ("memory", "GB")), strict=True):
        axis.plot(lengths, lines[what], color="#0072B2", label=label if what == "time" else "forecast")
        if dots:
            c, b, a = np.polyfit(lengths, dots[what], 2)
            axis.plot(lengths, dots[what], "o", color="#D55E00", label="measured")
            axis.plot(fine, a + b * fine + c * fine**2, ":", color="#D55E00", label=f"{a:.2g} {b:+.2g} T {c:+.2g} T²")
        axis.set(xlabel="length T", ylabel=f"{what} ({unit})", ylim=(0, None), xlim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.suptitle(f"{name}, {asked['mode']}, batch {asked['batch']}, {asked['precision']}, {asked['device']}")
    figure.savefig(file, dpi=110)
    plt.close(figure)
    console = wide_console()
    for what, real in dots.items():
        errors = [foretold / found - 1 for foretold, found in zip(lines[what], real, strict=True)]
        console.print(f"{what:<8} forecast {min(errors):+.1%} to {max(errors):+.1%} of measured", highlight=False)
    console.print(f"drawn to {file}", highlight=False)


def show_geometry(name: str | None, config: Config | None) -> None:
    from clearhead.costs import geometry as g

    console = wide_console()
    table = plain_table("n", "off 90°", "union", "greedy", "structured", "optimised", "upper bound", "popular formula")
    for n in (128, 768, 12288) if config is None else (config.d_model,):
        for degrees in (1, 2, 5):
            eps = math.sin(math.radians(degrees))
            bounds = (g.union_bound(n, eps), g.greedy_bound(n, eps), g.structured_bound(n, eps))
            packed = g.PACKED.get((n, degrees))
            popular = g.popular_formula(n, 90.0 - degrees) * math.log10(2)
            cells = [*map(_spell, bounds), f"{packed:,}" if packed else "", _spell(g.upper_bound(n, eps))]
            table.add_row(f"{n:,}", f"{degrees}°", *cells, f"1e{popular:,.0f}")
        table.add_section()
    console.print("how many directions fit in n dimensions, all pairs within so many degrees of a right angle\n")
    console.print(table, highlight=False)
    console.print(
        "\nFrom below: union, greedy, structured, optimised; the truth lies between their best and the upper bound.\n"
        "The popular formula, 2^((n/2)(1 - ln(1/sin a))), is wrong: it is above what is proven impossible.",
        highlight=False,
    )
    if config is None or name is None:
        n, count = 768, 2000
        seen, wanted = g.sample_coherence(n, count), g.expected_coherence(n, count)
        console.print(
            f"{count:,} random directions in {n} dimensions: worst pair {_off(seen)} off 90° (expected {_off(wanted)}; "
            f"no set of {count:,} can stay below {_off(g.least_coherence(n, count))}).",
            highlight=False,
        )
        return
    if config.vocab_size > 1:
        least = g.least_coherence(config.d_model, config.vocab_size)
        console.print(
            f"{name}: {config.vocab_size:,} tokens in {config.d_model:,} dimensions must contain a pair at least "
            f"{_off(least)} off 90°.",
            highlight=False,
        )
    if Path(name).exists() and config.inputs == "tokens":
        from clearhead.checkpoint import load

        show_angles(g.embedding_angles(load(Path(name)).get_parameter("tokens.weight")))


def show_angles(angles: Angles) -> None:
    """The histogram of pairwise angles, beside what random directions would have."""
    from clearhead.costs import geometry as g

    console = wide_console()
    seen = [i for i, pairs in enumerate(angles.histogram) if pairs]
    step = max(1, -(-(seen[-1] - seen[0] + 1) // 20))
    starts = range(seen[0] // step * step, seen[-1] + 1, step)
    shares = [sum(angles.histogram[i : i + step]) / angles.pairs for i in starts]
    table = plain_table("angle", "pairs", "random")
    table.add_column("")
    for start, share in zip(starts, shares, strict=True):
        random = sum(g.angle_density(angles.n, start + (i + 0.5) / 10) / 10 for i in range(10 * step))
        bar = "█" * round(40 * share / max(shares))
        table.add_row(f"{start}-{start + step}°", f"{share:.2%}", f"{random:.2%}", bar)
    console.print()
    console.print(table, highlight=False)
    console.print(
        f"\n{angles.count:,} rows: mean angle {angles.mean:.1f}°, {angles.share_within(2):.1%} of pairs within 2° of 90°; the pair "
        f"furthest off is {_off(angles.coherence)} off, and at least {_off(angles.bound)} it must be.",
        highlight=False,
    )


def _off(eps: float) -> str:
    return f"{math.degrees(math.asin(eps)):.2f}°"


def _spell(n: float | int) -> str:
    return f"{n:.1f}" if n < 20 else f"{n:,.0f}" if n < 1e6 else f"{n:.3g}"
