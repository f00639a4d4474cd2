"""The engine: many requests generated at once by one model, each as if it were alone.

    engine = Engine(model)
    ticket = engine.submit(Request(prompt=ids, max_new_tokens=64))
    while engine.is_busy:
        for ticket, token in engine.step():
            ...

Requests join and leave between steps (continuous batching: Yu et al. 2022, "Orca"). A step admits what fits in memory, prefills
a part of the prompts, and decodes one token for every running request. Keys and values lie in blocks (Kwon et al. 2023,
"PagedAttention"), which beams and texts with the same prefix share until one of them writes.

On a GPU scheduling is asynchronous: the CPU starts the next step before it knows the last tokens, unless the next step depends on
them (a grammar, a penalty, a beam search that the CPU chooses). The end of a text is then noticed one step later, and the extra
token is dropped. A large batch changes seldom: rows of texts that are over stay, and requests wait, until there are several of them
(`Scheduler.hold`).
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.engine.allocator import BLOCK_SIZE, BlockAllocator
from clearhead.engine.beams import BeamSearcher, search_params
from clearhead.engine.outputs import OutputProcessor, StepOutput
from clearhead.engine.processor_cache import ProcessorCache
from clearhead.engine.request import Request, Ticket, check_at_least, check_request
from clearhead.engine.runner import ModelRunner
from clearhead.engine.sampler import SamplingGroup, group_sequences, sample_tokens
from clearhead.engine.scheduler import Scheduler, first_rows
from clearhead.engine.sequence import Sequence
from clearhead.engine.speculation import DRAFT_ROWS, Speculator
from clearhead.engine.transfer import HostCopy, to_device
from clearhead.errors import InputError
from clearhead.inside.evaluation_mode import eval_mode, may_train
from clearhead.kernels.memory import available_memory
from clearhead.models import Decoder, EncoderDecoder
from clearhead.quantization.model_weights import example_weight
from clearhead.sampling.beam_search import BeamSearchParams


@dataclass
class BatchPlan:
    """How the running sequences are sampled; valid as long as they are the same."""

    sequences: list[Sequence]
    groups: list[SamplingGroup]
    search: BeamSearchParams | None  # that of all rows, if the device continues it without the CPU
    can_run_ahead: bool  # whether the next step can start before the last tokens are known
    can_draft: bool


@dataclass
class StepInFlight:
    """Sampled tokens, or a search's candidates, on their way from the device."""

    step: int
    sequences: list[Sequence]
    copy: HostCopy
    search: BeamSearchParams | None = None
    is_simple: bool = False  # as of a `SamplingGroup`


class Engine:
    """`submit` requests, then `step` while it `is_busy`. For one thread at a time.

    `max_tokens` bounds the tokens in the KV cache, of prompts, texts and sources (None: what half of the free memory holds, on a
    GPU most of it). `max_rows` bounds the texts generated at once, each beam one. `prefill_tokens` bounds the prompt tokens of
    one step, so that a long prompt does not hold up the others. `prefixes` keeps blocks for later prompts that start alike.
    A `runner` of an earlier engine with the same model brings its memory and its CUDA graphs; it sets the bounds.
    """

    def __init__(
        self,
        model: Decoder | EncoderDecoder,
        *,
        max_tokens: int | None = None,
        max_rows: int = 256,
        prefill_tokens: int | None = None,
        prefixes: bool = True,
        runner: ModelRunner | None = None,
    ) -> None:
        for name, value in (("max_tokens", max_tokens), ("max_rows", max_rows), ("prefill_tokens", prefill_tokens)):
            check_at_least(1 if value is None else value, 1, name)
        self.model = model
        self.runner = make_runner(model, max_tokens, max_rows) if runner is None else runner
        assert self.runner.n == 0, "a runner serves one engine at a time"
        self.device, self.max_rows = self.runner.device, self.runner.max_rows
        self.runs_async = self.device.type == "cuda"
        self.prefill_tokens = prefill_tokens or (16_384 if self.runs_async else 1024)
        is_decoder = isinstance(model, Decoder)
        # The keys of a text after a source depend on that source: others can not use them.
        self.allocator = BlockAllocator(
            self.runner.n_blocks,
            BLOCK_SIZE,
            max_reservations=self.max_rows,
            prefix_cache=prefixes and is_decoder,
        )
        self.scheduler = Scheduler(self.allocator, self.runner)
        self.outputs = OutputProcessor(self.scheduler, normalises=not is_decoder)
        self.beam_searcher = BeamSearcher(self.runner, self.allocator)
        self.speculator = Speculator(self.runner, self.scheduler, self.outputs)
        self.plan: BatchPlan | None = None
        self.in_flight: deque[StepInFlight] = deque()
        self.processors = ProcessorCache(model)
        self.n_steps = 0

    @property
    def is_busy(self) -> bool:
        return self.scheduler.is_busy or bool(self.in_flight)

    @property
    def n_waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self.scheduler.waiting)

    def n_waiting_of(self, client: str | None) -> int:
        """Those of one client."""
        return len(self.scheduler.waiting.clients.get(client, ()))

    @property
    def n_running(self) -> int:
        """Requests that are admitted, and not done."""
        return sum(not sequence.ticket.is_done for sequence in (*self.scheduler.running, *self.scheduler.prefilling))

    @property
    def cache_usage(self) -> float:
        """The share of the KV cache's blocks that is in use, 0 to 1."""
        return self.allocator.n_used / max(self.allocator.n_blocks - 1, 1)

    def submit(self, request: Request, what: str = "prompt") -> Ticket:
        """Queue a request. One that can not work is refused here, with an error that calls its prompt `what`."""
        prompt = check_request(request, self.model, what)
        processor = self.processors.get(request)
        search_params(request, processor)  # checks the number of beams
        needed, most = self.scheduler.blocks_needed(request, len(prompt)), self.allocator.n_blocks - 1
        if needed > most:
            raise InputError(
                f"{what} may need {needed * BLOCK_SIZE:,} tokens of memory ({len(prompt)} of its own, "
                f"max_new_tokens={request.max_new_tokens}, beams={request.beams}), but there are {most * BLOCK_SIZE:,}; "
                f"ask for fewer, or raise max_tokens"
            )
        if request.beams > self.max_rows:
            raise InputError(
                f"beams={request.beams} is more than max_rows={self.max_rows}; lower it, or raise the other"
            )
        if (request.lookup or request.draft is not None) and self.max_rows == 1:
            name = "lookup" if request.lookup else "draft"
            raise InputError(
                f"{name} needs rows for its drafts; got max_rows=1; raise it, best to {DRAFT_ROWS} for one text"
            )
        if request.name in self.scheduler.names:
            raise InputError(f"a request of the name {request.name!r} is not over yet; give each its own name")
        ticket = Ticket(request)
        ticket.n_prompt = len(prompt)
        self.scheduler.add(ticket, prompt, processor)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Stop a request. Its memory is free at once, except for a step in flight."""
        if not ticket.is_done:
            self.scheduler.drop_waiting(ticket)
            self.outputs.finish(ticket, "cancelled")
            self._sweep()

    def step(self) -> StepOutput:
        """One step for all requests. Returns each new token with its ticket, and None with each ticket that is done."""
        with eval_mode(self.model) if may_train(self.model) else nullcontext():
            self._step()
        return self.outputs.collect()

    def run(self) -> None:
        """Step until all requests are done."""
        with torch.no_grad(), eval_mode(self.model), self.runner.assume_unchanged():
            while self.is_busy:
                self._step()
                self.outputs.changed.clear()

    def _step(self) -> None:
        self.n_steps += 1
        # Another thread may have called `train`. Only the whole model is asked: to ask all modules takes 0.1 ms a step.
        with torch.no_grad(), eval_mode(self.model) if self.model.training else nullcontext():
            is_held, can_linger = self.scheduler.hold(), self._can_linger()
            if not (is_held and can_linger):
                self._sweep()
            if not is_held:
                self.scheduler.admit()
            self._prefill()
            running = bool(self.scheduler.running)
            ahead = self.runs_async and (not running or self._batch_plan().can_run_ahead)
            if not ahead:
                self._receive(self.n_steps)
                self._sweep()
                running = bool(self.scheduler.running)
            if running:
                self._decode()
            self._receive(self.n_steps - (ahead and running))
            if not self._can_linger():
                self._sweep()

    def _can_linger(self) -> bool:
        """Whether rows of texts that are over may stay until the next step: in a large batch of plain texts on a GPU."""
        plan, scheduler = self.plan, self.scheduler
        is_plain = (
            plan is not None and plan.sequences is scheduler.running and plan.can_run_ahead and plan.search is None
        )
        return is_plain and self.runs_async and scheduler.is_large

    def _sweep(self) -> None:
        """Remove what is done, and free its memory."""
        if self.scheduler.needs_sweep:
            self.scheduler.sweep()
            self.beam_searcher.remove_done()
            self.speculator.remove_done()

    def _prefill(self) -> None:
        """Compute prompts in order, at most `prefill_tokens` tokens."""
        budget, scheduler = self.prefill_tokens, self.scheduler
        while scheduler.prefilling and budget > 0:
            batch, cost = scheduler.next_prefill(budget)
            T = min(max(sequence.n_to_prefill for sequence in batch), budget)
            budget -= cost
            logits = self.runner.prefill(batch, T)
            scheduler.prefilled(batch, T)
            if batch[0].n_to_prefill == 0:
                self._start(batch, logits)

    def _start(self, sequences: list[Sequence], logits: Float[Tensor, "B V"]) -> None:
        """Prompts are computed: their rows join the batch, and their first tokens are chosen."""
        firsts = self.scheduler.start(sequences)
        for group in group_sequences(sequences, firsts, range(len(sequences)), self.device):
            self._launch(group.sequences, sample_tokens(group, logits, self.runner), is_simple=group.is_simple)
        searches: dict[BeamSearchParams, list[int]] = {}
        for at, sequence in enumerate(sequences):
            if sequence.search is not None:
                searches.setdefault(sequence.search, []).append(at)
        if searches:
            self.beam_searcher.share_prompts(sequences, firsts)
        for search, places in searches.items():
            own = [sequences[at] for at in places]
            is_all = len(own) == len(sequences)
            own_logits = logits if is_all else logits[to_device(np.array(places), self.device)]
            candidates = self.beam_searcher.start(search, own, [firsts[at] for at in places], own_logits)
            self._launch(own, candidates, search)

    def _batch_plan(self) -> BatchPlan:
        running = self.scheduler.running
        if self.plan is None or self.plan.sequences is not running:
            firsts = first_rows(running)
            groups = group_sequences(running, firsts, firsts, self.device)
            search = self.beam_searcher.common_params(running)
            can_run_ahead = search is not None or all(sequence.can_run_ahead for sequence in running)
            can_draft = any(s.has_drafts for s in running) and all(s.n_rows == 1 for s in running)
            self.plan = BatchPlan(running, groups, search, can_run_ahead, can_draft)
        return self.plan

    def _decode(self) -> None:
        """One token for every row, and more where some were drafted."""
        plan, searcher, scheduler = self._batch_plan(), self.beam_searcher, self.scheduler
        if plan.can_draft and self.speculator.step():
            return
        copies = bool(searcher.groups) and not self.runner.has_paths
        scheduler.allocate_next(searcher.copy_shared_blocks if copies else None)
        if plan.search is not None:
            self._launch(scheduler.running, HostCopy(self.runner.decode(plan.search)), plan.search)
            return
        logits = self.runner.decode()
        for group in plan.groups:
            self._launch(group.sequences, sample_tokens(group, logits, self.runner), is_simple=group.is_simple)
        if not plan.can_run_ahead:  # if it can, no search is running, though one may wait for its last candidates
            self._launch(searcher.extend(scheduler.running, first_rows(scheduler.running), logits), None)

    def _launch(
        self,
        sequences: list[Sequence],
        copy: HostCopy | None,
        search: BeamSearchParams | None = None,
        *,
        is_simple: bool = False,
    ) -> None:
        """Count a token of each as scheduled. `copy` brings them from the device; None: the CPU has chosen them."""
        if copy is not None:
            self.in_flight.append(StepInFlight(self.n_steps, sequences, copy, search, is_simple))
        self.scheduler.scheduled(sequences)
        if copy is None:
            self._finish_searches()

    def _receive(self, until: int) -> None:
        """Append the tokens of all steps up to this one to their tickets."""
        while self.in_flight and self.in_flight[0].step <= until:
            done = self.in_flight.popleft()
            if done.search is None:
                self.outputs.append_tokens(done.sequences, done.copy, is_simple=done.is_simple)
            else:
                self.beam_searcher.advance(done.search, done.sequences, done.copy)
                self._finish_searches()

    def _finish_searches(self) -> None:
        for ticket, hypotheses in self.beam_searcher.finished():
            self.outputs.finish_search(ticket, hypotheses)


def make_runner(model: Decoder | EncoderDecoder, max_tokens: int | None, max_rows: int) -> ModelRunner:
    """A runner with memory for so many tokens; None: as many as fit."""
    config, is_decoder = model.config, isinstance(model, Decoder)
    n_blocks = 1 + (_count_blocks(model, max_rows) if max_tokens is None else -(-max_tokens // BLOCK_SIZE))
    return ModelRunner(
        model,
        n_blocks=n_blocks,
        block_size=BLOCK_SIZE,
        max_rows=max_rows,
        table_width=min(-(-config.max_len // BLOCK_SIZE), n_blocks),
        source_width=0 if is_decoder else min(-(-config.max_source_len // BLOCK_SIZE), n_blocks),
    )


def _count_blocks(model: Decoder | EncoderDecoder, max_rows: int) -> int:
    """As many blocks as the rows can use, or a share of the free memory holds."""
    config, weight = model.config, example_weight(model)
    n_layers = config.n_layers if isinstance(model, Decoder) else config.n_decoder_layers
    n_bytes = 2 * BLOCK_SIZE * n_layers * config.n_kv_heads * config.d_head * weight.element_size()
    most = max_rows * -(-(config.max_len + config.max_source_len) // BLOCK_SIZE)
    # On a GPU the rest is for the states and logits of one step.
    share = 0.85 if weight.device.type == "cuda" else 0.5
    return max(1, min(most, int(share * available_memory(weight.device)) // n_bytes))
