"""`intervene`: change what a model computes at chosen sites while it runs.

    with intervene(model, zero("blocks.3.attention.out", head=5), add("blocks.6.residual", direction, batch=[1, 2])):
        model(tokens)

Sites and patterns are those of `probe`. Changes at one site are applied in the order given; those of an inner `with` after those
of the outer one. `zero("blocks.3.attention.out", head=5)` removes a head: the same as zeros in its columns of
the output projection.

To change only a part of a site:

    head       one head or several; at k and v, key heads
    batch      rows of the call's batch, by number or as a boolean (B,)
    positions  tokens by number, as a slice, or as a boolean (B, T). Numbers count from the start of the text, including cached
               tokens and without padding; negative ones count from the end of the call.
    unit       numbers of the last axis: zero("blocks.3.feedforward.hidden", unit=17) removes a neuron of a feed-forward layer

A probe entered inside the `with` records the changed values, one entered outside the values before the change (at q, k and v: the
inputs of attention, from which it computes weights). Kernels, caches and engines work as usual, with two exceptions: changing
`scores` or `weights` computes that attention by the equation, all (B, H, T, S) at once; and a graph compiled or recorded before
runs without the changes, which is an error if no call ran a changed site.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from clearhead.errors import InputError
from clearhead.inside.probe import ALL, AttentionInputs, Heads, Seen, heads_of, lay_out, select_inputs
from clearhead.inside.site_selection import (
    Batch,
    Positions,
    SiteCall,
    as_indices,
    chosen_rows,
    chosen_tokens,
    chosen_units,
    fit_value,
    over_tokens,
)
from clearhead.inside.sites import ATTENTION, blocks_of, entry_of, find_sites, sites, uncompiled
from clearhead.layers.attention import Attend, Lowered, facts_of, gathered, masked_softmax
from clearhead.layers.cache import LayerCache
from clearhead.layers.masks import ABSENT, Mask

Change = Callable[[Tensor, SiteCall], Tensor]


@dataclass(frozen=True, kw_only=True)
class Intervention:
    """A change to the sites that match `pattern`; `zero`, `scale`, `mean`, `patch` and `add` make them."""

    pattern: str
    change: Change
    head: Heads = None
    batch: Batch = None
    positions: Positions = None
    unit: Heads = None
    source: Seen | None = None  # where values are taken from: only sites recorded there are changed
    takes_any_rows: bool = False  # whether `source` may hold some rows only: a mean has no places

    def apply(self, x: Tensor, call: SiteCall) -> Tensor:
        changed = self.change(x, call).to(x.dtype)
        chosen = self._chosen(x, call)
        return changed.expand_as(x) if chosen is None else torch.where(chosen, changed, x)

    def _chosen(self, x: Tensor, call: SiteCall) -> Tensor | None:
        """Which elements of x are changed, as booleans that broadcast over it; None: all."""
        terms: list[Tensor] = []
        if self.batch is not None:
            terms.append(chosen_rows(self.batch, x, call.site).view(-1, *(1,) * (x.ndim - 1)))
        if self.positions is not None:
            terms.append(over_tokens(chosen_tokens(self.positions, x, call), x))
        if self.head is not None:
            heads = heads_of(self.head, x.shape[1], call.site)
            terms.append(torch.isin(torch.arange(x.shape[1], device=x.device), as_indices(heads, x)).view(1, -1, 1, 1))
        if self.unit is not None:
            terms.append(chosen_units(self.unit, x, call.site))
        if not terms:
            return None
        chosen = terms[0]
        for term in terms[1:]:
            chosen = chosen & term
        return chosen


def zero(
    site: str, *, head: Heads = None, batch: Batch = None, positions: Positions = None, unit: Heads = None
) -> Intervention:
    """Replace by zeros."""
    return Intervention(
        pattern=site, change=lambda x, _: torch.zeros_like(x), head=head, batch=batch, positions=positions, unit=unit
    )


def scale(
    site: str,
    by: float | Tensor,
    *,
    head: Heads = None,
    batch: Batch = None,
    positions: Positions = None,
    unit: Heads = None,
) -> Intervention:
    """Multiply by a number, or by one number for each row of the batch."""

    def change(x: Tensor, call: SiteCall) -> Tensor:
        if not isinstance(by, Tensor) or by.ndim == 0:
            return x * by
        if by.shape != x.shape[:1]:
            raise InputError(
                f"{call.site!r} is scaled by one number or one a row ({x.shape[0]}); got shape {tuple(by.shape)}; reshape it"
            )
        return x * by.to(x).view(-1, *(1,) * (x.ndim - 1))

    return Intervention(pattern=site, change=change, head=head, batch=batch, positions=positions, unit=unit)


def mean(
    site: str,
    of: Tensor | Seen | None = None,
    *,
    head: Heads = None,
    batch: Batch = None,
    positions: Positions = None,
    unit: Heads = None,
) -> Intervention:
    """Replace by the mean over the rows and real tokens of this call, or `of` another run: a tensor, or what a probe recorded.

    With a cache a call has one token; give `of` there. Of another run all tokens count, also padding: probe it without.
    """

    def change(x: Tensor, call: SiteCall) -> Tensor:
        if of is not None:
            return _value(of, call.site).to(x).mean((0, -2), keepdim=True)
        real = over_tokens(call.positions != ABSENT, x).expand(len(x), *(-1,) * (x.ndim - 1)).to(x)
        return (x * real).sum((0, -2), keepdim=True) / real.sum((0, -2), keepdim=True)

    return Intervention(
        pattern=site,
        change=change,
        head=head,
        batch=batch,
        positions=positions,
        unit=unit,
        source=_source(of),
        takes_any_rows=True,
    )


def patch(
    site: str,
    value: Tensor | Seen,
    *,
    head: Heads = None,
    batch: Batch = None,
    positions: Positions = None,
    unit: Heads = None,
) -> Intervention:
    """Replace by the values of another run: a tensor that fits the site, or what a probe recorded.

    A tensor of another length than the call is indexed by position, such as that of a whole text while the model generates.
    """

    def change(x: Tensor, call: SiteCall) -> Tensor:
        new, there = fit_value(_value(value, call.site), x, call)
        return torch.where(there, new, x)

    return Intervention(
        pattern=site, change=change, head=head, batch=batch, positions=positions, unit=unit, source=_source(value)
    )


def add(
    site: str, vector: Tensor | Seen, *, head: Heads = None, batch: Batch = None, positions: Positions = None
) -> Intervention:
    """Add a vector, such as a steering vector at a `residual`, or any value that fits the site as in `patch`."""

    def change(x: Tensor, call: SiteCall) -> Tensor:
        new, there = fit_value(_value(vector, call.site), x, call)
        return torch.where(there, x + new, x)

    return Intervention(
        pattern=site, change=change, head=head, batch=batch, positions=positions, source=_source(vector)
    )


@contextmanager
def intervene(model: nn.Module, *interventions: Intervention) -> Generator[None]:
    """Apply these changes in every call of the model inside the `with`. All hooks are removed afterwards."""
    plan = _plan(model, interventions)
    fired: set[str] = set()
    with ExitStack() as attached:
        attached.enter_context(uncompiled(model))
        for name, block in blocks_of(model).items():
            hooks = _BlockHooks(name, plan, fired)
            if not hooks.is_needed:
                continue
            attached.callback(block.register_forward_pre_hook(hooks.enter, with_kwargs=True).remove)
            for step, attention in (("attention", block.attention), ("cross", block.cross)):
                if attention is not None and hooks.changes(*(f"{step}.{part}" for part in ATTENTION)):
                    attached.callback(attention.heads.register_forward_pre_hook(hooks.before(step)).remove)
                    attached.callback(attention.heads.register_forward_hook(hooks.after(step)).remove)
            if hooks.changes("feedforward.hidden"):
                attached.callback(block.feedforward.down.register_forward_pre_hook(hooks.hidden).remove)
            if hooks.changes("residual"):
                attached.callback(block.register_forward_hook(hooks.leave).remove)
        yield
    if plan and not fired:
        raise InputError(
            f"no call of the model passed {next(iter(plan))!r}, so nothing was changed; call the model inside the `with`, "
            f"itself and not a function that was compiled around it"
        )


Plan = dict[str, list[Intervention]]


def _plan(model: nn.Module, interventions: Sequence[Intervention]) -> Plan:
    """The changes of each site, in order."""
    known, plan = sites(model), defaultdict[str, list[Intervention]](list)
    for one in interventions:
        for site in find_sites(one.pattern, list(known)):
            if one.source is not None and site not in one.source:
                continue
            if one.head is not None and not {"H", "K"} & set(known[site]):
                raise InputError(f"{site!r} {known[site]} has no heads, but got head={one.head!r}; leave it out")
            if one.source is not None:
                _check_whole(one.source, site, one)
            plan[site].append(one)
        if one.source is not None and not any(one in changes for changes in plan.values()):
            raise InputError(
                f"of what matches {one.pattern!r} nothing was seen in the run to take it from; "
                f"probe it there: probe(model, {one.pattern!r})"
            )
    return dict(plan)


def _check_whole(source: Seen, site: str, one: Intervention) -> None:
    """Refuse what a probe kept of some heads or rows only, where it would be put at other ones."""
    kept = source.heads_at(site)
    wanted = (one.head,) if isinstance(one.head, int) else tuple(one.head or ())
    if source.head is not None and kept and wanted != kept:
        raise InputError(
            f"of {site!r} the probe kept head={source.head!r} only, which are not the heads to change (head={one.head!r}); "
            f"name the same head, or probe all"
        )
    if source.kept != ALL and not one.takes_any_rows and not site.endswith((".k", ".v")):  # of these all rows are kept
        raise InputError(
            f"of {site!r} the probe kept rows={source.kept} only, whose places in the text a change does not know; probe all rows, "
            f"or give a tensor: seen[{site!r}]"
        )


class _BlockHooks:
    """The hooks of one block."""

    def __init__(self, name: str, plan: Plan, fired: set[str]) -> None:
        self.name, self.plan, self.fired = name, plan, fired
        self.entry = entry_of(name)
        self.is_needed = self.entry in plan or any(site.startswith(f"{name}.") for site in plan)
        self.positions = torch.zeros(1, 0, dtype=torch.int64)

    def changes(self, *places: str) -> bool:
        return any(f"{self.name}.{place}" in self.plan for place in places)

    def apply(self, site: str | None, x: Tensor, positions: Tensor | None = None) -> Tensor:
        for one in self.plan.get(site or "", ()):
            x = one.apply(x, SiteCall(str(site), self.positions if positions is None else positions))
            self.fired.add(str(site))
        return x

    def enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        x, mask = args
        self.positions = _positions(x, mask, kwargs.get("cache"))
        return (self.apply(self.entry, x), mask), kwargs

    def leave(self, _: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
        return self.apply(f"{self.name}.residual", out)

    def hidden(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.apply(f"{self.name}.feedforward.hidden", args[0]),)

    def before(self, step: str) -> Callable[..., Any]:
        def hook(_: Attend, args: tuple[Any, ...]) -> tuple[Any, ...]:
            q, k, v, mask = args
            q = self.apply(f"{self.name}.{step}.q", q)
            if self.changes(f"{step}.k", f"{step}.v"):
                k, v, keys = gathered(k), gathered(v), facts_of(mask)[0].keys
                at = torch.arange(k.shape[2], device=k.device)[None] if keys is None else keys
                k, v = self.apply(f"{self.name}.{step}.k", k, at), self.apply(f"{self.name}.{step}.v", v, at)
            return q, k, v, mask

        return hook

    def after(self, step: str) -> Callable[..., Tensor]:
        def hook(attention: Attend, args: tuple[Any, ...], out: Tensor) -> Tensor:
            if self.changes(f"{step}.scores", f"{step}.weights"):
                given = lay_out(args)
                inputs = select_inputs(given, attention.scale, tuple(range(out.shape[1])))
                out = self._recompute(step, inputs, given[2], out)
            return self.apply(f"{self.name}.{step}.out", out)

        return hook

    def _recompute(self, step: str, inputs: AttentionInputs, v: Tensor, out: Tensor) -> Tensor:
        """The attention with changed scores or weights. Rows without a change keep the kernel's result."""
        heads = tuple(range(out.shape[1]))
        allowed = inputs.mask.allowed(inputs.T, v.shape[2], ALL, ALL, v.device)
        before = inputs.weights(heads, ALL)
        scores = self.apply(f"{self.name}.{step}.scores", inputs.scores(heads, ALL))
        weights = self.apply(f"{self.name}.{step}.weights", masked_softmax(scores, allowed).to(v.dtype))
        grouped = weights.unflatten(1, (v.shape[1], -1)).flatten(2, 3)
        new = (grouped @ v).unflatten(2, (-1, out.shape[2])).flatten(1, 2)
        return torch.where((weights == before).all(-1, keepdim=True), out, new)


def _positions(x: Tensor, lowered: Mask | Lowered | None, cache: Any) -> Int[Tensor, "_ T"]:
    """The position of each token of a call in its text; ABSENT for padding."""
    mask, _ = facts_of(lowered)
    if mask.queries is not None:
        return mask.queries
    if mask.keys is not None:
        return mask.keys[:, -x.shape[1] :]
    start = cache.step.start if isinstance(cache, LayerCache) else 0
    return torch.arange(start, start + x.shape[1], device=x.device)[None]


def _value(value: Tensor | Seen, site: str) -> Tensor:
    return value[site] if isinstance(value, Seen) else value


def _source(value: Tensor | Seen | None) -> Seen | None:
    return value if isinstance(value, Seen) else None
