"""A training run in a terminal or a notebook: a summary, a progress bar, a line for each evaluation, and the result."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from clearhead.training.callbacks import Callbacks, Row
from clearhead.training.metric_format import spell_metrics
from clearhead.training.run_folder import read_run

if TYPE_CHECKING:
    from clearhead.training.loop import Result


class Display(Callbacks):
    """Draws a progress bar on a terminal. Into a pipe it writes a line for each logged step."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, force_jupyter=False)  # a notebook gets lines, as a pipe does
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.bars = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.steps: Any = None
        self.began = self.total = 0  # at this step; the steps of the whole run

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
            self.bars.update(bar, completed=done, total=total, visible=done < total, text=f"{done:,}/{total:,}")

        return move

    def begin(self, summary: dict[str, str], step: int, steps: int) -> None:
        if self.console.is_terminal:
            table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
            for name, value in summary.items():
                table.add_row(Text(name, style="bold"), Text(value))
            self.console.print(table, soft_wrap=True)
        else:  # a line each, as long as it is: a pipe has no width to break it at
            for name, value in summary.items():
                self.say(f"{name:<{max(map(len, summary))}}  {value}")
        self.began, self.total = step, steps
        if step:
            self.say(f"going on from step {step:,}", "bold")
        self.console.print()
        self.steps = self.bars.add_task("training", total=steps, completed=step, text=f"{step:,}/{steps:,}")

    def step(self, row: Row) -> None:
        share = row["utilisation"]
        # The peak is measured once, at the start: where other programs ran then and have ended, a share of it means nothing.
        spelled = f", {share:.0%} of the machine's peak" if share <= 1 else ""
        text = f"loss {row['loss']:.4f}, {row['tokens_per_second']:,.0f} tokens/s{spelled}"
        if self.bars.disable:
            self.say(f"step {row['step']:,}: {text}, {row['seconds']:.0f} s")
        else:
            # By work, not by steps: they may grow, and the time left follows from the bar.
            done, count = row["progress"] * self.total, f"{row['step']:,}/{self.total:,}"
            self.bars.update(self.steps, completed=done, text=f"{count} {text}")

    def evaluated(self, row: Row) -> None:
        self.say(f"step {row['step']:,}, held out: {spell_metrics(row)}", "bold")
        if row.get("samples"):
            one = row["samples"][0]
            self.say(f"  {short(one['input'])} -> {short(one['output'])}", "dim")

    def end(self) -> None:
        if self.steps is not None:
            self.bars.update(self.steps, visible=False)

    def report(self, result: Result) -> None:
        """The result with its samples, or how to go on."""
        if int(os.environ.get("RANK", "0")):  # one of several processes, and not the one that prints
            return
        if result.is_complete:
            self._finish(result)
        else:
            self._interrupted(result)

    def _finish(self, result: Result) -> None:
        self.console.print()
        self.say(f"result, on held-out data: {spell_metrics(result.metrics)}", "bold green")
        # A language model continues a text in its own way: the text itself is one of many that are right.
        one_is_right = read_run(result.folder).task != "language"
        for sample in result.metrics.get("samples", [])[:5]:
            differs = one_is_right and sample["output"] != sample["wanted"]
            mark = f"   (wanted: {short(sample['wanted'])})" if differs else ""
            self.say(f"  {short(sample['input'])} -> {short(sample['output'])}{mark}")
        if result.speed:
            self.say(f"speed   {spell_speed(result.speed, self.began)}")
        self.say(f"model   {result.folder}")
        self.say(f"report  {result.folder / 'report.html'}")

    def _interrupted(self, result: Result) -> None:
        if result.step:
            self.say(f"stopped after step {result.step:,}; everything is saved. Go on with:", "bold")
        else:
            kept = "its recipe and tokenizer" if (result.folder / "tokenizer_config.json").is_file() else "its recipe"
            self.say(
                f"stopped before the first step; {kept} and finished parts of the data are kept. Go on with:", "bold"
            )
        self.say(f"  clearhead train --resume {result.folder}")


def spell_speed(row: Row, began: int) -> str:
    """`began`: the step at which this process began, which is what it knows the speed of."""
    later = row.get("tokens_per_second_later")
    spelled = f"{row['tokens_per_second']:,.0f} tokens/s {f'since step {began:,}' if began else 'over the run'}"
    return spelled + (
        f", {later:,.0f} after the first step, which ended after {row['first_step_seconds']:.1f} s" if later else ""
    )


def next_commands(result: Result) -> list[str]:
    """What to do with a run's result: commands that can be copied."""
    folder, recipe = shlex.quote(str(result.folder)), read_run(result.folder)
    samples = result.metrics.get("samples") or [{"input": "some text"}]
    text = shlex.quote(" ".join(samples[0]["input"].split()[:5]) or "some text")
    match recipe.task:
        case "language":
            return [f"generate {folder} {text}", f"evaluate {folder} FILE", f"explore {folder} {text}"]
        case "translate":
            evaluate = f"evaluate {folder} --source FILE --target FILE"
            return [f"translate {folder} FILE", evaluate, f"explore {folder} {text}"]
        case "mask":
            return [f"train classify TABLE --from {folder}", f"evaluate {folder} FILE", f"explore {folder} {text}"]
        case _:
            what = "PICTURE --export page.html" if recipe.model.get("inputs") == "patches" else text
            return [f"classify {folder} FILE", f"evaluate {folder} FILE", f"explore {folder} {what}"]


def in_notebook() -> bool:
    """Whether this runs in a Jupyter kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def short(text: str, width: int = 60) -> str:
    """The text on one line, cut to `width` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"
