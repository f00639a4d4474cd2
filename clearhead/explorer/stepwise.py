"""A stack's forward pass, block by block: what the first layers computed is known before the last ones have begun.

The core's `run` is called once, and left at the first block; from there on each block is called here with what it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from clearhead.inside.evaluation_mode import eval_mode
from clearhead.inside.interventions import Intervention, intervene
from clearhead.inside.probe import Seen, probe
from clearhead.models import Model
from clearhead.models.stack import Stack


class _EnteredError(Exception):
    """The stack's first block was called; nothing of it was computed yet."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs, self.kwargs = args, kwargs


def run_blocks(
    model: Model,
    prefix: str,
    call: Callable[[], object],
    *,
    seen: Seen,
    kept: Sequence[str],
    interventions: Sequence[Intervention] = (),
) -> Generator[None, None, Float[Tensor, "1 T D"]]:
    """The final states of the stack that `call` runs, one block a step; `seen` grows by what each block has of the `kept` sites.

    Hooks are there only during a step: between two of them others may use the model. The interventions' patterns are the whole
    names of sites.
    """
    stack = model.get_submodule(prefix.removesuffix(".")) if prefix else model
    assert isinstance(stack, Stack)
    with eval_mode(model):
        (x, *rest), kwargs = _entered(stack.layers[0], call)
    for number, block in enumerate(stack.layers):
        name = f"{prefix}blocks.{number}"
        names = [site for site in kept if site.startswith(f"{name}.") or (number == 0 and site == f"{prefix}embedding")]
        here = [one for one in interventions if one.pattern.startswith(f"{name}.")]
        with intervene(model, *here), probe(model, *names) as new, eval_mode(model):
            x = block(x, *rest, **kwargs)
        seen.sites += new.sites
        seen.attention |= new.attention
        seen.tensors |= new.tensors
        yield
    with eval_mode(model):
        return stack.norm(x)


def _entered(block: nn.Module, call: Callable[[], object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `call` gives to a block."""

    def leave(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _EnteredError(args, kwargs)

    handle = block.register_forward_pre_hook(leave, with_kwargs=True, prepend=True)
    try:
        call()
    except _EnteredError as entered:
        return entered.inputs, entered.kwargs
    finally:
        handle.remove()
    raise AssertionError("the call does not run this stack")
