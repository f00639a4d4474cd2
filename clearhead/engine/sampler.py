"""The sampler: next tokens for rows without beam search. Rows with the same settings form one group, sampled together."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass

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
    rows: Int[Tensor, " n"]  # of the batch
    logit_rows: Int[Tensor, " n"] | None  # of the logits; None: all, in order
    seeds: Int[Tensor, " n"]
    n_prompt: Int[Tensor, " n"]
    limits: Int[Tensor, " n"]
    scored: bool
    alternatives: int
    is_simple: bool  # no scores are asked for, and only eos and the limit can end a text


def group_sequences(
    sequences: abc.Sequence[Sequence], rows: abc.Sequence[int], logit_rows: abc.Sequence[int], device: torch.device
) -> list[SamplingGroup]:
    """Groups of the sequences without beam search; `rows` and `logit_rows` are those of each sequence."""
    found: dict[tuple[int, bool, int], list[tuple[Sequence, int, int]]] = {}
    for sequence, row, logit_row in zip(sequences, rows, logit_rows, strict=True):
        if sequence.n_rows == 1:
            request = sequence.ticket.request
            key = id(sequence.processor), request.scored, request.alternatives
            found.setdefault(key, []).append((sequence, row, logit_row))
    groups: list[SamplingGroup] = []
    for (_, scored, alternatives), parts in found.items():
        own = [sequence for sequence, _, _ in parts]
        facts = [(s.ticket.request.seed, len(s.prompt), s.limit, row, at) for s, row, at in parts]
        seeds, n_prompt, limits, own_rows, among = to_device(np.array(facts, np.int64), device).unbind(1)
        groups.append(
            SamplingGroup(
                processor=own[0].processor,
                sequences=own,
                rows=own_rows,
                logit_rows=among if len(parts) < len(sequences) else None,
                seeds=seeds,
                n_prompt=n_prompt,
                limits=limits,
                scored=scored,
                alternatives=alternatives,
                is_simple=not (scored or alternatives or any(s.constraints or s.ticket.request.stop for s in own)),
            )
        )
    return groups


def sample_tokens(group: SamplingGroup, logits: Float[Tensor, "n V"], runner: ModelRunner) -> HostCopy:
    """Each row's next token, into `runner.tokens` and to the host, NO_TOKEN where there is none.

    If asked for, there follow its log-probability, and log-probabilities and ids of the likeliest tokens.
    """
    processor, sequences = group.processor, group.sequences
    constrained = any(sequence.constraints for sequence in sequences)
    greedy = processor.is_identity and processor.strategy.temperature == 0 and not constrained
    needs_logits = not (greedy and runner.has_argmax) or group.scored or bool(group.alternatives)
    is_part = group.logit_rows is not None
    logits = logits[group.logit_rows] if needs_logits and is_part else logits
    if greedy:
        if runner.has_argmax:
            tokens = runner.tokens[group.rows] if is_part else runner.tokens[: len(sequences)]
        else:
            tokens = runner.tokens[group.rows] = logits.argmax(-1)
        # NaN if one is: argmax counts it as the largest.
        best = logits[group.logit_rows, tokens] if is_part and not needs_logits else logits.gather(1, tokens[:, None])
    else:
        steps = to_device(np.array([sequence.n_scheduled for sequence in sequences]), runner.device)
        history = None
        if processor.needs_history:
            rows = [[*s.prompt, *s.ticket.written] for s in sequences]
            history = to_device(pad(rows, ABSENT)[0], runner.device)
        processed = processor(upcast(logits), history, group.n_prompt, steps, group.limits)
        if constrained:
            allowed = grammar_masks(sequences, processor.vocab_size, runner.device)
            processed = processed.masked_fill(~allowed, -math.inf)
        tokens = runner.tokens[group.rows] = processor.strategy.choose(processed, group.seeds, steps)
        best = processed.amax(-1)  # NaN if one is
        logits = processed if processor.strategy.timestamps else logits  # what its scores are of
    outputs: list[Tensor] = [tokens.masked_fill(~(best.flatten() > -math.inf), NO_TOKEN)]
    if group.scored or group.alternatives:
        log_probs = upcast(logits).log_softmax(-1)
        outputs.append(log_probs.gather(1, tokens[:, None])[:, 0])
        outputs += log_probs.topk(group.alternatives) if group.alternatives else ()
    return HostCopy(*outputs)


def grammar_masks(sequences: abc.Sequence[Sequence], vocab_size: int, device: torch.device) -> Bool[Tensor, "n V"]:
    """The tokens that each row's grammar allows next; without one, all."""
    rows: list[Tensor] = []
    for sequence in sequences:
        everything = torch.ones(vocab_size, dtype=torch.bool)
        for constraint in sequence.constraints or [None] * sequence.n_rows:
            try:
                rows.append(constraint.allowed() if constraint is not None else everything)
            except InputError:  # the vocabulary lacks what must come next: this text fails, the others continue
                rows.append(~everything)
    return torch.stack(rows).to(device)
