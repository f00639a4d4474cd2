"""Beam searches in the engine: groups of beams, and the blocks of memory that beams share.

A search without a logits processor or a grammar continues on a GPU by itself: the CPU starts the next step before it knows the
last, and repeats the choices when their candidates arrive. In all other cases the CPU chooses.
"""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Iterator

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from clearhead.engine.allocator import BlockAllocator
from clearhead.engine.request import Request, Ticket
from clearhead.engine.runner import ModelRunner
from clearhead.engine.sampler import grammar_masks
from clearhead.engine.sequence import Sequence
from clearhead.engine.transfer import HostCopy, to_device
from clearhead.sampling.beam_search import Beams, BeamSearchParams, Hypothesis, Rows
from clearhead.sampling.logits_processors import LogitsProcessor


def search_params(request: Request, processor: LogitsProcessor) -> BeamSearchParams | None:
    """How the request is searched; None: it has one beam."""
    if request.beams == 1:
        return None
    return BeamSearchParams(request.beams, request.length_penalty, request.early_stopping, processor)


class BeamGroup:
    """Sequences with equal search params, and their beams, in the same order."""

    def __init__(self, params: BeamSearchParams, sequences: list[Sequence], dtype: torch.dtype) -> None:
        self.sequences = sequences
        requests = [s.ticket.request for s in sequences]
        traces = [s.ticket.trace if s.ticket.request.trace else None for s in sequences]
        self.beams = Beams(params, [s.prompt for s in sequences], [r.max_new_tokens for r in requests], dtype, traces)

    def merge(self, other: BeamGroup) -> None:
        self.sequences = [*self.sequences, *other.sequences]
        self.beams.merge(other.beams)

    def remove_done(self) -> None:
        rows = [row for row, sequence in enumerate(self.sequences) if not sequence.ticket.is_done]
        if len(rows) < len(self.sequences):
            self.sequences = [self.sequences[row] for row in rows]
            self.beams.keep(rows)


class BeamSearcher:
    """All beam searches of an engine, in groups."""

    def __init__(self, runner: ModelRunner, allocator: BlockAllocator) -> None:
        self.runner, self.allocator = runner, allocator
        self.groups: dict[BeamSearchParams, BeamGroup] = {}

    def runs_on_device(self, params: BeamSearchParams, sequences: abc.Iterable[Sequence]) -> bool:
        """Whether the device can continue these searches without the CPU."""
        return self.runner.has_paths and params.fits_device and not any(s.constraints for s in sequences)

    def common_params(self, sequences: abc.Sequence[Sequence]) -> BeamSearchParams | None:
        """The search params of all sequences, if these are equal and the searches run on the device."""
        params = sequences[0].search
        if params is None or any(s.search != params for s in sequences):
            return None
        return params if self.runs_on_device(params, sequences) else None

    def share_prompts(self, sequences: abc.Sequence[Sequence], firsts: abc.Sequence[int]) -> None:
        """The beams of a sequence share its prompt's blocks. With paths, all but the first get a last block of their own."""
        searched = [(s, first) for s, first in zip(sequences, firsts, strict=True) if s.n_rows > 1]
        self.allocator.share(np.concatenate([np.tile(s.blocks, s.n_rows - 1) for s, _ in searched]))
        size, table = self.runner.block_size, self.runner.block_table
        partly_full = [(s, first + k) for s, first in searched if len(s.prompt) % size for k in range(1, s.n_rows)]
        if partly_full and self.runner.has_paths:
            rows, at = np.array([row for _, row in partly_full]), [len(s.prompt) // size for s, _ in partly_full]
            self.allocator.free(table[rows, at])
            table[rows, at] = self.allocator.allocate([s.reservation for s, _ in partly_full])

    def start(
        self, params: BeamSearchParams, sequences: list[Sequence], firsts: list[int], logits: Float[Tensor, "B V"]
    ) -> HostCopy | None:
        """Choose each beam's first token. Returns the device's candidates, or None if the CPU chose."""
        group = BeamGroup(params, sequences, self.runner.scores.dtype)
        candidates = None
        if self.runs_on_device(params, sequences):
            candidates = HostCopy(self.runner.start_beams(logits, params, _rows(firsts, params.beams)))
        else:
            self._extend(group, firsts, logits.repeat_interleave(params.beams, 0))
        if params in self.groups:
            self.groups[params].merge(group)
        else:
            self.groups[params] = group
        return candidates

    def extend(
        self, sequences: abc.Sequence[Sequence], firsts: abc.Sequence[int], logits: Float[Tensor, "n V"]
    ) -> list[Sequence]:
        """One step of all searches, chosen by the CPU. Returns the sequences that are searched."""
        first_of = {id(sequence): first for sequence, first in zip(sequences, firsts, strict=True)}
        searched: list[Sequence] = []
        for params, group in self.groups.items():
            own = [first_of[id(sequence)] for sequence in group.sequences]
            rows = _rows(own, params.beams)
            own_logits = logits if len(rows) == len(logits) else logits[to_device(rows, self.runner.device)]
            self._extend(group, own, own_logits)
            searched += group.sequences
        return searched

    def _extend(self, group: BeamGroup, firsts: abc.Sequence[int], logits: Float[Tensor, "n V"]) -> None:
        """Choose the next beams of a group; they share the blocks of their parents."""
        runner, beams, sequences = self.runner, group.beams, group.sequences
        constrained = any(sequence.constraints for sequence in sequences)
        rows = _rows(firsts, beams.params.beams)
        vocab_size = beams.params.processor.vocab_size
        allowed = grammar_masks(sequences, vocab_size, runner.device) if constrained else None
        tokens, parents = beams.extend(*beams.candidates(logits, allowed))
        at = to_device(rows, runner.device)
        runner.tokens[at] = to_device(tokens.ravel(), runner.device)
        sources = (np.array(firsts)[:, None] + parents).ravel()
        moved = np.flatnonzero(rows != sources)
        if runner.has_paths:
            runner.scores[at] = to_device(beams.scores.ravel(), runner.device)
        if len(moved):
            self._continue_rows(rows[moved], sources[moved])
        for place, sequence in enumerate(sequences if constrained else []):
            if sequence.constraints:
                alive = (beams.scores[place] > -math.inf).tolist()
                _advance_constraints(sequence, tokens[place].tolist(), parents[place].tolist(), alive)

    def _continue_rows(self, rows: NDArray[np.int64], sources: NDArray[np.int64]) -> None:
        """Each of `rows` continues the tokens of the row in `sources`."""
        runner = self.runner
        if runner.has_paths:
            runner.copy_paths(rows, sources)
            return
        used = -(-int(runner.lengths[rows].max()) // runner.block_size)
        old, new = runner.block_table[rows, :used], runner.block_table[sources, :used]
        self.allocator.share(new[new > 0])
        self.allocator.free(old[old > 0])
        runner.block_table[rows, :used] = new

    def copy_shared_blocks(self, reservations: NDArray[np.int64]) -> None:
        """Copy on write, without paths: a row that is about to write to a shared block gets a copy of it."""
        runner, rows = self.runner, np.arange(self.runner.n)
        at = runner.lengths[rows] // runner.block_size
        last = runner.block_table[rows, at]
        shared = np.flatnonzero(self.allocator.ref_counts[last] > 1)
        if len(shared):
            # Of the rows that share a block, one keeps it, if all of them are here.
            blocks, first, n_here = np.unique(last[shared], return_index=True, return_counts=True)
            copied = np.delete(shared, first[n_here == self.allocator.ref_counts[blocks]])
            targets = self.allocator.allocate(reservations[copied])
            runner.copy_blocks(last[copied], targets)
            runner.block_table[copied, at[copied]] = targets
            self.allocator.free(last[copied])

    def advance(self, params: BeamSearchParams, sequences: abc.Sequence[Sequence], copy: HostCopy) -> None:
        """Repeat on the CPU a step that the device chose, from its candidates."""
        candidates = copy.wait()[0].numpy()
        rows: Rows = slice(None)
        if any(s.ticket.is_done for s in sequences):
            at = [at for at, s in enumerate(sequences) if not s.ticket.is_done]
            sequences, candidates = [sequences[each] for each in at], candidates[:, at]
        if sequences:
            group = self.groups[params]
            if sequences != group.sequences:
                places = {id(s): place for place, s in enumerate(group.sequences)}
                rows = np.array([places[id(s)] for s in sequences])
            scores, tokens, parents = candidates
            group.beams.advance(rows, scores.view(group.beams.scores.dtype), tokens, parents)

    def finished(self) -> Iterator[tuple[Ticket, list[Hypothesis]]]:
        """Searches that are over and not reported yet: their tickets and finished texts."""
        for group in self.groups.values():
            for place in np.flatnonzero(~group.beams.is_open).tolist():
                ticket = group.sequences[place].ticket
                if not ticket.is_done:
                    yield ticket, group.beams.finished[place]

    def remove_done(self) -> None:
        """Remove searches whose tickets are done."""
        for params, group in list(self.groups.items()):
            group.remove_done()
            if not group.sequences:
                del self.groups[params]


def _rows(firsts: abc.Sequence[int], beams: int) -> NDArray[np.int64]:
    """All rows of the sequences with these first rows."""
    return (np.array(firsts)[:, None] + np.arange(beams)).ravel()


def _advance_constraints(sequence: Sequence, tokens: list[int], parents: list[int], alive: list[bool]) -> None:
    """Each new beam gets a copy of its parent's grammar state, with its token added."""
    before = sequence.constraints
    after = [before[parent] if lives else None for parent, lives in zip(parents, alive, strict=True)]
    sequence.constraints = [constraint.fork() if constraint is not None else None for constraint in after]
    for constraint, token in zip(sequence.constraints, tokens, strict=True):
        if constraint is not None:
            constraint.push(token)
