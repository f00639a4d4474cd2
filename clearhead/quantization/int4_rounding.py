"""Rounding to 4 bits: a scale and a minimum for each group of 32 weights, and which of the 16 values each weight takes.

`search` finds them for a group. Without inputs it looks for the smallest squared error of the weights. `gptq` knows on which
inputs a matrix will work, and looks for the smallest squared error of its results (Frantar et al. 2022): each weight is rounded in
turn, and those that are not rounded yet move so that they make up for its error, as far as the inputs' correlations allow.

Let H be the sum of x x^T over the inputs, and U the upper Cholesky factor of its inverse. If row w becomes w - e, the results
change by e H e^T = |e U^-1|^2. The i-th number of e U^-1 is known as soon as weight i is rounded: its error, from where those
before it have moved it, divided by U[i, i]. So the loss of a group, after the best change of all later groups, is a sum over its
own 32 numbers: scales and minimums are fitted to it by least squares, and compared by it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

GROUP = 32
# Shares of a group's range that the search starts from: clipping its ends makes the steps between finer. Each start is refitted.
SHRINKS, FITS = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6), 3
DAMPING = (
    0.01  # of the mean of H's diagonal, added to it: few inputs leave directions in which weights could move freely
)
CHUNK = 1024  # rows at a time: their starts stay in the CPU's cache

Found = tuple[Tensor, Tensor, Tensor, Tensor]  # values 0 .. 15, (32, n); scales and minimums, (n); e U^-1, (32, n)


def search(
    weights: Float[Tensor, "32 n"],
    factor: Float[Tensor, "32 32"] | None = None,
    shrinks: tuple[float, ...] = SHRINKS,
) -> Found:
    """The best of several starts for n groups, each a column. `factor` is the group's part of U; None: the identity."""
    inverse = None if factor is None else torch.linalg.solve_triangular(factor, _identity(weights), upper=True)

    def in_metric(x: Tensor) -> Tensor:
        return x if inverse is None else (inverse.T @ x.flatten(1)).view_as(x)

    n, shares = weights.shape[1], torch.tensor(shrinks, device=weights.device)[:, None]
    low, high = weights.amin(0), weights.amax(0)
    scale, least = _halves((high - low) * shares / 15, low + (high - low) * (1 - shares) / 2)
    points, ones = in_metric(weights)[:, None], in_metric(torch.ones_like(weights[:, :1]))[:, None]
    u, lost = _round(weights, scale, least, factor)
    for _ in range(FITS):
        scale, least = _fit(points, in_metric(u), ones, scale, least)
        u, lost = _round(weights, scale, least, factor)
    best = lost.square().sum(0).argmin(0, keepdim=True)
    u, lost = (each.gather(1, best.expand(GROUP, 1, n))[:, 0] for each in (u, lost))
    return u, scale.gather(0, best)[0], least.gather(0, best)[0], lost


def gptq(weight: Float[Tensor, "N D"], hessian: Float[Tensor, "D D"]) -> tuple[Tensor, Tensor, Tensor]:
    """Values 0 .. 15 of shape (N, D), scales and minimums of shape (N, D / 32). `hessian` is the mean of x x^T over the inputs.

    Groups with the largest inputs come first, and in each the largest: they matter most, and many weights are left that can make
    up for their errors.
    """
    weight, hessian = weight.float(), hessian.float()
    N, D = weight.shape
    sizes = hessian.diagonal().view(-1, GROUP)
    groups = sizes.sum(1).argsort(descending=True)
    order = (groups[:, None] * GROUP + sizes[groups].argsort(1, descending=True)).flatten()
    weight, hessian = weight[:, order], hessian[order][:, order]
    hessian.diagonal().add_((DAMPING * hessian.diagonal().mean()).clamp(min=torch.finfo(torch.float32).tiny))
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    u, scales, mins = weight.new_empty(N, D), weight.new_empty(N, len(groups)), weight.new_empty(N, len(groups))
    for place, group in enumerate(groups.tolist()):
        columns = slice(place * GROUP, (place + 1) * GROUP)
        part = factor[columns, columns]
        rows = weight[:, columns].split(CHUNK)
        found = [search(chunk.T.contiguous(), part) for chunk in rows]
        values, scales[:, group], mins[:, group], lost = (torch.cat(each, -1) for each in zip(*found, strict=True))
        u[:, order[columns]] = values.T
        weight[:, columns.stop :].addmm_(lost.T, factor[columns, columns.stop :], alpha=-1)
    return u, scales, mins


def _round(weights: Tensor, scale: Tensor, least: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """The value of each weight for each start, and e U^-1; both of shape (32, starts, n)."""
    inverse = 1 / scale.clamp(min=1e-7)
    if factor is None:
        u = ((weights[:, None] - least) * inverse).round_().clamp_(0, 15)
        return u, weights[:, None] - u * scale - least
    u, lost = (weights.new_empty(GROUP, *scale.shape) for _ in range(2))
    for i in range(GROUP):
        moved = (weights[i] - least).sub_((factor[:i, i] @ lost[:i].flatten(1)).view_as(scale))
        torch.mul(moved, inverse, out=u[i]).round_().clamp_(0, 15)
        torch.div(moved.addcmul_(u[i], scale, value=-1), factor[i, i], out=lost[i])
    return u, lost


def _fit(points: Tensor, u: Tensor, ones: Tensor, scale: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """The line points = scale u + least by least squares, along the first axis; where there is none, the old one."""
    uu, uo, oo = u.square().sum(0), (u * ones).sum(0), ones.square().sum(0)
    up, op = (u * points).sum(0), (ones * points).sum(0)
    spread = uu * oo - uo.square()
    slope = (up * oo - uo * op) / spread
    fits = (spread > 1e-6 * uu * oo) & (slope > 0)
    slope = torch.where(fits, slope, scale)
    return _halves(slope, torch.where(fits, (op - slope * uo) / oo, least))


def _halves(scale: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded as float16 stores them."""
    return scale.half().float(), least.half().float()


def _identity(like: Tensor) -> Tensor:
    return torch.eye(GROUP, device=like.device, dtype=like.dtype)
