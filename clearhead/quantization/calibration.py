"""The inputs of each product of a model, on a few texts: what `int4_rounding.gptq` needs to round weights with the least loss.

One pass over all texts at once. Just before a module computes, its inputs are seen and its weight is rounded; then it computes with
the rounded weight. So each weight is rounded for the inputs that it will get, from layers that are rounded already. No other state
is kept than the activations of one layer and one matrix of inputs times inputs.

Where the inputs come from a norm, a column of the matrix may be multiplied by any factor if the norm's parameters are divided by
it. `int4_rounding.balancing_factors` says by which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.config import Config
from clearhead.errors import InputError
from clearhead.layers.block import Block
from clearhead.layers.embedding import check_ids
from clearhead.quantization.int4_rounding import balancing_factors
from clearhead.quantization.model_weights import example_weight

Calibration = Sequence[Sequence[int]] | Callable[[Any], object]  # texts as ids, or a function that calls the model once
WINDOW, FEWEST, MOST = 256, 256, 4096  # tokens: of a row, and in all
STRIP = 256  # rows of a matrix that are computed at a time


class AllRounded(Exception):  # noqa: N818  a signal, not an error
    """The last weight is rounded: what the model would compute after it is not needed."""


def make_pass(model: nn.Module, calibrate: Calibration) -> Callable[[Any], object]:
    """The function that calls the model; texts are joined, and rows of them, evenly spread over the whole, make one batch."""
    if callable(calibrate):
        return calibrate
    config: Config = model.config  # type: ignore[assignment]
    if config.shape == "encoder-decoder" or config.inputs != "tokens":
        raise InputError(
            f"calibrate=TEXTS is for a model that reads one text; this one has shape={config.shape!r}, "
            f"inputs={config.inputs!r}; in Python pass a function that calls it once: lambda model: model(source, target)"
        )
    try:
        ids = torch.tensor([token for text in calibrate for token in text], dtype=torch.long)
    except (TypeError, ValueError):
        raise InputError(
            f"calibrate=TEXTS is a list of texts, each a list of ids; got {calibrate!r:.60}; encode each text with the model's "
            f"tokenizer: [tokenizer.encode(text)]"
        ) from None
    if len(ids) < FEWEST:
        raise InputError(
            f"calibrate=TEXTS needs {FEWEST} tokens at least, {MOST:,} are better; got {len(ids)}; give more "
            f"text of the kind that the model will read"
        )
    width = min(WINDOW, config.max_len)
    rows = ids[: len(ids) // width * width].view(-1, width)
    rows = rows[torch.linspace(0, len(rows) - 1, min(len(rows), MOST // width)).long()]
    rows = check_ids(rows, tuple(rows.shape), config.vocab_size, "token ids", "vocab_size")
    return lambda model: model(rows.to(example_weight(model).device))


def second_moments(x: Float[Tensor, "n D"]) -> Float[Tensor, "D D"]:
    """The mean of x x^T over n inputs, its correlations made smaller where there are too few inputs to know them.

    Else weights would move freely in the directions that these few leave out. Schäfer and Strimmer (2005) estimate which share of
    the correlations is chance, from how much each varies over the inputs; with many inputs it is nearly nothing.
    """
    n, D = x.shape
    found = x.new_empty(D, D)
    for start in range(0, D, STRIP):  # what is above the diagonal, and its mirror image
        strip = x[:, start : start + STRIP].T @ x[:, start:] / n
        found[start:, start : start + STRIP] = strip.T
        found[start : start + STRIP, start:] = strip
    sizes = found.diagonal().clamp(min=torch.finfo(x.dtype).tiny)
    # Sums over all pairs of two channels of size 1: of z_i^2 z_j^2, in the mean of all inputs, and of r_ij^2.
    squares = x.square().div_(sizes)
    varying = (squares.sum(1).square() - squares.square_().sum(1)).mean()
    certain = found.square().div_(sizes).div_(sizes[:, None]).fill_diagonal_(0).sum()
    share = ((varying - certain) / (certain * max(n - 1, 1)).clamp(min=torch.finfo(x.dtype).tiny)).clamp(0, 1)
    return found.lerp(found.diagonal().diag(), share)


def find_norms(model: nn.Module) -> dict[str, nn.Module]:
    """By the name of a product, the norm whose results it alone takes: those of pre-norm blocks."""
    found: dict[str, Any] = {}
    for name, block in model.named_modules():
        if isinstance(block, Block) and block.norm_first:
            found[f"{name}.attention.qkv"] = block.attention_norm
            found[f"{name}.cross.q_proj"] = block.cross_norm
            found[f"{name}.feedforward.{'gate_up' if block.feedforward.gated else 'up'}"] = block.feedforward_norm
    # A weight that several modules share can not be divided for one of them.
    uses = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
    return {
        name: norm
        for name, norm in found.items()
        if isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        and all(uses[id(each)] == 1 for each in (*norm.parameters(), model.get_submodule(name).weight))
    }


def divide(norm: nn.Module, factors: Float[Tensor, " D"]) -> None:
    """Its results, by changing its parameters."""
    for name, parameter in list(norm.named_parameters()):
        setattr(norm, name, nn.Parameter((parameter / factors).to(parameter.dtype), requires_grad=False))


@torch.no_grad()
def round_in_turn(
    model: nn.Module,
    names: Collection[str],
    norms: Mapping[str, nn.Module],
    call: Callable[[Any], object],
    replace: Callable[[str, Tensor, Tensor | None], None],
) -> None:
    """Call `replace(name, hessian, factors)` for each module when its inputs are known, before it computes. Its columns are to be
    multiplied by the factors, by which the norm before it (`find_norms`, before any weight is rounded) has been divided."""
    left = set(names)

    def hook(name: str, module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        if name not in left:
            return None
        x, factors = inputs[0], None
        hessian = second_moments(x.flatten(0, -2).float())
        if not hessian.isfinite().all():
            raise InputError(f"the inputs of {name} are not all numbers on these texts: the model's weights are spoilt")
        if name in norms:
            factors = balancing_factors(module.weight, hessian)
            divide(norms[name], factors)
            x, hessian = (x / factors).to(x.dtype), hessian / factors / factors[:, None]
        replace(name, hessian, factors)
        left.remove(name)
        if not left:
            raise AllRounded
        return (x,)

    hooks = [model.get_submodule(name).register_forward_pre_hook(partial(hook, name)) for name in names]
    try:
        call(model)
    except AllRounded:
        return
    finally:
        for each in hooks:
            each.remove()
    raise InputError(f"the calibration did not reach {len(left)} modules, such as {min(left)}; call the whole model")
