"""A training run in the terminal: a summary, a progress bar, a line for each evaluation, and the result."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from clearhead.cli.metric_format import spell_metrics
from clearhead.training.callbacks import Callbacks, Row
from clearhead.training.loop import Result


class Display(Callbacks):
    """Draws a progress bar on a terminal. Into a pipe it writes a line for each logged step."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.bars = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.steps: Any = None

    def __enter__(self) -> Display:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)

    def note(self, text: str) -> None:
        self.say(text, "yellow")

    def progress(self, title: str) -> Callable[[int, int], None]:
        bar = self.bars.add_task(title, total=None, text="", visible=False)

        def move(done: int, total: int) -> None:
            self.bars.update(bar, completed=done, total=total, visible=done < total)

        return move

    def begin(self, summary: dict[str, str], step: int, steps: int) -> None:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for name, value in summary.items():
            table.add_row(Text(name, style="bold"), Text(value))
        self.console.print(table, soft_wrap=True)
        if step:
            self.say(f"going on from step {step:,}", "bold")
        self.console.print()
        self.steps = self.bars.add_task("training", total=steps, completed=step, text="")

    def step(self, row: Row) -> None:
        text = f"loss {row['loss']:.4f}, {row['tokens_per_second']:,.0f} tokens/s, {row['utilisation']:.0%} of the machine's peak"
        if self.bars.disable:
            self.say(f"step {row['step']:,}: {text}, {row['seconds']:.0f} s")
        else:
            self.bars.update(self.steps, completed=row["step"], text=text)

    def evaluated(self, row: Row) -> None:
        self.say(f"step {row['step']:,}, held out: {spell_metrics(row)}", "bold")
        if row.get("samples"):
            one = row["samples"][0]
            self.say(f"  {short(one['input'])} -> {short(one['output'])}", "dim")

    def end(self) -> None:
        if self.steps is not None:
            self.bars.update(self.steps, visible=False)

    def finish(self, result: Result) -> None:
        if self.steps is None:  # one of several processes, and not the one that prints
            return
        self.console.print()
        self.say(f"result, on held-out data: {spell_metrics(result.metrics)}", "bold green")
        for sample in result.metrics.get("samples", [])[:5]:
            mark = "" if sample["output"] == sample["wanted"] else f"   (wanted: {short(sample['wanted'])})"
            self.say(f"  {short(sample['input'])} -> {short(sample['output'])}{mark}")
        self.say(f"model   {result.folder}")
        self.say(f"report  {result.folder / 'report.html'}")

    def interrupted(self, result: Result) -> None:
        if int(os.environ.get("RANK", "0")):  # one of several processes, and not the one that prints
            return
        if result.step:
            self.say(f"stopped after step {result.step:,}; everything is saved. Go on with:", "bold")
        else:
            kept = "its recipe and tokenizer" if (result.folder / "tokenizer_config.json").is_file() else "its recipe"
            self.say(
                f"stopped before the first step; {kept} and finished parts of the data are kept. Go on with:", "bold"
            )
        self.say(f"  clearhead train --resume {result.folder}")


def short(text: str, width: int = 60) -> str:
    """The text on one line, cut to `width` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
