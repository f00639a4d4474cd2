"""What an experiment gives: tables, charts, and findings whose sentences follow from the numbers. Plain data, without torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Cell = str | int | float
Verdict = Literal["agrees", "contradicts", "not told apart"]


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Curve:
    """One line of a chart, or one group of bars: then `x` are names. On a map: one kind of points, with their `words`."""

    label: str
    x: tuple[Cell, ...]
    y: tuple[float, ...]
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    log_x: bool = False
    log_y: bool = False
    is_map: bool = False  # points in a plane, not lines: both axes have the same scale


@dataclass(frozen=True)
class Finding:
    """What is commonly said, what was measured, and whether the two agree."""

    claim: str
    measured: str
    verdict: Verdict


@dataclass(frozen=True)
class Result:
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]
    findings: tuple[Finding, ...]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Result:
        """The result that `dataclasses.asdict` and JSON made a dictionary of."""
        return cls(
            tuple(Table(t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"]))) for t in values["tables"]),
            tuple(
                replace(
                    Chart(**chart),
                    curves=tuple(
                        Curve(k["label"], tuple(k["x"]), tuple(k["y"]), tuple(k.get("words", ())))
                        for k in chart["curves"]
                    ),
                )
                for chart in values["charts"]
            ),
            tuple(Finding(**finding) for finding in values["findings"]),
        )


def judge(claim: str, measured: str, *, more: Sequence[float], less: Sequence[float], margin: float) -> Finding:
    """The claim says that `more` is above `less` (one number a seed). It agrees if every seed of the one is above every seed of
    the other by at least `margin`, contradicts if it is the other way round, and is otherwise not told apart."""
    if min(more) - max(less) >= margin:
        return Finding(claim, measured, "agrees")
    return Finding(claim, measured, "contradicts" if min(less) - max(more) >= margin else "not told apart")


def if_learnt(learnt: bool, finding: Finding) -> Finding:
    """The finding, if the models compared have learnt anything at all; else it says nothing of the claim."""
    if learnt:
        return finding
    return Finding(finding.claim, f"{finding.measured} The task is not learnt.", "not told apart")


def decide(claim: str, measured: str, holds: bool) -> Finding:
    """A claim about one number, or about counts: it agrees or it does not."""
    return Finding(claim, measured, "agrees" if holds else "contradicts")


def middle(values: Sequence[float]) -> float:
    """The median of the seeds."""
    return statistics.median(values)


def spell(values: Sequence[float], digits: int = 2) -> str:
    """The median of the seeds, and in brackets the smallest and the largest, if there are several."""
    median = f"{middle(values):.{digits}f}"
    return median if len(values) == 1 else f"{median} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def percent(values: Sequence[float]) -> str:
    """Shares of 1 as percent, as `spell` writes them."""
    return spell([100 * value for value in values], 0) + "%"
