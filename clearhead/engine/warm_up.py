"""Warm-up: the CUDA graphs of a decoder's engine are recorded before its first request, so that no request waits for it.

After that, prompts are padded to one of the recorded sizes. What fits into none is computed without a graph, as it is once here: a
first burst of requests finds its kernels loaded.
"""

from __future__ import annotations

import random

from clearhead.engine.cuda_graphs import round_up
from clearhead.engine.engine import Engine
from clearhead.engine.prefill import MAX_GRAPH_NUMBERS
from clearhead.engine.request import Request
from clearhead.sampling.strategy import Strategy

MIN_LENGTH = 16  # of a recorded prompt
SAMPLED = (Strategy(temperature=1.0), Strategy(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01))


def warm_up(engine: Engine) -> None:
    """Run a step of each size that is recorded. The engine must have no requests."""
    assert not engine.is_busy
    rng, vocab_size = random.Random(0), engine.model.config.vocab_size

    def prompt(n: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(n)]

    sizes = batch_sizes(engine.max_rows)
    for row in range(engine.max_rows):  # the batch shrinks by one size in each step
        n_steps = sum(row < size for size in sizes)
        _submit(engine, Request(prompt=prompt(1), max_new_tokens=n_steps + 1, eos=()))
    engine.run()
    grid = prompt_sizes(engine)
    for rows, length in grid:
        for _ in range(rows):
            _submit(engine, Request(prompt=prompt(length), max_new_tokens=1, eos=()))
        engine.run()
    for strategy in SAMPLED:  # loads the kernels
        for scored in (False, True):
            _submit(engine, Request(prompt=prompt(1), max_new_tokens=3, strategy=strategy, scored=scored, eos=()))
    engine.run()
    engine.runner.prompts.recorded = grid
    longest = max((length for rows, length in grid if rows == grid[-1][0]), default=1)
    for _ in range(engine.max_rows):  # more than any graph has
        _submit(engine, Request(prompt=prompt(longest + 1), max_new_tokens=2, eos=()))
    engine.run()


def batch_sizes(max_rows: int) -> list[int]:
    """The batch sizes of decode steps, largest first."""
    return sorted({round_up(n, max_rows) for n in range(1, max_rows + 1)}, reverse=True)


def prompt_sizes(engine: Engine) -> list[tuple[int, int]]:
    """The numbers of prompts, and their lengths, that are recorded: powers of two, as far as graphs pay and a step goes."""
    config, found = engine.model.config, list[tuple[int, int]]()
    most = min(MAX_GRAPH_NUMBERS // config.d_model, engine.prefill_tokens)
    rows = 1
    while rows <= engine.max_rows:
        length = MIN_LENGTH
        while rows * length <= most and length < config.max_len:
            found.append((rows, length))
            length *= 2
        rows *= 2
    return found


def _submit(engine: Engine, request: Request) -> None:
    """If the model and its memory can take it at all."""
    needed = engine.scheduler.blocks_needed(request, len(request.prompt))
    if (
        len(request.prompt) + request.max_new_tokens <= engine.model.config.max_len
        and needed < engine.allocator.n_blocks
    ):
        engine.submit(request)
