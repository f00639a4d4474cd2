"""What is said before the first step, and how fast a run goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.training import summary
from clearhead.training.checkpoints import State
from clearhead.training.prefetch import make_step
from clearhead.training.processes import Processes
from clearhead.training.summary import Meter, spell, summarise
from training.made import ALONE, make, model_for, recipe_of, words, write

PEAK = 1e9


@pytest.fixture(autouse=True)
def peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of a known speed: measuring this one takes time, and its answer varies."""
    monkeypatch.setattr(summary, "measure_peak", lambda device, dtype: PEAK)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def language(folder: Path, **train: Any) -> Any:
    data = dict(files=[write(folder / "text.txt", words(307))], length=13)
    return make(recipe_of("language", data=data, batch_tokens=7 * 13, **train), folder)


def test_a_row_of_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    task = language(tmp_path)
    meter = Meter(model_for(task).config, task, ALONE)
    state = State(step=10, tokens=1000, seconds=50.0)
    meter.start(state)
    batches = [make_step(task, step, ALONE) for step in range(3)]
    for batch, loss in zip(batches, (3.0, 5.0, 7.0), strict=True):
        clock.now += 2
        meter.add((torch.tensor(loss), torch.tensor(loss / 10), batch))
        state.step += 1
    row = meter.row(state, {"lr": 0.5})
    assert row["loss"] == 15 / (3 * 7 * 13)  # a mean over predictions, not over steps
    assert row["grad_norm"] == pytest.approx(0.5)
    assert row["tokens_per_second"] == 3 * 7 * 13 / 6
    assert row["utilisation"] == pytest.approx(3 * meter.flops / 6 / PEAK)
    assert (row["step"], row["kind"], row["lr"]) == (13, "train", 0.5)
    assert (row["seconds"], row["tokens"]) == (56, 1000 + 3 * 7 * 13)
    assert (state.seconds, state.tokens) == (56, 1000 + 3 * 7 * 13)
    assert row["epoch"] == task.epoch(13)
    # an evaluation takes no part in the speed, but in the time
    with meter.paused():
        clock.now += 100
    clock.now += 1
    meter.add((torch.tensor(1.0), torch.tensor(1.0), batches[0]))
    row = meter.row(state, {})
    assert row["tokens_per_second"] == 7 * 13
    assert row["loss"] == 1 / (7 * 13)
    assert row["seconds"] == 157


@pytest.mark.parametrize(
    ("accumulate", "world", "parallel"), [(1, 1, "ddp"), (7, 1, "ddp"), (1, 7, "ddp"), (1, 7, "fsdp")]
)
def test_operations_of_a_step_do_not_depend_on_how_it_is_cut(
    tmp_path: Path, accumulate: int, world: int, parallel: Any
):
    task = language(tmp_path, accumulate=accumulate, parallel=parallel)
    config = model_for(task).config
    whole = Meter(config, language(tmp_path), ALONE)
    meter = Meter(config, task, Processes(torch.device("cpu"), 0, world))
    assert meter.flops == pytest.approx(whole.flops, rel=1e-6)


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
    assert spell(1234 * meter.flops / (summary.USUAL_SHARE * PEAK)) in table["forecast"]
    assert "GB free" in table["forecast"]
    assert "held out" in table["text"]
    assert "warning" not in table


def test_what_does_not_fit_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(summary, "available_memory", lambda device: 1)
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
    assert spell(float(seconds)) == said
