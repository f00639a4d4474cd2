"""The KV cache: writing with and without it, side by side, over the length. The tokens are the same; the work is not."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.config import Config
from clearhead.costs import cost
from clearhead.experiments.fitting import build, small
from clearhead.experiments.result import Chart, Curve, Result, Table, decide, judge, middle, spell
from clearhead.models import Decoder

VOCAB, PROMPT = 256, 8


@dataclass(frozen=True)
class Size:
    lengths: tuple[int, ...] = (32, 64, 128, 256)
    layers: int = 4
    width: int = 128


SIZES = {
    "quick": Size(lengths=(12, 16), layers=1, width=32),
    "usual": Size(),
    "full": Size(lengths=(32, 64, 128, 256, 512, 1024), layers=6, width=256),
}


@dataclass(frozen=True)
class Measured:
    """By length; seconds of processor time, one a seed (each seed is another model and prompt)."""

    with_cache: dict[int, list[float]]
    without: dict[int, list[float]]
    work: dict[int, tuple[int, int]]  # operations with and without
    memory: dict[int, int]  # bytes of the cache
    same: bool  # all tokens were equal


def measure(size: Size, seeds: range) -> Measured:
    sizes = dict(n_layers=size.layers, d_model=size.width, n_heads=size.width // 32, vocab_size=VOCAB)
    config = small("llama-3-8b", **sizes, n_kv_heads=size.width // 32, d_ff=4 * size.width, max_len=max(size.lengths))
    with_cache: dict[int, list[float]] = {n: [] for n in size.lengths}
    without: dict[int, list[float]] = {n: [] for n in size.lengths}
    same = True
    for seed in seeds:
        model = build(config, seed)
        assert isinstance(model, Decoder)
        model.eval()
        prompt = torch.randint(0, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(seed))
        plain(model, prompt, PROMPT + 4)  # what is prepared once
        for length in size.lengths:
            began = time.process_time()
            a = cached(model, prompt, length)
            between = time.process_time()
            b = plain(model, prompt, length)
            with_cache[length].append(between - began)
            without[length].append(time.process_time() - between)
            same &= torch.equal(a, b)
    work = {length: work_of(config, length) for length in size.lengths}
    memory = {n: cost(config, batch=1, length=n, mode="decode").kv_cache_bytes for n in size.lengths}
    return Measured(with_cache, without, work, memory, same)


def work_of(config: Config, length: int) -> tuple[int, int]:
    """Operations with and without a cache: the prompt, then a token at a time; or each time the whole text."""
    first = cost(config, batch=1, length=PROMPT).useful_flops
    steps = range(PROMPT + 1, length)
    decode = sum(cost(config, batch=1, length=n, mode="decode").useful_flops for n in steps)
    whole = sum(cost(config, batch=1, length=n).useful_flops for n in steps)
    return first + decode, first + whole


@torch.no_grad()
def cached(model: Decoder, prompt: Tensor, length: int) -> Tensor:
    cache, tokens, given = model.new_cache(batch=1, max_len=length), prompt, prompt
    while tokens.shape[1] < length:
        given = model(given, cache=cache)[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, given], 1)
    return tokens


@torch.no_grad()
def plain(model: Decoder, prompt: Tensor, length: int) -> Tensor:
    tokens = prompt
    while tokens.shape[1] < length:
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return tokens


def conclude(m: Measured) -> Result:
    lengths = list(m.with_cache)
    longest = lengths[-1]
    times = {n: [a / b for a, b in zip(m.without[n], m.with_cache[n], strict=True)] for n in lengths}
    work = {n: without / with_it for n, (with_it, without) in m.work.items()}
    rows = [
        (
            n,
            spell([1000 * s for s in m.with_cache[n]], 0),
            spell([1000 * s for s in m.without[n]], 0),
            spell(times[n], 1),
            f"{work[n]:.1f}",
            f"{m.memory[n] / 1e3:,.0f}",
        )
        for n in lengths
    ]
    return Result(
        tables=(
            Table(
                f"Writing up to a length, after {PROMPT} tokens",
                ("length", "ms with cache", "ms without", "times as fast", "times less work", "cache, kB"),
                tuple(rows),
            ),
        ),
        charts=charts_of(m, lengths, times, work),
        findings=(
            decide(
                "A cache changes the time and not the text.", f"All tokens equal: {'yes' if m.same else 'no'}.", m.same
            ),
            judge(
                "A cache makes writing faster, and the more so the longer the text.",
                f"{spell(times[lengths[0]], 1)} times as fast at length {lengths[0]}, {spell(times[longest], 1)} times at "
                f"{longest}.",
                more=times[longest],
                less=[1.0, *times[lengths[0]]],
                margin=0.1,
            ),
            judge(
                "The time saved is the work saved.",
                f"At length {longest} the work is {work[longest]:.1f} times less, the time {spell(times[longest], 1)} times.",
                more=times[longest],
                less=[0.8 * work[longest]],
                margin=0.0,
            ),
        ),
    )


def charts_of(
    m: Measured, lengths: list[int], times: dict[int, list[float]], work: dict[int, float]
) -> tuple[Chart, ...]:
    return (
        Chart(
            "Time to write a text",
            "length",
            "s of processor time",
            (
                Curve("with cache", tuple(lengths), tuple(middle(m.with_cache[n]) for n in lengths)),
                Curve("without", tuple(lengths), tuple(middle(m.without[n]) for n in lengths)),
            ),
            log_x=True,
            log_y=True,
        ),
        Chart(
            "How many times",
            "length",
            "without / with",
            (
                Curve("time", tuple(lengths), tuple(middle(times[n]) for n in lengths)),
                Curve("operations", tuple(lengths), tuple(work[n] for n in lengths)),
            ),
            log_x=True,
        ),
    )
