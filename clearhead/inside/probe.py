"""`probe`: what went on inside a model, seen from outside.

    with ch.probe(model, "blocks.*.attention.weights") as seen:
        model(tokens)
    seen["blocks.3.attention.weights"]            # (B, H, T, S)
    seen.rows("blocks.3.attention.weights", slice(5, 6))

The model runs as it always does, on its fast kernels: of attention, only q and k are kept, and weights are computed from them
when asked for, for just the rows asked for.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.errors import InputError, did_you_mean
from clearhead.layers.attention import Attend
from clearhead.layers.block import Block
from clearhead.layers.feedforward import FeedForward
from clearhead.layers.kernels import attention_scores, attention_weights
from clearhead.layers.masks import Mask
from clearhead.layers.pages import unpage
from clearhead.layers.positions import Bias

ATTENTION = ("q", "k", "v", "scores", "weights", "out")


@dataclass(frozen=True)
class Look:
    """What one attention was given: enough to compute any of its rows. Copies, since a cache writes over its keys."""

    q: Tensor
    k: Tensor
    mask: Mask | None
    bias: Bias | None
    scale: float | None


class Seen:
    """The sites that a probe saw in the model's last call, by name."""

    def __init__(self) -> None:
        self.looks: dict[str, Look] = {}  # by the attention's name
        self.tensors: dict[str, Tensor] = {}
        self.sites: list[str] = []

    def __getitem__(self, site: str) -> Tensor:
        return self.rows(site)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    @torch.no_grad()
    def rows(self, site: str, rows: slice = slice(None)) -> Tensor:
        """A site's tensor; of attention's weights and scores only these rows of queries are computed."""
        if site not in self.sites:
            raise InputError(f"{site!r} was not probed; {did_you_mean(site, self.sites)}")
        name, _, part = site.rpartition(".")
        if site not in self.tensors and name not in self.looks:
            raise InputError(f"{site!r} was not reached; call the model inside the `with` first")
        if site in self.tensors:
            return self.tensors[site]
        look = self.looks[name]
        compute = attention_scores if part == "scores" else attention_weights
        return compute(look.q, look.k, look.mask, bias=look.bias, scale=look.scale, rows=rows)


def sites(model: nn.Module) -> list[str]:
    """Every place that can be looked at, in the order of the computation."""
    found: list[str] = []
    for name, block in model.named_modules():
        if isinstance(block, Block):
            steps = ("attention",) if block.cross is None else ("attention", "cross")
            found += [f"{name}.{step}.{part}" for step in steps for part in ATTENTION]
            found += [f"{name}.feedforward.hidden", f"{name}.residual"]
    return found


@contextmanager
def probe(model: nn.Module, *patterns: str) -> Generator[Seen]:
    """Look at the sites whose names match a pattern (`*` matches anything). Nothing stays attached afterwards."""
    seen, known = Seen(), sites(model)
    for pattern in patterns or ("*",):
        matched = fnmatch.filter(known, pattern)
        if not matched:
            raise InputError(f"no site matches {pattern!r}; {did_you_mean(pattern, known)}")
        seen.sites += [site for site in matched if site not in seen.sites]
    handles: list[Any] = []
    try:
        for name, module in model.named_modules():
            if isinstance(module, Attend):
                place = name.removesuffix(".heads")
                wanted = [part for part in ATTENTION if f"{place}.{part}" in seen.sites]
                if wanted:
                    handles.append(module.register_forward_hook(_keep_look(seen, place, wanted)))
            elif isinstance(module, FeedForward) and f"{name}.hidden" in seen.sites:
                handles.append(module.down.register_forward_pre_hook(_keep_input(seen, f"{name}.hidden")))
            elif isinstance(module, Block) and f"{name}.residual" in seen.sites:
                handles.append(module.register_forward_hook(_keep_output(seen, f"{name}.residual")))
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _keep_look(seen: Seen, name: str, wanted: list[str]) -> Callable[..., None]:
    def hook(module: Attend, inputs: tuple[Any, ...], out: Tensor) -> None:
        q, k, v, mask, bias = inputs
        if mask is not None:
            k, v, mask = unpage(k, v, mask)
        tensors = {"q": q, "k": k, "v": v, "out": out}
        kept = {part: tensors[part].detach().clone() for part in wanted if part in tensors}
        seen.tensors.update({f"{name}.{part}": tensor for part, tensor in kept.items()})
        if "weights" in wanted or "scores" in wanted:
            q, k = (kept[part] if part in kept else tensors[part].detach().clone() for part in "qk")
            seen.looks[name] = Look(q, k, mask, bias, module.scale)

    return hook


def _keep_input(seen: Seen, name: str) -> Callable[..., None]:
    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        seen.tensors[name] = inputs[0].detach()

    return hook


def _keep_output(seen: Seen, name: str) -> Callable[..., None]:
    def hook(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> None:
        seen.tensors[name] = out.detach()

    return hook
