"""Masking: how many tokens are masked and how, that it depends only on the row, and that losses equal those of all logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models.tiny import assert_same

from clearhead.data import train_tokenizer
from clearhead.errors import ConfigError
from clearhead.kernels.cross_entropy import IGNORED
from clearhead.layers.masks import documents
from clearhead.training.tasks.masked_language_modeling import Masked
from training.tiny_tasks import MODEL, all_held_out, make, model_for, one_by_one, recipe_of, sums, words, write

LENGTH = 31


def masked(folder: Path, *, tokenizer: str = "chars", **train: Any) -> Masked:
    lines = "\n".join(words(1 + i % 11, seed=i) for i in range(101))
    data = dict(files=[write(folder / "text.txt", lines)], documents="line", length=LENGTH, valid_share=0.3)
    recipe = recipe_of(
        "mask",
        model=MODEL | dict(tie_embeddings=True),
        data=data | dict(tokenizer=tokenizer),
        batch_tokens=7 * LENGTH,
        **train,
    )
    return make(recipe, folder)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Masked:
    return masked(tmp_path_factory.mktemp("mask"), mask_share=0.3, label_smoothing=0.1)


def test_each_row_has_as_many_guesses(task: Masked):
    assert task.n_masked(LENGTH) == round(0.3 * LENGTH) == 9
    for step in range(11):
        rows = task.rows(step)
        batch = task.batch(rows, step)
        assert ((batch["targets"] != IGNORED).sum(1) == 9).all()
        assert int(task.count(batch)) == task.predictions(rows, step) == 9 * len(rows)


def test_short_windows_have_the_same_share_of_guesses(tmp_path: Path):
    text = write(tmp_path / "text.txt", words(307))
    train: dict[str, Any] = dict(steps=8, batch_tokens=5 * 20, mask_share=0.3, length_doublings=1)
    task = make(recipe_of("mask", data=dict(files=[text], length=20), **train), tmp_path)
    model = model_for(task).train()
    for step, guesses in ((0, 3), (7, 6)):
        rows = task.rows(step)
        batch = task.batch(rows, step)
        assert ((batch["targets"] != IGNORED).sum(1) == guesses).all()
        assert task.predictions(rows, step) == guesses * len(rows) == 30
        assert_same(sums(task.losses(model, batch)), one_by_one(task, model, rows, step))


def test_eight_hidden_one_replaced_one_left(task: Masked):
    hidden = replaced = total = 0
    counts = torch.zeros(LENGTH)
    for step in range(97):
        rows = task.rows(step)
        batch, (plain, _) = task.batch(rows, step), task.windows.batch(rows)
        plain, wanted = plain[:, :-1], batch["targets"] != IGNORED
        assert torch.equal(batch["targets"][wanted], plain[wanted])
        assert torch.equal(batch["tokens"][~wanted], plain[~wanted])
        shown = batch["tokens"][wanted]
        hidden += int((shown == task.mask).sum())
        changed = shown[(shown != task.mask) & (shown != plain[wanted])]
        assert not {*changed.tolist()} & task.words.special_ids
        replaced += len(changed)
        total += int(wanted.sum())
        counts += wanted.sum(0)
    # Means of some 6,000 draws, within five standard deviations. A replacement is the token itself once in `plain` times.
    n_plain = len(task.plain)
    for share, wanted_share in ((hidden / total, 0.8), (replaced / total, 0.1 * (1 - 1 / n_plain))):
        assert abs(share - wanted_share) < 5 * np.sqrt(wanted_share * (1 - wanted_share) / total)
    # every place has its turn
    expected = total / LENGTH
    assert ((counts - expected).abs() < 5 * expected**0.5).all()


def test_only_real_tokens_are_hidden(task: Masked):
    last = task.valid.in_order()[-1:]
    batch = task.held_out_batch(last)
    real = batch["documents"] >= 0
    assert not real.all()  # a short window
    assert (batch["targets"][~real] == IGNORED).all()
    assert int((batch["targets"] != IGNORED).sum()) == min(9, int(real.sum()))


def test_a_row_is_hidden_alike_whatever_the_batch(task: Masked):
    rows = task.rows(3)
    whole = task.batch(rows, 3)
    for i, row in enumerate(rows):
        alone = task.batch(np.array([row]), 3)
        assert all(torch.equal(alone[name][0], whole[name][i]) for name in whole)
    other = task.batch(rows, 4)
    assert not torch.equal(other["targets"], whole["targets"])


def test_another_seed_hides_others(task: Masked, tmp_path: Path):
    other = masked(tmp_path, mask_share=0.3, seed=1)
    rows = task.rows(3)
    assert not torch.equal(task.batch(rows, 3)["targets"], other.batch(rows, 3)["targets"])


def test_held_out_rows_are_always_hidden_alike(task: Masked):
    rows = task.valid.in_order()
    first, again = task.held_out_batch(rows), task.held_out_batch(rows[::-1].copy())
    assert all(torch.equal(first[name], again[name].flip(0)) for name in first)


def test_losses_are_those_of_all_logits(task: Masked):
    """Only masked positions are multiplied with the vocabulary; torch's loss over all positions must be the same."""
    model = model_for(task)
    for batch in (task.batch(task.rows(2), 2), task.held_out_batch(task.valid.in_order()[-3:])):
        logits = model(batch["tokens"], documents(batch["documents"]))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED, reduction="sum")
        correct = (logits.argmax(-1) == batch["targets"]).sum()
        assert_same(sums(task.losses(model, batch)), torch.stack([loss, loss, correct.double()]).detach())


def test_a_window_may_have_fewer_tokens_than_guesses(tmp_path: Path):
    task = masked(tmp_path, mask_share=0.97)
    model = model_for(task)
    rows = task.valid.in_order()[-1:]
    batch = task.held_out_batch(rows)
    n_real = int((batch["documents"] >= 0).sum())
    assert n_real < task.n_masked(LENGTH)
    assert int(task.count(batch)) == n_real
    logits = model(batch["tokens"], documents(batch["documents"]))
    loss = F.cross_entropy(logits[0], batch["targets"][0], ignore_index=IGNORED, reduction="sum")
    assert_same(task.losses(model, batch).loss, loss)


def test_a_batch_is_its_rows(task: Masked):
    model = model_for(task)
    for training in (True, False):
        model.train(training)
        rows = task.rows(5)
        assert_same(sums(task.losses(model, task.batch(rows, 5))), one_by_one(task, model, rows, 5))
    total = torch.stack([sums(task.losses(model, task.held_out_batch(rows))) for rows in task.held_out()]).sum(0)
    assert_same(total, one_by_one(task, model, all_held_out(task)))


def test_documents_do_not_see_each_other(task: Masked):
    """Changing a word in one document changes no loss in another."""
    model = model_for(task)
    batch = task.batch(task.rows(1), 1)
    row = next(i for i, n in enumerate(batch["documents"]) if len(n.unique()) > 1)
    numbers = batch["documents"][row]
    changed = batch["tokens"].clone()
    changed[row, 0] = task.plain[0] if int(changed[row, 0]) != task.plain[0] else task.plain[1]
    before, after = (model(tokens, documents(batch["documents"])) for tokens in (batch["tokens"], changed))
    others = numbers != numbers[0]
    assert_same(after[row, others], before[row, others])
    assert (after[row, ~others] - before[row, ~others]).abs().max() > 1e-3


@pytest.mark.parametrize("samples", [0, 2])
def test_samples(tmp_path: Path, samples: int):
    task = masked(tmp_path, samples=samples)
    _, written = task.write(model_for(task, dtype=torch.float32), final=True)
    assert len(written) == samples
    for sample in written:
        assert "<mask>" in sample.input
        assert "<mask>" not in sample.wanted


def test_facts(task: Masked):
    assert task.facts.fields == dict(shape="encoder", head="tokens", vocab_size=task.words.vocab_size, max_len=LENGTH)
    assert task.mask not in task.plain
    assert len(task.plain) == task.words.vocab_size - 5


def test_a_tokenizer_without_a_mask_is_refused(tmp_path: Path):
    train_tokenizer(texts=[words(53)], kind="chars").save(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"needs a mask token.*none"):
        masked(tmp_path, tokenizer=str(tmp_path / "plain"))
