"""Faults while training: gradients that are no number are skipped, and memory that does not suffice means smaller parts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.errors import ConfigError
from clearhead.training import train
from clearhead.training.optimizers import Optimizers
from clearhead.training.prefetch import StepBatch
from clearhead.training.recipe import Train
from clearhead.training.tasks.classification import PictureClasses
from clearhead.training.train_step import ForwardBackward, Update
from clearhead.training.trainer import Trainer
from tests.models.tiny import tiny
from tests.training.tiny_runs import Watching, make_recipe, metrics, read_checkpoint, stop_and_resume, weights

BAD = [math.nan, math.inf, -math.inf]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a number into one gradient of these steps."""
    gradients = Trainer._gradients

    def spoil(*steps: int, value: float = math.nan) -> None:
        def spoilt(self: Trainer, batch: StepBatch, step: int) -> Tensor:
            total = gradients(self, batch, step)
            if step in steps:
                grad = self.optimizers.parameters()[-1].grad
                assert grad is not None
                grad.view(-1)[0] = value
            return total

        monkeypatch.setattr(Trainer, "_gradients", spoilt)

    return spoil


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_skipped_step_changes_nothing(optimizer: Any, value: float) -> None:
    """Neither weights nor moments nor step counts, bit for bit; the step after it is as if it had not been."""

    def run(bad: bool) -> list[Tensor]:
        model = tiny("llama", dtype=torch.float32).train()
        options = Train(optimizer=optimizer, weight_decay=0.1)
        optimizers = Optimizers(model, options, lr=0.01)
        update, draw = Update(optimizers, clip=1.0), torch.Generator().manual_seed(0)
        for step in range(4):
            is_bad = bad and step == 2
            before = [t.clone() for t in (*optimizers.tensors().values(), *optimizers.parameters())]
            for parameter in optimizers.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            if step == 2:
                if not bad:
                    optimizers.zero_grad()
                    continue
                optimizers.parameters()[3].grad.view(-1)[5] = value  # type: ignore[union-attr]
            norm = update()
            after = [*optimizers.tensors().values(), *optimizers.parameters()]
            assert bool(norm.isfinite()) != is_bad
            same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
            assert all(same) if is_bad else not all(same)
        return [t.clone() for t in (*optimizers.tensors().values(), *optimizers.parameters())]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_skipped_steps_are_reported_and_the_run_goes_on(
    optimizer: str, tmp_path: Path, spoil: Callable[..., None]
) -> None:
    spoil(1, 2, 4, value=math.inf)
    recipe = make_recipe("language", tmp_path, log_every=2, optimizer=optimizer)
    out = train(recipe, tmp_path / "run", show=(show := Watching())).folder
    notes = [note for note in show.notes if "changed nothing" in note]
    assert notes == [
        f"{n} up to step {at} changed nothing: the gradient was NaN or infinite (more than train.max_skips=10 in a row end the run)"
        for n, at in (("1 step", 2), ("1 step", 3), ("1 step", 6))
    ]
    rows = [row for row in metrics(out) if row["kind"] == "train"]
    assert [row.get("skipped", 0) for row in rows] == [1, 2, 3]
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    # A run that is stopped and resumed counts the same.
    again = stop_and_resume(recipe, tmp_path / "again", 2, 4).folder
    assert weights(again) == weights(out)
    assert metrics(again) == metrics(out)


def test_too_many_in_a_row_end_the_run(tmp_path: Path, spoil: Callable[..., None]) -> None:
    spoil(1, 2, 3, 4)
    train(make_recipe("language", tmp_path, max_skips=4), tmp_path / "enough")
    with pytest.raises(ConfigError, match=r"gradients of the last 4 steps are no number .*at step 5; .* unharmed"):
        train(make_recipe("language", tmp_path, max_skips=3), tmp_path / "run")
    for checkpoint in (tmp_path / "run" / "checkpoints").glob("step-*"):
        assert all(bool(tensor.isfinite().all()) for tensor in read_checkpoint(checkpoint).values())
    # The streak is counted over a resume, too.
    recipe = make_recipe("language", tmp_path, max_skips=3)
    train(make_recipe("language", tmp_path, max_skips=3, steps=3), tmp_path / "short")
    with pytest.raises(ConfigError, match="gradients of the last 4 steps"):
        train(recipe, tmp_path / "short", resume=True)


def test_a_batch_with_nan_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = PictureClasses.batch

    def broken(self: PictureClasses, rows: Any, step: int) -> Any:
        made = batch(self, rows, step)
        name = next(name for name, tensor in made.items() if tensor.is_floating_point())
        if step == 3:
            made[name] = made[name].clone()
            made[name].view(-1)[7] = math.nan
        return made

    monkeypatch.setattr(PictureClasses, "batch", broken)
    result = train(make_recipe("pictures", tmp_path), tmp_path / "run", show=(show := Watching()))
    assert sum("1 step up to step 4 changed nothing" in note for note in show.notes) == 1
    assert math.isfinite(result.metrics["loss"])


# Memory.

OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    MemoryError(),
]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Exception], None]:
    """Let parts of more than so many rows fail, after they have added to some gradients."""
    run = ForwardBackward.run

    def bound(most: int, error: Exception) -> None:
        def limited(self: ForwardBackward, batch: Any, factor: Any) -> Tensor:
            loss = run(self, batch, factor)
            if len(next(iter(batch.values()))) > most:
                raise error
            return loss

        monkeypatch.setattr(ForwardBackward, "run", limited)

    return bound


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=["cuda", "cpu", "python"])
def test_smaller_parts_are_the_same_run(error: Exception, tmp_path: Path, bound: Callable[..., None]) -> None:
    """A batch of 4 rows in a memory for one: the run is that of accumulate=4, bit for bit, and says so; also when resumed."""
    expected = train(make_recipe("language", tmp_path, accumulate=4), tmp_path / "four").folder
    bound(1, error)
    recipe = make_recipe("language", tmp_path)
    out = train(recipe, tmp_path / "run", show=(show := Watching())).folder
    assert [note for note in show.notes if "memory" in note] == [
        f"memory does not suffice for {n} of a batch: from here on it is computed in {more}, whose gradients are added "
        f"(train.accumulate)"
        for n, more in (("1 part", 2), ("2 parts", 4))
    ]
    assert weights(out) == weights(expected)
    # Held-out batches have another size, and their sums another order.
    rows, wanted = ([row for row in metrics(run) if row["kind"] == "train"] for run in (out, expected))
    assert rows == wanted
    train(recipe, tmp_path / "again", show=Watching(2))
    train(recipe, tmp_path / "again", resume=True, show=(show := Watching()))
    assert not any("memory" in note for note in show.notes)
    assert weights(tmp_path / "again") == weights(out)
    state = json.loads((tmp_path / "again" / "checkpoints" / "step-00000006" / "state.json").read_text())["state"]
    assert state["accumulate"] == 4


def test_one_row_that_does_not_fit_is_one_line(tmp_path: Path, bound: Callable[..., None]) -> None:
    bound(0, OUT_OF_MEMORY[0])
    with pytest.raises(
        ConfigError, match=r"in train\.accumulate=4 parts, of about 1 rows each, and one row is too much; raise"
    ):
        train(make_recipe("language", tmp_path), tmp_path / "run")


def test_other_errors_are_not_taken_for_it(tmp_path: Path, bound: Callable[..., None]) -> None:
    bound(0, RuntimeError("size mismatch"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        train(make_recipe("language", tmp_path), tmp_path / "run")
