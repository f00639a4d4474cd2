"""The simulation of the engine: it finds nothing in 10,000 events, and finds each bug that is planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clearhead.engine import allocator, engine, outputs, runner, sampler, scheduler, speculation
from clearhead.engine.allocator import BlockAllocator
from clearhead.engine.beams import BeamSearcher
from clearhead.engine.fair_queue import FairQueue
from clearhead.serving.model_worker import ModelWorker
from tests.faults.simulation import EVENTS, failure_of, run_events, shrink, some_events

pytestmark = pytest.mark.usefixtures("unchecked")  # thousands of steps; shapes are checked by other tests


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 25, 5))
def test_no_invariant_is_broken(first: int) -> None:
    done = [run_events(seed, some_events(seed, EVENTS)) for seed in range(first, first + 5)]
    reasons = {reason for each in done for reason in each.reasons}
    assert {"end", "length", "cancelled"} < reasons  # it was a crowd
    assert sum(each.n_accepted for each in done)  # drafted tokens


def skip_a_free(patch: pytest.MonkeyPatch) -> None:
    free = BlockAllocator.free
    patch.setattr(BlockAllocator, "free", lambda self, blocks: free(self, blocks[1:]))


def free_twice(patch: pytest.MonkeyPatch) -> None:
    free = BlockAllocator.free
    patch.setattr(BlockAllocator, "free", lambda self, blocks: free(self, np.concatenate([blocks, blocks[:1]])))


def forget_a_reservation(patch: pytest.MonkeyPatch) -> None:
    cancel = BlockAllocator.cancel
    patch.setattr(BlockAllocator, "cancel", lambda self, numbers: cancel(self, numbers[1:]))


def keep_tables_of_others(patch: pytest.MonkeyPatch) -> None:
    """Rows move up, their block tables stay."""
    keep_rows = runner.ModelRunner.keep_rows

    def keep(self: Any, rows: Any, **more: Any) -> None:
        table = self.block_table.copy()
        keep_rows(self, rows, **more)
        self.block_table[: self.n] = table[: self.n]

    patch.setattr(runner.ModelRunner, "keep_rows", keep)


def stale_device_tables(patch: pytest.MonkeyPatch) -> None:
    """A new block is not told to the device."""
    allocate_next = scheduler.Scheduler.allocate_next

    def allocate(self: Any, copy_shared: Any) -> None:
        before = self.runner.tables_changed
        allocate_next(self, copy_shared)
        self.runner.tables_changed = before

    patch.setattr(scheduler.Scheduler, "allocate_next", allocate)


def write_to_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BeamSearcher, "copy_shared_blocks", lambda self, reservations: None)


def copy_nothing(patch: pytest.MonkeyPatch) -> None:
    """A beam gets a block of its own, without what was in it."""
    from tests.faults.fake_model import FakeRunner

    patch.setattr(FakeRunner, "copy_blocks", lambda self, sources, targets: None)


def mix_up_prefixes(patch: pytest.MonkeyPatch) -> None:
    """A block is known by its own tokens, and not by those before it."""
    hashed = allocator._hash
    patch.setattr(allocator, "_hash", lambda before, tokens: hashed(b"", tokens))


def one_more_cached_token(patch: pytest.MonkeyPatch) -> None:
    """The last token of a text, which was never an input, counts as one whose keys are in its block."""
    free = scheduler.Scheduler._free
    patch.setattr(scheduler.Scheduler, "_free", lambda self, gone: free(self, [(s, t, n + 1) for s, t, n in gone]))


def answer_twice(patch: pytest.MonkeyPatch) -> None:
    collect = outputs.OutputProcessor.collect

    def twice(self: Any) -> Any:
        done = [ticket for ticket in self.changed if ticket.is_done]
        found = collect(self)
        self.changed += [ticket for ticket in done if ticket.reason == "length"]
        return found

    patch.setattr(outputs.OutputProcessor, "collect", twice)


def lose_an_answer(patch: pytest.MonkeyPatch) -> None:
    finish = outputs.OutputProcessor.finish

    def lose(self: Any, ticket: Any, reason: Any) -> None:
        if reason == "stop":
            self.scheduler.finish(ticket, reason)
            self.changed = [each for each in self.changed if each is not ticket]
        else:
            finish(self, ticket, reason)

    patch.setattr(outputs.OutputProcessor, "finish", lose)


def take_nan_for_a_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sampler, "NO_TOKEN", 0)


def same_seed_for_all(patch: pytest.MonkeyPatch) -> None:
    sample_tokens = sampler.sample_tokens

    def sample(group: Any, *args: Any) -> Any:
        group.seeds[:] = group.seeds[0]
        return sample_tokens(group, *args)

    patch.setattr(engine, "sample_tokens", sample)


def leave_the_waiting_queue_alone(patch: pytest.MonkeyPatch) -> None:
    """A client that left stays in the queue."""
    patch.setattr(scheduler.Scheduler, "drop_waiting", lambda self, ticket: None)


def first_again(patch: pytest.MonkeyPatch) -> None:
    """After its turn a client is first again."""
    pop = FairQueue.pop

    def pop_first(self: Any, client: Any) -> Any:
        item = pop(self, client)
        if client in self.clients:
            self.clients = {client: self.clients[client], **self.clients}
        return item

    patch.setattr(FairQueue, "pop", pop_first)


def spare_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "SPARED", 10**9)


def tell_nobody(patch: pytest.MonkeyPatch) -> None:
    """The model failed: the clients wait for ever."""
    patch.setattr(ModelWorker, "_fail", lambda self, error: self._channels.clear())


def accept_every_draft(patch: pytest.MonkeyPatch) -> None:
    """What the model says after the last drafted token is taken, whether or not it chose that token."""
    append = speculation.Speculator._append

    def append_last(self: Any, group: Any, copy: Any) -> Any:
        ids = copy.wait()[0]
        for place, drafted in enumerate(group.drafted):
            if drafted:
                ids[place - 1] = drafted[-1]
        return append(self, group, copy)

    patch.setattr(speculation.Speculator, "_append", append_last)


def keep_rejected_lengths(patch: pytest.MonkeyPatch) -> None:
    """The row of a text's last draft goes on, not that of its last token."""
    append = speculation.Speculator._append

    def append_far(self: Any, group: Any, copy: Any) -> Any:
        append(self, group, copy)
        return {id(sequence): rows[0] for sequence, rows in zip(group.sequences, group.places, strict=True)}

    patch.setattr(speculation.Speculator, "_append", append_far)


PLANTED: list[Callable[[pytest.MonkeyPatch], None]] = [
    skip_a_free,
    free_twice,
    forget_a_reservation,
    keep_tables_of_others,
    stale_device_tables,
    write_to_shared_blocks,
    copy_nothing,
    mix_up_prefixes,
    one_more_cached_token,
    answer_twice,
    lose_an_answer,
    take_nan_for_a_token,
    same_seed_for_all,
    leave_the_waiting_queue_alone,
    first_again,
    spare_nothing,
    tell_nobody,
    accept_every_draft,
    keep_rejected_lengths,
]


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert any(failure_of(seed, some_events(seed, EVENTS)) is not None for seed in range(12))


@pytest.mark.slow
def test_a_failing_seed_is_the_same_again_and_becomes_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        write_to_shared_blocks(patch)
        seed = next(seed for seed in range(12) if failure_of(seed, some_events(seed, EVENTS)) is not None)
        errors = {str(failure_of(seed, some_events(seed, EVENTS))) for _ in range(2)}
        assert len(errors) == 1
        few = shrink(seed, some_events(seed, EVENTS), seconds=5)
        assert len(few) < EVENTS / 10
        assert failure_of(seed, few) is not None
    assert failure_of(seed, few) is None


def test_a_short_crowd() -> None:
    assert run_events(1, some_events(1, 100)).n_submitted > 10
