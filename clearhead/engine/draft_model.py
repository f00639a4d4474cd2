"""A draft model: a smaller decoder with the same vocabulary writes ahead, and the large model verifies (Leviathan et al. 2023).

It chooses each token as the large model will: same strategy, same grammar, and the same noise, which depends on seed, place and
token alone. Where both models give similar probabilities they choose the same token, also sampled, and the draft is accepted.
"""

from __future__ import annotations

from collections import abc
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.engine.allocator import BLOCK_SIZE
from clearhead.engine.request import Request, Ticket
from clearhead.engine.runner import ModelRunner
from clearhead.engine.sampler import group_sequences, sample_tokens
from clearhead.engine.sequence import Sequence
from clearhead.inside.evaluation_mode import eval_mode, may_train
from clearhead.models import Decoder, EncoderDecoder
from clearhead.quantization.model_weights import count_weights
from clearhead.sampling.strategy import Strategy

MAX_ROWS = 8  # tokens of the text that one step may compute, after the large model has chosen them; more are a prompt
PREFILL_TOKENS = 1024  # at once
FIRST_RATE, FIRST_WEIGHT = 0.7, 8  # how often a drafted token is right, before any was seen, and as if from so many
MEMORY = 16  # tokens: then the weight of older ones falls by 1 / MEMORY with each new one

# Most of a step reads the weights, one thread 35 bytes in a nanosecond. Other work in the same unit, as measured with SmolLM2-135M:
ROW_BYTES = 0.43  # what a row more takes for each weight: as a share of a step, 0.1 (float32) to 0.4 (8 bits)
DRAWING_BYTES = 300  # what drawing takes for each token of the vocabulary: 250 with top-p, 370 with noise for all

Model = Decoder | EncoderDecoder


class DraftModel:
    """Drafts for one sequence, with a KV cache of its own, which is cut at the first token of a draft that was rejected."""

    def __init__(self, sequence: Sequence, model: Model) -> None:
        """`model` is the one that verifies."""
        draft = sequence.ticket.request.draft
        assert draft is not None
        self.model: Decoder = draft
        width = -(-(len(sequence.prompt) + sequence.limit) // BLOCK_SIZE)
        self.blocks = np.arange(1, width + 1, dtype=np.int32)
        self.runner = ModelRunner(
            draft, n_blocks=width + 1, block_size=BLOCK_SIZE, max_rows=MAX_ROWS, table_width=width, source_width=0
        )
        # To record graphs takes longer than a text.
        self.runner.graphs = self.runner.prompts.graphs = None
        self.runner.block_table[0], self.runner.n = self.blocks, 1
        self.n_known = 0  # tokens of prompt and text when it last drafted
        self.n_cached = 0  # tokens in its cache that are of the text
        self.drafted: list[int] = []
        self.rate, self.weight = FIRST_RATE, FIRST_WEIGHT
        self.cost = draft_cost(draft, model, sequence.processor.strategy)

    def draft(self, sequence: Sequence, most: int, n_running: int) -> list[int]:
        """The tokens that may come next, at most so many; none where they cost more time than they save."""
        tokens = [*sequence.prompt, *sequence.ticket.written]
        self._compare(tokens)
        n = draft_length(self.rate, self.cost, most, n_running)
        if n:
            with eval_mode(self.model) if may_train(self.model) else nullcontext(), self.runner.assume_unchanged():
                self.drafted = self._draft(sequence, tokens, n)
        self.n_known = len(tokens)
        return self.drafted

    def _compare(self, tokens: list[int]) -> None:
        """Count which tokens of the last draft came, and forget the others."""
        n_right = 0
        for drafted, token in zip(self.drafted, tokens[self.n_known :], strict=False):
            self.weight = min(self.weight + 1, MEMORY)
            self.rate += ((drafted == token) - self.rate) / self.weight
            if drafted != token:
                break
            n_right += 1
        self.n_cached = min(self.n_cached, self.n_known + n_right)
        self.drafted = []

    def _draft(self, sequence: Sequence, tokens: list[int], n: int) -> list[int]:
        runner, found = self.runner, list[int]()
        logits = self._catch_up(sequence, tokens)
        while True:
            (group,) = group_sequences([sequence], [0], [0], runner.device, [found])
            token = int(sample_tokens(group, logits, runner).wait()[0])
            if token < 0 or token in sequence.processor.ends:
                break  # nothing follows
            found.append(token)
            if len(found) == n:
                break
            logits = runner.decode()
        self.n_cached = int(runner.lengths[0])
        return found

    def _catch_up(self, sequence: Sequence, tokens: list[int]) -> Float[Tensor, "1 V"]:
        """Compute the tokens that are not in the cache; returns the logits after the last of them, in row 0."""
        runner, new = self.runner, tokens[self.n_cached :]
        if len(new) > MAX_ROWS:
            return self._prefill(sequence, tokens)
        runner.lengths[0] = self.n_cached
        runner.tokens[0] = new[0]
        if len(new) == 1:
            return runner.decode()
        runner.add_drafts([new[1:]])
        logits = runner.decode()[-1:]
        runner.keep_rows([runner.n - 1], has_beams=False)
        return logits

    def _prefill(self, sequence: Sequence, tokens: list[int]) -> Float[Tensor, "1 V"]:
        own = Sequence(Ticket(Request(prompt=tokens)), tokens, sequence.processor, None, 0)
        own.blocks, own.n_prefilled = self.blocks[: -(-len(tokens) // BLOCK_SIZE)], self.n_cached
        logits = torch.empty(0)
        while own.n_to_prefill:
            logits = self.runner.prefill([own], PREFILL_TOKENS)
            own.n_prefilled += min(PREFILL_TOKENS, own.n_to_prefill)
        self.runner.lengths[0] = len(tokens)
        return logits


class DraftCost(NamedTuple):
    """Times as shares of a step of the model that verifies, with one row: of a drafted token in all, and of a row more."""

    token: float
    row: float


def draft_cost(draft: Decoder, model: Model, strategy: Strategy) -> DraftCost:
    """Estimated from the sizes of the models."""
    drawing = 0 if strategy.temperature == 0 else DRAWING_BYTES * model.config.vocab_size
    step = _n_bytes(model) + drawing
    row = (ROW_BYTES * count_weights(model) + drawing) / step
    return DraftCost((_n_bytes(draft) + drawing) / step + row, row)


def draft_length(rate: float, cost: DraftCost, most: int, n_running: int) -> int:
    """How many tokens to draft for each of the sequences that run: as many as give most tokens for the time, at most `most`.

    `rate` is the chance that a token is right if those before it are.
    """
    time = (1 + (n_running - 1) * cost.row) / n_running  # each sequence's part of a step without drafts
    best, chance, expected, speed = 0, 1.0, 1.0, 1 / time
    for n in range(1, most + 1):
        chance *= rate
        expected += chance
        time += cost.token
        if expected / time <= speed:
            break
        best, speed = n, expected / time
    return best


def _n_bytes(model: nn.Module) -> int:
    """What a step reads, about."""
    tensors: abc.Iterable[Tensor] = (*model.parameters(), *model.buffers())
    return sum(tensor.nbytes for tensor in tensors)
