"""Classification: one label for each text or picture."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead.checkpoint.loading import open_checkpoint
from clearhead.config import Config, Generation
from clearhead.data.batch_order import RowOrder, TokenOrder, held_out, in_order, padding_waste
from clearhead.data.builtin_datasets import digits, held_out_fifth
from clearhead.data.corpora import find_images, read_labelled
from clearhead.data.image_preparation import prepare_arrays, prepare_images
from clearhead.data.text_preparation import prepare_labelled
from clearhead.data.token_store import Store
from clearhead.errors import ConfigError, InputError
from clearhead.families import preset
from clearhead.kernels.cross_entropy import IGNORED
from clearhead.models import Encoder, Model
from clearhead.quantization.model_weights import example_weight
from clearhead.training.recipe import Recipe
from clearhead.training.tasks.corpus import Corpus
from clearhead.training.tasks.task import Batch, Facts, Losses, Rows, Sample, Task, pad, row_generator


def are_pictures(recipe: Recipe) -> bool:
    """Whether the recipe's model reads pictures."""
    return recipe.model.get("inputs", known_config(recipe).inputs) == "patches"


def known_config(recipe: Recipe) -> Any:
    """The config a recipe starts from: a checkpoint's, a preset's, or the fields' defaults."""
    if "from" in recipe.model:
        return open_checkpoint(Path(recipe.model["from"])).config
    return preset(recipe.model["preset"]) if "preset" in recipe.model else Config


def given_labels(recipe: Recipe) -> list[str] | None:
    """The labels in their order, if the recipe lists them; None: they come from the data."""
    return list(recipe.model["labels"]) if recipe.model.get("labels") else None


class Classes(Task):
    """Shared by texts and pictures: the loss, the labels, the held-out split."""

    store: Store
    valid: Store
    chosen: Rows
    valid_rows: Rows

    @property
    def labels(self) -> list[str]:
        return self.store.info["labels"]

    def _split(self, valid: Store | None) -> None:
        self.chosen, self.valid = np.arange(len(self.store)), valid or self.store
        if valid is None:
            self.chosen, self.valid_rows = held_out(
                len(self.store), self.recipe.data.valid_share, self.recipe.train.seed
            )
        else:
            self.valid_rows = np.arange(len(valid))

    def _facts(self, corpus: Corpus, fields: dict[str, Any], table: dict[str, str], pad: int | None = None) -> None:
        table = {"rows": f"{len(self.chosen):,} to learn from, {len(self.valid_rows):,} held out", **table}
        table["classes"] = f"{len(self.labels)}: {', '.join(self.labels[:8])}" + (
            " ..." if len(self.labels) > 8 else ""
        )
        known = set(self.store["label"].flat[self.chosen])
        unknown = sum(label not in known for label in self.valid["label"].flat[self.valid_rows].tolist())
        if unknown:
            corpus.note(
                f"{unknown:,} of {len(self.valid_rows):,} held-out rows have a class that no row to learn from has"
            )
        fields = dict(shape="encoder", head="classes", labels=tuple(self.labels), n_classes=len(self.labels), **fields)
        self.facts = Facts(fields, Generation(pad=pad), table, corpus.notes)

    def predictions(self, rows: Rows, step: int) -> int:
        return len(rows)

    def count(self, batch: Batch) -> Tensor:
        return (batch["labels"] != IGNORED).sum()

    def batch(self, rows: Rows, step: int) -> Batch:
        return self._batch(self.store, self.chosen[rows], step)

    def held_out_batch(self, rows: Rows) -> Batch:
        return self._batch(self.valid, self.valid_rows[rows], None)

    @abstractmethod
    def _batch(self, store: Store, rows: Rows, step: int | None) -> Batch:
        """The tensors of rows of a store; `step` is None for held-out ones."""

    def losses(self, model: Model, batch: Batch) -> Losses:
        assert isinstance(model, Encoder)
        checkpointing = self.recipe.train.checkpointing and model.training
        logits = model(batch["inputs"], batch.get("mask"), checkpointing=checkpointing).float()
        smoothing = self.recipe.train.label_smoothing if model.training else 0.0
        goal = F.cross_entropy(logits, batch["labels"], label_smoothing=smoothing, reduction="sum")
        loss = F.cross_entropy(logits.detach(), batch["labels"], reduction="sum")
        return Losses(goal, loss, (logits.argmax(-1) == batch["labels"]).sum())

    def write(self, model: Model, *, final: bool) -> tuple[dict[str, float], list[Sample]]:
        rows = np.arange(min(self.recipe.train.samples, len(self.valid_rows)))
        if not len(rows):
            return {}, []
        batch = self.held_out_batch(rows)
        device = example_weight(model).device
        with torch.no_grad():
            mask = batch["mask"].to(device) if "mask" in batch else None
            guesses = model(batch["inputs"].to(device), mask).argmax(-1)[: len(rows)].tolist()
        shown = [self._show(int(row)) for row in self.valid_rows[rows]]
        right = [self.labels[label] for label in batch["labels"][: len(rows)].tolist()]
        return {}, [Sample(*one) for one in zip(shown, (self.labels[g] for g in guesses), right, strict=True)]

    @abstractmethod
    def _show(self, row: int) -> str:
        """A held-out row as text, for the samples."""


class TextClasses(Classes):
    """A label for a text."""

    def __init__(self, corpus: Corpus) -> None:
        super().__init__(corpus.recipe)
        d, t = self.recipe.data, self.recipe.train
        columns = (d.columns[0], d.columns[1]) if len(d.columns) == 2 else ("text", "label")

        def read() -> Iterator[str]:
            return (text for text, _ in read_labelled(d.files, columns=columns, policy=corpus.policy))

        self.tokenizer = self.words = tokenizer = corpus.tokenizer(
            read, ("<pad>", "<s>", "</s>", "<unk>", "<mask>"), around=True
        )

        def prepare(name: str, files: Sequence[str], labels: list[str] | None) -> Store:
            return corpus.store(
                name,
                lambda folder: prepare_labelled(
                    folder,
                    files,
                    tokenizer,
                    max_len=d.length,
                    columns=columns,
                    labels=labels,
                    lowercase=d.lowercase,
                    policy=corpus.policy,
                    progress=corpus.show.progress(f"tokenising {name}"),
                ),
                tokenizer.core.to_str(),
            )

        self.store = prepare("texts", d.files, given_labels(self.recipe))
        # `evaluate` measures on all of its data.
        self._split(self.store if d.valid == d.files else prepare("valid", d.valid, self.labels) if d.valid else None)
        if not self.store["text"].lengths.all():
            raise InputError(
                "a text has no token at all, so there is nothing to read a label from; set data.empty=drop"
            )
        lengths = self.store["text"].lengths[self.chosen]
        self.order = TokenOrder([lengths], t.batch_tokens, t.seed)
        first = [self.order.rows(step) for step in range(20)]
        count = round(float(np.mean([len(batch) for batch in first])))
        self.shape = (count, t.batch_tokens // count, 0)
        table = {"vocabulary": f"{tokenizer.vocab_size:,} tokens", "tokens": f"{lengths.sum():,}"}
        table["padding"] = f"{padding_waste([lengths], first):.1%} of a batch"
        self._facts(corpus, dict(vocab_size=tokenizer.vocab_size, max_len=d.length), table, tokenizer.pad)

    def tokens(self, rows: Rows, step: int) -> int:
        return int(self.store["text"].lengths[self.chosen[rows]].sum())

    def held_out(self) -> list[Rows]:
        lengths = self.valid["text"].lengths[self.valid_rows]
        return in_order(
            [lengths], max(self.recipe.train.batch_tokens // self.recipe.train.accumulate, int(lengths.max()))
        )

    def _batch(self, store: Store, rows: Rows, step: int | None) -> Batch:
        texts = [store["text"][int(row)] for row in rows]
        if step is not None and self.recipe.data.leave_out:
            texts = [self._drop_tokens(text, step, int(row)) for text, row in zip(texts, rows, strict=True)]
        tokens, real = pad(texts, self.words.pad or 0, self.rounding)
        labels = torch.full((len(tokens),), IGNORED)
        labels[: len(rows)] = torch.from_numpy(store["label"].flat[rows].astype(np.int64))
        return {"inputs": tokens, "mask": real, "labels": labels}

    def _drop_tokens(self, text: np.ndarray, step: int, row: int) -> np.ndarray:
        """Word dropout: the text without some tokens, others each time (Iyyer et al. 2015)."""
        lots = row_generator(self.recipe.train.seed, step, row).random(len(text))
        return text[(lots >= self.recipe.data.leave_out) | (lots == lots.max())]

    def _show(self, row: int) -> str:
        return self.words.decode(self.valid["text"][row].tolist())


class PictureClasses(Classes):
    """A label for a picture. In training it may be shifted and mirrored."""

    is_even = True

    def __init__(self, corpus: Corpus) -> None:
        super().__init__(corpus.recipe)
        d, t, model = self.recipe.data, self.recipe.train, self.recipe.model
        known = known_config(self.recipe)
        size, patch, channels = (
            model.get(name, getattr(known, name)) for name in ("image_size", "patch_size", "n_channels")
        )
        if d.embedded == "digits":
            pictures, labels = digits()
            held = held_out_fifth(labels)
            stores = [
                corpus.store(
                    name,
                    lambda folder, chosen=chosen: prepare_arrays(
                        folder, pictures[chosen].numpy(), [str(int(label)) for label in labels[chosen]]
                    ),
                )
                for name, chosen in (("digits", ~held), ("digits-held-out", held))
            ]
            self.store = stores[0]
            self._split(stores[1])
        else:

            def prepare(name: str, folder: str, labels: list[str] | None) -> Store:
                return corpus.store(
                    name,
                    lambda place: prepare_images(
                        place,
                        find_images(Path(folder)),
                        size,
                        channels,
                        labels=labels,
                        policy=corpus.policy,
                        progress=corpus.show.progress(f"reading {name}"),
                    ),
                    folder,
                    size,
                    channels,
                )

            self.store = prepare("pictures", d.files[0], given_labels(self.recipe))
            self._split(prepare("valid", d.valid[0], self.labels) if d.valid else None)
        self.extra_files = {"preprocessor_config.json": preprocessor_config(size)}
        self.length = (size // patch) ** 2 + 1
        if t.batch_tokens < self.length:
            raise ConfigError(
                f"train.batch_tokens={t.batch_tokens} is less than one picture of {self.length} tokens; raise it to {self.length} "
                f"or more"
            )
        rows = t.batch_tokens // self.length
        self.order = RowOrder(len(self.chosen), rows, t.seed)
        self.shape = (rows, self.length, 0)
        table = {"pictures": f"{channels} x {size} x {size}, {self.length} tokens each"}
        self._facts(corpus, dict(inputs="patches", image_size=size, n_channels=channels), table)

    def tokens(self, rows: Rows, step: int) -> int:
        return len(rows) * self.length

    def held_out(self) -> list[Rows]:
        at_once = max(1, self.shape[0] // self.recipe.train.accumulate)
        rows = np.arange(len(self.valid_rows))
        return [rows[at : at + at_once] for at in range(0, len(rows), at_once)]

    def _batch(self, store: Store, rows: Rows, step: int | None) -> Batch:
        pictures = store["picture"].flat[rows]
        if step is not None and (self.recipe.data.shift or self.recipe.data.flip):
            pictures = np.stack([self._augment(p, step, int(row)) for p, row in zip(pictures, rows, strict=True)])
        inputs = torch.from_numpy(np.array(pictures, dtype=np.float32)) / 127.5 - 1
        return {"inputs": inputs, "labels": torch.from_numpy(store["label"].flat[rows].astype(np.int64))}

    def _augment(self, picture: np.ndarray, step: int, row: int) -> np.ndarray:
        d, random = self.recipe.data, row_generator(self.recipe.train.seed, step, row)
        down, right = random.integers(-d.shift, d.shift + 1, 2) if d.shift else (0, 0)
        height, width = picture.shape[1:]
        wide = np.pad(picture, ((0, 0), (d.shift, d.shift), (d.shift, d.shift)), mode="edge")
        moved = wide[:, d.shift + down : d.shift + down + height, d.shift + right : d.shift + right + width]
        return moved[:, :, ::-1] if d.flip and random.random() < 0.5 else moved

    def _show(self, row: int) -> str:
        return f"picture {row}"


def preprocessor_config(size: int) -> dict[str, Any]:
    """How Hugging Face's image processor must treat pictures: as data/ did for training."""
    crop = dict(height=size, width=size)
    return dict(size=dict(shortest_edge=size), do_center_crop=True, crop_size=crop, image_mean=[0.5], image_std=[0.5])
