"""The equations written out naively: loops, Python's numbers, float64. They share no code with the rest of the library.

Exercises compare a student's function with these, and the tests of layers/ compare our own: one oracle for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Pair = Callable[[int, int, int], bool]  # row of the batch, place of the query among the S keys, key: may it attend?
BiasAt = Callable[[int, int, int, int], Tensor]  # row, head, place of the query, key: what is added to the score

ACTIVATIONS: Mapping[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "relu2": lambda x: max(x, 0.0) ** 2,
}


def attend(
    q: Tensor, k: Tensor, v: Tensor, may: Pair, *, bias: BiasAt | None = None, scale: float | None = None
) -> Tensor:
    """softmax(q k^T * scale + bias) v, one query at a time; zeros where a query may attend to nothing."""
    B, H, T, E = q.shape
    S, group = k.shape[2], H // k.shape[1]
    scale = 1 / math.sqrt(E) if scale is None else scale
    out: list[Tensor] = []
    for b in range(B):
        for h in range(H):
            for t in range(T):
                i = t + S - T  # the queries are the last T of the S
                keys = [j for j in range(S) if may(b, i, j)]
                if not keys:
                    out.append(torch.zeros(v.shape[-1], dtype=q.dtype))
                    continue
                scores = torch.stack([q[b, h, t].dot(k[b, h // group, j]) for j in keys]) * scale
                if bias is not None:
                    scores = scores + torch.stack([bias(b, h, i, j) for j in keys])
                weights = torch.exp(scores - scores.detach().max())
                out.append(weights / weights.sum() @ v[b, h // group, keys])
    return torch.stack(out).reshape(B, H, T, v.shape[-1])


def softmax(row: list[float]) -> list[float]:
    """exp(x) / sum of exp, for one row of numbers; -inf has weight 0."""
    top = max(row)
    each = [math.exp(x - top) for x in row]
    return [x / sum(each) for x in each]


def sinusoid(position: int, d: int) -> list[float]:
    """Section 3.5 of the paper, one number at a time: sin and cos in turns."""
    table: list[float] = []
    for i in range(d // 2):
        angle = position / 10000 ** (2 * i / d)
        table += [math.sin(angle), math.cos(angle)]
    return table


def turn(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary positions as complex numbers: x_i + i x_(i + E/2), times exp(i position base^(-2i/E)); x is (B, H, T, E)."""
    E = x.shape[-1]
    first, second = x.chunk(2, -1)
    angles = positions[:, None] * base ** (-2 * torch.arange(E // 2, dtype=torch.float64) / E)
    turned = torch.complex(first, second) * torch.exp(1j * angles)
    return torch.cat([turned.real, turned.imag], -1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * w + b, over the last axis."""
    D = x.shape[-1]
    mean = x.sum(-1, keepdim=True) / D
    variance = ((x - mean) ** 2).sum(-1, keepdim=True) / D
    out = (x - mean) / (variance + eps) ** 0.5 * weight
    return out if bias is None else out + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean of squares + eps) * w, over the last axis."""
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5 * weight


def activate(f: Callable[[float], float], x: Tensor) -> Tensor:
    """f of each number, in float64."""
    return torch.tensor([f(value) for value in x.flatten().tolist()], dtype=torch.float64).reshape(x.shape)


def noam(step: int, d_model: int, warmup: int) -> float:
    """Section 5.3 of the paper; steps are counted from 1."""
    return d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)


def top_p(row: list[float], p: float) -> list[bool]:
    """Which tokens stay: the fewest likeliest whose probabilities sum to p, at least one."""
    probs = softmax(row)
    total, kept = 0.0, [False] * len(row)
    for token in sorted(range(len(row)), key=lambda token: -probs[token]):
        kept[token] = True
        total += probs[token]
        if total >= p:
            break
    return kept


def induction(weights: list[list[float]], tokens: list[int]) -> list[float]:
    """For each query whose token came before: one head's weight on the tokens that followed it."""
    found: list[float] = []
    for t, row in enumerate(weights):
        after = [row[s] for s in range(1, t) if tokens[s - 1] == tokens[t]]
        found += [sum(after)] if after else []
    return found
