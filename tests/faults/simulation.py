"""The real engine, scheduler and server's worker under a fake model, in random events from a seed, with invariants after each.

.venv/bin/python -m tests.faults.simulation --events 1000000
.venv/bin/python -m tests.faults.simulation --seed 17          # one seed again: the failing events, as few as still fail

A seed is one engine, of random sizes, and some hundred events: a client asks (alone, with a prefix that others have, with beams, a
grammar, an error), leaves or loses patience; the engine makes a step; the model fails. The clock counts steps. After each event:
every block is in one place, with the right number of references; no slot was written twice, or read before it was written (see
fake_model.py); clients were admitted in turns; each request was answered once, with the text that it gets alone. For some requests
tokens are drafted, right and wrong ones.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter, abc
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from unittest import mock

import torch

from clearhead.engine import engine as engine_module
from clearhead.engine.engine import Engine
from clearhead.engine.outputs import StepOutput
from clearhead.engine.request import Request, Ticket, Token
from clearhead.engine.scheduler import SPARED, Scheduler
from clearhead.engine.sequence import Sequence
from clearhead.errors import InputError
from clearhead.sampling.strategy import Strategy
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.worker import BrokenError
from tests.engine.test_engine import (
    MAX_LEN,
    assert_nothing_left,
    check_memory,
    grammar,
    ids,
    is_pair,
    some_strategy,
)
from tests.faults.fake_model import Expected, FakeRunner, InjectedError, ViolationError, expect, tiny_model

EVENTS = 400  # of one seed
CLIENTS = [None, "a", "b", "c"]


class Event(NamedTuple):
    """What happens, and the seed of what is random in it: so events can be left out, and the others stay the same."""

    kind: str
    seed: int


@dataclass
class Reader:
    """A client's end of a request: a `Channel` without an event loop."""

    request: Request
    patience: int  # steps
    began: float = 0.0
    ticket: Ticket | None = None
    accepted: Future[Ticket] = field(default_factory=Future)
    arrived: list[Token | BaseException | None] = field(default_factory=list)
    is_open: bool = True  # neither answered nor gone
    is_gone: bool = False

    has_gone = False  # so that a request that was given up is submitted all the same

    @property
    def home(self) -> object:
        return id(self)

    def accept(self, ticket: Ticket) -> None:
        self.accepted.set_result(ticket)

    def refuse(self, error: BaseException) -> None:
        self.accepted.set_exception(error)
        self.is_open = False

    def leave(self) -> None:
        self.is_gone, self.is_open = True, False

    def fail(self, error: BaseException) -> None:
        self.put(error)

    def deliver(self, deliveries: abc.Sequence[tuple[Any, Token | BaseException | None]]) -> None:
        for _, token in deliveries:
            self.put(token)

    def put(self, token: Token | BaseException | None) -> None:
        if not self.is_open:
            raise ViolationError(f"{self.request.name} was answered already, and gets {token}")
        self.arrived.append(token)
        self.is_open = isinstance(token, Token)


class Turns:
    """Checks the order of admission: each client's own order, turns between clients, and the spared part."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.n, self.turns = scheduler, 0, dict[str | None, int]()
        self.admit = scheduler._admit
        scheduler._admit = self._admit

    def submitted(self, client: str | None) -> None:
        """A client without a waiting request gets its turn after all who wait."""
        if len(self.scheduler.waiting.clients.get(client, ())) == 1:
            self.n += 1
            self.turns[client] = self.n

    def _admit(self, one: Any, *args: Any) -> None:
        scheduler, client = self.scheduler, one.ticket.request.client
        active = [*scheduler.running, *scheduler.prefilling]
        rows = Counter[str | None]()
        for sequence in active:
            rows[sequence.ticket.request.client] += sequence.n_rows
        for other in scheduler.waiting.clients:
            # One whose turn it was is passed over only to keep the spared part for those of whom nothing runs.
            if other != client and self.turns[other] < self.turns[client] and (other is None or not rows[other]):
                raise ViolationError(f"client {client} was admitted in the turn of client {other}")
        self.admit(one, *args)
        left = scheduler.max_rows - rows.total() - one.ticket.request.beams
        blocks = scheduler.allocator
        if client is not None and rows[client] and left < scheduler.max_rows // SPARED:
            raise ViolationError(f"client {client} has {rows[client]} rows, and takes those of others: {left} are left")
        if client is not None and rows[client] and blocks.n_available < blocks.n_blocks // SPARED:
            raise ViolationError(f"client {client} takes the blocks of others: {blocks.n_available} are left")
        self.n += 1
        self.turns[client] = self.n


class AnsweredOnce:
    """`Engine.step`, which must not return anything of a ticket after its end."""

    def __init__(self, step: Callable[[], StepOutput]) -> None:
        self.step, self.ended = step, set[Ticket]()

    def __call__(self) -> StepOutput:
        output = self.step()
        for ticket, token in output:
            if ticket in self.ended:
                raise ViolationError(f"{ticket.request.name} was over, and gets {token}")
            if token is None:
                self.ended.add(ticket)
        return output


class Simulation:
    """One seed: an engine under a worker without its thread."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(f"simulation {seed}")
        self.model = tiny_model(rng.choice(["decoder", "decoder", "encoder-decoder"]))
        self.size = rng.choice([2, 4, 16])
        self.max_rows = rng.choice([4, 6, 9, 24])
        self.n_blocks = 1 + -(-rng.choice([100, 160, 400, 1600]) // self.size)
        self.on_gpu, self.has_argmax, self.prefixes = rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.8
        self.prefill_tokens = rng.choice([3, 16, 60, 1000])
        self.hold_steps = random.Random(f"hold {seed}").choice([0, 0, 2, 3]) if self.on_gpu else 0
        if self.hold_steps:
            self.max_rows, self.n_blocks = 24, max(self.n_blocks, 1 + 400 // self.size)
        with mock.patch.object(threading.Thread, "start"):
            self.worker = ModelWorker("simulated", self.model, None, max_tokens=64, max_rows=1)
        self.worker._make = self.make_engine
        self.worker.engine = self.make_engine()
        self.readers: list[Reader] = []
        self.clock = self.n_failures = self.n_submitted = 0
        self.reasons = Counter[str]()
        self.previous: Reader | None = None
        self.texts: list[list[int]] = []  # prompts with their texts
        self.expected: dict[Ticket, Expected] = {}  # of tickets for which something was drafted
        self.n_accepted = 0  # drafted tokens

    def make_engine(self) -> Engine:
        sizes = dict(n_blocks=self.n_blocks, block_size=self.size, max_rows=self.max_rows)
        width = min(-(-MAX_LEN // self.size), self.n_blocks)
        widths = dict(table_width=width, source_width=width if is_pair(self.model) else 0)
        runner = FakeRunner(self.model, on_gpu=self.on_gpu, has_argmax=self.has_argmax, **sizes, **widths)
        with mock.patch.object(engine_module, "BLOCK_SIZE", self.size):
            engine = Engine(self.model, prefill_tokens=self.prefill_tokens, prefixes=self.prefixes, runner=runner)
        engine.runs_async = self.on_gpu
        engine.step = AnsweredOnce(engine.step)
        engine.scheduler.hold_steps, engine.scheduler.large_batch = self.hold_steps, 4
        runner.watch(engine.scheduler)
        self.turns = Turns(engine.scheduler)
        return engine

    @property
    def engine(self) -> Engine:
        assert self.worker.engine is not None
        return self.worker.engine

    def happen(self, event: Event) -> None:
        """One event, and all invariants after it."""
        getattr(self, event.kind)(random.Random(event.seed))
        self.check()

    def order(self, order: Callable[[], None]) -> None:
        """What the worker's thread does. A failure that was asked for is handled as there; any other is a finding."""
        try:
            order()
        except InjectedError as error:
            failure, self.n_failures = error, self.n_failures + 1

            def fail() -> None:
                raise failure

            self.worker._obey(fail)
            for reader in self.readers:
                if reader.is_open and reader.accepted.done():
                    raise ViolationError(f"{reader.request.name} was not told that the engine failed") from error

    # Events.

    def submit(self, rng: random.Random) -> None:
        request = some_request(rng, self.model, f"request {self.n_submitted}")
        if self.texts and rng.random() < 0.3:  # as in a chat, an earlier text goes on
            request = replace(request, prompt=[*rng.choice(self.texts[-5:]), *ids(rng, rng.choice([1, 5]))])
        if self.hold_steps and rng.random() < 0.98:  # a batch of such ones need not change in every step
            plain: dict[str, Any] = dict(beams=1, n_best=1, lookup=False, grammar=None)
            strategy = Strategy(temperature=request.strategy.temperature)
            request = replace(request, **plain, strategy=strategy, max_new_tokens=rng.choice([12, 28]))
        reader = Reader(request, rng.choice([3, 30, *[10**6] * 6]))
        self.n_submitted += 1
        if rng.random() < 0.02 and self.previous is not None:
            reader.request = self.previous.request  # its name may be in use, or not any more
        self.previous = reader
        self.readers.append(reader)
        before = self.engine.n_waiting
        self.order(lambda: self.worker._submit(reader))
        if reader.accepted.exception() is None:
            self.turns.submitted(reader.request.client)
        elif not isinstance(reader.accepted.exception(), InputError) or self.engine.n_waiting != before:
            raise ViolationError(f"refused otherwise than it should be: {reader.accepted.exception()!r}")
        reader.patience += self.clock

    def leave(self, rng: random.Random) -> None:
        """A client is gone: one of the last, so that some are waiting and some are running."""
        if self.readers:
            reader = rng.choice(self.readers[-12:])
            self.order(lambda: self.worker._forget(reader))
            reader.leave()

    def step(self, rng: random.Random) -> None:
        self.clock += 1
        self.order(self.worker._step)
        for reader in self.readers:
            if reader.is_open and reader.patience < self.clock:
                self.order(lambda reader=reader: self.worker._forget(reader))
                reader.leave()

    def fail(self, rng: random.Random) -> None:
        """The model fails in this or one of the next calls."""
        assert isinstance(self.engine.runner, FakeRunner)
        self.engine.runner.fails_in = rng.randrange(4)

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        """In place of `Sequence.draft`: what a lookup finds is hardly ever right here, so most drafts are the text itself, more or
        less of it, with mistakes."""
        if sequence.lookup is None or most < 1:
            return []
        ticket = sequence.ticket
        rng = random.Random(f"draft {ticket.request.seed} {len(ticket.written)}")
        if ticket not in self.expected:
            self.expected[ticket] = expect(self.model, ticket.request)
        right = self.expected[ticket].ids[len(ticket.written) :] + ids(rng, most)
        return [token if rng.random() < 0.8 else rng.randrange(53) for token in right[: rng.randint(0, most)]]

    # Invariants.

    def check(self) -> None:
        check_memory(self.engine)
        ended = [reader for reader in self.readers if not reader.is_open]
        if ended:
            self.readers = [reader for reader in self.readers if reader.is_open]
        for reader in ended:
            self.check_answer(reader)
        n_open = len({reader.request.name for reader in self.readers})
        if len(self.worker._channels) != n_open or self.engine.n_waiting + self.engine.n_running > n_open:
            raise ViolationError(f"{n_open} readers, {len(self.worker._channels)} channels")

    def check_answer(self, reader: Reader) -> None:
        """What arrived is the ticket's text, and that is the text of the request alone, or a part of it."""
        if reader.accepted.exception() is not None:
            return
        ticket, tokens = reader.ticket, [token for token in reader.arrived if isinstance(token, Token)]
        assert ticket is not None
        # The model may fail in the step in which a text ended: the reader is told that, and never sees the end.
        is_lost = bool(reader.arrived) and isinstance(reader.arrived[-1], BrokenError)
        reason = "lost" if is_lost or ticket.reason is None else ticket.reason
        self.reasons[reason] += 1
        self.n_accepted += ticket.n_accepted
        found = [token.id for token in tokens]
        expected = self.expected.pop(ticket, None) or expect(self.model, ticket.request)
        is_whole = reason in ("end", "stop", "length") and not reader.is_gone
        if is_whole:
            got = Expected(ticket.ids, reason, [(one.tokens, one.finished) for one in ticket.hypotheses])
            if got != expected or found != expected.ids:
                raise ViolationError(f"{ticket.request} got {found}, {got}; alone it gets {expected}")
            self.texts.append([*ticket.request.prompt, *ticket.ids])
        elif expected.ids[: len(found)] != found and not (expected.reason == "stop" and ticket.request.stop):
            raise ViolationError(f"{ticket.request} got {found}, which does not begin {expected}")
        if not reader.is_gone:
            last = reader.arrived[-1]
            is_right = is_lost if reason == "lost" else last is ticket.error
            if not is_right or (reason == "failed") != (expected.reason == "failed" and reason != "lost"):
                raise ViolationError(f"{ticket.request} ended with {last!r}, {reason}; alone it gets {expected}")

    def drain(self) -> None:
        """All that is open is answered, in so many steps as it can take at most, and nothing is left."""
        assert isinstance(self.engine.runner, FakeRunner)
        self.engine.runner.fails_in = float("inf")
        most = sum(3 + MAX_LEN + MAX_LEN // min(self.prefill_tokens, 16) for _ in self.readers) + 3
        for _ in range(most):
            if not self.engine.is_busy:
                break
            self.happen(Event("step", 0))
        assert_nothing_left(self.engine)
        if self.readers:
            raise ViolationError(f"never answered: {[reader.request for reader in self.readers]}")


def some_request(rng: random.Random, model: Any, name: str) -> Request:
    """A random request; many prompts have a common prefix, and few are wrong."""
    beams = rng.choice([1, 1, 1, 1, 2, 3, 4])
    # Texts of a block, in any order.
    common = [token for _ in range(3) for token in ids(random.Random(rng.randrange(3)), 16)]
    prompt = common[: rng.choice([0, 4, 8, 16, 30, 32, 33, 48])] + ids(rng, rng.choice([0, 1, 3, 11]))
    strategy = Strategy(temperature=rng.choice([0.0, 1.0]) if beams == 1 else 0.0)
    strategy = some_strategy(rng, beams) if rng.random() < 0.3 else strategy
    more: dict[str, Any] = dict(prompt=prompt, beams=beams, strategy=strategy)
    if is_pair(model):
        more |= dict(source=ids(rng, rng.randint(1, 31)), prompt=prompt[: rng.choice([0, 0, 2, 20])])
    if beams > 1:
        more |= dict(length_penalty=rng.choice([1.0, 0.6, 0.0, -1.0]), n_best=rng.randint(1, beams))
        more |= dict(early_stopping=rng.choice([True, False, "never"]))
    elif rng.random() < 0.3:
        more |= dict(lookup=not is_pair(model))
    if beams == 1 and rng.random() < 0.3:
        more |= dict(stop=[ids(rng, rng.choice([1, 1, 2])) for _ in range(rng.choice([2, 20]))])
    if rng.random() < 0.1:
        more |= dict(grammar=grammar(rng.randrange(2)), strategy=Strategy(temperature=1.0 if beams == 1 else 0.0))
    if rng.random() < 0.3:
        more |= dict(eos=rng.choice([(), 5, [5, 7]]), grammar=None)
    limit = rng.choice([1, 2, 5, 12, 18, 28]) if rng.random() < 0.99 else MAX_LEN + 1
    return Request(max_new_tokens=limit, seed=rng.randrange(-99, 99), name=name, client=rng.choice(CLIENTS), **more)


def some_events(seed: int, n: int) -> list[Event]:
    rng = random.Random(f"events {seed}")
    weights = [rng.choice([8, 20, 60]), rng.choice([0, 1, 8]), 60, rng.choice([0, 0, 0.3, 1.0])]
    kinds = rng.choices(["submit", "leave", "step", "fail"], weights, k=n)
    return [Event(kind, rng.randrange(2**32)) for kind in kinds]


def run_events(seed: int, events: Iterable[Event]) -> Simulation:
    """All of these events, then the end; ViolationError or AssertionError if an invariant does not hold."""
    quiet = logging.getLogger("clearhead.serving")
    simulation = Simulation(seed)
    with (
        torch.no_grad(),
        mock.patch.object(quiet, "disabled", True),
        mock.patch.object(Sequence, "draft", lambda sequence, most: simulation.draft(sequence, most)),
    ):
        for event in events:
            simulation.happen(event)
        simulation.drain()
    return simulation


def failure_of(seed: int, events: list[Event]) -> Exception | None:
    try:
        run_events(seed, events)
    except Exception as error:
        return error
    return None


def shrink(seed: int, events: list[Event], seconds: float = 30.0) -> list[Event]:
    """As few of these failing events as still fail: pieces are left out, from large to single ones."""
    end, size = time.monotonic() + seconds, len(events) // 2
    while size and time.monotonic() < end:
        at = 0
        while at < len(events) and time.monotonic() < end:
            fewer = events[:at] + events[at + size :]
            if failure_of(seed, fewer) is not None:
                events = fewer
            else:
                at += size
        size //= 2
    return events


def run_seed(seed: int) -> tuple[Counter[str], int, str | None]:
    """Why its requests ended, how often the model failed, and the error if an invariant does not hold."""
    torch.set_num_threads(1)
    try:
        done = run_events(seed, some_events(seed, EVENTS))
    except Exception:
        return Counter(), 0, traceback.format_exc()
    return done.reasons, done.n_failures, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, help=f"in all; a seed has {EVENTS}")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="only this seed, and the fewest of its events that fail")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args()
    if args.seed is not None:
        events = some_events(args.seed, EVENTS)
        if failure_of(args.seed, events) is None:
            print(f"seed {args.seed}: no failure in {EVENTS} events")
            return 0
        events = shrink(args.seed, events)
        print(f"seed {args.seed} fails with {len(events)} events:", *events, sep="\n  ")
        traceback.print_exception(failure_of(args.seed, events))
        return 1
    n_seeds, began = -(-args.events // EVENTS), time.monotonic()
    seeds = range(args.first, args.first + n_seeds)
    reasons, failures = Counter[str](), 0
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        for seed, (counts, n, failure) in zip(seeds, pool.map(run_seed, seeds, chunksize=8), strict=True):
            if failure is not None:
                pool.shutdown(cancel_futures=True)
                again = f"python -m tests.faults.simulation --seed {seed}"
                print(f"{failure}seed {seed} failed; again, with as few events as fail: {again}")
                return 1
            reasons, failures = reasons + counts, failures + n
            if (n_done := (seed - args.first + 1) * EVENTS) % 100_000 == 0:
                print(f"engine: {n_done:,} events so far, no invariant broken", flush=True)
    shown = ", ".join(f"{n:,} {reason}" for reason, n in sorted(reasons.items()))
    print(
        f"engine: {n_seeds * EVENTS:,} events, seeds {seeds[0]} to {seeds[-1]}; {reasons.total():,} requests ({shown}); "
        f"{failures:,} failures of the model; no invariant broken, in {time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
