"""Who is being written for: requests that were let in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clearhead.engine.request import Ticket, n_source
from clearhead.sampling.beam_search import Search
from clearhead.sampling.grammar import Constraint
from clearhead.sampling.strategy import Shaper

Numbers = NDArray[np.int32]


class Member:
    """A request that was let in: its prompt and the blocks that hold it, and what is known of its text."""

    def __init__(self, ticket: Ticket, prompt: list[int], shaper: Shaper, holder: int) -> None:
        self.ticket, self.prompt, self.shaper, self.holder = ticket, prompt, shaper, holder
        request = ticket.request
        self.limit, self.width = request.max_new_tokens, request.beams
        self.search = Search.of(request, shaper) if request.beams > 1 else None
        self.row: Numbers = np.zeros(0, np.int32)
        self.source: Numbers = np.zeros(0, np.int32)
        self.n_source = n_source(request.source)
        self.n_read = 0  # of the prompt
        self.n_asked = 0  # tokens asked of the model; the ticket holds those that have arrived
        # One a row; None for a beam that is not alive.
        self.constraints: list[Constraint | None] = [] if request.grammar is None else [request.grammar.start()]

    @property
    def is_blind(self) -> bool:
        """Whether its next token can be asked for before its last is known."""
        return self.width == 1 and not self.constraints and not self.shaper.looks_back

    @property
    def n_left(self) -> int:
        """Tokens of the prompt still to be read."""
        return len(self.prompt) - self.n_read
