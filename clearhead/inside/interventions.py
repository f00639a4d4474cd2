"""`intervene`: change what goes on inside a model while it runs, and see what becomes of it.

    with intervene(model, zero("blocks.3.attention.out", head=5), add("blocks.6.residual", direction, batch=[1, 2])):
        model(tokens)

Sites are those of `probe`, and so are the patterns that name several. Changes at one site are made in the order they are given,
those of a `with` inside another after the outer one's. `zero("blocks.3.attention.out", head=5)` takes a head away: it is the same
as zeros in its columns of the output projection.

What to change, if not all of a site:

    head       one or several; of k and v, the key heads
    batch      rows of the call's batch, by number or as a boolean (B,)
    positions  tokens by number, as a slice, or as a boolean (B, T). They are counted as the model counts them: from the start of
               the text, what a cache holds included, padding left out; negative ones from the end of the call.

A probe inside sees the changed values, one outside those before (of q, k and v, what attention is given; weights are computed
from these). Kernels, caches and engines are as ever, with two exceptions: changing `scores` or `weights` computes that attention by
the equation, (B, H, T, S) at once; and a graph that was compiled or recorded before knows nothing of this, which is an error where
no call passed here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from clearhead.errors import InputError
from clearhead.inside.probe import (
    ALL,
    ATTENTION,
    Heads,
    Look,
    Seen,
    blocks_of,
    entry_of,
    find_sites,
    heads_of,
    lay_out,
    look_at,
    sites,
    uncompiled,
)
from clearhead.layers.attend import softmax_of
from clearhead.layers.attention import Attend
from clearhead.layers.cache import LayerCache
from clearhead.layers.masks import ABSENT, Mask

Batch = int | Sequence[int] | Bool[Tensor, " B"] | None  # None: all
Positions = int | Sequence[int] | slice | Bool[Tensor, "B T"] | None


@dataclass(frozen=True)
class Spot:
    """A site in one call: its name, and where its rows stand in the text."""

    site: str
    stands: Int[Tensor, "_ T"]


Change = Callable[[Tensor, Spot], Tensor]


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """A change to the sites that match `pattern`; `zero`, `scale`, `mean`, `patch` and `add` make them."""

    pattern: str
    change: Change
    head: Heads = None
    batch: Batch = None
    positions: Positions = None
    source: Seen | None = None  # what it is taken from, if only from some of the sites

    def apply(self, x: Tensor, spot: Spot) -> Tensor:
        changed = self.change(x, spot).to(x.dtype)
        chosen = self._chosen(x, spot)
        return changed.expand_as(x) if chosen is None else torch.where(chosen, changed, x)

    def _chosen(self, x: Tensor, spot: Spot) -> Tensor | None:
        """Which numbers of x are meant, as booleans that broadcast over it; None: all."""
        terms: list[Tensor] = []
        if self.batch is not None:
            terms.append(_rows(self.batch, x, spot.site).view(-1, *(1,) * (x.ndim - 1)))
        if self.positions is not None:
            terms.append(_over(_tokens(self.positions, x, spot), x))
        if self.head is not None:
            heads = heads_of(self.head, x.shape[1], spot.site)
            terms.append(torch.isin(torch.arange(x.shape[1], device=x.device), _numbers(heads, x)).view(1, -1, 1, 1))
        if not terms:
            return None
        chosen = terms[0]
        for term in terms[1:]:
            chosen = chosen & term
        return chosen


def zero(site: str, *, head: Heads = None, batch: Batch = None, positions: Positions = None) -> Intervention:
    """Zeros."""
    return Intervention(
        pattern=site, change=lambda x, _: torch.zeros_like(x), head=head, batch=batch, positions=positions
    )


def scale(
    site: str, by: float | Tensor, *, head: Heads = None, batch: Batch = None, positions: Positions = None
) -> Intervention:
    """Times a number, or times one for each row of the batch."""

    def change(x: Tensor, spot: Spot) -> Tensor:
        if not isinstance(by, Tensor) or by.ndim == 0:
            return x * by
        if by.shape != x.shape[:1]:
            raise InputError(
                f"{spot.site!r} is scaled by one number or one a row ({x.shape[0]}); got shape {tuple(by.shape)}; reshape it"
            )
        return x * by.to(x).view(-1, *(1,) * (x.ndim - 1))

    return Intervention(pattern=site, change=change, head=head, batch=batch, positions=positions)


def mean(
    site: str,
    of: Tensor | Seen | None = None,
    *,
    head: Heads = None,
    batch: Batch = None,
    positions: Positions = None,
) -> Intervention:
    """The mean over the rows and real tokens of this call, or over those `of` another run: a site, or all that was seen.

    With a cache a call is one token, so give the mean `of` something larger there.
    """

    def change(x: Tensor, spot: Spot) -> Tensor:
        if of is not None:
            return _value(of, spot.site).to(x).mean((0, -2), keepdim=True)
        real = _over(spot.stands != ABSENT, x).expand(len(x), *(-1,) * (x.ndim - 1)).to(x)
        return (x * real).sum((0, -2), keepdim=True) / real.sum((0, -2), keepdim=True)

    return Intervention(pattern=site, change=change, head=head, batch=batch, positions=positions, source=_source(of))


def patch(
    site: str, value: Tensor | Seen, *, head: Heads = None, batch: Batch = None, positions: Positions = None
) -> Intervention:
    """What another run had there: a tensor that fits the site, or all that a probe saw of it.

    A tensor of another length than the call's is taken by position: a whole text's, say, while the model generates.
    """

    def change(x: Tensor, spot: Spot) -> Tensor:
        new, there = _fit(_value(value, spot.site), x, spot)
        return torch.where(there, new, x)

    return Intervention(pattern=site, change=change, head=head, batch=batch, positions=positions, source=_source(value))


def add(
    site: str, vector: Tensor | Seen, *, head: Heads = None, batch: Batch = None, positions: Positions = None
) -> Intervention:
    """A vector, such as a steering vector at a `residual`, or anything that fits the site as in `patch`."""

    def change(x: Tensor, spot: Spot) -> Tensor:
        new, there = _fit(_value(vector, spot.site), x, spot)
        return torch.where(there, x + new, x)

    return Intervention(
        pattern=site, change=change, head=head, batch=batch, positions=positions, source=_source(vector)
    )


@contextmanager
def intervene(model: nn.Module, *interventions: Intervention) -> Generator[None]:
    """Make these changes in every call of the model inside the `with`. Nothing stays attached afterwards."""
    plan = _plan(model, interventions)
    fired: set[str] = set()
    with ExitStack() as attached:
        attached.enter_context(uncompiled(model))
        for name, block in blocks_of(model).items():
            here = _Here(name, plan, fired)
            if not here.is_needed:
                continue
            attached.callback(block.register_forward_pre_hook(here.enter, with_kwargs=True).remove)
            for step, attention in (("attention", block.attention), ("cross", block.cross)):
                if attention is not None and here.changes(*(f"{step}.{part}" for part in ATTENTION)):
                    attached.callback(attention.heads.register_forward_pre_hook(here.before(step)).remove)
                    attached.callback(attention.heads.register_forward_hook(here.after(step)).remove)
            if here.changes("feedforward.hidden"):
                attached.callback(block.feedforward.down.register_forward_pre_hook(here.hidden).remove)
            if here.changes("residual"):
                attached.callback(block.register_forward_hook(here.leave).remove)
        yield
    if plan and not fired:
        raise InputError(
            f"no call of the model passed {next(iter(plan))!r}, so nothing was changed; call the model inside the `with`, "
            f"itself and not a function that was compiled around it"
        )


Plan = dict[str, list[Intervention]]


def _plan(model: nn.Module, interventions: Sequence[Intervention]) -> Plan:
    """Each site's changes in order."""
    known, plan = sites(model), defaultdict[str, list[Intervention]](list)
    for one in interventions:
        for site in find_sites(one.pattern, list(known)):
            if one.source is not None and site not in one.source:
                continue
            if one.head is not None and not {"H", "K"} & set(known[site]):
                raise InputError(f"{site!r} {known[site]} has no heads, but got head={one.head!r}; leave it out")
            plan[site].append(one)
        if one.source is not None and not any(one in changes for changes in plan.values()):
            raise InputError(
                f"of what matches {one.pattern!r} nothing was seen in the run to take it from; "
                f"probe it there: probe(model, {one.pattern!r})"
            )
    return dict(plan)


class _Here:
    """The hooks of one block."""

    def __init__(self, name: str, plan: Plan, fired: set[str]) -> None:
        self.name, self.plan, self.fired = name, plan, fired
        self.entry = entry_of(name)
        self.is_needed = self.entry in plan or any(site.startswith(f"{name}.") for site in plan)
        self.stands = torch.zeros(1, 0, dtype=torch.int64)

    def changes(self, *places: str) -> bool:
        return any(f"{self.name}.{place}" in self.plan for place in places)

    def apply(self, site: str | None, x: Tensor, stands: Tensor | None = None) -> Tensor:
        for one in self.plan.get(site or "", ()):
            x = one.apply(x, Spot(str(site), self.stands if stands is None else stands))
            self.fired.add(str(site))
        return x

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x, mask = args
        self.stands = _stands(x, mask, kwargs.get("cache"))
        return (self.apply(self.entry, x), mask), kwargs

    def leave(self, _: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
        return self.apply(f"{self.name}.residual", out)

    def hidden(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.apply(f"{self.name}.feedforward.hidden", args[0]),)

    def before(self, step: str) -> Callable[..., Any]:
        def hook(_: Attend, args: tuple[Any, ...]) -> tuple[Any, ...]:
            q, k, v, mask, bias = lay_out(args) if self.changes(f"{step}.k", f"{step}.v") else args
            q = self.apply(f"{self.name}.{step}.q", q)
            if self.changes(f"{step}.k", f"{step}.v"):
                at = torch.arange(k.shape[2], device=k.device)[None] if mask.keys is None else mask.keys
                k, v = self.apply(f"{self.name}.{step}.k", k, at), self.apply(f"{self.name}.{step}.v", v, at)
            return q, k, v, mask, bias

        return hook

    def after(self, step: str) -> Callable[..., Tensor]:
        def hook(attention: Attend, args: tuple[Any, ...], out: Tensor) -> Tensor:
            if self.changes(f"{step}.scores", f"{step}.weights"):
                given = lay_out(args)
                look = look_at(given, attention.scale, tuple(range(out.shape[1])))
                out = self._weigh_anew(step, look, given[2], out)
            return self.apply(f"{self.name}.{step}.out", out)

        return hook

    def _weigh_anew(self, step: str, look: Look, v: Tensor, out: Tensor) -> Tensor:
        """The equation with its scores or weights changed. Rows in which nothing changed keep the kernel's own result."""
        heads = tuple(range(out.shape[1]))
        allowed = look.mask.allowed(look.T, v.shape[2], ALL, ALL, v.device)
        before = look.weights(heads, ALL)
        scores = self.apply(f"{self.name}.{step}.scores", look.scores(heads, ALL))
        weights = self.apply(f"{self.name}.{step}.weights", softmax_of(scores, allowed).to(v.dtype))
        grouped = weights.unflatten(1, (v.shape[1], -1)).flatten(2, 3)
        new = (grouped @ v).unflatten(2, (-1, out.shape[2])).flatten(1, 2)
        return torch.where((weights == before).all(-1, keepdim=True), out, new)


def _stands(x: Tensor, mask: Mask | None, cache: Any) -> Int[Tensor, "_ T"]:
    """Where each token of a call stands in its text; ABSENT for padding."""
    if mask is not None and mask.queries is not None:
        return mask.queries
    if mask is not None and mask.keys is not None and mask.pages is None:
        return mask.keys[:, -x.shape[1] :]
    start = cache.step.start if isinstance(cache, LayerCache) else 0
    return torch.arange(start, start + x.shape[1], device=x.device)[None]


def _over(tokens: Tensor, x: Tensor) -> Tensor:
    """Something for each token, laid along x's own tokens."""
    return tokens[:, None, :, None] if x.ndim == 4 else tokens[..., None]


def _numbers(numbers: Sequence[int], x: Tensor) -> Int[Tensor, " n"]:
    return torch.tensor(list(numbers), device=x.device, dtype=torch.int64)


def _rows(batch: int | Sequence[int] | Tensor, x: Tensor, site: str) -> Bool[Tensor, " B"]:
    if isinstance(batch, Tensor) and batch.dtype == torch.bool:
        if batch.shape != x.shape[:1]:
            raise InputError(
                f"{site!r} has {len(x)} rows, but batch= is of shape {tuple(batch.shape)}; give one boolean a row"
            )
        return batch.to(x.device)
    rows = [batch] if isinstance(batch, int) else [int(row) for row in batch]
    if any(not -len(x) <= row < len(x) for row in rows):
        raise InputError(f"{site!r} has rows 0 .. {len(x) - 1}; got batch={batch!r}; name some of these")
    return torch.isin(torch.arange(len(x), device=x.device), _numbers([row % len(x) for row in rows], x))


def _tokens(positions: int | Sequence[int] | slice | Tensor, x: Tensor, spot: Spot) -> Bool[Tensor, "_ T"]:
    stands = spot.stands
    end = stands.amax(-1, keepdim=True) + 1
    if isinstance(positions, slice):
        low, high, step = positions.start or 0, positions.stop, positions.step or 1
        low = end + low if low < 0 else torch.full_like(end, low)
        chosen = (stands >= low) & ((stands - low) % step == 0)
        return chosen if high is None else chosen & (stands < (end + high if high < 0 else high))
    if isinstance(positions, Tensor) and positions.dtype == torch.bool:
        if positions.shape != (len(x), x.shape[-2]):
            raise InputError(
                f"{spot.site!r} has {(len(x), x.shape[-2])} (rows, tokens), but positions= is of shape "
                f"{tuple(positions.shape)}; give one boolean a token of the call, or positions by number"
            )
        return positions.to(x.device)
    numbers = [positions] if isinstance(positions, int) else [int(at) for at in positions]
    chosen = torch.isin(stands, _numbers([at for at in numbers if at >= 0], x))
    return chosen | torch.isin(stands - end, _numbers([at for at in numbers if at < 0], x))


def _fit(value: Tensor, x: Tensor, spot: Spot) -> tuple[Tensor, Tensor]:
    """The value as x's, and where there is one."""
    value, there = value.to(x), torch.ones((), dtype=torch.bool, device=x.device)
    if value.ndim == x.ndim and value.shape[-2] not in (1, x.shape[-2]):
        n, at = value.shape[-2], _over(spot.stands, x)
        there = (at >= 0) & (at < n)
        value = torch.take_along_dim(value, at.clamp(0, n - 1), -2)
    try:
        fits = torch.broadcast_shapes(value.shape, x.shape) == x.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise InputError(
            f"{spot.site!r} is {tuple(x.shape)} in this call, and a value of shape {tuple(value.shape)} does not fit it; "
            f"take it from a run of as many rows, or give one vector of {x.shape[-1]}"
        )
    return value, there


def _value(value: Tensor | Seen, site: str) -> Tensor:
    return value[site] if isinstance(value, Seen) else value


def _source(value: Tensor | Seen | None) -> Seen | None:
    return value if isinstance(value, Seen) else None
