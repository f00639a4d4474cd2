"""Rounding to 4 bits: a scale and a minimum for each group of 32 weights, and which of the 16 values each weight takes.

`search` finds them for a group. Without inputs it looks for the smallest squared error of the weights. `gptq` knows on which
inputs a matrix will work, and looks for the smallest squared error of its results (Frantar et al. 2022): each weight is rounded in
turn, and those that are not rounded yet move so that they make up for its error, as far as the inputs' correlations allow.

Let H be the sum of x x^T over the inputs, and U the upper Cholesky factor of its inverse. If row w becomes w - e, the results
change by e H e^T = |e U^-1|^2. The i-th number of e U^-1 is known as soon as weight i is rounded: its error, from where those
before it have moved it, divided by U[i, i]. So the loss of a group, after the best change of all later groups, is a sum over its
own 32 numbers: scales and minimums are fitted to it by least squares, and compared by it.

`balancing_factors`: where a column of the weight may be multiplied by a factor if its input is divided by it (AWQ, Lin et al. 2023,
searches for such factors). An error of column i costs 1 / U[i, i]^2, and is about as large as the group's scale, which grows with
the group's weights. So columns that are small for what their errors cost should be larger. The sum of all costs times the sum of
all squared weights is least if both are in proportion.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead import kernels

GROUP = 32
# Shares of a group's range that the search starts from: clipping its ends makes the steps between finer. Each start is refitted.
SHRINKS, FITS = (1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6), 3
KNOWN_FITS = 6  # for known inputs
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
    inverse, fits = None, FITS
    if factor is not None:
        inverse, fits = torch.linalg.solve_triangular(factor, _identity(weights), upper=True), KNOWN_FITS
        found = kernels.search_int4(weights, factor, inverse, shrinks, fits)
        if found is not None:
            return found

    def in_metric(x: Tensor) -> Tensor:
        return x if inverse is None else (inverse.T @ x.flatten(1)).view_as(x)

    n, shares = weights.shape[1], torch.tensor(shrinks, device=weights.device)[:, None]
    low, high = weights.amin(0), weights.amax(0)
    scale, least = _halves((high - low) * shares / 15, low + (high - low) * (1 - shares) / 2)
    points, ones = in_metric(weights)[:, None], in_metric(torch.ones_like(weights[:, :1]))[:, None]
    u, lost = _round(weights, scale, least, factor)
    for _ in range(fits):
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
    N, D = weight.shape
    groups, order = _in_turn(hessian)
    weight, root = weight.float()[:, order], _root(hessian, order)
    # H^-1 = U^T U
    factor = torch.linalg.solve_triangular(root, torch.eye(D, device=root.device), upper=True)
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


def balancing_factors(weight: Float[Tensor, "N D"], hessian: Float[Tensor, "D D"]) -> Float[Tensor, " D"]:
    """By what to multiply each column, if its input is divided by it; their geometric mean is 1."""
    _, order = _in_turn(hessian)
    costs = torch.empty_like(hessian[0])
    costs[order] = _root(hessian, order).diagonal().square()
    sizes = weight.float().square().mean(0)
    logs = torch.where(sizes > 0, (costs / sizes).log() / 4, 0)
    return (logs - logs.mean()).exp()


def _in_turn(hessian: Float[Tensor, "D D"]) -> tuple[Tensor, Tensor]:
    """The order of the groups, and of all columns."""
    sizes = hessian.diagonal().view(-1, GROUP)
    groups = sizes.sum(1).argsort(descending=True)
    return groups, (groups[:, None] * GROUP + sizes[groups].argsort(1, descending=True)).flatten()


def _root(hessian: Float[Tensor, "D D"], order: Int[Tensor, " D"]) -> Float[Tensor, "D D"]:
    """U^-1 for H in this order, damped: upper triangular, H = U^-1 U^-T. Cholesky's lower factor with its axes turned round."""
    hessian = hessian.float()[order][:, order]
    hessian.diagonal().add_((DAMPING * hessian.diagonal().mean()).clamp(min=torch.finfo(torch.float32).tiny))
    return torch.linalg.cholesky(hessian.flip(0, 1)).flip(0, 1)


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
