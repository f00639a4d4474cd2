"""The engine: many requests written at once by one model, each as if it were alone.

    engine = Engine(model)
    ticket = engine.submit(Request(prompt=ids, max_new_tokens=64))
    while engine.is_busy:
        for ticket, token in engine.step():
            ...

Requests join and leave between steps (Yu et al. 2022, "Orca"). A step lets in what fits in memory, reads a piece of the prompts
that wait, and writes one token for every request that runs. Keys and values lie in blocks (Kwon et al. 2023, "PagedAttention"),
which beams and texts with the same beginning share until one of them writes. Memory is promised before a request is let in,
so that none runs out of it halfway.

On a GPU the CPU does not wait for a token before it asks for the next, unless the next depends on it (a search, a grammar,
penalties): what ended a text is then noticed one step later, and that step's token dropped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from clearhead.costs.hardware import available_memory
from clearhead.engine.allocator import Blocks
from clearhead.engine.batches import Parcel, check_least, evaluating, send
from clearhead.engine.beams import Searches
from clearhead.engine.request import Hypothesis, Reason, Request, Ticket, Token, check_request, n_source
from clearhead.engine.runner import Runner
from clearhead.engine.sampler import Group, choose, make_groups
from clearhead.engine.sequence import Member
from clearhead.errors import InputError
from clearhead.models import Decoder, EncoderDecoder
from clearhead.sampling.beam_search import Search
from clearhead.sampling.strategy import Shaper

BLOCK = 16  # tokens: few enough to share short beginnings, enough to be read in one piece

News = list[tuple[Ticket, Token | None]]


@dataclass
class Standing:
    """How those running are chosen for, as long as nobody comes or goes."""

    groups: list[Group]
    search: Search | None  # that of all rows, if the device goes on with it alone
    is_blind: bool  # whether all their next tokens can be asked for before their last are known


@dataclass
class Launch:
    """Tokens that were asked for, or what a search's beams looked at, on their way from the device."""

    step: int
    members: list[Member]
    parcel: Parcel
    search: Search | None = None
    is_plain: bool = False  # as a group's


class Engine:
    """`submit` requests, then `step` while it `is_busy`. For one thread at a time, and a model in its eval mode.

    `max_tokens` bounds the tokens held at once, prompts, texts and sources (None: what half of the free memory holds, on a GPU
    most of it). `max_rows` bounds the texts written at once, each beam one. `prefill_tokens` bounds what one step reads of
    prompts, so that a long prompt does not hold up the others. `prefixes` keeps beginnings for whom they fit next.
    """

    def __init__(
        self,
        model: Decoder | EncoderDecoder,
        *,
        max_tokens: int | None = None,
        max_rows: int = 256,
        prefill_tokens: int | None = None,
        prefixes: bool = True,
    ) -> None:
        for name, told in (("max_tokens", max_tokens), ("max_rows", max_rows), ("prefill_tokens", prefill_tokens)):
            check_least(1 if told is None else told, 1, name)
        self.model, self.max_rows, config = model, max_rows, model.config
        self.device = next(model.parameters()).device
        self.is_gpu = self.device.type == "cuda"
        self.prefill_tokens = prefill_tokens or (16_384 if self.is_gpu else 1024)
        n_blocks = 1 + (self._count_blocks() if max_tokens is None else -(-max_tokens // BLOCK))
        is_decoder = isinstance(model, Decoder)
        # What is written after a source depends on all of it: a beginning alone fits nobody else.
        self.blocks = Blocks(n_blocks, BLOCK, max_holders=max_rows, keep_beginnings=prefixes and is_decoder)
        self.runner = Runner(
            model,
            n_blocks=n_blocks,
            block=BLOCK,
            max_rows=max_rows,
            width=min(-(-config.max_len // BLOCK), n_blocks),
            source_width=0 if is_decoder else min(-(-config.max_source_len // BLOCK), n_blocks),
        )
        self.waiting: deque[tuple[Ticket, list[int], Shaper]] = deque()
        self.reading: list[Member] = []
        self.running: list[Member] = []
        self.standing: Standing | None = None  # of those running; None: to be made anew
        self.searches = Searches(self.runner, self.blocks)
        self.launches: deque[Launch] = deque()
        self.shapers: dict[str, Shaper] = {}
        self.last: tuple[tuple[object, ...], Shaper] | None = None  # of these, and what it was made from
        self.names: set[str] = set()
        self.changed: list[Ticket] = []  # since the last step was told
        self.has_left = False  # whether there is something to sweep
        self.n_steps = 0

    def _count_blocks(self) -> int:
        config, weight = self.model.config, next(self.model.parameters())
        n_layers = config.n_layers if isinstance(self.model, Decoder) else config.n_decoder_layers
        each = 2 * BLOCK * n_layers * config.n_kv_heads * config.d_head * weight.element_size()
        most = self.max_rows * -(-(config.max_len + config.max_source_len) // BLOCK)
        # On a GPU the rest is for the states and logits of one step.
        share = 0.85 if self.is_gpu else 0.5
        return max(1, min(most, int(share * available_memory(self.device)) // each))

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.reading or self.running or self.launches)

    def submit(self, request: Request, what: str = "prompt") -> Ticket:
        """Ask for a text. What can not work is refused here, and disturbs nobody."""
        prompt = check_request(request, self.model, what)
        shaper = self._shaper(request)
        if request.beams > 1:
            Search.of(request, shaper)
        ticket = Ticket(request)
        ticket.n_prompt = len(prompt)
        need, most = self._need(request, len(prompt)), self.blocks.n_blocks - 1
        if need > most:
            raise InputError(
                f"{what} may need {need * BLOCK:,} tokens of memory ({len(prompt)} of its own, "
                f"max_new_tokens={request.max_new_tokens}, beams={request.beams}), but there are {most * BLOCK:,}; "
                f"ask for fewer, or raise max_tokens"
            )
        if request.beams > self.max_rows:
            raise InputError(
                f"beams={request.beams} is more than max_rows={self.max_rows}; lower it, or raise the other"
            )
        if request.name is not None:
            if request.name in self.names:
                raise InputError(f"a request of the name {request.name!r} is not over yet; give each its own name")
            self.names.add(request.name)
        self.waiting.append((ticket, prompt, shaper))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stop a request; its memory is free at once, but for a step that is under way."""
        if not ticket.is_done:
            self._end(ticket, "cancelled")
            self._sweep()

    def step(self) -> News:
        """One step for all. Returns each new token with its ticket, and None with each ticket that is over."""
        self._step()
        news: News = []
        for ticket in dict.fromkeys(self.changed):
            news += [(ticket, ticket.token(at)) for at in range(ticket.n_told, ticket.n_shown)]
            ticket.n_told = ticket.n_shown
            news += [(ticket, None)] if ticket.is_done else []
        self.changed.clear()
        return news

    def _step(self) -> None:
        self.n_steps += 1
        with evaluating(self.model) if self.model.training else torch.no_grad():
            self._sweep()
            self._admit()
            self._read()
            ahead = self.is_gpu and (not self.running or self._stand().is_blind)
            if not ahead:
                self._receive(self.n_steps)
                self._sweep()
            if self.running:
                self._write()
            self._receive(self.n_steps - (ahead and bool(self.running)))
            self._sweep()

    def run(self) -> None:
        """Until everything is written."""
        with evaluating(self.model), self.runner.native_step.assume_unchanged():
            while self.is_busy:
                self._step()
                self.changed.clear()

    # Coming and going.

    def _shaper(self, request: Request) -> Shaper:
        told = request.strategy, self.model.generation, request.eos
        # Many requests of one caller have the same ones, which may not be such as can be changed.
        is_fixed = not (request.strategy.logit_bias or request.strategy.suppress) and isinstance(
            request.eos, tuple | None
        )
        if is_fixed and self.last is not None and all(map(is_, told, self.last[0])):
            return self.last[1]
        key = f"{request.strategy} {request.eos} {self.model.generation}"
        if key not in self.shapers:
            if len(self.shapers) >= 1000:  # a server's users may each bring their own
                self.shapers.clear()
            self.shapers[key] = Shaper(self.model, request.eos, request.strategy)
        self.last = told, self.shapers[key]
        return self.shapers[key]

    def _need(self, request: Request, n_prompt: int) -> int:
        """The most blocks that a request may come to hold. Beams share the prompt's whole blocks: none writes there."""
        whole = -(-(n_prompt + request.max_new_tokens) // BLOCK)
        shared = n_prompt // BLOCK
        return -(-n_source(request.source) // BLOCK) + shared + request.beams * (whole - shared)

    def _admit(self) -> None:
        """Let in, in order, what fits."""
        if not self.waiting:
            return
        n_rows = sum(member.width for member in (*self.running, *self.reading))
        while self.waiting:
            ticket, prompt, shaper = self.waiting[0]
            request = ticket.request
            if ticket.is_done:
                self.waiting.popleft()
                continue
            known = self.blocks.find(prompt)
            need = self._need(request, len(prompt)) - len(known)
            lost = sum(int(self.blocks.refs[block]) == 0 for block in known)  # to those who come after
            if need + lost > self.blocks.n_available or n_rows + request.beams > self.max_rows:
                return
            self.waiting.popleft()
            n_rows += request.beams
            self.blocks.hold(known)
            member = Member(ticket, prompt, shaper, self.blocks.admit(need))
            n_source_blocks, n_new = -(-member.n_source // BLOCK), -(-len(prompt) // BLOCK) - len(known)
            taken = self.blocks.take([member.holder] * (n_source_blocks + n_new))
            member.source, fresh = taken[:n_source_blocks], taken[n_source_blocks:]
            member.row = np.concatenate([np.array(known, np.int32), fresh]) if known else fresh
            member.n_read = ticket.n_cached = len(known) * BLOCK
            self.reading.append(member)

    def _end(self, ticket: Ticket, reason: Reason) -> None:
        ticket.reason = reason
        self.has_left = True
        self.changed.append(ticket)
        if ticket.request.name is not None:
            self.names.discard(ticket.request.name)

    def _fail(self, ticket: Ticket) -> None:
        """It can not go on; the others can."""
        ticket.error = InputError(
            f"a text can not go on after {ticket.n_shown} tokens: no token has a score; got NaN logits, or a strategy or "
            f"grammar that forbids every token ({ticket.request.strategy}); look at the weights, or loosen one"
        )
        self._end(ticket, "failed")

    def _sweep(self) -> None:
        """What is over leaves the batch, and its blocks are free."""
        if not self.has_left:
            return
        self.has_left = False
        gone = [(member, member.row[None], member.n_read) for member in self.reading if member.ticket.is_done]
        self.reading = [member for member in self.reading if not member.ticket.is_done]
        keep: list[int] = []
        stay: list[Member] = []
        for member, first in zip(self.running, self._firsts(self.running), strict=True):
            rows = range(first, first + member.width)
            if member.ticket.is_done or member.n_asked >= member.limit:
                table, counts = self.runner.table, self.runner.counts
                gone.append((member, table[rows.start : rows.stop], int(counts[first])))
            else:
                keep += rows
                stay.append(member)
        self._free(gone)
        self.searches.forget()
        if len(stay) < len(self.running):
            self.running, self.standing = stay, None
            self.runner.keep(keep, beams=any(member.width > 1 for member in stay))

    def _firsts(self, members: Sequence[Member]) -> list[int]:
        """The first row of each."""
        ends = np.cumsum([0, *(member.width for member in members)])
        return ends[:-1].tolist()

    def _free(self, gone: list[tuple[Member, NDArray[np.int32], int]]) -> None:
        """Their blocks back; whole ones whose tokens are known stay to be found, until their room is needed."""
        held: list[NDArray[np.int32]] = []
        for member, rows, n_held in gone:
            if member.width == 1 and self.blocks.keep_beginnings:
                self.blocks.remember([*member.prompt, *member.ticket.written][:n_held], rows[0].tolist())
            held += [rows.ravel(), member.source]
        if held:
            blocks = np.concatenate(held)
            self.blocks.release(blocks[blocks > 0])
            self.blocks.leave([member.holder for member, _, _ in gone])

    # Reading prompts.

    def _read(self) -> None:
        """A piece of the prompts that wait, in order, at most `prefill_tokens` in all."""
        budget = self.prefill_tokens
        while self.reading and budget > 0:
            batch, cost = self._readers(budget)
            T = min(max(member.n_left for member in batch), budget)
            budget -= cost
            logits = self.runner.read(batch, T)
            for member in batch:
                member.n_read += min(member.n_left, T)
            self.reading = [member for member in self.reading if member.n_left]
            if batch[0].n_left == 0:
                self._start(batch, logits)

    def _readers(self, budget: int) -> tuple[list[Member], int]:
        """Prompts to read together, and how many tokens that is: whole ones, if they must be padded about as long as the first
        in order, or a piece of that one alone."""
        first, packs = self.reading[0], self.runner.reader.packs
        batch, longest, total = [first], _length(first), _length(first)
        if first.n_read or first.n_left > budget:
            return batch, max(min(first.n_left, budget), first.n_source)
        for member in self.reading[1:]:
            length = _length(member)
            T = max(longest, length)
            alike = packs or (2 * min(longest, length) + BLOCK >= T and _frames(member) == _frames(first))
            cost = total + length if packs else (len(batch) + 1) * T
            if alike and not member.n_read and cost <= budget:
                batch.append(member)
                longest, total = T, cost
        if packs:  # long ones first: later steps look at the rows in order, and short ones fill the gaps at the end
            batch.sort(key=lambda member: -member.n_left)
        return batch, total

    def _start(self, members: list[Member], logits: Float[Tensor, "B V"]) -> None:
        """Prompts were read: their rows join the batch, and their first tokens are chosen."""
        for member in members:
            if member.width == 1:
                self.blocks.remember(member.prompt, member.row.tolist())
            if member.constraints and member.width > 1:
                member.constraints = [held.fork() for held in member.constraints * member.width if held is not None]
        firsts = [self.runner.n + at for at in self._firsts(members)]
        self.runner.join(members)
        self.running = [*self.running, *members]  # a new list: what was asked for holds the old one
        self.standing = None
        for group in make_groups(members, firsts, range(len(members)), self.device):
            self._ask(group.members, choose(group, logits, self.runner), is_plain=group.is_plain)
        wide: dict[Search, list[int]] = {}
        for at, member in enumerate(members):
            if member.search is not None:
                wide.setdefault(member.search, []).append(at)
        if wide:
            self.searches.share(members, firsts)
        for search, places in wide.items():
            own = logits if len(places) == len(members) else logits[send(np.array(places), self.device)]
            those = [members[at] for at in places]
            self._ask(those, self.searches.start(search, those, [firsts[at] for at in places], own), search)

    # Writing.

    def _stand(self) -> Standing:
        if self.standing is None:
            members, firsts = self.running, self._firsts(self.running)
            groups, search = make_groups(members, firsts, firsts, self.device), self.searches.common(members)
            is_blind = search is not None or all(member.is_blind for member in members)
            self.standing = Standing(groups, search, is_blind)
        return self.standing

    def _write(self) -> None:
        """One token for every row."""
        standing = self._stand()
        self._make_room()
        if standing.search is not None:
            self._ask(self.running, Parcel(self.runner.write(standing.search)), standing.search)
            return
        logits = self.runner.write()
        for group in standing.groups:
            self._ask(group.members, choose(group, logits, self.runner), is_plain=group.is_plain)
        if not standing.is_blind:  # blind: none that searches is running, but some may not have heard their last
            self._ask(self.searches.extend(self.running, self._firsts(self.running), logits), None)

    def _ask(
        self, members: list[Member], parcel: Parcel | None, search: Search | None = None, *, is_plain: bool = False
    ) -> None:
        """Tokens are on their way, or have come."""
        if parcel is not None:
            self.launches.append(Launch(self.n_steps, members, parcel, search, is_plain))
        for member in members:
            member.n_asked += 1
            if member.n_asked >= member.limit:
                self.has_left = True
        if parcel is None:
            self._close()

    def _make_room(self) -> None:
        """A block for each row's next token: a new one, or its own copy of one that others share."""
        runner, n = self.runner, self.runner.n
        counts, at = runner.counts[:n], runner.counts[:n] // BLOCK
        full = np.flatnonzero(counts % BLOCK == 0)
        copies = bool(self.searches) and not runner.has_paths
        if len(full) == 0 and not copies:
            return
        holders = np.repeat([member.holder for member in self.running], [member.width for member in self.running])
        if len(full):
            runner.table[full, at[full]] = self.blocks.take(holders[full])
            runner.is_stale = True
        if copies:
            self.searches.copy_shared(holders)

    def _receive(self, until: int) -> None:
        """Tokens asked for up to this step: they join their texts."""
        while self.launches and self.launches[0].step <= until:
            launch = self.launches.popleft()
            if launch.search is not None:
                self.searches.advance(launch.search, launch.members, launch.parcel)
                self._close()
            else:
                self._tell(launch)

    def _close(self) -> None:
        """Searches that are over are told."""
        for ticket, hypotheses in self.searches.over():
            ticket.hypotheses = hypotheses[: ticket.request.n_best]
            if not hypotheses:
                self._fail(ticket)
                continue
            ticket.written = hypotheses[0].tokens
            ticket.n_shown = len(ticket.written)
            self._end(ticket, "end" if hypotheses[0].finished else "length")

    def _tell(self, launch: Launch) -> None:
        """One more token of each text; -1: there was none to choose."""
        ids, *rest = (part.tolist() for part in launch.parcel.open())
        for place, (member, id) in enumerate(zip(launch.members, ids, strict=True)):
            ticket = member.ticket
            if ticket.reason is not None:
                continue
            ends, n = member.shaper.ends, len(ticket.written) + 1
            if (
                launch.is_plain and id >= 0 and id not in ends and n < member.limit
            ):  # most are, and there may be hundreds
                ticket.written.append(id)
                ticket.n_shown = n
                self.changed.append(ticket)
            elif id < 0:
                self._fail(ticket)
            else:
                if rest:
                    ticket.scores.append(rest[0][place])
                if len(rest) > 1:
                    ticket.alternatives.append(tuple(zip(rest[2][place], rest[1][place], strict=True)))
                self._add(member, id)

    def _add(self, member: Member, id: int) -> None:
        """One more token of a text, and whether it ends it."""
        ticket, request = member.ticket, member.ticket.request
        written = ticket.written
        is_whole = False
        if member.constraints and (constraint := member.constraints[0]) is not None:
            try:
                constraint.push(id)
                is_whole = constraint.is_done
            except InputError:  # it was chosen where nothing was left to choose from
                self._fail(ticket)
                return
        written.append(id)
        self.changed.append(ticket)
        reason: Reason | None = None
        held = 0  # tokens at the end that are not, or not yet, the text's
        if id in member.shaper.ends:
            reason, held = "end", 1
        elif request.stop:
            held = max((len(stop) for stop in request.stop if written[-len(stop) :] == list(stop)), default=0)
            reason = "stop" if held else None
            held = held or max(_overlap(written, stop) for stop in request.stop)
        if reason is None and (is_whole or len(written) == member.limit):
            reason, held = "end" if is_whole else "length", 0
        ticket.n_shown = max(ticket.n_shown, len(written) - held)
        if reason is not None:
            total = sum(ticket.scores) if ticket.scores else math.nan
            if isinstance(self.model, EncoderDecoder):
                total /= len(written) ** request.length_penalty
            ticket.hypotheses = [Hypothesis(ticket.ids, total, reason != "length")]
            self._end(ticket, reason)


def _length(member: Member) -> int:
    """What reading it costs: its prompt, or its source if that is longer."""
    return max(member.n_left, member.n_source)


def _frames(member: Member) -> tuple[int, ...]:
    """Sound is read together only with sound of the same length."""
    source = member.ticket.request.source
    return tuple(source.shape) if isinstance(source, Tensor) else ()


def _overlap(ids: Sequence[int], stop: Sequence[int]) -> int:
    """How many of the last ids a stop may begin with."""
    return max(n for n in range(min(len(stop), len(ids) + 1)) if list(ids[len(ids) - n :]) == list(stop[:n]))
