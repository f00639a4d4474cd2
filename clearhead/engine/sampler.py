"""The sampler: next tokens for rows without beam search. Rows with the same settings form one group, sampled together."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.engine.runner import ModelRunner
from clearhead.engine.sequence import Sequence
from clearhead.engine.transfer import HostCopy, to_device
from clearhead.errors import InputError
from clearhead.layers.masks import ABSENT
from clearhead.sampling.logits_processors import LogitsProcessor, upcast
from clearhead.sampling.token_ids import pad

NO_TOKEN = -1  # in place of an id: every token is forbidden, or the logits are NaN


@dataclass
class SamplingGroup:
    """Rows with the same processor and outputs, and their facts as tensors; valid until the batch changes."""

    processor: LogitsProcessor
    sequences: list[Sequence]
    places: list[tuple[int, int]]  # of each: its row of the batch, and of the logits
    is_part: bool  # whether others have logits, too
    device: torch.device
    scored: bool
    alternatives: int
    is_simple: bool  # no scores are asked for, and only eos and the limit can end a text
    drafted: list[abc.Sequence[int]]  # of each: drafted tokens between its last token and this row

    @cached_property
    def facts(self) -> Int[Tensor, "5 n"]:
        """Rows, rows of the logits, seeds, lengths of prompts and limits, on the device. Greedy groups of all rows need none."""
        numbers = [
            (row, at, s.ticket.request.seed, len(s.prompt), s.limit)
            for s, (row, at) in zip(self.sequences, self.places, strict=True)
        ]
        return to_device(np.array(numbers, np.int64), self.device).T

    @property
    def rows(self) -> Int[Tensor, " n"]:
        return self.facts[0]

    @property
    def logit_rows(self) -> Int[Tensor, " n"]:
        return self.facts[1]


def group_sequences(
    sequences: abc.Sequence[Sequence],
    rows: abc.Sequence[int],
    logit_rows: abc.Sequence[int],
    device: torch.device,
    drafted: abc.Sequence[abc.Sequence[int]] | None = None,
) -> list[SamplingGroup]:
    """Groups of the sequences without beam search; `rows` and `logit_rows` are those of each.

    `drafted`: a sequence may occur several times in a row, each time with one more drafted token after its last one.
    """
    found: dict[tuple[int, bool, int], tuple[list[Sequence], list[tuple[int, int]]]] = {}
    for sequence, place in zip(sequences, zip(rows, logit_rows, strict=True), strict=True):
        if sequence.n_rows == 1:
            request = sequence.ticket.request
            own, places = found.setdefault((id(sequence.processor), request.scored, request.alternatives), ([], []))
            own.append(sequence)
            places.append(place)
    return [
        SamplingGroup(
            processor=own[0].processor,
            sequences=own,
            places=places,
            is_part=len(own) < len(sequences),
            device=device,
            scored=scored,
            alternatives=alternatives,
            is_simple=not (scored or alternatives or any(s.constraints or s.ticket.request.stop for s in own)),
            drafted=[()] * len(own) if drafted is None else [drafted[at] for _, at in places],
        )
        for (_, scored, alternatives), (own, places) in found.items()
    ]


def sample_tokens(group: SamplingGroup, logits: Float[Tensor, "n V"], runner: ModelRunner) -> HostCopy:
    """Each row's next token, into `runner.tokens` and to the host, NO_TOKEN where there is none.

    If asked for, there follow its log-probability, and log-probabilities and ids of the likeliest tokens.
    """
    processor, sequences = group.processor, group.sequences
    constrained = any(sequence.constraints for sequence in sequences)
    greedy = processor.is_identity and processor.strategy.temperature == 0 and not constrained
    needs_logits = not (greedy and runner.has_argmax) or group.scored or bool(group.alternatives)
    is_part = group.is_part
    logits = logits[group.logit_rows] if needs_logits and is_part else logits
    if greedy:
        if runner.has_argmax:
            tokens = runner.tokens[group.rows] if is_part else runner.tokens[: len(sequences)]
        else:
            tokens = runner.tokens[group.rows] = logits.argmax(-1)
        # NaN if one is: argmax counts it as the largest.
        best = logits[group.logit_rows, tokens] if is_part and not needs_logits else logits.gather(1, tokens[:, None])
    else:
        numbers = [s.n_scheduled + len(before) for s, before in zip(sequences, group.drafted, strict=True)]
        steps = to_device(np.array(numbers), runner.device)
        history = None
        if processor.needs_history:
            rows = [[*s.prompt, *s.ticket.written, *d] for s, d in zip(sequences, group.drafted, strict=True)]
            history = to_device(pad(rows, ABSENT)[0], runner.device)
        seeds, n_prompt, limits = group.facts[2:]
        processed = processor(upcast(logits), history, n_prompt, steps, limits)
        if constrained:
            allowed = grammar_masks(sequences, processor.vocab_size, runner.device, group.drafted)
            processed = processed.masked_fill(~allowed, -math.inf)
        tokens = runner.tokens[group.rows] = processor.strategy.choose(processed, seeds, steps)
        best = processed.amax(-1)  # NaN if one is
        logits = processed if processor.strategy.timestamps else logits  # what its scores are of
    outputs: list[Tensor] = [tokens.masked_fill(~(best.flatten() > -math.inf), NO_TOKEN)]
    if group.scored or group.alternatives:
        log_probs = upcast(logits).log_softmax(-1)
        outputs.append(log_probs.gather(1, tokens[:, None])[:, 0])
        outputs += log_probs.topk(group.alternatives) if group.alternatives else ()
    return HostCopy(*outputs)


def grammar_masks(
    sequences: abc.Sequence[Sequence],
    vocab_size: int,
    device: torch.device,
    drafted: abc.Iterable[abc.Sequence[int]] = repeat(()),
) -> Bool[Tensor, "n V"]:
    """The tokens that each row's grammar allows next, after what was drafted for it; without one, all."""
    rows: list[Tensor] = []
    for sequence, ids in zip(sequences, drafted, strict=False):
        everything = torch.ones(vocab_size, dtype=torch.bool)
        for constraint in sequence.constraints or [None] * sequence.n_rows:
            try:
                rows.append(constraint.after(ids).allowed() if constraint is not None else everything)
            except (
                InputError
            ):  # a draft that is not allowed; or the vocabulary lacks what must come next: this text fails
                rows.append(~everything)
    return torch.stack(rows).to(device)
