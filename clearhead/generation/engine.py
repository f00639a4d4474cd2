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

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from clearhead.costs.machine import available_memory
from clearhead.errors import InputError
from clearhead.generation.batches import check_least, evaluating, send, widen
from clearhead.generation.beams import Beams, Search, lay_out
from clearhead.generation.blocks import Blocks
from clearhead.generation.requests import Hypothesis, Reason, Request, Ticket, Token, check_request, n_source
from clearhead.generation.running import Member, Parcel, Runner
from clearhead.generation.strategies import Shaper
from clearhead.models import Decoder, EncoderDecoder

BLOCK = 16  # tokens: few enough to share short beginnings, enough to be read in one piece

News = list[tuple[Ticket, Token | None]]


@dataclass
class Group:
    """Rows that are chosen for in the same way, and what is known of them as long as nobody comes or goes."""

    shaper: Shaper
    members: list[Member]
    rows: Int[Tensor, " n"]
    among: Int[Tensor, " n"] | None  # of the logits, its rows; None: all, in order
    seeds: Int[Tensor, " n"]
    n_prompt: Int[Tensor, " n"]
    limits: Int[Tensor, " n"]
    scored: bool
    alternatives: int


@dataclass
class Launch:
    """Tokens that were asked for, on their way from the device."""

    step: int
    members: list[Member]
    parcel: Parcel


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
        self.groups: list[Group] | None = None  # of those running; None: to be made anew
        self.searches: dict[Search, Beams] = {}
        self.launches: deque[Launch] = deque()
        self.shapers: dict[str, Shaper] = {}
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
            _search(request, shaper)
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
            ahead = self.is_gpu and all(member.is_blind for member in self.running)
            self._receive(self.n_steps - ahead)
            self._sweep()
            if self.running:
                self._write()
            self._receive(self.n_steps - (ahead and bool(self.running)))
            self._sweep()

    def run(self) -> None:
        """Until everything is written."""
        with evaluating(self.model):
            while self.is_busy:
                self._step()
                self.changed.clear()

    # Coming and going.

    def _shaper(self, request: Request) -> Shaper:
        key = f"{request.strategy} {request.eos} {self.model.generation}"
        if key not in self.shapers:
            if len(self.shapers) >= 1000:  # a server's users may each bring their own
                self.shapers.clear()
            self.shapers[key] = Shaper(self.model, request.eos, request.strategy)
        return self.shapers[key]

    def _need(self, request: Request, n_prompt: int) -> int:
        """The most blocks that a request may come to hold. Beams share the prompt's whole blocks: none writes there."""
        whole = -(-(n_prompt + request.max_new_tokens) // BLOCK)
        shared = n_prompt // BLOCK
        return -(-n_source(request.source) // BLOCK) + shared + request.beams * (whole - shared)

    def _admit(self) -> None:
        """Let in, in order, what fits."""
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
            member.row = np.concatenate([np.array(known, np.int32), fresh])
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
        if len(stay) < len(self.running):
            for search, beams in list(self.searches.items()):
                beams.keep([row for row, ticket in enumerate(beams.tickets) if not ticket.is_done])
                if not beams.tickets:
                    del self.searches[search]
            self.running, self.groups = stay, None
            self.runner.keep(keep)

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
            batch = self._readers(budget)
            T = min(max(member.n_left for member in batch), max(budget, 1))
            budget -= max(T, *map(_length, batch)) * len(batch) if batch[0].n_source else T * len(batch)
            logits = self.runner.read(batch, T)
            for member in batch:
                member.n_read += min(member.n_left, T)
            self.reading = [member for member in self.reading if member.n_left]
            if batch[0].n_left == 0:
                self._start(batch, logits)

    def _readers(self, budget: int) -> list[Member]:
        """Prompts to read together: whole ones about as long as the first in order, or a piece of that one alone."""
        first = self.reading[0]
        batch, longest = [first], _length(first)
        if first.n_read or first.n_left > budget:
            return batch
        for member in self.reading[1:]:
            length = _length(member)
            T = max(longest, length)
            alike = 2 * min(longest, length) + BLOCK >= T and _frames(member) == _frames(first)
            if alike and not member.n_read and (len(batch) + 1) * T <= budget:
                batch.append(member)
                longest = T
        return batch

    def _start(self, members: list[Member], logits: Float[Tensor, "B V"]) -> None:
        """Prompts were read: their rows join the batch, and their first tokens are chosen."""
        for member in members:
            if member.width == 1:
                self.blocks.remember(member.prompt, member.row.tolist())
            self.blocks.share(np.tile(member.row, member.width - 1))
            if member.constraints and member.width > 1:
                member.constraints = [held.fork() for held in member.constraints * member.width if held is not None]
        first = self.runner.n
        self.runner.join(members)
        self.running += members
        self.groups = None
        wide = [at for at, member in enumerate(members) if member.width > 1]
        if wide:
            logits = logits.repeat_interleave(torch.tensor([m.width for m in members], device=self.device), 0)
        firsts = [first + at for at in self._firsts(members)]
        for group in self._group(members, firsts, len(logits)):
            self._choose(group, logits)
        searches: dict[Search, list[int]] = {}
        for at in wide:
            searches.setdefault(_search(members[at].ticket.request, members[at].shaper), []).append(at)
        for search, places in searches.items():
            joined = [members[at] for at in places]
            dtype = torch.promote_types(logits.dtype, torch.float32)
            beams = Beams(search, [m.ticket for m in joined], [m.prompt for m in joined], dtype)
            self._extend(beams, joined, [firsts[at] for at in places], logits, first)
            self.searches[search] = self.searches[search].merge(beams) if search in self.searches else beams

    # Writing.

    def _write(self) -> None:
        """One token for every row."""
        self._make_room()
        logits = self.runner.write()
        if self.groups is None:
            self.groups = self._group(self.running, self._firsts(self.running), len(logits))
        for group in self.groups:
            self._choose(group, logits)
        places = dict(zip(map(id, (m.ticket for m in self.running)), self._firsts(self.running), strict=True))
        members = {id(member.ticket): member for member in self.running}
        for beams in self.searches.values():
            those = [members[id(ticket)] for ticket in beams.tickets]
            self._extend(beams, those, [places[id(ticket)] for ticket in beams.tickets], logits, 0)

    def _make_room(self) -> None:
        """A block for each row's next token: a new one, or its own copy of one that others share."""
        runner, n = self.runner, self.runner.n
        counts, at = runner.counts[:n], runner.counts[:n] // BLOCK
        full = np.flatnonzero(counts % BLOCK == 0)
        if len(full) == 0 and not self.searches:
            return
        holders = np.repeat([member.holder for member in self.running], [member.width for member in self.running])
        if len(full):
            runner.table[full, at[full]] = self.blocks.take(holders[full])
            runner.is_stale = True
        last = runner.table[np.arange(n), at]
        shared = np.flatnonzero(self.blocks.refs[last] > 1)  # only beams share a block that is being written
        if len(shared):
            # Where all who share a block are here, one of them goes on with it.
            blocks, first, n_here = np.unique(last[shared], return_index=True, return_counts=True)
            copied = np.delete(shared, first[n_here == self.blocks.refs[blocks]])
            targets = self.blocks.take(holders[copied])
            runner.copy(last[copied], targets)
            runner.table[copied, at[copied]] = targets
            self.blocks.release(last[copied])
            runner.is_stale = True

    def _group(self, members: Sequence[Member], firsts: Sequence[int], n_rows: int) -> list[Group]:
        """Those that do not search, by the way their tokens are chosen."""
        by: dict[tuple[int, bool, int], list[tuple[Member, int]]] = {}
        for member, first in zip(members, firsts, strict=True):
            if member.width == 1:
                request = member.ticket.request
                by.setdefault((id(member.shaper), request.scored, request.alternatives), []).append((member, first))
        groups: list[Group] = []
        for (_, scored, alternatives), those in by.items():
            each = [member for member, _ in those]
            facts = [(m.ticket.request.seed, len(m.prompt), m.limit, first) for m, first in those]
            seeds, n_prompt, limits, rows = send(np.array(facts, np.int64), self.device).unbind(1)
            among = rows - firsts[0] if len(those) < n_rows else None
            groups.append(Group(each[0].shaper, each, rows, among, seeds, n_prompt, limits, scored, alternatives))
        return groups

    def _choose(self, group: Group, logits: Float[Tensor, "n V"]) -> None:
        """Each row's next token, asked for; it is told when it has arrived."""
        shaper, members, runner = group.shaper, group.members, self.runner
        bound = any(member.constraints for member in members)
        greedy = shaper.is_plain and shaper.strategy.temperature == 0 and not bound
        looked_at = not (greedy and runner.is_greedy) or group.scored or bool(group.alternatives)
        logits = logits[group.among] if looked_at and group.among is not None else logits
        scores = alternatives = dead = None
        if greedy and runner.is_greedy:
            tokens = runner.tokens[: len(members)] if group.among is None else runner.tokens[group.rows]
        elif greedy:
            tokens = runner.tokens[group.rows] = logits.argmax(-1)
        else:
            steps = send(np.array([member.n_asked for member in members]), self.device)
            history = None
            if shaper.looks_back:
                history = lay_out([[*m.prompt, *m.ticket.written] for m in members], self.device)
            shaped = shaper(widen(logits), history, group.n_prompt, steps, group.limits)
            if bound:
                shaped = shaped.masked_fill(~self._allowed(members), -math.inf)
            tokens = runner.tokens[group.rows] = shaper.strategy.choose(shaped, group.seeds, steps)
            dead = ~(shaped > -math.inf).any(-1)  # nothing is left to choose from
        if group.scored or group.alternatives:
            log_probs = widen(logits).log_softmax(-1)
            scores = log_probs.gather(1, tokens[:, None])[:, 0]
            alternatives = tuple(log_probs.topk(group.alternatives)) if group.alternatives else None
        if dead is not None:
            tokens = tokens.masked_fill(dead, -1)
        for member in members:
            member.n_asked += 1
            self.has_left |= member.n_asked >= member.limit
        self.launches.append(Launch(self.n_steps, members, Parcel(tokens, scores, alternatives)))

    def _allowed(self, members: Sequence[Member]) -> Bool[Tensor, "n V"]:
        """What their grammars allow next; where there is none, everything."""
        rows: list[Tensor] = []
        for member in members:
            everything = torch.ones(self.model.config.vocab_size, dtype=torch.bool)
            for held in member.constraints or [None] * member.width:
                try:
                    rows.append(held.allowed() if held is not None else everything)
                except InputError:  # the vocabulary lacks what must come next: this text fails, the others go on
                    rows.append(~everything)
        return torch.stack(rows).to(self.device)

    def _receive(self, until: int) -> None:
        """Tokens asked for up to this step: they join their texts."""
        while self.launches and self.launches[0].step <= until:
            launch = self.launches.popleft()
            for member, id, score, others in zip(launch.members, *launch.parcel.open(), strict=True):
                ticket = member.ticket
                if ticket.reason is None and id < 0:
                    self._fail(ticket)
                elif ticket.reason is None:
                    if score is not None:
                        ticket.scores.append(score)
                    if others is not None:
                        ticket.alternatives.append(others)
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

    def _extend(
        self,
        beams: Beams,
        members: Sequence[Member],
        firsts: Sequence[int],
        logits: Float[Tensor, "n V"],
        first: int,
    ) -> None:
        """One step of searches: beams go on from each other's texts, sharing the blocks that hold them."""
        K, runner = beams.search.beams, self.runner
        rows = (np.array(firsts)[:, None] + np.arange(K)).ravel()
        if len(rows) < len(logits):
            logits = logits[send(rows - first, self.device)]
        allowed = self._allowed(members) if any(member.constraints for member in members) else None
        tokens, parents = beams.extend(*beams.candidates(logits, allowed))
        whole = len(rows) == runner.n and rows[0] == 0 and rows[-1] == runner.n - 1
        runner.tokens[slice(0, runner.n) if whole else send(rows, self.device)] = send(tokens.ravel(), self.device)
        sources = (np.array(firsts)[:, None] + parents).ravel()
        moved = np.flatnonzero(rows != sources)
        if len(moved):
            used = -(-int(runner.counts[rows].max()) // BLOCK)
            old, new = runner.table[rows[moved], :used], runner.table[sources[moved], :used]
            self.blocks.share(new[new > 0])
            self.blocks.release(old[old > 0])
            runner.table[rows[moved], :used] = new
            runner.is_stale = True
        for place, member in enumerate(members):
            member.n_asked += 1
            self.has_left |= member.n_asked >= member.limit
            if member.constraints:
                alive = (beams.scores[place] > -math.inf).tolist()
                self._follow(member, tokens[place].tolist(), parents[place].tolist(), alive)
            if not beams.is_open[place]:
                ticket = member.ticket
                ticket.hypotheses = beams.done[place][: ticket.request.n_best]
                if not ticket.hypotheses:
                    self._fail(ticket)
                    continue
                ticket.written = ticket.hypotheses[0].tokens
                ticket.n_shown = len(ticket.written)
                self._end(ticket, "end" if ticket.hypotheses[0].finished else "length")

    def _follow(self, member: Member, tokens: list[int], parents: list[int], alive: list[int]) -> None:
        """Each beam's grammar goes where the beam went."""
        before = member.constraints
        after = [before[parent] if lives else None for parent, lives in zip(parents, alive, strict=True)]
        member.constraints = [held.fork() if held is not None else None for held in after]
        for held, token in zip(member.constraints, tokens, strict=True):
            if held is not None:
                held.push(token)


def _search(request: Request, shaper: Shaper) -> Search:
    return Search(request.beams, request.length_penalty, request.early_stopping, shaper)


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
