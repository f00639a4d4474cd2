"""Language modelling: predict the next token at each position of a text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from clearhead.config import Generation
from clearhead.data.corpora import read_texts
from clearhead.data.text_preparation import prepare_texts
from clearhead.data.token_store import Store
from clearhead.data.windows import Windows, split_stream
from clearhead.generation import generate
from clearhead.inside import probe
from clearhead.kernels.cross_entropy import IGNORED
from clearhead.layers.masks import documents
from clearhead.models import Decoder, Model
from clearhead.training.report_figures import AttentionPicture
from clearhead.training.schedules import Stage, stages
from clearhead.training.tasks.corpus import Corpus
from clearhead.training.tasks.task import Batch, Facts, Losses, Rows, Sample, Task, token_losses

PROMPT, CONTINUED = 32, 64  # tokens of a sample


class WindowTask(Task):
    """Shared by language modelling and masking: texts one after the other, cut into windows of equal length.

    A batch schedule takes fewer windows at first. A length schedule cuts the windows of a step into parts, so that it sees the same
    tokens in the same steps as without.
    """

    special = ("<pad>", "<s>", "</s>", "<unk>")

    def __init__(self, corpus: Corpus) -> None:
        super().__init__(corpus.recipe)
        d, seed = self.recipe.data, self.recipe.train.seed
        column = d.columns[0] if d.columns else "text"

        def read() -> Iterator[str]:
            options: dict[str, Any] = dict(column=column, documents=d.documents, policy=corpus.policy)
            return (piece.text for piece in read_texts(d.files, **options))

        self.tokenizer = self.words = tokenizer = corpus.tokenizer(read, self.special, around=False)

        def prepare(name: str, files: tuple[str, ...]) -> Store:
            return corpus.store(
                name,
                lambda folder: prepare_texts(
                    folder,
                    files,
                    tokenizer,
                    column=column,
                    documents=d.documents,
                    lowercase=d.lowercase,
                    policy=corpus.policy,
                    progress=corpus.show.progress(f"tokenising {name}"),
                ),
                files,
                tokenizer.core.to_str(),
            )

        store = prepare("text", d.files)
        # `evaluate` measures on all of its data.
        held = prepare("valid", d.valid) if d.valid and d.valid != d.files else store
        cut = None if d.valid else split_stream(len(store["text"].flat), d.valid_share)
        self.length, self.stages = d.length, stages(self.recipe.train)
        self.is_even = len(self.stages) == 1
        rows = [(each.first, self._count_windows(each)) for each in self.stages]
        self.windows = Windows(store["text"], d.length, seed, stop=cut, rows_per_step=rows)
        self.valid = Windows(held["text"], d.length, seed, start=cut or 0)
        self.bytes_per_token = held.info["bytes"] / max(len(held["text"].flat), 1)
        self.shape = self.shapes[-1][-1]
        eos = tokenizer.eos
        self.facts = Facts(
            fields=self.fields(tokenizer.vocab_size),
            generation=Generation(bos=eos, eos=() if eos is None else (eos,), pad=tokenizer.pad),
            table={
                "text": f"{size(self.windows):,} tokens to learn from, {size(self.valid):,} held out",
                "vocabulary": f"{tokenizer.vocab_size:,} tokens, {self.bytes_per_token:.2f} bytes each",
                **self._spell_stages(),
            },
            notes=corpus.notes,
        )

    def fields(self, vocab_size: int) -> dict[str, Any]:
        return dict(shape="decoder", vocab_size=vocab_size, max_len=self.length)

    @property
    def shapes(self) -> list[tuple[int, int, tuple[int, int, int]]]:
        return [
            (each.first, each.stop, (self._count_windows(each) << n, self.length >> n, 0))
            for each in self.stages
            for n in [each.length_halvings]
        ]

    def _count_windows(self, stage: Stage) -> int:
        """Whole windows in a step's batch."""
        return (self.recipe.train.batch_tokens >> stage.batch_halvings) // self.length

    def _spell_stages(self) -> dict[str, str]:
        """The growth of batch and length, for the summary."""
        if self.is_even:
            return {}
        spelled = (f"{rows:,} of {length:,} from step {first:,}" for first, _, (rows, length, _) in self.shapes)
        return {"windows": ", ".join(spelled)}

    def length_at(self, step: int) -> int:
        """The length of the windows of a step."""
        return next(length for first, _, (_, length, _) in reversed(self.shapes) if first <= step)

    def rows(self, step: int) -> Rows:
        parts = np.arange(0, self.length, self.length_at(step))
        return (self.windows.starts(step)[:, None] + parts).ravel()

    def epoch(self, step: int) -> float:
        return self.windows.epoch(step)

    def predictions(self, rows: Rows, step: int) -> int:
        return len(rows) * self.length_at(step)

    def tokens(self, rows: Rows, step: int) -> int:
        return len(rows) * self.length_at(step)

    def held_out(self) -> list[Rows]:
        at_once = max(1, self.shape[0] // self.recipe.train.accumulate)
        starts = self.valid.in_order()
        return [starts[at : at + at_once] for at in range(0, len(starts), at_once)]


class Language(WindowTask):
    """Predict each token from the tokens before it in its document."""

    def batch(self, rows: Rows, step: int) -> Batch:
        return split_windows(*self.windows.batch(rows, self.length_at(step)))

    def held_out_batch(self, rows: Rows) -> Batch:
        return split_windows(*self.valid.batch(rows))

    def losses(self, model: Model, batch: Batch) -> Losses:
        assert isinstance(model, Decoder)
        states = model.states(
            batch["tokens"],
            documents(batch["documents"]) if "documents" in batch else None,
            positions=batch.get("positions"),
            checkpointing=self.recipe.train.checkpointing and model.training,
        )
        return token_losses(model, states, batch["targets"], self.recipe.train.label_smoothing)

    def metrics(self, loss: float, correct: float, count: float) -> dict[str, float]:
        found = super().metrics(loss, correct, count)
        return {**found, "bits_per_byte": found["loss"] / math.log(2) / self.bytes_per_token}

    def write(self, model: Model, *, final: bool) -> tuple[dict[str, float], list[Sample]]:
        """Continuations of held-out text, sampled: greedy ones repeat themselves."""
        assert isinstance(model, Decoder)
        prompt = min(PROMPT, self.length // 2)
        starts = self.valid.in_order()
        starts = starts[starts + prompt < self.valid.stop][: self.recipe.train.samples]  # the last window may be short
        tokens, _ = self.valid.batch(starts)
        prompts = [row[:prompt].tolist() for row in tokens]
        room = min(CONTINUED, self.length - prompt)
        written = generate(model, prompts, max_new_tokens=room, temperature=0.8, top_p=0.95, seed=0)
        wanted = [row[prompt : prompt + room].tolist() for row in tokens]
        texts = zip(prompts, written, wanted, strict=True)
        return {}, [Sample(*(self.words.decode(ids) for ids in each)) for each in texts]

    def attention_pictures(self, model: Model) -> list[AttentionPicture]:
        """The mean of the heads of the first and of the last layer, on held-out text."""
        assert isinstance(model, Decoder)
        tokens, _ = self.valid.batch(self.valid.in_order()[:1])
        tokens = tokens[:, : min(40, self.length)]
        names = self.words.names(tokens[0].tolist())
        layers = sorted({0, len(model.blocks) - 1})
        with probe(model, *(f"blocks.{i}.attention.weights" for i in layers)) as seen, torch.no_grad():
            model(tokens)
        return [
            AttentionPicture(f"Layer {i}, the mean of its heads", names, names, seen[site][0].mean(0))
            for i in layers
            for site in [f"blocks.{i}.attention.weights"]
        ]


def size(windows: Windows) -> int:
    return windows.stop - windows.start


def split_windows(tokens: Int[Tensor, "n long"], numbers: Int[Tensor, "n long"]) -> Batch:
    """Inputs and targets, which are one position later. Documents that share a row do not attend to each other."""
    targets = tokens[:, 1:].masked_fill(numbers[:, 1:] < 0, IGNORED)
    batch = {"tokens": tokens[:, :-1].contiguous(), "targets": targets}
    numbers = numbers[:, :-1]
    if bool((numbers != numbers[:, :1]).any()):  # without a mask attention is faster
        places = torch.arange(numbers.shape[1]).expand_as(numbers)
        begins = torch.cat([torch.ones_like(numbers[:, :1]), numbers.diff(dim=1)], 1) != 0
        batch["documents"] = numbers.contiguous()
        batch["positions"] = places - torch.where(begins, places, 0).cummax(1).values
    return batch
