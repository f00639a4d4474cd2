"""Tables of `clearhead cost`: the forecast, the measurement, and the largest batch or length that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clearhead.cli.console import plain_table, wide_console, write_rows
from clearhead.config import Config
from clearhead.costs.capacity import devices_needed, largest
from clearhead.costs.flops import Lengths, check_lengths
from clearhead.costs.forecast import COLUMNS, PARTS, Cost, cost, spell_figure
from clearhead.costs.units import parse_rate, parse_size, spell_count, spell_seconds
from clearhead.errors import InputError

if TYPE_CHECKING:
    from clearhead.costs.measurement import Workload


@dataclass(frozen=True)
class DeviceSpec:
    """A device: its memory in bytes, operations a second, and bytes read a second."""

    memory: int
    rate: float
    bandwidth: float

    @classmethod
    def read(cls, memory: str, rate: str, bandwidth: str) -> DeviceSpec:
        return cls(parse_size(memory), parse_rate(rate), parse_rate(bandwidth, "B/s"))


@dataclass(frozen=True)
class Case:
    """A model and what it does: `workload` holds the other arguments of `clearhead.costs.cost`."""

    name: str
    config: Config
    workload: dict[str, Any]

    @property
    def lengths(self) -> Lengths:
        return check_lengths(self.config, self.workload["length"], self.workload["source_length"])

    def forecast(self, **changes: Any) -> Cost:
        """What it takes, with these changes of the workload."""
        return cost(self.config, **{**self.workload, **changes})

    def measurable(self, **changes: Any) -> Workload:
        """The same, with these changes, as something that this machine can run."""
        from clearhead.costs.measurement import Workload

        if self.workload["shards"] > 1:
            raise InputError(
                f"--measure runs one device; got --shards {self.workload['shards']}; leave one of them out"
            )
        options = {name: value for name, value in self.workload.items() if name not in ("shards", "parallel")}
        return Workload(config=self.config, **{**options, **changes})

    def title(self) -> str:
        """Two lines: the model, and the workload."""
        w, config, lengths = self.workload, self.config, self.lengths
        length = f"length {lengths.target:,}" + (f" from a source of {lengths.source:,}" if lengths.source else "")
        words = [w["mode"], f"batch {w['batch']:,}", length, w["precision"]]
        words += [w["quantize"]] * bool(w["quantize"]) + ["checkpointing"] * w["checkpointing"]
        words += [w["optimizer"]] * (w["mode"] == "train")
        words += [f"{w['shards']} devices ({w['parallel']})"] * (w["shards"] > 1) + [f"on {w['device']}"]
        return f"{self.name}: {config.shape}, {config.depth} layers of width {config.d_model:,}\n{', '.join(words)}"


def show_forecast(case: Case, device: DeviceSpec) -> None:
    """Parameters, operations and bytes of each part; then how many devices and how much time they take."""
    report, console = case.forecast(), wide_console()
    console.print(case.title() + "\n")
    shown = [field for field in COLUMNS if getattr(report, field)]
    table = plain_table("part", *(COLUMNS[field] for field in shown))
    for part, label in PARTS.items():
        table.add_row(label, *(spell_figure(field, report.parts[field][part]) for field in shown))
    table.add_section()
    table.add_row("all", *(spell_figure(field, getattr(report, field)) for field in shown), style="bold")
    console.print(table)
    console.print()
    console.print(_devices(case, device))
    console.print(_time(case, report, device))
    length, max_len = case.workload["length"], case.config.max_len
    if length and length > max_len:
        console.print(f"note     {case.name} is made for {max_len:,} tokens", style="yellow")


def _devices(case: Case, device: DeviceSpec) -> str:
    one, workload = spell_bytes(device.memory), case.workload
    if workload["shards"] > 1:
        return f"memory   {case.forecast().peak_bytes / device.memory:.0%} of each device's {one} (--memory)"
    needed = devices_needed(case.config, device.memory, **workload)
    if needed is None:
        own = case.forecast(shards=2**20).peak_bytes  # what no number of shards divides
        copies = ", bfloat16 copies of weights" if workload["precision"] == "bfloat16" else ""
        why = f"each holds {spell_bytes(own)} of its own (activations{copies})"
        return f"memory   no number of devices of {one} is enough: {why}"
    how = " that share weights and states (fsdp)" if workload["mode"] == "train" and needed > 1 else ""
    return f"memory   {needed:,} {'device' if needed == 1 else 'devices'} of {one} (--memory){how}"


def _time(case: Case, report: Cost, device: DeviceSpec) -> str:
    seconds, lengths, workload = report.seconds(device.rate, device.bandwidth), case.lengths, case.workload
    length = 1 if workload["mode"] == "decode" else lengths.target + lengths.source
    tokens = workload["batch"] * workload["shards"] * length
    if seconds > report.flops / device.rate:
        bound = f"reading weights and cache at {spell_count(device.bandwidth, 'B/s')} (--bandwidth)"
    else:
        bound = f"{spell_count(device.rate, 'FLOP/s')} (--rate)"
    unit = "token/s" if case.config.inputs == "tokens" else "position/s"
    return f"time     {spell_seconds(seconds)}, {spell_count(tokens / seconds, unit)}: {bound}"


def show_fit(case: Case, size: str, *, as_json: bool = False) -> None:
    """The largest batch at the given length, and the largest length at the given batch, in memory of this size."""
    memory = parse_size(size)
    rows = [largest_fit(case, memory, "batch")]
    if case.config.inputs != "patches":
        rows.append(largest_fit(case, memory, "length"))
    if as_json:
        write_rows(rows, "json")
        return
    console = wide_console()
    console.print(case.title() + "\n")
    table = plain_table(f"in {spell_bytes(memory)}", "largest", "peak memory")
    labels = {
        "batch": f"batch at length {case.lengths.target:,}",
        "length": f"length at batch {case.workload['batch']:,}",
    }
    for row in rows:
        peak = spell_bytes(row["peak_bytes"]) if row["largest"] else "does not fit"
        table.add_row(labels[row["vary"]], f"{row['largest']:,}", peak)
        if row["vary"] == "length" and row["largest"] > case.config.max_len:
            table.add_row(f"  (the model is made for {case.config.max_len:,})", "", "")
    console.print(table)


def largest_fit(case: Case, memory: int, vary: str) -> dict[str, Any]:
    n = largest(case.config, memory, vary, **case.workload)
    changes = {vary: n}
    if vary == "length" and case.lengths.source and not case.workload["source_length"]:
        changes["source_length"] = n
    return {"vary": vary, "largest": n, "peak_bytes": case.forecast(**changes).peak_bytes if n else None}


def show_measured(case: Case, *, as_json: bool = False) -> None:
    """The forecast beside the measurement. The time is forecast from one run at half the length."""
    from clearhead.costs.measurement import Calibration, measure

    work = case.measurable()
    shorter = work.shorter()
    short, measured = measure(shorter, work, repeats=7)
    forecast = case.forecast(chunked_loss=False)
    there = [field for field in COLUMNS if getattr(measured, field, None)]
    rows: dict[str, tuple[Any, Any]] = {field: (getattr(forecast, field), getattr(measured, field)) for field in there}
    rows["seconds"] = Calibration(shorter, short).seconds(work), measured.seconds
    if as_json:
        write_rows([{"what": what, "forecast": pair[0], "measured": pair[1]} for what, pair in rows.items()], "json")
        return
    console = wide_console()
    console.print(case.title() + "\n")
    table = plain_table("", "forecast", "measured", "error")
    for field, (expected, actual) in rows.items():
        spell = spell_seconds if field == "seconds" else spell_bytes if field.endswith("bytes") else "{:,}".format
        table.add_row(COLUMNS.get(field, "time"), spell(expected), spell(actual), _error(expected, actual))
    console.print(table)
    run = f"length {shorter.lengths.target:,}" if shorter.batch == work.batch else f"batch {shorter.batch}"
    console.print(f"\ntime is forecast from one run at {run}, which took {spell_seconds(short.seconds)}")


def _error(expected: float | int, actual: float | int) -> str:
    return "exact" if expected == actual else f"{expected / actual - 1:+.1%}"


def spell_bytes(n: int) -> str:
    return spell_count(n, "B")
