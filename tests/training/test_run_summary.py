"""The summary before the first step."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from clearhead.training import meter as meters
from clearhead.training import run_summary
from clearhead.training.display import Display
from clearhead.training.evaluation import evaluation_steps, rows_to_evaluate
from clearhead.training.meter import Meter
from clearhead.training.run_summary import format_seconds, summarise
from training.tiny_tasks import ALONE, make, model_for, recipe_of, words, write

PEAK = 1e9


@pytest.fixture(autouse=True)
def peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed peak: measuring it takes time and varies."""
    monkeypatch.setattr(meters, "measure_peak", lambda device, dtype: PEAK)


def language(folder: Path, **train: Any) -> Any:
    data = dict(files=[write(folder / "text.txt", words(307))], length=13)
    return make(recipe_of("language", data=data, batch_tokens=7 * 13, **train), folder)


@pytest.mark.parametrize(("share", "said"), [(0.3, ", 30% of the machine's peak, 8 s"), (1.21, ", 8 s")])
def test_no_share_above_the_whole(share: float, said: str) -> None:
    """A peak that was measured while other programs ran is exceeded once they have ended."""
    written = io.StringIO()
    row = dict(step=3, loss=2.0, tokens_per_second=700.0, utilisation=share, seconds=8.0)
    Display(Console(file=written, width=200)).step(row)
    assert written.getvalue() == f"step 3: loss 2.0000, 700 tokens/s{said}\n"


def test_a_pipe_breaks_no_line_of_the_summary() -> None:
    written, value = io.StringIO(), "about 51 min, 3 min of it for evaluations; 0.15 GB of memory (11.5 GB free)"
    Display(Console(file=written, width=40)).begin({"device": "cpu", "forecast": value}, 0, 5)
    assert written.getvalue() == f"device    cpu\nforecast  {value}\n\n"


def test_a_summary(tmp_path: Path):
    task = language(tmp_path, steps=1234, checkpoint_every=17)
    model = model_for(task)
    meter = Meter(model.config, task, ALONE)
    tensors = {"a": torch.zeros(250_000)}
    table = summarise(task.recipe, task, model, meter, tensors)
    n = sum(p.numel() for p in model.parameters())
    assert f"decoder, 2 layers of width 22, {n:,} parameters" == table["model"]
    assert "1,234 steps of 91 tokens" in table["training"]
    assert f"{task.epoch(1234):.1f} epochs" in table["training"]
    assert table["checkpoints"] == "every 17 steps, 1.0 MB each"
    assert table["device"] == "cpu, float32 products at 1 GFLOP/s"
    usual = meter.flops / (run_summary.USUAL_UTILISATION * PEAK)
    evaluations = format_seconds(usual * evaluation_steps(task))
    assert table["forecast"].startswith(
        f"about {format_seconds(usual * (1234 + evaluation_steps(task)))} at 30% of that, "
    )
    assert f"{evaluations} of it for evaluations; " in table["forecast"]
    assert "GB free" in table["forecast"]
    assert "held out" in table["text"]
    assert "warning" not in table


def test_a_measured_step_is_the_forecast(tmp_path: Path):
    """Evaluations are counted by their rows, and a resumed run forecasts what is left."""
    task = language(tmp_path, steps=1000, evaluate_every=1, evaluate_rows=0)
    model = model_for(task)
    meter = Meter(model.config, task, ALONE)
    table = summarise(task.recipe, task, model, meter, {}, measured=1.0)
    held = sum(map(len, task.held_out()))
    evaluations = 1001 * held / 7 / 3  # 7 rows a step; a pass without gradients takes a third of one with
    assert table["forecast"].startswith(
        f"about {format_seconds(1000 + evaluations)}, {format_seconds(evaluations)} of it"
    )
    assert "at 30%" not in table["forecast"]
    half = summarise(task.recipe, task, model, meter, {}, measured=1.0, done=500)
    assert half["forecast"].startswith(f"about {format_seconds(500 + evaluations / 2)}, ")


def test_steps_that_grow_are_forecast_by_their_work(tmp_path: Path):
    """Half of the steps with half of the batch: three quarters of the time, of the tokens and of the evaluated rows."""
    task = language(tmp_path, steps=1000, evaluate_every=10, batch_doublings=1)
    model = model_for(task)
    meter = Meter(model.config, task, ALONE)
    # 3 and then 7 windows
    assert meter.work(0, 1000) == pytest.approx(meter.flops * (500 * 3 / 7 + 500))
    assert meter.work(499, 501) == pytest.approx(meter.flops * (3 / 7 + 1))
    assert rows_to_evaluate(task) == int(0.3 * 10 * 7 * 0.75)
    evaluations = evaluation_steps(task)
    for done, left in ((0, 500 * 3 / 7 + 500), (700, 300)):
        table = summarise(task.recipe, task, model, meter, {}, measured=1.0, done=done)
        assert table["forecast"].startswith(f"about {format_seconds(left + evaluations * (1 - done / 1000))}, ")
    assert "1,000 steps of 45 to 91 tokens" in table["training"]
    assert table["windows"] == "3 of 13 from step 0, 7 of 13 from step 500"


def test_shorter_windows_take_less_attention(tmp_path: Path):
    data = dict(files=[write(tmp_path / "text.txt", words(307))], length=64)
    task = make(recipe_of("language", data=data, batch_tokens=128, steps=10, length_doublings=3), tmp_path)
    work = [Meter(model_for(task).config, task, ALONE).work(step, step + 1) for step in range(10)]
    assert work == sorted(work)
    assert 0.5 * work[-1] < work[0] < work[-1]


def test_the_bar_moves_with_the_work() -> None:
    """So that the time left is right when steps grow; the numbers beside it are steps."""
    written = io.StringIO()
    with Display(Console(file=written, force_terminal=True, width=150)) as display:
        display.begin({}, 0, 10)
        row = dict(step=5, loss=2.0, tokens_per_second=700.0, utilisation=0.3, seconds=8.0, progress=0.25)
        display.step(row)
        (bar,) = display.bars.tasks
        assert (bar.completed, bar.total) == (2.5, 10)
        display.bars.refresh()
        move = display.progress("tokenising")
        move(1_500, 2_000)
        assert display.bars.tasks[-1].fields["text"] == "1,500/2,000"
    assert "5/10 loss 2.0000, 700 tokens/s" in written.getvalue()


def test_what_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_summary, "available_memory", lambda device: 1)
    task = language(tmp_path)
    model = model_for(task)
    table = summarise(task.recipe, task, model, Meter(model.config, task, ALONE), {})
    assert "may not fit in memory" in table["warning"]
    assert "train.accumulate" in table["warning"]


def test_what_learns_is_said(tmp_path: Path):
    task = language(tmp_path)
    model = model_for(task)
    model.requires_grad_(False)
    next(model.parameters()).requires_grad_(True)
    learnt = next(model.parameters()).numel()
    table = summarise(task.recipe, task, model, Meter(model.config, task, ALONE), {})
    assert table["model"].endswith(f"{learnt:,} of them learn")


@pytest.mark.parametrize("task_name", ["translate", "mask", "classify"])
def test_every_task_has_a_forecast(tmp_path: Path, task_name: str):
    data: dict[str, Any] = dict(length=31)
    match task_name:
        case "translate":
            lines = "\n".join(words(3, seed=i) for i in range(41))
            data |= dict(source=[write(tmp_path / "a", lines)], target=[write(tmp_path / "b", lines)])
        case "classify":
            rows = "".join(f"{words(3, seed=i)},{'yn'[i % 2]}\n" for i in range(41))
            data |= dict(files=[write(tmp_path / "t.csv", "text,label\n" + rows)])
        case _:
            data |= dict(files=[write(tmp_path / "a.txt", words(307))])
    task = make(recipe_of(task_name, data=data, batch_tokens=211, accumulate=3), tmp_path)
    model = model_for(task)
    meter = Meter(model.config, task, ALONE)
    assert meter.flops > 0
    assert summarise(task.recipe, task, model, meter, {})["forecast"].startswith("about ")


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0 s"), (119, "119 s"), (121, "2 min"), (7000, "117 min"), (9000, "2.5 h")]
)
def test_times_as_people_say_them(seconds: float, said: str):
    assert format_seconds(float(seconds)) == said
