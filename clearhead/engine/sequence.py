"""A request that was admitted: its prompt, its blocks of memory, and how far it has come."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clearhead.engine.prompt_lookup import PromptLookup
from clearhead.engine.request import Ticket, source_length
from clearhead.sampling.beam_search import BeamSearchParams
from clearhead.sampling.grammar import Constraint
from clearhead.sampling.logits_processors import LogitsProcessor

BlockIds = NDArray[np.int32]


class Sequence:
    """An admitted request. With beams it has several rows in the batch; they share the prompt.

    `blocks` hold the prompt's keys and values, `source_blocks` those of an encoder-decoder's source. Once it runs, its rows of
    the runner's block table say which blocks it holds. `reservation` is the number under which the allocator keeps blocks for it.
    """

    def __init__(
        self,
        ticket: Ticket,
        prompt: list[int],
        processor: LogitsProcessor,
        search: BeamSearchParams | None,
        reservation: int,
    ) -> None:
        self.ticket, self.prompt, self.processor, self.search = ticket, prompt, processor, search
        self.reservation = reservation
        request = ticket.request
        self.limit, self.n_rows = request.max_new_tokens, request.beams
        self.blocks: BlockIds = np.zeros(0, np.int32)
        self.source_blocks: BlockIds = np.zeros(0, np.int32)
        self.n_source = source_length(request.source)
        self.n_prefilled = 0  # tokens of the prompt
        self.enters_cache = True  # whether others may read its blocks; not if the model changed meanwhile
        self.n_scheduled = 0  # new tokens asked of the model; the ticket holds those that have arrived
        self.constraints: list[Constraint | None] = []  # one for each row; None for a beam with a score of -inf
        if request.grammar is not None:
            self.constraints = [request.grammar.start() for _ in range(self.n_rows)]

        self.lookup = PromptLookup(prompt) if request.lookup else None

    def draft(self, most: int) -> list[int]:
        """At most so many tokens that may come next, if it has a lookup."""
        if self.lookup is None:
            return []
        self.lookup.extend(self.ticket.written[len(self.lookup.tokens) - len(self.prompt) :])
        return self.lookup.draft(most)

    @property
    def is_over(self) -> bool:
        """Whether no more tokens are needed: it is done, or its last ones are on their way."""
        return self.n_scheduled >= self.limit or self.ticket.reason is not None

    @property
    def can_run_ahead(self) -> bool:
        """Whether its next step can start before its last token is known on the CPU."""
        is_free = not self.has_drafts and not self.constraints and not self.processor.needs_history
        return self.n_rows == 1 and is_free

    @property
    def has_drafts(self) -> bool:
        """Whether tokens may be drafted for it."""
        return self.lookup is not None or self.ticket.request.draft is not None

    @property
    def n_to_prefill(self) -> int:
        """Tokens of the prompt that are not in the cache yet."""
        return len(self.prompt) - self.n_prefilled
