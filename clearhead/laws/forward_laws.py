"""Laws of the forward pass: which kernel runs, what else is in the batch and what comes later must not matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clearhead import kernels
from clearhead.kernels.compiler import missing_for_compile
from clearhead.laws.finding import OUTPUT, Comparison, Finding, Skip, same_bits
from clearhead.laws.subject import ROWS, Subject, Trace, forced_kernel, trace
from clearhead.models import Decoder, Encoder, EncoderDecoder, Model


def check_weights(subject: Subject) -> Finding:
    """Every number of the model is finite."""
    broken = [name for name, each in subject.model.state_dict().items() if not bool(each.isfinite().all())]
    if broken:
        return Finding("fail", f"NaN or infinite: {', '.join(broken[:3])} ({len(broken)} tensors)")
    return Finding("pass", f"{len(subject.model.state_dict())} tensors are finite")


def check_kernels(subject: Subject) -> Finding:
    """Our own kernels compute what torch's operators do, for many rows and for few."""
    comparison, few = Comparison(), subject.alone(0, None if is_over_images(subject.model) else 1)
    for args in (subject.args, few):
        with kernels.torch_only():
            expected = trace(subject.model, *args)
        comparison.add(trace(subject.model, *args), expected)
    return comparison.judge(subject.allowed, subject.reason)


def check_fused(subject: Subject) -> Finding:
    comparison = Comparison()
    with forced_kernel(subject.model, "explicit"):
        expected = trace(subject.model, *subject.args)
    with forced_kernel(subject.model, "fused"):
        comparison.add(trace(subject.model, *subject.args), expected)
    return comparison.judge(subject.allowed, subject.reason)


def check_batched(subject: Subject) -> Finding:
    comparison, together = Comparison(), trace(subject.model, *subject.args)
    for row in range(ROWS):
        comparison.add(
            {name: x[row : row + 1] for name, x in together.items()}, trace(subject.model, *subject.alone(row))
        )
    return comparison.judge(subject.allowed, subject.reason)


def check_padded(subject: Subject) -> Finding:
    """Rows of different lengths, padded on the right and on the left with ids that would be noticed."""
    if is_over_images(subject.model):
        raise Skip("an image has no padding")
    comparison = Comparison()
    for side in ("right", "left"):
        lengths = [[x.shape[1] - cut * row for row in range(ROWS)] for x, cut in tokens_of(subject)]
        if min(map(min, lengths)) < 1:
            raise Skip(f"inputs of {subject.target.shape[1]} tokens are too short to be cut; give a larger --length")
        reals = [place(x.shape[1], cuts, side) for (x, _), cuts in zip(tokens_of(subject), lengths, strict=True)]
        padded = [pad(x, real, cuts) for (x, _), real, cuts in zip(tokens_of(subject), reals, lengths, strict=True)]
        together = call_padded(subject, padded, reals)
        for row in range(ROWS):
            alone = trace(subject.model, *cut_args(subject, row, [cuts[row] for cuts in lengths]))
            comparison.add(cut_trace(subject, together, row, reals), alone)
    return comparison.judge(subject.allowed, subject.reason)


def tokens_of(subject: Subject) -> list[tuple[Tensor, int]]:
    """The arguments that are tokens, and by how many each row is shorter than the one before it."""
    return [(x, 3 if x is subject.target else 2) for x in subject.args if not x.is_floating_point()]


def place(width: int, lengths: list[int], side: str) -> Tensor:
    """True for real tokens."""
    at, n = torch.arange(width), torch.tensor(lengths)[:, None]
    return at < n if side == "right" else at >= width - n


def pad(tokens: Tensor, real: Tensor, lengths: list[int]) -> Tensor:
    """Each row's first tokens at its real places; anywhere else the last id that it has."""
    padded = tokens[:, -1:].expand_as(tokens).clone()
    for row, length in enumerate(lengths):
        padded[row, real[row]] = tokens[row, :length]
    return padded


def call_padded(subject: Subject, padded: list[Tensor], reals: list[Tensor]) -> Trace:
    if not isinstance(subject.model, EncoderDecoder):
        return trace(subject.model, padded[0], reals[0])
    if len(padded) == 1:  # sound in, tokens out
        return trace(subject.model, *subject.source, padded[0], target_mask=reals[0])
    return trace(subject.model, *padded, reals[0], target_mask=reals[1])


def cut_args(subject: Subject, row: int, lengths: list[int]) -> list[Tensor]:
    cuts = iter(lengths)
    return [x[row : row + 1] if x.is_floating_point() else x[row : row + 1, : next(cuts)] for x in subject.args]


def cut_trace(subject: Subject, together: Trace, row: int, reals: list[Tensor]) -> Trace:
    """The real positions of a row; of sound, and of one result a row, all."""

    def real_of(name: str) -> Tensor | None:
        if name.startswith("encoder."):
            return reals[0] if len(reals) == 2 else None
        return None if name == OUTPUT and ends_in_classes(subject.model) else reals[-1]

    masks = {name: real_of(name) for name in together}
    return {
        name: x[row : row + 1] if (real := masks[name]) is None else x[row : row + 1, real[row]]
        for name, x in together.items()
    }


def check_cached(subject: Subject) -> Finding:
    """A text in parts, through a cache, as at once: some tokens, then one at a time, then the rest."""
    model = subject.model
    if isinstance(model, Encoder):
        raise Skip("an encoder has no cache")
    target, T = subject.target, subject.target.shape[1]
    if T < 3:
        raise Skip(f"a text of {T} tokens has no parts to compare; give a larger --length")
    cache = model.new_cache(batch=ROWS, max_len=T)
    half = T // 2
    sizes = [size for size in (half, 1, 1, T - half - 2) if size > 0]
    parts: list[Trace] = []
    for number, piece in enumerate(target.split(sizes, 1)):
        source = subject.source if number == 0 else (None,) * len(subject.source)
        parts.append(trace(model, *source, piece, cache=cache))
    joined = {name: torch.cat([part[name] for part in parts], 1) for name in parts[-1]}
    comparison = Comparison()
    comparison.add(joined, trace(model, *subject.args))
    return comparison.judge(subject.allowed, subject.reason)


@torch.no_grad()
def check_future(subject: Subject) -> Finding:
    """Other tokens later change no logit before them by one bit; and the changed token itself is seen."""
    model = subject.model
    if isinstance(model, Encoder):
        raise Skip("an encoder sees both ways")
    if subject.target.shape[1] < 2:
        raise Skip("a text of one token has no future; give a larger --length")
    leak, unread = find_leak(lambda target: model(*subject.source, target), subject.target, model.config.vocab_size)
    if unread is not None:
        return Finding("fail", f"another token at position {unread} changes nothing there: the model does not read it")
    reason = "bit for bit: a hidden key has weight 0, not a small one"
    return Finding("fail" if leak else "pass", reason, leak, 0.0)


def find_leak(run: Callable[[Tensor], Tensor], target: Tensor, vocab_size: int) -> tuple[float, int | None]:
    """How much other tokens later change logits before them, as a share of the largest logit; 0 only if no bit changes.

    Also a position where another token changes nothing, if there is one.
    """
    before, largest, T = run(target), 0.0, target.shape[1]
    for t in sorted({1, T // 2, T - 1} - {0}):
        other = target.clone()
        other[:, t:] = (other[:, t:] + 1) % vocab_size
        after = run(other)
        if not same_bits(after[:, :t], before[:, :t]):
            difference = (after[:, :t] - before[:, :t]).abs().nan_to_num(torch.inf).max() / before.abs().max()
            largest = max(largest, float(difference), torch.finfo(torch.float32).tiny)
        if torch.equal(after[:, t], before[:, t]):
            return largest, t
    return largest, None


def check_compiled(subject: Subject) -> Finding:
    if missing := missing_for_compile():
        raise Skip(f"torch.compile needs {' and '.join(missing)}")
    compiled: Callable[..., Any] = torch.compile(subject.model)
    comparison = Comparison()
    try:
        with torch.no_grad():
            comparison.add({OUTPUT: compiled(*subject.args)}, {OUTPUT: subject.model(*subject.args)})
    finally:
        torch.compiler.reset()
    return comparison.judge(subject.allowed, subject.reason)


def is_over_images(model: Model) -> bool:
    return model.config.inputs == "patches"


def ends_in_classes(model: Model) -> bool:
    return not isinstance(model, Decoder) and model.config.head == "classes"
