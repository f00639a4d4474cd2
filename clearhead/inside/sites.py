"""Sites: the names of the places in a model that can be recorded and changed. Compiled modules run so that hooks see every call."""

from __future__ import annotations

import fnmatch
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import nn

from clearhead.errors import InputError, did_you_mean
from clearhead.layers.block import Block

# The sites of an attention and of the rest of a block, with their shapes (legend in layers/).
ATTENTION = {
    "q": "(B, H, T, E)",
    "k": "(B, K, S, E)",
    "v": "(B, K, S, E)",
    "scores": "(B, H, T, S)",
    "weights": "(B, H, T, S)",
    "out": "(B, H, T, E)",
}
OTHERS = {"feedforward.hidden": "(B, T, F)", "residual": "(B, T, D)"}


def sites(model: nn.Module) -> dict[str, str]:
    """Every site of a model in the order of the computation, with its shape (legend in layers/)."""
    found: dict[str, str] = {}
    for name, block in blocks_of(model).items():
        if (entry := entry_of(name)) is not None:
            found[entry] = "(B, T, D)"
        steps = ("attention",) if block.cross is None else ("attention", "cross")
        found |= {f"{name}.{step}.{part}": shape for step in steps for part, shape in ATTENTION.items()}
        found |= {f"{name}.{place}": shape for place, shape in OTHERS.items()}
    return found


def entry_of(block: str) -> str | None:
    """The name of the site before a stack's first block; None for any other block."""
    return block.removesuffix("blocks.0") + "embedding" if block.endswith("blocks.0") else None


def blocks_of(model: nn.Module) -> dict[str, Block]:
    """A model's blocks by name, whether compiled or not."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, Block)}
    return {".".join(part for part in name.split(".") if part != "_orig_mod"): block for name, block in found.items()}


@contextmanager
def uncompiled(model: nn.Module) -> Generator[None]:
    """Run compiled modules, the model itself or its parts, uncompiled."""
    whole = [module for module in model.modules() if module._compiled_call_impl is not None]  # pyright: ignore[reportPrivateUsage]
    around = [module for module in model.modules() if "_orig_mod" in module._modules]  # pyright: ignore[reportPrivateUsage]
    graphs = [module._compiled_call_impl for module in whole]  # pyright: ignore[reportPrivateUsage]
    forwards = [module.forward for module in around]
    try:
        for module in whole:
            module._compiled_call_impl = None  # pyright: ignore[reportPrivateUsage]
        for module in around:
            module.forward = module.get_submodule("_orig_mod").__call__
        yield
    finally:
        for module, graph in zip(whole, graphs, strict=True):
            module._compiled_call_impl = graph  # pyright: ignore[reportPrivateUsage]
        for module, forward in zip(around, forwards, strict=True):
            module.forward = forward


def find_sites(pattern: str, known: Sequence[str]) -> list[str]:
    if not isinstance(pattern, str):  # pyright: ignore[reportUnnecessaryIsInstance] - not every caller has types
        raise InputError(
            f"a site is a text; got {pattern!r:.60}; give several one after the other: probe(model, 'a', 'b')"
        )
    matched = fnmatch.filter(known, pattern)
    if not matched:
        raise InputError(f"no site matches {pattern!r}; {did_you_mean(pattern, known)}")
    return matched
