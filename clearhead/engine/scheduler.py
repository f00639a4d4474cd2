"""The scheduler: which requests wait, which are prefilled, which run, and the blocks of memory that each holds.

A request is admitted when the most blocks that it may ever need can be reserved, in the order of submission. So no request is
preempted, and none overtakes another of the same client. Clients take turns, and the last eighth of blocks and of rows (8 at most)
is for clients of which nothing runs yet: who comes to a full engine does not wait for a whole text of somebody else.
"""

from __future__ import annotations

from collections import Counter, abc
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from clearhead.engine.allocator import BlockAllocator
from clearhead.engine.beams import search_params
from clearhead.engine.fair_queue import FairQueue
from clearhead.engine.request import Memory, Reason, Request, Ticket, source_length
from clearhead.engine.runner import ModelRunner
from clearhead.engine.sequence import Sequence
from clearhead.kernels.snapshot import ModelState
from clearhead.sampling.logits_processors import LogitsProcessor

SPARED = 8  # one part of so many is for clients of which nothing runs
MOST_SPARED = 8  # rows: in a large batch some text ends every few steps, and clients of which nothing runs come first
HOLD_STEPS = 8  # that a large batch stays as it is on a GPU, while few texts end and few requests wait
LARGE_BATCH = 64


class Waiting(NamedTuple):
    """A request that is not admitted yet."""

    ticket: Ticket
    prompt: list[int]
    processor: LogitsProcessor


class Scheduler:
    """Three queues: `waiting`, `prefilling` and `running`. The rows of the running ones, in order, are the runner's."""

    def __init__(self, allocator: BlockAllocator, runner: ModelRunner) -> None:
        self.allocator, self.runner, self.max_rows = allocator, runner, runner.max_rows
        self.spared_rows = min(self.max_rows // SPARED, MOST_SPARED)
        self.room = min(runner.model.config.max_len, runner.block_table.shape[1] * allocator.block_size)  # of a row
        # On a GPU a change of the batch costs the CPU about as much as a step costs the GPU.
        self.hold_steps, self.large_batch = HOLD_STEPS if runner.device.type == "cuda" else 0, LARGE_BATCH
        self.n_held = 0  # steps since then
        self.over: list[int] = []  # rows of texts that are over and stay for now
        self.waiting: FairQueue[Waiting] = FairQueue()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []  # replaced, never changed: steps in flight hold the old list
        self.names: set[str] = set()  # of all requests that are not done
        self.needs_sweep = False  # whether a ticket is done, or a sequence has all its tokens scheduled
        self.model_state = ModelState(runner.model) if allocator.prefix_cache else None
        self.has_looked = False  # whether the model has changed, in this step

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    def add(self, ticket: Ticket, prompt: list[int], processor: LogitsProcessor) -> None:
        """Put a request in the queue."""
        if ticket.request.name is not None:
            self.names.add(ticket.request.name)
        self.waiting.append(ticket.request.client, Waiting(ticket, prompt, processor))

    def drop_waiting(self, ticket: Ticket) -> None:
        """Take a request out of the queue, if it is there."""
        self.waiting.keep(ticket.request.client, lambda one: one.ticket is not ticket)

    def sort_longest_first(self) -> None:
        """Order the waiting requests by length: those that are computed together are then about as long."""
        self.waiting.sort(lambda one: -len(one.prompt) - source_length(one.ticket.request.source))

    def finish(self, ticket: Ticket, reason: Reason) -> None:
        """Mark a request as done; the next `sweep` frees its memory."""
        ticket.reason = reason
        self.needs_sweep = True
        if ticket.request.name is not None:
            self.names.discard(ticket.request.name)

    def blocks_needed(self, request: Request, n_prompt: int) -> int:
        """The most blocks that a request may hold. Beams share the full blocks of the prompt, where none writes."""
        size = self.allocator.block_size
        whole, shared = -(-(n_prompt + request.max_new_tokens) // size), n_prompt // size
        return -(-source_length(request.source) // size) + shared + request.beams * (whole - shared)

    @property
    def is_large(self) -> bool:
        """Whether the batch is one that need not change in every step."""
        return self.hold_steps > 0 and self.large_batch <= self.runner.n

    def hold(self) -> bool:
        """Whether the batch may stay as it is for one more step: a large one, if few texts are over and few requests could join.

        The rows of texts that are over are computed on. Their tokens are dropped, and they get no more blocks: without one they
        write to block 0.
        """
        n, lengths = self.runner.n, self.runner.lengths
        self.over = (
            [row for row, s in enumerate(self.running) if s.is_over] if self.is_large and self.needs_sweep else []
        )
        is_held = self.is_large and bool(self.over or self.waiting) and self.n_held < self.hold_steps
        is_held = is_held and 2 * self.hold_steps * max(len(self.over), self._n_fitting()) < n
        is_held = is_held and all(lengths[row] < self.room for row in self.over)
        self.n_held = self.n_held + 1 if is_held else 0
        return is_held

    def admit(self) -> None:
        """Move waiting requests to `prefilling`, client by client, as long as blocks and rows suffice."""
        if not self.waiting:
            return
        self.has_looked, n_rows = False, Counter[str | None]()
        for sequence in (*self.running, *self.prefilling):
            n_rows[sequence.ticket.request.client] += sequence.n_rows
        while (found := self._next(n_rows)) is not None:
            client, prefix, n = found
            one = self.waiting.pop(client)
            n_rows[client] += one.ticket.request.beams
            self._admit(one, prefix, n)

    def _n_fitting(self) -> int:
        """How many of the waiting requests there is room for, if all are as large as the first."""
        if not self.waiting:
            return 0
        allocator, (ticket, prompt, _) = self.allocator, next(iter(self.waiting.clients.values()))[0]
        spares = None not in self.waiting.clients
        rows = self.max_rows - self.runner.n + len(self.over) - spares * self.spared_rows
        blocks = allocator.n_available - spares * (allocator.n_blocks // SPARED)
        return min(len(self.waiting), rows, blocks // self.blocks_needed(ticket.request, len(prompt)))

    def _next(self, n_rows: Counter[str | None]) -> tuple[str | None, list[int], int] | None:
        """The client whose request is next, the blocks of its prefix, and how many it needs besides; None: nothing fits."""
        allocator = self.allocator
        for client, (ticket, prompt, _) in self.waiting.heads():
            prefix = allocator.find_prefix(prompt)
            n = self.blocks_needed(ticket.request, len(prompt)) - len(prefix)
            revived = sum(int(allocator.ref_counts[block]) == 0 for block in prefix)  # no longer available to others
            rows_left = self.max_rows - n_rows.total() - ticket.request.beams
            blocks_left = allocator.n_available - n - revived
            if rows_left < 0 or blocks_left < 0:
                return None  # nobody overtakes it: it might never fit
            spares = client is not None and n_rows[client] > 0
            if spares and (rows_left < self.spared_rows or blocks_left < allocator.n_blocks // SPARED):
                continue
            if prefix and self._forget_prefixes():
                return self._next(n_rows)
            return client, prefix, n
        return None

    def _forget_prefixes(self) -> bool:
        """Empty the prefix cache if the model was changed or hooked since some of it was computed. Looks once a step."""
        if self.model_state is None or self.has_looked:
            return False
        self.has_looked = True
        if not self.model_state.has_changed():
            return False
        self.allocator.forget_prefixes()
        for sequence in (*self.running, *self.prefilling):
            sequence.enters_cache = False
        return True

    def _admit(self, one: Waiting, prefix: list[int], n: int) -> None:
        """Reserve n blocks besides those of the prefix, and queue the request for prefill, where clients take turns, too."""
        (ticket, prompt, processor), allocator, size = one, self.allocator, self.allocator.block_size
        allocator.take_prefix(prefix)
        search = search_params(ticket.request, processor)
        sequence = Sequence(ticket, prompt, processor, search, allocator.reserve(n))
        n_source, n_new = -(-sequence.n_source // size), -(-len(prompt) // size) - len(prefix)
        blocks = allocator.allocate([sequence.reservation] * (n_source + n_new))
        sequence.source_blocks, new = blocks[:n_source], blocks[n_source:]
        sequence.blocks = np.concatenate([np.array(prefix, np.int32), new]) if prefix else new
        sequence.n_prefilled = ticket.n_cached = len(prefix) * size
        ticket.is_waiting = False
        self.prefilling.insert(_turn(self.prefilling, ticket.request.client), sequence)

    def next_prefill(self, budget: int) -> tuple[list[Sequence], int]:
        """Sequences to prefill together, and how many tokens that computes.

        Either whole prompts, which must be about as long as the first if they are padded, or a chunk of the first one alone.
        """
        first, packs = self.prefilling[0], self.runner.prompts.packs
        batch, longest, total = [first], _prefill_length(first), _prefill_length(first)
        if first.n_to_prefill > budget:
            return batch, max(budget, first.n_source)
        if first.n_prefilled:
            return self._next_chunks(first, budget)
        for sequence in self.prefilling[1:]:
            length = _prefill_length(sequence)
            T = max(longest, length)
            is_alike = 2 * min(longest, length) + self.allocator.block_size >= T
            fits = packs or (is_alike and _frames(sequence) == _frames(first))
            cost = total + length if packs else (len(batch) + 1) * T
            if fits and not sequence.n_prefilled and cost <= budget:
                batch.append(sequence)
                longest, total = T, cost
        if packs:  # longest first: decode steps take rows in order, and short ones fill the gaps at the end
            batch.sort(key=lambda sequence: -sequence.n_to_prefill)
        return batch, total

    def _next_chunks(self, first: Sequence, budget: int) -> tuple[list[Sequence], int]:
        """The rest of the first prompt, and of others of which as many tokens are there, such as those with the same prefix."""
        batch, longest = [first], first.n_to_prefill
        for sequence in self.prefilling[1:] if not first.n_source else ():
            T = max(longest, sequence.n_to_prefill)
            if sequence.n_prefilled == first.n_prefilled and (len(batch) + 1) * T <= budget:
                batch.append(sequence)
                longest = T
        return batch, max(len(batch) * longest, first.n_source)

    def prefilled(self, batch: list[Sequence], T: int) -> None:
        """Count T tokens of each prompt as computed. Finished ones leave `prefilling`."""
        for sequence in batch:
            sequence.n_prefilled += min(sequence.n_to_prefill, T)
        self.prefilling = [sequence for sequence in self.prefilling if sequence.n_to_prefill]

    def start(self, sequences: list[Sequence]) -> list[int]:
        """Prefilled sequences join the batch. Returns their first rows."""
        for sequence in sequences:
            if sequence.n_rows == 1 and sequence.enters_cache:
                self.allocator.cache_prefix(sequence.prompt, sequence.blocks.tolist())
        firsts = [self.runner.n + at for at in first_rows(sequences)]
        self.runner.add_rows(sequences)
        self.running = [*self.running, *sequences]
        return firsts

    def scheduled(self, sequences: abc.Iterable[Sequence]) -> None:
        """Count one more token of each as scheduled."""
        for sequence in sequences:
            sequence.n_scheduled += 1
            if sequence.n_scheduled >= sequence.limit:
                self.needs_sweep = True

    def allocate_next(self, copy_shared: abc.Callable[[NDArray[np.int64]], None] | None) -> None:
        """A block for each row's next token, if its last one is full. `copy_shared` copies blocks that beams share."""
        runner, size = self.runner, self.allocator.block_size
        lengths = runner.lengths[: runner.n]
        full = np.flatnonzero(lengths % size == 0)
        full = full[runner.block_table[full, lengths[full] // size] == 0]  # drafts may have taken it before
        full = np.array([row for row in full.tolist() if row not in self.over], np.int64)
        if len(full) == 0 and copy_shared is None:
            return
        numbers = [sequence.reservation for sequence in self.running]
        reservations = np.repeat(numbers, [sequence.n_rows for sequence in self.running])
        if len(full):
            runner.block_table[full, lengths[full] // size] = self.allocator.allocate(reservations[full])
            runner.tables_changed = True
        if copy_shared is not None:
            copy_shared(reservations)

    def allocate_drafts(self, counts: abc.Iterable[int]) -> None:
        """Blocks for each row's next token, and for so many drafted ones after it. No row is a beam."""
        runner, size = self.runner, self.allocator.block_size
        for row, (sequence, count) in enumerate(zip(self.running, counts, strict=True)):
            table, length = runner.block_table[row], int(runner.lengths[row])
            new = [at for at in range(length // size, (length + count) // size + 1) if table[at] == 0]
            if new:
                table[new] = self.allocator.allocate([sequence.reservation] * len(new))
                runner.tables_changed = True

    def sweep(self) -> None:
        """Remove sequences that are done, or have all their tokens scheduled, and free their blocks."""
        self.needs_sweep, self.over = False, []
        runner = self.runner
        gone = [(s, s.blocks[None], s.n_prefilled) for s in self.prefilling if s.ticket.is_done]
        self.prefilling = [s for s in self.prefilling if not s.ticket.is_done]
        rows: list[int] = []
        kept: list[Sequence] = []
        for sequence, first in zip(self.running, first_rows(self.running), strict=True):
            own = range(first, first + sequence.n_rows)
            if sequence.is_over:
                gone.append((sequence, runner.block_table[own.start : own.stop], int(runner.lengths[first])))
            else:
                rows += own
                kept.append(sequence)
        self._free(gone)
        if len(kept) < len(self.running):
            self.running = kept
            runner.keep_rows(rows, has_beams=any(sequence.n_rows > 1 for sequence in kept))

    def _free(self, gone: list[tuple[Sequence, NDArray[np.int32], int]]) -> None:
        """Free the blocks in these block tables; full blocks of the first so many tokens enter the prefix cache."""
        held: list[NDArray[np.int32]] = []
        for sequence, tables, length in gone:
            if sequence.n_rows == 1 and sequence.enters_cache and self.allocator.prefix_cache:
                tokens = [*sequence.prompt, *sequence.ticket.written][:length]
                self.allocator.cache_prefix(tokens, tables[0].tolist())
            held += [tables.ravel(), sequence.source_blocks]
        if held:
            blocks = np.concatenate(held)
            self.allocator.free(blocks[blocks > 0])
            self.allocator.cancel([sequence.reservation for sequence, _, _ in gone])


def first_rows(sequences: abc.Sequence[Sequence]) -> list[int]:
    """The first row of each, if the first sequence starts at row 0."""
    ends = np.cumsum([0, *(sequence.n_rows for sequence in sequences)])
    return ends[:-1].tolist()


def _turn(prefilling: list[Sequence], client: str | None) -> int:
    """Where the client's next sequence belongs: before the first of anyone who has more sequences in front than this client."""
    clients = [sequence.ticket.request.client for sequence in prefilling]
    own, seen = clients.count(client), Counter[str | None]()
    if own == len(clients):
        return own
    for at, other in enumerate(clients):
        seen[other] += 1
        if other != client and seen[other] > own + 1:
            return at
    return len(clients)


def _prefill_length(sequence: Sequence) -> int:
    """Tokens to compute: of its prompt, or of its source if that is longer."""
    return max(sequence.n_to_prefill, sequence.n_source)


def _frames(sequence: Sequence) -> tuple[int | str, ...]:
    """The shape of a source that is sound, or a memory: only equal ones are computed together."""
    source = sequence.ticket.request.source
    if isinstance(source, Memory):
        return ("memory", *source.states.shape)
    return tuple(source.shape) if isinstance(source, Tensor) else ()
