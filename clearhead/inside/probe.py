"""`probe`: record what a model computes at chosen sites.

    with ch.probe(model, "blocks.*.attention.weights") as seen:
        model(tokens)
    seen["blocks.3.attention.weights"]            # (B, H, T, S)
    seen.rows("blocks.3.attention.weights", -1, head=5)  # (B, 1, 1, S): one row of one head

The model runs on its usual fast kernels. Of an attention only q and k are kept; its weights are computed from them when they
are read, for the heads and rows that are read. On a long text, `probe(..., head=5, rows=-1)` keeps only what these need.

A compiled model runs uncompiled inside the `with`, since its graphs run no hooks. A compiled function that calls the model keeps
its graph and runs no hook either (the site is then "not reached"): call the model itself.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead import viewers
from clearhead.display import html_table
from clearhead.errors import InputError, did_you_mean
from clearhead.inside.sites import ATTENTION, blocks_of, entry_of, find_sites, sites, uncompiled
from clearhead.layers.attention import Attend, attention_scores, facts_of, gathered, masked_softmax
from clearhead.layers.masks import Mask
from clearhead.layers.positions import Bias

Heads = int | Sequence[int] | None  # None: all
Rows = int | slice
ALL = slice(None)


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs of one attention: enough to compute the scores and weights of the kept heads and rows.

    A probe stores copies, since a cache overwrites its keys.
    """

    q: Float[Tensor, "B h t E"]
    k: Float[Tensor, "B _ S E"]
    heads: tuple[int, ...]  # the numbers of the heads in q
    groups: tuple[int, ...]  # for each of them, the index of its key head in k
    T: int  # rows of the whole call
    kept: slice  # the rows in q
    mask: Mask
    bias: Bias | None
    scale: float | None

    def scores(self, indices: tuple[int, ...], rows: slice) -> Float[Tensor, "B h t S"]:
        """q k^T / sqrt(E) + bias for some of the kept heads and rows, by their index among the kept ones."""
        q, k, n = self.q[:, :, rows], self.k, len(self.heads)
        is_in_order = self.groups == tuple(i * k.shape[1] // n for i in range(n))
        if indices != tuple(range(n)) or not is_in_order:  # else no copy is needed
            q, k = q[:, list(indices)], k[:, [self.groups[i] for i in indices]]
        scores = attention_scores(q, k, scale=self.scale)
        if self.bias is None:
            return scores
        rows, heads = self._rows_of_call(rows), [self.heads[i] for i in indices]
        if isinstance(self.bias, Tensor):
            bias = self.bias[:, :, rows]
        else:
            bias = self.bias.dense(self.mask.distances(self.T, k.shape[2], rows, ALL, k.device))
        return scores + (bias if bias.shape[1] == 1 else bias[:, heads])

    def weights(self, indices: tuple[int, ...], rows: slice) -> Float[Tensor, "B h t S"]:
        allowed = self.mask.allowed(self.T, self.k.shape[2], self._rows_of_call(rows), ALL, self.k.device)
        return masked_softmax(self.scores(indices, rows), allowed).to(self.q.dtype)

    def _rows_of_call(self, rows: slice) -> slice:
        """Some of the kept rows, as rows of the whole call."""
        which = range(*self.kept.indices(self.T))[rows]
        return slice(which.start, max(which.stop, 0), which.step)


class Seen:
    """What a probe recorded in the model's last call, by site."""

    def __init__(self, head: Heads = None, rows: Rows = ALL) -> None:
        self.head, self.kept = head, as_slice(rows)  # the heads and rows that are kept
        self.heads: dict[str, tuple[int, ...]] = {}  # the kept heads of each tensor that has heads
        self.attention: dict[str, AttentionInputs] = {}  # by the attention's name, such as "blocks.3.attention"
        self.tensors: dict[str, Tensor] = {}
        self.sites: list[str] = []

    def heads_at(self, site: str) -> tuple[int, ...]:
        """The heads that were kept of a site, at k and v key heads; () where it has none."""
        given = self.attention.get(site.rpartition(".")[0])
        return self.heads.get(site, ()) if site in self.tensors or given is None else given.heads

    def __getitem__(self, site: str) -> Tensor:
        return self.rows(site)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __contains__(self, site: object) -> bool:
        return site in self.sites

    def __len__(self) -> int:
        return len(self.sites)

    def __repr__(self) -> str:
        named = ", ".join(f"{pattern} {shape}" for pattern, _, shape in self._summary()[:4])
        return f"Seen({len(self)} sites: {named}{', ...' if len(self._summary()) > 4 else ''})"

    def _repr_html_(self) -> str:
        return html_table(
            "Seen", ("site", "layers", "shape"), self._summary(), "seen[site] is a tensor; seen.show() draws attention"
        )

    def _summary(self) -> list[tuple[str, int, str]]:
        """Sites of the same name in all layers, as one: the pattern, how many there are, and the shape of each."""
        found: dict[tuple[str, str], int] = {}
        for site in self.sites:
            key = re.sub(r"\.\d+\.", ".*.", site), self._shape(site)
            found[key] = found.get(key, 0) + 1
        return [(pattern, n, shape) for (pattern, shape), n in found.items()]

    def _shape(self, site: str) -> str:
        if site in self.tensors:
            return str(tuple(self.tensors[site].shape))
        given = self.attention.get(site.rpartition(".")[0])
        return "not reached" if given is None else str((*given.q.shape[:3], given.k.shape[2]))

    @torch.no_grad()
    def rows(self, site: str, rows: Rows = ALL, *, head: Heads = None) -> Tensor:
        """Some rows and heads of a site; all axes stay. Of an attention's weights and scores only these are computed.

        Rows are tokens of the call (for k and v: keys). If the probe kept only some rows, they are counted among the kept ones.
        """
        if site not in self.sites:
            raise InputError(f"{site!r} was not probed; {did_you_mean(site, self.sites)}")
        name, _, part = site.rpartition(".")
        if site not in self.tensors and name not in self.attention:
            raise InputError(f"{site!r} was not reached; call the model inside the `with` first")
        rows = as_slice(rows)
        if site in self.tensors:
            tensor = self.tensors[site]
            if head is None:
                return tensor[..., rows, :]
            if site not in self.heads:
                raise InputError(f"{site!r} has no heads, but head={head!r} was asked for; leave it out")
            return tensor[:, _indices(head, self.heads[site], site), rows]
        given = self.attention[name]
        indices = tuple(range(len(given.heads))) if head is None else tuple(_indices(head, given.heads, site))
        return given.scores(indices, rows) if part == "scores" else given.weights(indices, rows)

    def plot(
        self,
        site: str,
        *,
        head: int | None = None,
        batch: int = 0,
        tokens: Sequence[str] = (),
        columns: Sequence[str] = (),
    ) -> Any:
        """A matplotlib figure of the attention at a site, of one head or the mean of all; needs clearhead[plot].

        A notebook displays it; `.savefig("map.svg")` (or .png) writes a file.
        """
        from clearhead.inside.plots import plot_seen

        return plot_seen(self, site, head=head, batch=batch, tokens=tokens, columns=columns)

    def show(self, tokens: Sequence[str] = (), columns: Sequence[str] = (), **options: Any) -> Any:
        """The recorded attention as the explorer's page, in a notebook's output; it is saved with the notebook.

        The page is in a room to the right of this one, so it is called through the viewer that the front door has set.
        """
        return viewers.show_seen(self, tokens, columns, **options)


@contextmanager
def probe(model: nn.Module, *patterns: str, head: Heads = None, rows: Rows = ALL) -> Generator[Seen]:
    """Record the sites whose names match a pattern (`*` matches anything). All hooks are removed afterwards.

    Only the heads and rows named by `head` and `rows` are kept: in GPT-2 at 32,768 tokens, a layer's queries and keys are 200 MB,
    the keys of one head 8 MB.
    """
    seen, known = Seen(head, rows), list(sites(model))
    for pattern in patterns or ("*",):
        seen.sites += [site for site in find_sites(pattern, known) if site not in seen.sites]
    with ExitStack() as attached:
        attached.enter_context(uncompiled(model))
        for name, block in blocks_of(model).items():
            if (entry := entry_of(name)) in seen.sites:
                attached.callback(block.register_forward_pre_hook(_keep_input(seen, str(entry))).remove)
            for step, attention in (("attention", block.attention), ("cross", block.cross)):
                wanted = [part for part in ATTENTION if f"{name}.{step}.{part}" in seen.sites]
                if attention is not None and wanted:
                    keep = _keep_attention(seen, f"{name}.{step}", wanted)
                    attached.callback(attention.heads.register_forward_hook(keep).remove)
            if f"{name}.feedforward.hidden" in seen.sites:
                keep = _keep_input(seen, f"{name}.feedforward.hidden")
                attached.callback(block.feedforward.down.register_forward_pre_hook(keep).remove)
            if f"{name}.residual" in seen.sites:
                keep = _keep_output(seen, f"{name}.residual")
                attached.callback(block.register_forward_hook(keep).remove)
        yield seen


def heads_of(head: Heads, n_heads: int, site: str) -> tuple[int, ...]:
    """The numbers of the chosen heads, each checked to be below `n_heads`."""
    heads = tuple(range(n_heads)) if head is None else (head,) if isinstance(head, int) else tuple(head)
    wrong = [h for h in heads if not 0 <= h < n_heads]
    if wrong or not heads:
        raise InputError(f"{site!r} has heads 0 .. {n_heads - 1}; got head={head!r}; name one or some of these")
    return heads


def as_slice(rows: Rows) -> slice:
    if isinstance(rows, slice) and (rows.step or 1) > 0:
        return rows
    if isinstance(rows, SupportsIndex):
        row = operator.index(rows)
        return slice(row, row + 1 or None)
    raise InputError(
        f"rows= is one row's number or a slice with steps forward; got {rows!r:.60}; write rows=5 for one row, or "
        f"rows=slice(5, 9) for rows 5 to 8"
    )


def _indices(head: Heads, kept: tuple[int, ...], site: str) -> list[int]:
    """The indices of some heads among the kept ones."""
    heads = (head,) if isinstance(head, int) else tuple(head or ())
    if not heads or not set(heads) <= set(kept):
        held = ", ".join(map(str, kept))
        raise InputError(f"of {site!r} the heads {held} are there; got head={head!r}; name one or some of these")
    return [kept.index(h) for h in heads]


Given = tuple[Tensor, Tensor, Tensor, Mask, Bias | None]  # q, k, v, mask, bias


def lay_out(inputs: tuple[Any, ...]) -> Given:
    """An attention's inputs, with the facts of its mask, and its bias."""
    q, k, v, mask = inputs
    return q, gathered(k), gathered(v), *facts_of(mask)


def select_inputs(given: Given, scale: float | None, heads: tuple[int, ...], rows: slice = ALL) -> AttentionInputs:
    """The part of an attention's inputs that these heads and rows need; views, not copies."""
    q, k, _, mask, bias = given
    group = q.shape[1] // k.shape[1]
    groups = tuple(dict.fromkeys(head // group for head in heads))  # several query heads share one key head
    served = tuple(groups.index(head // group) for head in heads)
    return AttentionInputs(
        _heads_of(q, heads)[:, :, rows], _heads_of(k, groups), heads, served, q.shape[2], rows, mask, bias, scale
    )


def _heads_of(x: Float[Tensor, "B h T E"], heads: tuple[int, ...]) -> Float[Tensor, "B _ T E"]:
    return x if len(heads) == x.shape[1] else x[:, list(heads)]


def _keep_attention(seen: Seen, name: str, wanted: list[str]) -> Callable[..., None]:
    def hook(attention: Attend, inputs: tuple[Any, ...], out: Tensor) -> None:
        given = lay_out(inputs)
        heads = heads_of(seen.head, out.shape[1], name)
        groups = tuple(dict.fromkeys(head * given[1].shape[1] // out.shape[1] for head in heads))
        if "weights" in wanted or "scores" in wanted:
            kept = select_inputs(given, attention.scale, heads, seen.kept)
            seen.attention[name] = replace(kept, q=kept.q.detach().clone(), k=kept.k.detach().clone())
        for part, x in zip(("q", "k", "v", "out"), (*given[:3], out), strict=True):
            if part in wanted:
                which, rows = (groups, ALL) if part in "kv" else (heads, seen.kept)
                seen.tensors[f"{name}.{part}"] = _heads_of(x, which)[:, :, rows].detach().clone()
                seen.heads[f"{name}.{part}"] = which

    return hook


def _keep_input(seen: Seen, name: str) -> Callable[..., None]:
    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.tensors[name] = _rows_of(inputs[0], seen.kept)

    return hook


def _keep_output(seen: Seen, name: str) -> Callable[..., None]:
    def hook(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> None:
        seen.tensors[name] = _rows_of(out, seen.kept)

    return hook


def _rows_of(x: Float[Tensor, "B T d"], rows: slice) -> Float[Tensor, "B t d"]:
    return x.detach() if rows == ALL else x[:, rows].detach().clone()
