"""The plot of `clearhead cost --plot`: time and memory over the length."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.cli.arguments import check_output
from clearhead.cli.console import wide_console
from clearhead.cli.cost_tables import Case, DeviceSpec
from clearhead.errors import InputError, MissingExtraError

UNITS = {"time": "s", "memory": "GB"}


@dataclass(frozen=True)
class Curves:
    """Time and memory at each length: as forecast, and as measured (empty without --measure)."""

    lengths: list[int]
    forecast: dict[str, list[float]]
    measured: dict[str, list[float]]
    label: str  # how the time was forecast


def plot_over_length(file: Path, case: Case, device: DeviceSpec, *, measured: bool) -> None:
    """Draw the forecast and, with `measured`, what this machine took, with a fit of a + bT + cT^2 through it."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingExtraError("--plot needs matplotlib, which is missing; pip install 'clearhead[plot]'") from None
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"--plot {str(file)!r} has no ending that says its kind; give a .png, .svg or .pdf")
    check_output("--plot", file)
    if case.config.inputs == "patches":
        raise InputError("pictures have one length, so there is nothing to draw over it; use --measure alone")
    mpl.use("Agg")
    curves = compute_curves(case, device, measured=measured)
    draw(file, case, curves)
    console = wide_console()
    for name, actual in curves.measured.items():
        errors = [expected / found - 1 for expected, found in zip(curves.forecast[name], actual, strict=True)]
        console.print(f"{name:<8} forecast {min(errors):+.1%} to {max(errors):+.1%} of measured")
    console.print(f"drawn to {file}")


def compute_curves(case: Case, device: DeviceSpec, *, measured: bool) -> Curves:
    """Eight lengths up to the longest. The measured time is also forecast: from the run at half of the lengths."""
    longest = case.lengths.target
    lengths = sorted({max(2, longest * i // 8) for i in range(1, 9)})
    reports = [case.forecast(length=n, chunked_loss=not measured) for n in lengths]
    memory = [report.peak_bytes / 1e9 for report in reports]
    if not measured:
        seconds = [report.seconds(device.rate, device.bandwidth) for report in reports]
        return Curves(lengths, {"time": seconds, "memory": memory}, {}, "forecast")
    from clearhead.costs.measurement import Calibration, measure

    runs = [case.measurable(length=n) for n in lengths]
    results = measure(*runs, repeats=9)  # the fastest of nine: other processes disturb single runs
    middle = len(runs) // 2 - 1
    calibration = Calibration(runs[middle], results[middle])
    return Curves(
        lengths,
        {"time": [calibration.seconds(run) for run in runs], "memory": memory},
        {"time": [run.seconds for run in results], "memory": [run.peak_bytes / 1e9 for run in results]},
        f"forecast from T = {lengths[middle]:,}",
    )


def draw(file: Path, case: Case, curves: Curves) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, name in zip(axes, UNITS, strict=True):
        draw_axis(axis, name, curves)
    workload = case.workload
    figure.suptitle(
        f"{case.name}, {workload['mode']}, batch {workload['batch']}, {workload['precision']}, {workload['device']}"
    )
    figure.savefig(file, dpi=110)
    plt.close(figure)


def draw_axis(axis: Any, name: str, curves: Curves) -> None:
    import numpy as np

    lengths = curves.lengths
    axis.plot(lengths, curves.forecast[name], color="#0072B2", label=curves.label if name == "time" else "forecast")
    if curves.measured:
        c, b, a = np.polyfit(lengths, curves.measured[name], 2)
        fine = np.linspace(lengths[0], lengths[-1], 200)
        axis.plot(lengths, curves.measured[name], "o", color="#D55E00", label="measured")
        axis.plot(fine, a + b * fine + c * fine**2, ":", color="#D55E00", label=f"{a:.2g} {b:+.2g} T {c:+.2g} T²")
    axis.set(xlabel="length T", ylabel=f"{name} ({UNITS[name]})", ylim=(0, None), xlim=(0, None))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
