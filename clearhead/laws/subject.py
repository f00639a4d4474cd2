"""Subject: a model under check, what it is called with, and how far rounding alone takes its output."""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead import kernels
from clearhead.config import Generation
from clearhead.inside.sites import blocks_of
from clearhead.laws.finding import OUTPUT, Comparison, Finding
from clearhead.layers.attention import Attend
from clearhead.models import EncoderDecoder, Model
from clearhead.models.stack import Stack

Trace = dict[str, Tensor]  # the output, and the residual stream after each block, by name

ROWS = 3
# Two correct float32 computations are each about as far from the exact result as the one that was measured; 16 leaves room for
# an unlucky order of summation. Below 2^-20 the measurement itself is chance: a few last bits of a float32.
ROUNDING = "float32 = float64"
MARGIN, LEAST = 16, 2.0**-20
UNSTABLE = 1e-2  # a model that loses five of float32's seven digits
MOST_WEIGHTS = 2 * 10**9  # above, a copy in float64 would take more than 16 GB; then the limit is fixed
FIXED = 1e-3
MOST_TOKENS, WINDOW = 4096, 512  # of a text whose perplexity is measured


@dataclass(frozen=True)
class Subject:
    """The model in float32 on the CPU, and the arguments of a call: tokens, images, or a source and a target."""

    model: Model
    args: tuple[Tensor, ...]
    allowed: float = FIXED
    reason: str = ""
    path: Path | None = None  # where the model came from
    text: tuple[int, ...] = ()  # the ids of a text, for perplexity

    @property
    def target(self) -> Tensor:
        """The tokens whose continuation a decoder predicts; an encoder's input."""
        return self.args[-1]

    @property
    def source(self) -> tuple[Tensor, ...]:
        return self.args[:-1]

    @property
    def measured_text(self) -> tuple[int, ...]:
        return self.text[:MOST_TOKENS]

    @cached_property
    def perplexity(self) -> float:
        """Of the text, by full weights."""
        return perplexity(self.model, self.measured_text)

    def alone(self, row: int, length: int | None = None) -> tuple[Tensor, ...]:
        """The arguments of one row, its target cut to `length`."""
        *source, target = (x[row : row + 1] for x in self.args)
        return (*source, target if length is None else target[:, :length])


def make_subject(model: Model, *, length: int, path: Path | None = None, text: Sequence[int] = ()) -> Subject:
    """The subject with arguments of `length` tokens, cut from the text if it is long enough, else random."""
    exact = copy.deepcopy(model).float().eval()  # 8 or 16 bits of a weight are exact in 32
    exact.generation = Generation()  # laws are about logits: no forced or suppressed token
    return Subject(exact, make_args(exact, length, text), path=path, text=tuple(text))


def make_args(model: Model, length: int, text: Sequence[int]) -> tuple[Tensor, ...]:
    config, generator = model.config, torch.Generator().manual_seed(0)
    T, S = min(length, config.max_len), min(length + 2, config.max_source_len)

    def ids(n: int, vocab: int) -> Tensor:
        if len(text) >= ROWS * n and max(text) < vocab:
            return torch.tensor(text[: ROWS * n]).unflatten(0, (ROWS, n))
        return torch.randint(0, vocab, (ROWS, n), generator=generator)

    match config.inputs, config.shape:
        case "patches", _:
            size = config.n_channels, config.image_size, config.image_size
            return (torch.randn(ROWS, *size, generator=generator),)
        case "frames", _:  # Whisper reads windows of one length
            frames = torch.randn(ROWS, config.n_mels, 2 * config.max_source_len, generator=generator)
            return frames, ids(T, config.vocab_size)
        case _, "encoder-decoder":
            return ids(S, config.source_vocab_size or config.vocab_size), ids(T, config.vocab_size)
        case _:
            return (ids(T, config.vocab_size),)


def trace(model: Model, *args: Any, **masks: Any) -> Trace:
    """The output of a call, and the residual stream after each block."""
    seen: Trace = {}

    def keep(name: str) -> Any:
        def hook(_module: object, _args: object, output: Tensor) -> None:
            seen[name] = output

        return hook

    handles = [block.register_forward_hook(keep(name)) for name, block in blocks_of(model).items()]
    try:
        with torch.no_grad():
            seen[OUTPUT] = model(*args, **masks)
    finally:
        for handle in handles:
            handle.remove()
    return seen


@torch.no_grad()
def perplexity(model: Model, text: Sequence[int]) -> float:
    """Of a text, in windows that do not overlap; the first token of each is given."""
    width, total, n = min(WINDOW, model.config.max_len), 0.0, 0
    for start in range(0, len(text) - 1, width):
        window = torch.tensor([text[start : start + width]])
        if window.shape[1] > 1:
            logits = model(window)[0, :-1].float()
            total += float(F.cross_entropy(logits, window[0, 1:], reduction="sum"))
            n += window.shape[1] - 1
    return math.exp(total / n)


@contextmanager
def forced_kernel(model: Model, kernel: str) -> Generator[None]:
    """Inside, attention is computed by this kernel."""
    stacks = [module for module in model.modules() if isinstance(module, Stack | EncoderDecoder)]
    attends = [module for module in model.modules() if isinstance(module, Attend)]
    configs, asked = [stack.config for stack in stacks], [attend.kernel for attend in attends]
    try:
        for stack in stacks:
            stack.config = replace(stack.config, kernel=kernel)
        for attend in attends:
            attend.kernel = kernel
        yield
    finally:
        for stack, config in zip(stacks, configs, strict=True):
            stack.config = config
        for attend, each in zip(attends, asked, strict=True):
            attend.kernel = each


def measure_rounding(subject: Subject) -> tuple[Subject, Finding]:
    """The subject with its limit: a multiple of what float32 changes in the plain equations, computed by torch's operators."""
    n_weights = sum(weight.numel() for weight in subject.model.parameters())
    if n_weights > MOST_WEIGHTS:
        reason = f"fixed: {n_weights:,} weights are too many for a copy in float64"
        return replace(subject, allowed=FIXED, reason=reason), Finding("skipped", reason, law=ROUNDING)
    with kernels.torch_only(), forced_kernel(subject.model, "explicit"):
        plain = trace(subject.model, *subject.args)
        wide = copy.deepcopy(subject.model).double()
        exact = trace(wide, *(x.double() if x.is_floating_point() else x for x in subject.args))
    comparison = Comparison()
    comparison.add(plain, exact)
    reason = f"what rounding does to this model; the laws below allow {MARGIN} times it"
    finding = replace(comparison.judge(UNSTABLE, reason), law=ROUNDING)
    rounding = finding.error or 0.0
    allowed = max(MARGIN * rounding, LEAST) if finding.outcome == "pass" else FIXED
    reason = f"rounding: {MARGIN} x {rounding:.1e}"
    if allowed == LEAST:
        reason = "rounding: a few last bits of a float32"
    elif allowed == FIXED:
        reason = "fixed: this model is not stable in float32"
    return replace(subject, allowed=allowed, reason=reason), finding
