"""Translation: padding changes no loss, counts are those of the batches, and outputs are scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
from models.tiny import assert_same

from clearhead.data import train_tokenizer
from clearhead.errors import ConfigError, InputError
from clearhead.kernels.cross_entropy import IGNORED
from clearhead.models import EncoderDecoder, build
from clearhead.training.prefetch import split_rows
from clearhead.training.tasks.translation import Translate, draw_alignment, score
from training.tiny_tasks import all_held_out, make, model_for, one_by_one, recipe_of, sums, words, write

N = 67


def translation(
    folder: Path, *, data: dict[str, Any] | None = None, batch_tokens: int = 211, **train: Any
) -> Translate:
    source = "\n".join(words(1 + i % 7, seed=i) for i in range(N))
    target = "\n".join(words(1 + i % 5, seed=i + N).upper() for i in range(N))
    files = dict(source=[write(folder / "a.txt", source)], target=[write(folder / "b.txt", target)])
    recipe = recipe_of(
        "translate",
        data={**files, "length": 43, "valid_share": 0.2, **(data or {})},
        batch_tokens=batch_tokens,
        **train,
    )
    return make(recipe, folder)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Translate:
    return translation(tmp_path_factory.mktemp("translate"), label_smoothing=0.1, accumulate=2)


def test_a_padded_batch_is_its_rows(task: Translate):
    model = model_for(task)
    for training in (False, True):
        model.train(training)
        for step in range(3):
            rows = task.rows(step)
            batch = task.batch(rows, step)
            assert not batch["mask"].all() or (batch["targets"] == IGNORED).any()
            assert_same(sums(task.losses(model, batch)), one_by_one(task, model, rows, step))


def test_rows_that_fill_a_batch_up_change_nothing(task: Translate, monkeypatch: pytest.MonkeyPatch):
    model = model_for(task).train()
    rows = task.rows(0)
    plain = task.batch(rows, 0)
    monkeypatch.setattr(task, "rounding", (13, 24))
    filled = task.batch(rows, 0)
    assert all(tensor.shape[0] % 13 == tensor.shape[1] % 24 == 0 for tensor in filled.values())
    assert filled["source"].shape != plain["source"].shape
    assert_same(sums(task.losses(model, filled)), sums(task.losses(model, plain)))
    assert int(task.count(filled)) == task.predictions(rows, 0)


def test_a_packed_batch_is_its_rows(tmp_path: Path):
    """Without padding, in rows of one shape: the losses and the gradients of the same pairs one by one."""
    task = translation(tmp_path, data={"length": 67}, label_smoothing=0.1, batch_tokens=384)
    model = model_for(task).train()
    assert task.pack(model)
    assert task.packed is not None
    shapes: set[tuple[torch.Size, ...]] = set()
    for step in range(5):
        rows = task.rows(step)
        packed = task.batch(rows, step)
        shapes.add(tuple(tensor.shape for tensor in packed.values()))
        assert int(task.count(packed)) == task.predictions(rows, step)
        shape, task.packed = task.packed, None
        padded = task.batch(rows, step)
        task.packed = shape
        ours, theirs = task.losses(model, packed), task.losses(model, padded)
        assert_same(sums(ours), sums(theirs))
        weights = list(model.parameters())
        for one, other in zip(*(torch.autograd.grad(x.goal, weights) for x in (ours, theirs)), strict=True):
            assert_same(one, other)
    assert len(shapes) == 1
    seen = np.concatenate([task.rows(step) for step in range(60) if task.epoch(step) < 1])
    assert sorted(seen.tolist()) == list(range(len(task.chosen)))


def test_a_part_of_a_packed_batch_is_smaller(tmp_path: Path):
    """Where memory did not suffice for a batch, it is computed in parts, each of which must take less."""
    task = translation(tmp_path, data={"length": 67}, batch_tokens=384)
    model = model_for(task)
    assert task.pack(model)
    rows = task.rows(0)
    whole = task.batch(rows, 0)
    task.accumulate = 4
    parts = [task.batch(part, 0) for part, _ in split_rows(rows, 0, 1, 4)]
    assert all(part["source"].numel() < 0.5 * whole["source"].numel() for part in parts)
    found = torch.stack([sums(task.losses(model, part)) for part in parts]).sum(0)
    assert_same(found, sums(task.losses(model, whole)))


def test_what_can_not_be_packed_stays_padded(tmp_path: Path):
    for data, model in (({"length": 43}, {}), ({"length": 67}, {"positions": "t5"}), ({"length": 67}, {"window": 3})):
        task = translation(tmp_path, data=data, batch_tokens=384)
        config = replace(model_for(task).config, **model)
        assert not task.pack(build(config))
        assert "mask" in task.batch(task.rows(0), 0)


def test_held_out_rows_one_by_one(task: Translate):
    model = model_for(task)
    total = torch.stack([sums(task.losses(model, task.held_out_batch(rows))) for rows in task.held_out()]).sum(0)
    assert_same(total, one_by_one(task, model, all_held_out(task)))
    assert sorted(all_held_out(task).tolist()) == list(range(len(task.valid_rows)))


def test_predictions_and_tokens_are_counted(task: Translate):
    for step in range(29):
        rows = task.rows(step)
        batch = task.batch(rows, step)
        assert task.predictions(rows, step) == int(task.count(batch))
        assert task.tokens(rows, step) == int(batch["mask"].sum() + task.count(batch))
        assert max(batch["source"].numel(), batch["targets"].numel()) <= 211


def test_what_is_read_is_what_is_written_one_place_later(task: Translate):
    batch = task.batch(task.rows(0), 0)
    assert (batch["target"][:, 0] == task.start).all()
    real = batch["targets"][:, :-1] != IGNORED
    assert torch.equal(batch["target"][:, 1:][real], batch["targets"][:, :-1][real])
    lengths = (batch["targets"] != IGNORED).sum(1)
    ends = batch["targets"][torch.arange(len(lengths)), lengths - 1]
    assert (ends == task.words.eos).all()


def test_the_split_holds_every_pair_once(task: Translate):
    assert sorted([*task.chosen, *task.valid_rows]) == list(range(N))
    seen = np.concatenate([task.rows(step) for step in range(int(1 / (task.epoch(1) - task.epoch(0)) + 0.5))])
    assert sorted(seen.tolist()) == list(range(len(task.chosen)))


def test_held_out_files(tmp_path: Path):
    data = dict(
        valid_source=[write(tmp_path / "c.txt", "abe\nged\n")], valid_target=[write(tmp_path / "d.txt", "ABE\nGED\n")]
    )
    task = translation(tmp_path, data=data)
    assert len(task.chosen) == N
    assert [task.words.decode(task.valid["target"][i].tolist()) for i in range(2)] == ["ABE", "GED"]
    assert len(all_held_out(task)) == 2


def test_a_table_of_pairs(tmp_path: Path):
    rows = "\n".join(f"{words(3, seed=i)}\t{words(2, seed=i).upper()}" for i in range(23))
    data = dict(source=[write(tmp_path / "t.tsv", "en\tde\n" + rows)], columns=["en", "de"], length=43)
    task = make(recipe_of("translate", data=data, batch_tokens=211), tmp_path)
    assert task.words.decode(task.pairs["target"][0].tolist()) == words(2, seed=0).upper()


@pytest.mark.parametrize(("final", "samples", "score_rows", "decoded"), [
    (False, 2, 5, 5), (False, 7, 5, 7), (False, 3, 0, 3), (False, 0, 0, 0), (True, 2, 5, 13), (True, 2, 0, 2),
])  # fmt: skip
def test_what_is_written(
    tmp_path: Path, final: bool, samples: int, score_rows: int, decoded: int, monkeypatch: pytest.MonkeyPatch
):
    task = translation(tmp_path, samples=samples, score_rows=score_rows)
    assert len(task.valid_rows) == 13
    seen: list[int] = []

    def copy(model: Any, sources: list[list[int]], **options: Any) -> list[list[int]]:
        seen.append(len(sources))
        return [source[:-1] for source in sources]

    monkeypatch.setattr("clearhead.training.tasks.translation.translate", copy)
    scores, written = task.write(model_for(task), final=final)
    assert sum(seen) == decoded
    assert len(written) == samples
    assert set(scores) == ({"exact", "bleu", "chrf"} if score_rows else set())
    assert all(sample.output == sample.input != sample.wanted for sample in written)


def test_writing_uses_the_model(tmp_path: Path):
    task = translation(tmp_path, samples=2, score_rows=3, beams=2)
    model = model_for(task, dtype=torch.float32)
    for final in (False, True):
        scores, written = task.write(model, final=final)
        assert len(written) == 2
        assert 0 <= scores["bleu"] <= 100


def test_nothing_to_write(tmp_path: Path):
    task = translation(tmp_path, samples=0, score_rows=0)
    assert task.write(model_for(task), final=True) == ({}, [])


def test_scores():
    outputs, wanted = ["a b c d e", "f g h i j"], ["a b c d e", "f g x i j"]
    found = score(outputs, wanted)
    assert found["exact"] == 0.5
    assert found["bleu"] == sacrebleu.corpus_bleu(outputs, [wanted]).score
    assert found["chrf"] == sacrebleu.corpus_chrf(outputs, [wanted]).score
    assert score(wanted, wanted)["bleu"] == pytest.approx(100)


def test_scores_without_sacrebleu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    assert score(["a"], ["a"]) == {"exact": 1}


def test_alignment(task: Translate):
    model = model_for(task, dtype=torch.float32)
    assert isinstance(model, EncoderDecoder)
    source = task.valid["source"][0].tolist()
    picture = draw_alignment(model, task.words, source, task.start)
    weights = torch.as_tensor(picture.weights)
    assert weights.shape[1] == len(source)
    torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)))
    assert task.attention_pictures(model)[0].columns[-1] == "</s>"


def test_no_target_is_said(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"'translate' learns from data\.source.*--source"):
        make(recipe_of("translate", data={}), tmp_path)
    with pytest.raises(ConfigError, match=r"data\.target.*--target"):
        make(recipe_of("translate", data=dict(source=[write(tmp_path / "a.txt", "a\n")])), tmp_path)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path):
    train_tokenizer(texts=[words(53)], kind="chars", special=("<unk>",), add_bos=False).save(tmp_path / "plain")
    with pytest.raises(ConfigError, match=r"an end and a start"):
        translation(tmp_path, data=dict(tokenizer=str(tmp_path / "plain")))


def test_a_batch_smaller_than_a_row_is_said(tmp_path: Path):
    with pytest.raises(InputError, match=r"more than a whole batch of 5"):
        make(
            recipe_of(
                "translate",
                data=dict(
                    source=[write(tmp_path / "a.txt", "abcdef\n" * 5)], target=[write(tmp_path / "b.txt", "a\n" * 5)]
                ),
                batch_tokens=5,
            ),
            tmp_path,
        )
