"""Classification of texts and pictures: padding changes nothing, and a picture varies only by seed, step and row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models.tiny import assert_same
from PIL import Image

from clearhead.errors import ClearheadError, ConfigError
from clearhead.training.tasks.classification import Classes, PictureClasses, TextClasses, are_pictures
from training.tiny_tasks import MODEL, all_held_out, make, model_for, one_by_one, recipe_of, sums, words, write

N = 61
LABELS = ["bad", "fine", "good"]


def table(n: int = N, labels: list[str] = LABELS, seed: int = 0) -> str:
    return "text,label\n" + "".join(f"{words(1 + i % 7, seed=i + seed)},{labels[i % len(labels)]}\n" for i in range(n))


def text_task(folder: Path, *, data: dict[str, Any] | None = None, pool: str = "mean", **train: Any) -> TextClasses:
    files = dict(files=[write(folder / "t.csv", table())], length=47, valid_share=0.2)
    recipe = recipe_of("classify", model=MODEL | dict(pool=pool), data=files | (data or {}), batch_tokens=197, **train)
    return make(recipe, folder)


PICTURES = MODEL | dict(inputs="patches", image_size=15, patch_size=5, n_channels=3, positions="learned")


def picture_task(folder: Path, *, data: dict[str, Any] | None = None, **train: Any) -> PictureClasses:
    draw = np.random.default_rng(0)
    for label in LABELS:
        for number in range(7):
            path = folder / "pictures" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (15, 15, 3), dtype=np.uint8)).save(path)
    files = dict(files=[str(folder / "pictures")], valid_share=0.25)
    recipe = recipe_of("classify", model=PICTURES, data=files | (data or {}), batch_tokens=50, **train)
    return make(recipe, folder)


@pytest.fixture(scope="module", params=["text", "text-first", "pictures"])
def task(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Classes:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "pictures":
        return picture_task(folder, data=dict(shift=2, flip=True), label_smoothing=0.1)
    return text_task(folder, pool="first" if "first" in request.param else "mean", label_smoothing=0.1, accumulate=2)


def double(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in batch.items()}


def as_double(task: Classes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures in float64, as the model is."""
    for name in ("batch", "held_out_batch"):
        plain = getattr(task, name)
        monkeypatch.setattr(task, name, lambda *args, plain=plain: double(plain(*args)))


# Logits become float32 before the loss: 2^-24 of each.
FLOAT32 = 1e-5


def test_a_padded_batch_is_its_rows(task: Classes, monkeypatch: pytest.MonkeyPatch):
    as_double(task, monkeypatch)
    model = model_for(task)
    for training in (False, True):
        model.train(training)
        rows = task.rows(1)
        assert len(rows) > 2
        assert_same(sums(task.losses(model, task.batch(rows, 1))), one_by_one(task, model, rows, 1), within=FLOAT32)
    model.eval()
    total = torch.stack([sums(task.losses(model, task.held_out_batch(rows))) for rows in task.held_out()]).sum(0)
    assert_same(total, one_by_one(task, model, all_held_out(task)), within=FLOAT32)
    assert sorted(all_held_out(task).tolist()) == list(range(len(task.valid_rows)))


def test_the_loss_is_torchs(task: Classes, monkeypatch: pytest.MonkeyPatch):
    as_double(task, monkeypatch)
    model = model_for(task).train()
    batch = task.batch(task.rows(0), 0)
    logits = model(batch["inputs"], batch.get("mask"))
    losses = task.losses(model, batch)
    for ours, smoothing in ((losses.goal, 0.1), (losses.loss, 0.0)):
        theirs = F.cross_entropy(logits, batch["labels"], label_smoothing=smoothing, reduction="sum")
        assert_same(ours.double(), theirs, within=FLOAT32)
    assert not losses.loss.requires_grad


def test_predictions_are_counted(task: Classes):
    for step in range(7):
        rows = task.rows(step)
        batch = task.batch(rows, step)
        assert task.predictions(rows, step) == int(task.count(batch)) == len(batch["inputs"])
        real = batch["mask"].sum() if "mask" in batch else len(rows) * 10  # nine patches and the class token
        assert task.tokens(rows, step) == int(real)


def test_labels_are_the_rows_own(task: Classes):
    assert task.labels == LABELS
    found = torch.cat([task.held_out_batch(rows)["labels"] for rows in task.held_out()])
    wanted = task.valid["label"].flat[task.valid_rows[all_held_out(task)]]
    assert found.tolist() == wanted.tolist()
    assert task.facts.fields["labels"] == tuple(LABELS)
    assert task.facts.fields["n_classes"] == 3


@pytest.mark.parametrize("samples", [0, 2])
def test_samples(tmp_path: Path, samples: int):
    for task in (text_task(tmp_path / "a", samples=samples), picture_task(tmp_path / "b", samples=samples)):
        _, written = task.write(model_for(task, dtype=torch.float32), final=False)
        assert len(written) == samples
        assert all(sample.output in LABELS and sample.wanted in LABELS for sample in written)


def test_rows_that_fill_a_batch_up_change_nothing(tmp_path: Path):
    task = text_task(tmp_path, label_smoothing=0.1)
    model = model_for(task).train()
    rows = task.rows(0)
    plain = task.batch(rows, 0)
    task.rounding = (13, 8)
    filled = task.batch(rows, 0)
    assert filled["inputs"].shape[0] % 13 == filled["inputs"].shape[1] % 8 == 0
    assert filled["inputs"].shape != plain["inputs"].shape
    assert_same(sums(task.losses(model, filled)), sums(task.losses(model, plain)))
    assert int(task.count(filled)) == len(rows) == task.predictions(rows, 0)
    assert len(task.write(model.eval(), final=True)[1]) == task.recipe.train.samples


def test_tokens_are_left_out_in_training_only(tmp_path: Path):
    task = text_task(tmp_path, data=dict(leave_out=0.4))
    rows = task.rows(0)
    lengths = task.store["text"].lengths[task.chosen[rows]]
    kept = task.batch(rows, 0)["mask"].sum(1).numpy()
    assert (kept >= 1).all()
    assert 0.4 < kept.sum() / lengths.sum() < 0.8
    again, later = task.batch(rows, 0), task.batch(rows, 1)
    assert torch.equal(again["mask"].sum(1), torch.from_numpy(kept))
    assert not torch.equal(later["mask"].sum(1), torch.from_numpy(kept))
    # What is left stands in the text's own order.
    text, thin = task.store["text"][int(task.chosen[rows[0]])].tolist(), again["inputs"][0][: kept[0]].tolist()
    left = iter(text)
    assert all(token in left for token in thin)
    held = task.held_out()[0]
    assert task.held_out_batch(held)["mask"].sum() == task.valid["text"].lengths[task.valid_rows[held]].sum()


def test_a_text_is_surrounded(tmp_path: Path):
    task = text_task(tmp_path)
    row = task.store["text"][0]
    assert (row[0], row[-1]) == (task.words.bos, task.words.eos)


def test_held_out_texts_have_the_same_labels(tmp_path: Path):
    """In another order, and not all of them."""
    task = text_task(tmp_path, data=dict(valid=[write(tmp_path / "v.csv", "text,label\nabc,good\ndeg,bad\n")]))
    assert [task.labels[i] for i in task.held_out_batch(np.arange(2))["labels"]] == ["good", "bad"]
    assert len(task.chosen) == N
    with pytest.raises(ClearheadError, match=r"other"):
        text_task(tmp_path / "b", data=dict(valid=[write(tmp_path / "w.csv", "text,label\nabc,other\n")]))


def test_held_out_classes_that_no_row_teaches_are_told(tmp_path: Path):
    files = [write(tmp_path / "a.csv", table(labels=[f"id {i}" for i in range(N)]))]
    task = text_task(tmp_path / "ids", data=dict(files=files))
    n = len(task.valid_rows)
    assert task.facts.notes == [f"{n} of {n} held-out rows have a class that no row to learn from has"]
    assert not text_task(tmp_path / "classes").facts.notes


def test_pictures_or_texts():
    assert are_pictures(recipe_of("classify", model=PICTURES, data={}))
    assert are_pictures(recipe_of("classify", model={"preset": "vit-b-32"}, data={}))
    assert not are_pictures(recipe_of("classify", data={}))


def test_a_picture_varies_only_by_seed_step_and_row(tmp_path: Path):
    task = picture_task(tmp_path, data=dict(shift=2, flip=True))
    rows = np.arange(11)
    whole = task.batch(rows, 3)["inputs"]
    assert torch.equal(task.batch(rows, 3)["inputs"], whole)
    for i in rows:
        assert torch.equal(task.batch(rows[i : i + 1], 3)["inputs"][0], whole[i])
    assert torch.equal(task.batch(rows[::-1].copy(), 3)["inputs"].flip(0), whole)
    assert not torch.equal(task.batch(rows, 4)["inputs"], whole)
    one = task.store["picture"].flat[0]
    varied = {task._augment(one, 3, row).tobytes() for row in range(50)}  # pyright: ignore[reportPrivateUsage]
    assert len(varied) > 25  # of 50 that are possible, each row draws its own
    other = picture_task(tmp_path, data=dict(shift=2, flip=True), seed=1)
    same = np.intersect1d(task.chosen, other.chosen)
    ours, theirs = (made.batch(np.searchsorted(made.chosen, same), 3)["inputs"] for made in (task, other))
    assert not torch.equal(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("shift", "flip"), [(0, False), (2, False), (0, True), (3, True)])
def test_a_picture_is_moved_and_mirrored(tmp_path: Path, shift: int, flip: bool):
    """Every augmentation occurs, and over many steps each about equally often."""
    task = picture_task(tmp_path, data=dict(shift=shift, flip=flip))
    plain = task.store["picture"].flat[task.chosen[0]].astype(np.float32) / 127.5 - 1
    wide = np.pad(plain, ((0, 0), (shift, shift), (shift, shift)), mode="edge")
    moves = [(y, x) for y in range(2 * shift + 1) for x in range(2 * shift + 1)]
    possible = {(y, x, 0): wide[:, y : y + 15, x : x + 15] for y, x in moves}
    if flip:
        possible |= {(y, x, 1): picture[:, :, ::-1] for (y, x, _), picture in list(possible.items())}
    keys = {picture.tobytes(): name for name, picture in possible.items()}
    assert len(keys) == len(possible)
    seen = [keys[task.batch(np.arange(1), step)["inputs"][0].numpy().tobytes()] for step in range(40 * len(possible))]
    counts = [seen.count(name) for name in possible]
    assert min(counts) > 40 - 5 * 40**0.5  # five standard deviations
    assert np.array_equal(
        task.held_out_batch(np.arange(1))["inputs"][0].numpy(),
        task.valid["picture"].flat[task.valid_rows[0]].astype(np.float32) / 127.5 - 1,
    )


def test_digits(tmp_path: Path):
    model = dict(PICTURES, image_size=8, patch_size=2, n_channels=1)
    task = make(
        recipe_of("classify", model=model, data=dict(embedded="digits", shift=1), batch_tokens=17 * 13), tmp_path
    )
    assert task.labels == [str(digit) for digit in range(10)]
    assert task.rows(0).shape == (13,)
    batch = task.held_out_batch(np.arange(5))
    assert batch["inputs"].shape == (5, 1, 8, 8)
    assert batch["inputs"].min() >= -1
    assert batch["inputs"].max() <= 1
    assert len(task.chosen) + len(task.valid_rows) == 1797
    losses = task.losses(model_for(task, dtype=torch.float32), batch)
    assert 0 <= int(losses.correct) <= 5


def test_a_preset_says_how_many_tokens_a_picture_is(tmp_path: Path):
    for model, side in (
        ({"preset": "vit-b-32"}, 32),
        ({"preset": "vit-b-32", "patch_size": 16}, 16),
        ({"inputs": "patches"}, 16),
    ):
        recipe = picture_task(tmp_path).recipe
        task = make(replace(recipe, model=model, train=replace(recipe.train, batch_tokens=197)), tmp_path)
        assert task.length == (224 // side) ** 2 + 1
        assert task.tokens(np.arange(3), 0) == 3 * task.length


def test_no_files_is_said(tmp_path: Path):
    for model in (MODEL, PICTURES):
        with pytest.raises(ConfigError, match=r"'classify' learns from data\.files"):
            make(recipe_of("classify", model=model, data={}), tmp_path)
