"""Language modelling: documents in one window do not attend to each other, and sums over batches are sums over rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models.tiny import assert_same

from clearhead.errors import ConfigError, InputError
from clearhead.kernels.cross_entropy import IGNORED
from clearhead.layers.masks import documents
from clearhead.models import Decoder
from clearhead.training.tasks.language_modeling import Language, split_windows
from training.tiny_tasks import MODEL, all_held_out, make, model_for, one_by_one, recipe_of, sums, words, write

LENGTH = 13


def language(folder: Path, *, documents: str = "line", model: dict[str, Any] | None = None, **train: Any) -> Language:
    lines = "\n".join(words(1 + i % 3, seed=i) for i in range(101))
    data = dict(files=[write(folder / "text.txt", lines)], documents=documents, length=LENGTH, valid_share=0.3)
    return make(recipe_of("language", model=model, data=data, batch_tokens=7 * LENGTH, **train), folder)


@pytest.mark.parametrize("positions", ["rotary", "learned", "alibi", "sinusoidal"])
def test_packed_documents_are_documents_alone(tmp_path: Path, positions: str):
    task = language(tmp_path, model={**MODEL, "positions": positions})
    model = model_for(task)
    assert isinstance(model, Decoder)
    batch = task.batch(task.rows(3), 3)
    assert "documents" in batch
    logits = model.project(model.states(batch["tokens"], documents(batch["documents"]), positions=batch["positions"]))
    total, n_documents = torch.zeros(3, dtype=torch.float64), 0
    for row in range(len(batch["tokens"])):
        numbers = batch["documents"][row]
        for number in numbers.unique():
            inside = numbers == number
            alone = model(batch["tokens"][row : row + 1, inside])[0]
            assert_same(logits[row, inside], alone)
            targets = batch["targets"][row, inside]
            loss = F.cross_entropy(alone, targets, reduction="sum")
            total += torch.stack([loss, loss, (alone.argmax(-1) == targets).sum().double()]).detach()
            n_documents += 1
    assert n_documents > 2 * len(batch["tokens"])
    assert_same(sums(task.losses(model, batch)), total)


def test_a_window_of_one_document_needs_no_mask(tmp_path: Path):
    task = language(tmp_path, documents="file")
    model = model_for(task)
    batch = task.batch(task.rows(0), 0)
    assert batch.keys() == {"tokens", "targets"}
    places = torch.arange(LENGTH).expand_as(batch["tokens"])
    spelt = {**batch, "documents": torch.zeros_like(places), "positions": places}
    assert_same(sums(task.losses(model, batch)), sums(task.losses(model, spelt)))


def test_positions_count_anew_in_each_document():
    numbers = torch.tensor([[4, 4, 4, 5, 6, 6, -1], [7, 7, 7, 7, 7, 8, 8]])
    tokens = torch.arange(14).view(2, 7)
    batch = split_windows(tokens, numbers)
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 0]]
    assert batch["tokens"].tolist() == tokens[:, :-1].tolist()
    assert batch["targets"].tolist() == [[1, 2, 3, 4, 5, IGNORED], [8, 9, 10, 11, 12, 13]]


def test_a_batch_is_its_rows(tmp_path: Path):
    task = language(tmp_path, label_smoothing=0.1)
    model = model_for(task)
    rows = task.rows(5)
    assert_same(sums(task.losses(model, task.batch(rows, 5))), one_by_one(task, model, rows, 5))
    model.train()  # no dropout here: only the goal changes, by its smoothing
    smoothed = sums(task.losses(model, task.batch(rows, 5)))
    assert_same(smoothed, one_by_one(task, model, rows, 5))
    assert smoothed[0] > smoothed[1] * 1.001


def test_held_out_rows_one_by_one(tmp_path: Path):
    task = language(tmp_path, accumulate=3)
    model = model_for(task)
    total = torch.stack([sums(task.losses(model, task.held_out_batch(rows))) for rows in task.held_out()]).sum(0)
    assert_same(total, one_by_one(task, model, all_held_out(task)))


def test_each_held_out_token_is_predicted_once(tmp_path: Path):
    task = language(tmp_path)
    targets = torch.cat([task.held_out_batch(rows)["targets"] for rows in task.held_out()])
    real = targets != IGNORED
    flat = task.valid._column.flat  # pyright: ignore[reportPrivateUsage]
    stream = torch.from_numpy(flat[task.valid.start + 1 : task.valid.stop].astype(np.int64))
    assert targets[real].tolist() == stream.tolist()
    assert sum(int(task.count(task.held_out_batch(rows))) for rows in task.held_out()) == len(stream)


def test_predictions_are_counted(tmp_path: Path):
    task = language(tmp_path)
    for step in range(23):  # several epochs
        rows = task.rows(step)
        counted = task.predictions(rows, step), task.tokens(rows, step), int(task.count(task.batch(rows, step)))
        assert counted == (7 * LENGTH,) * 3


GROWING: dict[str, Any] = dict(steps=23, batch_doublings=2, length_doublings=1, growth=0.5)


def growing(folder: Path, **train: Any) -> Language:
    """Windows of 7, then 14, and 1, 3 and at last 7 of the long ones a step."""
    lines = "\n".join(words(1 + i % 3, seed=i) for i in range(101))
    data = dict(files=[write(folder / "text.txt", lines)], documents="line", length=14, valid_share=0.3)
    return make(recipe_of("language", data=data, batch_tokens=7 * 14, **{**GROWING, **train}), folder)


def test_batch_and_length_grow(tmp_path: Path):
    task = growing(tmp_path)
    shapes = [tuple(task.batch(task.rows(step), step)["tokens"].shape) for step in range(23)]
    assert shapes == 6 * [(2, 7)] + 5 * [(6, 7)] + 12 * [(7, 14)]
    assert task.shapes == [(0, 6, (2, 7, 0)), (6, 11, (6, 7, 0)), (11, 23, (7, 14, 0))]
    assert not task.is_even
    assert task.facts.table["windows"] == "2 of 7 from step 0, 6 of 7 from step 6, 7 of 14 from step 11"
    for step in range(23):
        rows = task.rows(step)
        count = shapes[step][0] * shapes[step][1]
        assert task.predictions(rows, step) == task.tokens(rows, step) == count
        assert int(task.count(task.batch(rows, step))) == count
    seen = sum(rows * length for rows, length in shapes)
    assert task.epoch(23) == pytest.approx(seen / (14 * len(task.windows)))
    assert {task.held_out_batch(rows)["tokens"].shape[1] for rows in task.held_out()} == {14}


def test_shorter_windows_are_parts_of_the_long_ones(tmp_path: Path):
    """With a length schedule the steps predict the same tokens."""
    short, long = (
        growing(tmp_path / "a", batch_doublings=0),
        growing(tmp_path / "b", batch_doublings=0, length_doublings=0, growth=0.5),
    )
    for step in range(23):
        parts, whole = (task.batch(task.rows(step), step) for task in (short, long))
        for name in ("tokens", "targets"):
            assert parts[name].flatten().tolist() == whole[name].flatten().tolist()


def test_short_windows_one_by_one(tmp_path: Path):
    task = growing(tmp_path)
    model = model_for(task)
    rows = task.rows(6)
    assert_same(sums(task.losses(model, task.batch(rows, 6))), one_by_one(task, model, rows, 6))


def test_held_out_text_is_not_learnt_from(tmp_path: Path):
    task = language(tmp_path)
    for step in range(40):
        assert (task.rows(step) + LENGTH + 1 <= task.windows.stop).all()
    assert task.windows.stop == task.valid.start


def test_checkpointing_changes_nothing(tmp_path: Path):
    plain, careful = (language(tmp_path / name, checkpointing=name == "b") for name in "ab")
    model = model_for(plain).train()
    found = []
    for task in (plain, careful):
        model.zero_grad()
        losses = task.losses(model, task.batch(task.rows(0), 0))
        losses.goal.backward()
        found.append([sums(losses), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


def test_metrics(tmp_path: Path):
    task = language(tmp_path)
    found = task.metrics(loss=20.0, correct=3.0, count=10.0)
    assert found["loss"] == 2
    assert found["accuracy"] == 0.3
    assert math.isclose(found["perplexity"], math.exp(2))
    # a character is a byte here; each line has one end more than its bytes
    assert found["bits_per_byte"] > 2 / math.log(2)
    assert math.isclose(found["bits_per_byte"] * task.bytes_per_token, 2 / math.log(2))
    assert task.metrics(loss=1e9, correct=0.0, count=1.0)["perplexity"] == math.exp(700)  # a number still


@pytest.mark.parametrize("samples", [0, 2])
def test_samples_go_on_with_held_out_text(tmp_path: Path, samples: int):
    task = language(tmp_path, samples=samples)
    scores, written = task.write(model_for(task), final=False)
    assert scores == {}
    assert len(written) == samples
    assert written == task.write(model_for(task), final=False)[1]  # drawn with a fixed seed
    if samples:
        tokens, _ = task.valid.batch(task.valid.in_order()[:1])
        assert written[0].input == task.words.decode(tokens[0, : LENGTH // 2].tolist())
        assert written[0].wanted == task.words.decode(tokens[0, LENGTH // 2 : LENGTH].tolist())


def test_a_sample_s_prompt_is_real_text(tmp_path: Path):
    """The last window of the held-out text may end before its prompt would."""
    data = dict(files=[write(tmp_path / "text.txt", words(80))], length=16, valid_share=0.06)
    task = make(recipe_of("language", data=data, samples=3), tmp_path)
    n = task.valid.stop - task.valid.start
    assert 16 < n < 16 + 8
    (sample,) = task.write(model_for(task), final=True)[1]
    assert len(sample.input) == 8


def test_pictures_of_the_first_and_last_layer(tmp_path: Path):
    task = language(tmp_path)
    first, last = task.attention_pictures(model_for(task, dtype=torch.float32))
    assert "Layer 0" in first.title
    assert "Layer 1" in last.title
    assert np.asarray(last.weights).shape == (LENGTH, LENGTH)


def test_facts(tmp_path: Path):
    task = language(tmp_path)
    assert task.facts.fields == dict(shape="decoder", vocab_size=task.words.vocab_size, max_len=LENGTH)
    assert task.facts.generation.eos == (task.words.eos,)
    assert "held out" in task.facts.table["text"]


def test_the_tokenizer_is_kept(tmp_path: Path):
    first = language(tmp_path)
    write(tmp_path / "text.txt", "other letters: xyz")  # a run that goes on keeps its tokenizer
    assert (tmp_path / "run" / "tokenizer.json").is_file()
    with pytest.raises(InputError, match="too few"):
        make(first.recipe, tmp_path)


def test_no_files_is_said(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"'language' learns from data\.files.*none.*files"):
        make(recipe_of("language", data={}), tmp_path)


def test_held_out_files(tmp_path: Path):
    data = dict(files=[write(tmp_path / "a.txt", words(97))], valid=[write(tmp_path / "b.txt", words(31, seed=9))])
    task = make(recipe_of("language", data=dict(data, length=LENGTH)), tmp_path)
    tokens, _ = task.valid.batch(task.valid.in_order()[:1])
    assert words(31, seed=9).startswith(task.words.decode(tokens[0].tolist()))
    assert task.windows.stop == len(words(97)) + 1
