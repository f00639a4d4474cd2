"""The searches of an engine: their beams, the blocks that these hold, and who chooses how they go on.

A plain search on a GPU goes on there: the CPU asks for the next step before it has heard of the last, and follows what the beams
looked at when that arrives. Where a grammar, a strategy or a checkpoint has a say, the CPU chooses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from clearhead.engine.allocator import Blocks
from clearhead.engine.batches import Parcel, send
from clearhead.engine.request import Hypothesis, Ticket
from clearhead.engine.runner import Runner
from clearhead.engine.sampler import allowed
from clearhead.engine.sequence import Member
from clearhead.sampling.beam_search import Beams, Rows, Search


class Searches:
    """Requests that agree in how they search are searched together."""

    def __init__(self, runner: Runner, blocks: Blocks) -> None:
        self.runner, self.blocks = runner, blocks
        self.beams: dict[Search, Beams] = {}

    def __len__(self) -> int:
        return len(self.beams)

    def goes_alone(self, search: Search, members: Iterable[Member]) -> bool:
        """Whether the device can go on with these without the CPU."""
        return self.runner.has_paths and search.is_plain and not any(member.constraints for member in members)

    def common(self, members: Sequence[Member]) -> Search | None:
        """The search of all of these, if it is the same and goes alone."""
        search = members[0].search
        same = search is not None and all(member.search == search for member in members)
        return search if search is not None and same and self.goes_alone(search, members) else None

    def share(self, members: Sequence[Member], firsts: Sequence[int]) -> None:
        """Beams hold their prompt's blocks together. Where they have paths, each but the first goes on in a block of its own."""
        wide = [(member, first) for member, first in zip(members, firsts, strict=True) if member.width > 1]
        self.blocks.share(np.concatenate([np.tile(member.row, member.width - 1) for member, _ in wide]))
        block = self.runner.block
        parted = [(m, first + k) for m, first in wide if len(m.prompt) % block for k in range(1, m.width)]
        if parted and self.runner.has_paths:
            rows, at = np.array([row for _, row in parted]), np.array([len(m.prompt) // block for m, _ in parted])
            self.blocks.release(self.runner.table[rows, at])
            self.runner.table[rows, at] = self.blocks.take([member.holder for member, _ in parted])

    def start(
        self, search: Search, members: list[Member], firsts: list[int], logits: Float[Tensor, "B V"]
    ) -> Parcel | None:
        """Each beam has one of its prompt's likeliest tokens. What was looked at is on its way; None: it is known already."""
        beams = Beams(search, [m.ticket for m in members], [m.prompt for m in members], self.runner.scores.dtype)
        parcel = None
        if self.goes_alone(search, members):
            parcel = Parcel(self.runner.start(logits, search, _rows(firsts, search.beams)))
        else:
            self._extend(beams, members, firsts, logits.repeat_interleave(search.beams, 0))
        self.beams[search] = self.beams[search].merge(beams) if search in self.beams else beams
        return parcel

    def extend(self, members: Sequence[Member], firsts: Sequence[int], logits: Float[Tensor, "n V"]) -> list[Member]:
        """One step of all searches, chosen here; whose they were."""
        found = {id(member.ticket): (member, first) for member, first in zip(members, firsts, strict=True)}
        searching: list[Member] = []
        for beams in self.beams.values():
            those = [found[id(ticket)] for ticket in beams.tickets]
            own, starts = [member for member, _ in those], [first for _, first in those]
            rows = _rows(starts, beams.search.beams)
            their_own = logits if len(rows) == len(logits) else logits[send(rows, self.runner.device)]
            self._extend(beams, own, starts, their_own)
            searching += own
        return searching

    def _extend(
        self, beams: Beams, members: Sequence[Member], firsts: Sequence[int], logits: Float[Tensor, "n V"]
    ) -> None:
        """Beams go on from each other's texts, sharing the blocks that hold them."""
        runner, bound = self.runner, any(member.constraints for member in members)
        rows = _rows(firsts, beams.search.beams)
        may = allowed(members, beams.search.shaper.vocab_size, runner.device) if bound else None
        tokens, parents = beams.extend(*beams.candidates(logits, may))
        at = send(rows, runner.device)
        runner.tokens[at] = send(tokens.ravel(), runner.device)
        sources = (np.array(firsts)[:, None] + parents).ravel()
        moved = np.flatnonzero(rows != sources)
        if runner.has_paths:
            runner.scores[at] = send(beams.scores.ravel(), runner.device)
        if len(moved):
            self._follow(rows[moved], sources[moved])
        for place, member in enumerate(members if bound else []):
            if member.constraints:
                alive = (beams.scores[place] > -math.inf).tolist()
                _constrain(member, tokens[place].tolist(), parents[place].tolist(), alive)

    def _follow(self, rows: NDArray[np.int64], sources: NDArray[np.int64]) -> None:
        """These rows hold from now on what those held."""
        runner = self.runner
        if runner.has_paths:
            runner.follow(rows, sources)
            return
        used = -(-int(runner.counts[rows].max()) // runner.block)
        old, new = runner.table[rows, :used], runner.table[sources, :used]
        self.blocks.share(new[new > 0])
        self.blocks.release(old[old > 0])
        runner.table[rows, :used] = new
        runner.is_stale = True

    def copy_shared(self, holders: NDArray[np.int64]) -> None:
        """Without paths: who is about to write to a block that others share gets a copy of his own."""
        runner, rows = self.runner, np.arange(self.runner.n)
        at = runner.counts[rows] // runner.block
        last = runner.table[rows, at]
        shared = np.flatnonzero(self.blocks.refs[last] > 1)
        if len(shared):
            # Where all who share a block are here, one of them goes on with it.
            blocks, first, n_here = np.unique(last[shared], return_index=True, return_counts=True)
            copied = np.delete(shared, first[n_here == self.blocks.refs[blocks]])
            targets = self.blocks.take(holders[copied])
            runner.copy(last[copied], targets)
            runner.table[copied, at[copied]] = targets
            self.blocks.release(last[copied])
            runner.is_stale = True

    def advance(self, search: Search, members: Sequence[Member], parcel: Parcel) -> None:
        """What a step that went alone looked at: texts go on as the device's beams did."""
        seen = parcel.open()[0].numpy()
        tickets = [member.ticket for member in members]
        rows: Rows = slice(None)
        if any(ticket.is_done for ticket in tickets):
            at = [at for at, ticket in enumerate(tickets) if not ticket.is_done]
            tickets, seen = [tickets[each] for each in at], seen[:, at]
        if tickets:
            beams = self.beams[search]
            if tickets != beams.tickets:
                places = {id(ticket): place for place, ticket in enumerate(beams.tickets)}
                rows = np.array([places[id(ticket)] for ticket in tickets])
            scores, tokens, parents = seen
            beams.advance(rows, scores.view(beams.scores.dtype), tokens, parents)

    def over(self) -> Iterator[tuple[Ticket, list[Hypothesis]]]:
        """Those that are over and were not told yet, each with all its finished texts."""
        for beams in self.beams.values():
            for place in np.flatnonzero(~beams.is_open).tolist():
                if not beams.tickets[place].is_done:
                    yield beams.tickets[place], beams.done[place]

    def forget(self) -> None:
        """Those that were told, or cancelled."""
        for search, beams in list(self.beams.items()):
            beams.keep([row for row, ticket in enumerate(beams.tickets) if not ticket.is_done])
            if not beams.tickets:
                del self.beams[search]


def _rows(firsts: Sequence[int], beams: int) -> NDArray[np.int64]:
    """All rows of requests whose first ones these are."""
    return (np.array(firsts)[:, None] + np.arange(beams)).ravel()


def _constrain(member: Member, tokens: list[int], parents: list[int], alive: list[int]) -> None:
    """Each beam's grammar goes where the beam went."""
    before = member.constraints
    after = [before[parent] if lives else None for parent, lives in zip(parents, alive, strict=True)]
    member.constraints = [held.fork() if held is not None else None for held in after]
    for held, token in zip(member.constraints, tokens, strict=True):
        if held is not None:
            held.push(token)
