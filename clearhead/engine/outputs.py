"""Output processing: sampled ids are appended to their tickets, and checked for what ends a text."""

from __future__ import annotations

import math
from collections import abc

from clearhead.engine.request import Reason, Ticket, Token
from clearhead.engine.scheduler import Scheduler
from clearhead.engine.sequence import Sequence
from clearhead.engine.transfer import HostCopy
from clearhead.errors import InputError
from clearhead.sampling.beam_search import Hypothesis

StepOutput = list[tuple[Ticket, Token | None]]  # each new token, and None for each ticket that is done


class OutputProcessor:
    """Appends tokens to tickets, ends them, and collects what `Engine.step` returns.

    `normalises`: whether the score of a text is divided by length**length_penalty, as an encoder-decoder's is.
    """

    def __init__(self, scheduler: Scheduler, *, normalises: bool) -> None:
        self.scheduler, self.normalises = scheduler, normalises
        self.changed: list[Ticket] = []  # since the last `collect`

    def collect(self) -> StepOutput:
        """The new tokens since the last call, and None for each ticket that is done."""
        output: StepOutput = []
        for ticket in dict.fromkeys(self.changed):
            start, end, request = ticket.n_reported, ticket.n_shown, ticket.request
            if request.scored or request.alternatives:
                output += [(ticket, ticket.token(at)) for at in range(start, end)]
            elif end == start + 1:  # the usual case: there may be hundreds of rows
                output.append((ticket, Token(ticket.written[start])))
            else:
                output += [(ticket, Token(id)) for id in ticket.written[start:end]]
            ticket.n_reported = end
            if ticket.reason is not None:
                output.append((ticket, None))
        self.changed.clear()
        return output

    def finish(self, ticket: Ticket, reason: Reason) -> None:
        self.scheduler.finish(ticket, reason)
        self.changed.append(ticket)

    def fail(self, ticket: Ticket) -> None:
        """No token can be chosen: this request ends with an error, the others continue."""
        ticket.error = InputError(
            f"a text can not go on after {ticket.n_shown} tokens: no token has a score; got NaN logits, or a strategy or "
            f"grammar that forbids every token ({ticket.request.strategy}); look at the weights, or loosen one"
        )
        self.finish(ticket, "failed")

    def finish_search(self, ticket: Ticket, hypotheses: list[Hypothesis]) -> None:
        """A beam search is over: its ticket gets the best texts."""
        ticket.hypotheses = hypotheses[: ticket.request.n_best]
        if not hypotheses:
            self.fail(ticket)
            return
        ticket.written = hypotheses[0].tokens
        ticket.n_shown = len(ticket.written)
        self.finish(ticket, "end" if hypotheses[0].finished else "length")

    def append_tokens(self, sequences: list[Sequence], copy: HostCopy, *, is_simple: bool) -> None:
        """One more token for each sequence; a negative id stands for none. Sequences that are done are skipped."""
        ids, *rest = (part.tolist() for part in copy.wait())
        for place, (sequence, id) in enumerate(zip(sequences, ids, strict=True)):
            ticket = sequence.ticket
            if ticket.reason is not None:
                continue
            n = len(ticket.written) + 1
            # The usual case first: there may be hundreds of rows.
            if is_simple and id >= 0 and id not in sequence.processor.ends and n < sequence.limit:
                ticket.written.append(id)
                ticket.n_shown = n
                self.changed.append(ticket)
            elif id < 0:
                self.fail(ticket)
            else:
                if rest:
                    ticket.scores.append(rest[0][place])
                if len(rest) > 1:
                    ticket.alternatives.append(tuple(zip(rest[2][place], rest[1][place], strict=True)))
                self._append(sequence, id)

    def _append(self, sequence: Sequence, id: int) -> None:
        """One more token of a text; ends the text if eos, a stop sequence, its grammar or its limit says so."""
        ticket, request = sequence.ticket, sequence.ticket.request
        written = ticket.written
        is_complete = False
        if sequence.constraints and (constraint := sequence.constraints[0]) is not None:
            try:
                constraint.push(id)
                # Complete too early, it fails at its next token, as a search does: nothing is left that may come.
                is_complete = constraint.is_done and len(written) + 1 >= request.strategy.min_new_tokens
            except InputError:  # sampled where the grammar allowed nothing
                self.fail(ticket)
                return
        written.append(id)
        self.changed.append(ticket)
        reason: Reason | None = None
        hidden = 0  # tokens at the end that do not, or may not, belong to the text
        if id in sequence.processor.ends:
            reason, hidden = "end", 1
        elif request.stop:
            hidden = max((len(stop) for stop in request.stop if written[-len(stop) :] == list(stop)), default=0)
            reason = "stop" if hidden else None
            hidden = hidden or max(stop_overlap(written, list(stop)) for stop in request.stop)
        if reason is None and (is_complete or len(written) == sequence.limit):
            reason, hidden = "end" if is_complete else "length", 0
        ticket.n_shown = max(ticket.n_shown, len(written) - hidden)
        if reason is not None:
            total = sum(ticket.scores) if ticket.scores else math.nan
            if self.normalises:
                total /= len(written) ** request.length_penalty
            ticket.hypotheses = [Hypothesis(ticket.ids, total, reason != "length")]
            self.finish(ticket, reason)


class StopMatcher:
    """How much of the beginning of a stop sequence the text so far ends with (Knuth, Morris and Pratt 1977).

    Each element, an id or a character, takes constant time on average, however long the stop is and whatever repeats in it.
    """

    def __init__(self, stop: abc.Sequence[object]) -> None:
        self.stop, self.n = stop, 0
        self.borders = [0] * len(stop)  # for stop[: i + 1]: the longest shorter beginning of it with which it also ends
        n = 0
        for place in range(1, len(stop)):
            while n and stop[place] != stop[n]:
                n = self.borders[n - 1]
            n += stop[place] == stop[n]
            self.borders[place] = n

    def push(self, elements: abc.Iterable[object]) -> int:
        """Append elements to the text; returns how many of its last ones begin the stop without completing it."""
        stop, borders, n = self.stop, self.borders, self.n
        for element in elements:
            while n and element != stop[n]:
                n = borders[n - 1]
            n += element == stop[n]
            if n == len(stop):
                n = borders[-1]
        self.n = n
        return n


def stop_overlap(written: abc.Sequence[object], stop: abc.Sequence[object]) -> int:
    """How many of the last elements (ids, or characters) a stop sequence begins with, if it is not complete."""
    return StopMatcher(stop).push(written[max(0, len(written) - len(stop) + 1) :])
