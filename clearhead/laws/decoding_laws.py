"""Laws of decoding: the engine's steps compute what the plain forward does, and every path writes the same greedy text."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clearhead.engine.engine import Engine
from clearhead.engine.request import Request
from clearhead.kernels import native
from clearhead.laws.finding import OUTPUT, Comparison, Finding, Skip
from clearhead.laws.subject import ROWS, Subject, forced_kernel
from clearhead.models import Decoder, Encoder, EncoderDecoder

NEW = 12  # tokens

Writer = Decoder | EncoderDecoder
Texts = list[list[int]]


@dataclass
class Decoded:
    """What an engine wrote, the logits of each decode step, and how many of these steps were one native call."""

    texts: Texts = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # a step each: (rows, V)
    n_native: int = 0


def prompts_of(subject: Subject) -> list[list[int]]:
    """Prompts of different lengths, that leave room for the new tokens."""
    longest = min(subject.target.shape[1], subject.model.config.max_len - NEW)
    if longest < 1:
        raise Skip(f"max_len={subject.model.config.max_len} leaves no room for a prompt and {NEW} tokens")
    return [subject.target[row, : max(1, longest - 3 * row)].tolist() for row in range(ROWS)]


def writer_of(subject: Subject) -> Writer:
    if isinstance(subject.model, Encoder):
        raise Skip("an encoder writes no text")
    return subject.model


def decode(model: Writer, subject: Subject, rows: Sequence[int], *, use_native: bool = True) -> Decoded:
    """What the engine writes after the prompts of these rows, all in one batch."""
    prompts, found = prompts_of(subject), Decoded()
    sources = [subject.source[0][row] if subject.source else None for row in rows]
    engine = Engine(model, max_tokens=ROWS * (subject.target.shape[1] + NEW + 64 + source_room(model)), max_rows=ROWS)
    record_steps(engine, found, use_native=use_native)
    tickets = [
        engine.submit(Request(prompt=prompts[row], source=as_source(source), max_new_tokens=NEW, eos=()))
        for row, source in zip(rows, sources, strict=True)
    ]
    engine.run()
    for ticket in tickets:
        if ticket.error is not None:
            raise ticket.error
    found.texts = [list(ticket.ids) for ticket in tickets]
    return found


def source_room(model: Writer) -> int:
    return model.config.max_source_len if isinstance(model, EncoderDecoder) else 0


def as_source(source: Tensor | None) -> Any:
    return source.tolist() if source is not None and not source.is_floating_point() else source


def record_steps(engine: Engine, found: Decoded, *, use_native: bool) -> None:
    """Keep the logits of each decode step of this engine, and count the native ones."""
    runner = engine.runner
    plain = runner.decode

    def decode(search: Any = None) -> Tensor:
        out = plain(search)
        found.logits.append(out.detach().float().cpu().clone())
        return out

    runner.decode = decode
    if not use_native:
        runner.native_step = None
    step = runner.native_step
    if step is not None:
        call = step.run

        def run(*args: Any, **named: Any) -> Tensor | None:
            out = call(*args, **named)
            found.n_native += out is not None
            return out

        step.run = run


@torch.no_grad()
def expected_logits(subject: Subject, row: int, ids: Sequence[int]) -> Tensor:
    """Logits after each of these tokens of a row, by the plain forward, the whole text at once."""
    source = [x[row : row + 1] for x in subject.source]
    return subject.model(*source, torch.tensor([ids]))[0]


def compare_steps(subject: Subject, decoded: Decoded) -> Finding:
    comparison, prompts = Comparison(), prompts_of(subject)
    for row, (prompt, text) in enumerate(zip(prompts, decoded.texts, strict=True)):
        expected = expected_logits(subject, row, [*prompt, *text])[len(prompt) : len(prompt) + NEW - 1]
        found = torch.stack([logits[row] for logits in decoded.logits[: NEW - 1]])
        comparison.add({OUTPUT: found}, {OUTPUT: expected})
    return comparison.judge(subject.allowed, subject.reason)


def check_native_steps(subject: Subject) -> Finding:
    model = writer_of(subject)
    if not native.is_there():
        raise Skip(f"no native kernels: {native.why_not()}")
    decoded = decode(model, subject, range(ROWS))
    if not decoded.n_native:
        raise Skip("native.cpp does not compute this model's step; the engine calls the plain forward")
    return compare_steps(subject, decoded)


def check_paged_steps(subject: Subject) -> Finding:
    """The engine without native steps: prefill, blocks of keys and values, one token a row."""
    decoded = decode(writer_of(subject), subject, range(ROWS), use_native=False)
    return compare_steps(subject, decoded)


def check_gpu_steps(subject: Subject) -> Finding:
    model = writer_of(subject)
    if not torch.cuda.is_available():
        raise Skip("torch sees no GPU here")
    decoded = decode(copy.deepcopy(model).to("cuda"), subject, range(ROWS))
    return compare_steps(subject, decoded)


def check_greedy(subject: Subject) -> Finding:
    """Each path's every token has the highest score that the plain forward gives after what came before, but for rounding."""
    model, prompts = writer_of(subject), prompts_of(subject)
    written = {name: write() for name, write in paths(model, subject)}
    first = next(iter(written.values()))
    lost, worst = 0.0, ""
    for name, texts in written.items():
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            logits = expected_logits(subject, row, [*prompt, *text])[len(prompt) - 1 : -1]
            gap = logits.amax(-1) - logits.gather(-1, torch.tensor(text)[:, None])[:, 0]
            error = float((gap / logits.abs().max()).nan_to_num(torch.inf).max())
            if error > lost:
                lost, worst = error, name
    allowed, ties = 2 * subject.allowed, [name for name, texts in written.items() if texts != first]
    if lost > allowed:
        return Finding("fail", f"{worst} takes a token that is not the likeliest", lost, allowed)
    equal = f"{len(written)} paths, {ROWS} texts of {NEW} tokens: {', '.join(written)}"
    reason = f"{equal}; two tokens as close as rounding: {', '.join(ties)}" if ties else equal
    return Finding("pass", reason, lost, allowed)


def paths(model: Writer, subject: Subject) -> Iterator[tuple[str, Callable[[], Texts]]]:
    """Each way to write a text."""
    every = range(ROWS)
    yield "whole", lambda: [write_whole(subject, row) for row in every]
    yield "explicit", lambda: write_explicit(subject)
    yield "cached", lambda: [write_cached(model, subject, row) for row in every]
    yield "engine", lambda: decode(model, subject, every).texts
    yield "engine without native steps", lambda: decode(model, subject, every, use_native=False).texts
    yield "engine alone", lambda: [decode(model, subject, [row]).texts[0] for row in every]
    if torch.cuda.is_available():
        yield "GPU", lambda: decode(copy.deepcopy(model).to("cuda"), subject, every).texts


def write_whole(subject: Subject, row: int) -> list[int]:
    ids = list(prompt := prompts_of(subject)[row])
    for _ in range(NEW):
        ids.append(int(expected_logits(subject, row, ids)[-1].argmax()))
    return ids[len(prompt) :]


def write_explicit(subject: Subject) -> Texts:
    with forced_kernel(subject.model, "explicit"):
        return [write_whole(subject, row) for row in range(ROWS)]


@torch.no_grad()
def write_cached(model: Writer, subject: Subject, row: int) -> list[int]:
    prompt, written = prompts_of(subject)[row], list[int]()
    cache = model.new_cache(batch=1, max_len=len(prompt) + NEW)
    piece: list[int] = prompt
    source: list[Any] = [x[row : row + 1] for x in subject.source]
    for _ in range(NEW):
        piece = [int(model(*source, torch.tensor([piece]), cache=cache)[0, -1].argmax())]
        source = [None] * len(source)
        written += piece
    return written
