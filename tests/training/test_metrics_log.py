"""metrics.jsonl and TensorBoard: the lines of a resumed run equal those of an uninterrupted one. And the numbers of a row."""

from __future__ import annotations

import errno
import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.training import meter as meters
from clearhead.training.checkpoints import State
from clearhead.training.distributed import Processes
from clearhead.training.meter import Meter
from clearhead.training.metrics_log import MetricsLog
from clearhead.training.prefetch import make_step_batch
from training.tiny_tasks import ALONE, make, model_for, recipe_of, words, write

PEAK = 1e9


@pytest.fixture(autouse=True)
def peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed peak: measuring it takes time and varies."""
    monkeypatch.setattr(meters, "measure_peak", lambda device, dtype: PEAK)


def rows(first: int, last: int) -> list[dict[str, Any]]:
    return [
        {"step": step, "kind": kind, "loss": 1 / step, "samples": [{"output": "März 日本"}]}
        for step in range(first, last + 1)
        for kind in (["train", "valid"] if step % 3 == 0 else ["train"])
    ]


def fill(folder: Path, *, step: int, last: int, tensorboard: bool = False) -> None:
    log = MetricsLog(folder, step=step, tensorboard=tensorboard)
    for row in rows(step + 1, last):
        log.write(row)
    log.close()


def test_a_resumed_log_is_an_uninterrupted_one(tmp_path: Path):
    whole, killed = tmp_path / "a", tmp_path / "b"
    for folder in (whole, killed):
        folder.mkdir()
    fill(whole, step=0, last=13)
    for step, last in ((0, 7), (6, 11), (3, 5), (3, 13)):  # each goes on from a checkpoint before where the last got
        fill(killed, step=step, last=last)
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert [json.loads(line) for line in (whole / "metrics.jsonl").read_text("utf-8").splitlines()] == rows(1, 13)
    assert "März 日本" in (whole / "metrics.jsonl").read_text("utf-8")
    assert sorted(path.name for path in killed.iterdir()) == ["metrics.jsonl"]


@pytest.mark.parametrize("cut", range(1, 83, 3))
def test_half_a_line_is_dropped(tmp_path: Path, cut: int):
    """Cut anywhere, in the middle of a letter too."""
    fill(tmp_path, step=0, last=5)
    file = tmp_path / "metrics.jsonl"
    whole = file.read_bytes()
    line = whole.splitlines(keepends=True)[-1]
    assert cut < len(line)
    file.write_bytes(whole[:-cut])
    MetricsLog(tmp_path, step=5, tensorboard=False)
    kept = [json.loads(text)["step"] for text in file.read_text("utf-8").splitlines()]
    assert kept == [1, 2, 3, 3, 4, 5][: 6 if cut == 1 else 5]  # only its end missing: the line is whole


def test_lines_that_are_none_are_dropped(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(
        '\n[]\n{"kind": "train"}\nnull\n3\n{"step": 1, "kind": "train"}\n', encoding="utf-8"
    )
    MetricsLog(tmp_path, step=1, tensorboard=False)
    assert (tmp_path / "metrics.jsonl").read_text("utf-8") == '{"step": 1, "kind": "train"}\n'


def test_other_processes_write_nothing(tmp_path: Path):
    log = MetricsLog(None, step=0, tensorboard=True)
    log.write({"step": 1, "kind": "train"})
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_the_result_is_written_again(tmp_path: Path):
    lines = ['{"step": 3, "kind": "train"}', '{"step": 3, "kind": "valid"}', '{"step": 3, "kind": "result"}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    MetricsLog(tmp_path, step=3, tensorboard=False)
    assert (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines() == lines[:2]


def test_tensorboard_reads_it(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fill(tmp_path, step=0, last=7, tensorboard=True)
    fill(tmp_path, step=3, last=11, tensorboard=True)  # goes on from 3: what was written after it is purged
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "valid/loss"}
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in found] == list(range(1, 12))
    assert [value for _, value in found] == pytest.approx([1 / step for step in range(1, 12)])
    assert [event.step for event in events.Scalars("valid/loss")] == [3, 6, 9]


def test_without_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    fill(tmp_path, step=0, last=2, tensorboard=True)
    assert not (tmp_path / "tensorboard").exists()


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
    batches = [make_step_batch(task, step, ALONE) for step in range(3)]
    for batch, loss in zip(batches, (3.0, 5.0, 7.0), strict=True):
        clock.now += 2
        meter.add(batch, torch.tensor(loss), torch.tensor(loss / 10))
        state.step += 1
    meter.close(13, {"lr": 0.5})
    row, skipped = meter.row(state)
    assert row is not None
    assert skipped == 0
    assert row["loss"] == 15 / (3 * 7 * 13)  # a mean over predictions, not over steps
    assert row["grad_norm"] == pytest.approx(0.5)
    assert row["tokens_per_second"] == 3 * 7 * 13 / 6
    assert row["utilisation"] == pytest.approx(3 * meter.flops / 6 / PEAK)
    assert (row["step"], row["kind"], row["lr"]) == (13, "train", 0.5)
    assert (row["seconds"], row["tokens"]) == (56, 1000 + 3 * 7 * 13)
    meter.stamp(state)
    assert (state.seconds, state.tokens) == (56, 1000 + 3 * 7 * 13)
    assert row["epoch"] == task.epoch(13)
    # an evaluation takes no part in the speed, but in the time
    with meter.paused():
        clock.now += 100
    clock.now += 1
    meter.add(batches[0], torch.tensor(1.0), torch.tensor(1.0))
    meter.close(14, {})
    row, _ = meter.row(state)
    assert row is not None
    assert row["tokens_per_second"] == 7 * 13
    assert row["loss"] == 1 / (7 * 13)
    assert row["seconds"] == 157
    # the whole run: 4 steps in 7 s, the first in 2 s; the loop began 3 s after the run
    speed = meter.speed(14, 3.0)
    assert speed["tokens_per_second"] == 4 * 7 * 13 / 7
    assert speed["tokens_per_second_later"] == 3 * 7 * 13 / 5
    assert (speed["first_step_seconds"], speed["training_seconds"]) == (5, 7)


def test_a_row_of_metrics_leaves_skipped_steps_out(tmp_path: Path):
    task = language(tmp_path)
    meter, state = Meter(model_for(task).config, task, ALONE), State()
    meter.start(state)
    for step, (loss, norm) in enumerate(((2.0, 1.0), (math.nan, math.inf), (4.0, 3.0), (1.0, math.nan))):
        meter.add(make_step_batch(task, step, ALONE), torch.tensor(loss), torch.tensor(norm))
    meter.close(4, {})
    meter.add(make_step_batch(task, 4, ALONE), torch.tensor(9.0), torch.tensor(9.0))  # a step of the next row
    row, skipped = meter.row(state)
    assert row is not None
    assert (row["step"], row["skipped"], skipped) == (4, 2, 2)
    assert row["loss"] == pytest.approx(6 / (2 * 7 * 13))
    assert row["grad_norm"] == 2
    assert state.skips == 1
    meter.add(make_step_batch(task, 5, ALONE), torch.tensor(math.nan), torch.tensor(math.nan))
    assert meter.drop_skipped(state) == 1
    assert (state.skips, state.skipped, len(meter.losses)) == (1, 3, 1)


@pytest.mark.parametrize(
    ("accumulate", "world_size", "parallel"), [(1, 1, "ddp"), (7, 1, "ddp"), (1, 7, "ddp"), (1, 7, "fsdp")]
)
def test_operations_of_a_step_do_not_depend_on_how_it_is_cut(
    tmp_path: Path, accumulate: int, world_size: int, parallel: Any
):
    task = language(tmp_path, accumulate=accumulate, parallel=parallel)
    config = model_for(task).config
    whole = Meter(config, language(tmp_path), ALONE)
    meter = Meter(config, task, Processes(torch.device("cpu"), 0, world_size))
    assert meter.flops == pytest.approx(whole.flops, rel=1e-6)


def test_a_full_disk_with_tensorboard_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of TensorBoard's thread comes to ours, and prints nothing by itself."""
    record_writer = pytest.importorskip("tensorboard.summary.writer.record_writer")
    printed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    log = MetricsLog(tmp_path, step=0, tensorboard=True)

    def full(self: object, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(record_writer.RecordWriter, "write", full)

    def write_many() -> None:
        for step in range(1000):
            log.write({"step": step, "kind": "train", "loss": 1.0})

    with pytest.raises(OSError, match="No space left"):
        write_many()
    assert printed == []
