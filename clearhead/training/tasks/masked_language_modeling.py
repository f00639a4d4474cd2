"""Masked language modelling (BERT): some tokens are masked, and predicted from both sides."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.errors import ConfigError
from clearhead.kernels.cross_entropy import IGNORED
from clearhead.layers.masks import documents
from clearhead.models import Encoder, Model
from clearhead.quantization.model_weights import example_weight
from clearhead.training.tasks.corpus import Corpus
from clearhead.training.tasks.language_modeling import WindowTask
from clearhead.training.tasks.task import Batch, Losses, Rows, Sample, row_generator, token_losses

HELD_OUT_STEP = -1  # held-out rows are masked the same way at each evaluation


class Masked(WindowTask):
    """The same number of tokens is predicted in each row: of 10, 8 are masked, 1 replaced, 1 unchanged (Devlin et al. 2018)."""

    special = ("<pad>", "<s>", "</s>", "<unk>", "<mask>")

    def __init__(self, corpus: Corpus) -> None:
        super().__init__(corpus)
        tokenizer = self.words
        if tokenizer.mask is None:
            raise ConfigError(
                "hiding tokens needs a mask token, and this tokenizer has none; train one, or choose another"
            )
        self.mask = tokenizer.mask
        # A replacement is any token that is not special.
        self.plain = np.setdiff1d(np.arange(tokenizer.vocab_size), sorted(tokenizer.special_ids))

    def fields(self, vocab_size: int) -> dict[str, Any]:
        return dict(shape="encoder", head="tokens", vocab_size=vocab_size, max_len=self.length)

    def n_masked(self, length: int) -> int:
        """The tokens to predict in a window."""
        return max(1, round(self.recipe.train.mask_share * length))

    def predictions(self, rows: Rows, step: int) -> int:
        return len(rows) * self.n_masked(self.length_at(step))

    def batch(self, rows: Rows, step: int) -> Batch:
        tokens, numbers = self.windows.batch(rows, self.length_at(step))
        return self._mask_tokens(tokens, numbers, rows, step)

    def held_out_batch(self, rows: Rows) -> Batch:
        tokens, numbers = self.valid.batch(rows)
        return self._mask_tokens(tokens, numbers, rows, HELD_OUT_STEP)

    def _mask_tokens(self, tokens: Tensor, numbers: Tensor, rows: Rows, step: int) -> Batch:
        tokens, numbers = tokens[:, :-1].clone(), numbers[:, :-1]
        targets = torch.full_like(tokens, IGNORED)
        n_masked = self.n_masked(tokens.shape[1])
        for i, row in enumerate(rows):
            random = row_generator(self.recipe.train.seed, step, int(row))
            real = np.flatnonzero((numbers[i] >= 0).numpy())
            places = random.permutation(real)[:n_masked]
            lots = random.random(len(places))
            others = random.choice(self.plain, len(places))
            shown = np.where(lots < 0.8, self.mask, np.where(lots < 0.9, others, tokens[i].numpy()[places]))
            targets[i, places] = tokens[i, places]
            tokens[i, places] = torch.from_numpy(shown)
        return {"tokens": tokens, "targets": targets, "documents": numbers}

    def losses(self, model: Model, batch: Batch) -> Losses:
        assert isinstance(model, Encoder)
        checkpointing = self.recipe.train.checkpointing and model.training
        states = model.states(batch["tokens"], documents(batch["documents"]), checkpointing=checkpointing)
        # Only predicted tokens need the product with the vocabulary; the same number in each row, for one shape.
        n_masked = self.n_masked(batch["targets"].shape[1])
        places = (batch["targets"] != IGNORED).int().topk(n_masked).indices
        rows = torch.arange(len(places), device=places.device)[:, None]
        return token_losses(
            model, states[rows, places], batch["targets"][rows, places], self.recipe.train.label_smoothing
        )

    def write(self, model: Model, *, final: bool) -> tuple[dict[str, float], list[Sample]]:
        samples: list[Sample] = []
        for row in self.valid.in_order()[: self.recipe.train.samples]:
            batch = self.held_out_batch(np.array([row]))
            device = example_weight(model).device
            with torch.no_grad():
                logits = model(batch["tokens"].to(device), documents(batch["documents"].to(device)))
            hidden = batch["targets"][0] != IGNORED
            guessed = torch.where(hidden, logits[0].argmax(-1).cpu(), batch["tokens"][0])
            wanted = torch.where(hidden, batch["targets"][0], batch["tokens"][0])
            texts = (self.words.decode(ids.tolist(), special=True) for ids in (batch["tokens"][0], guessed, wanted))
            samples.append(Sample(*texts))
        return {}, samples
