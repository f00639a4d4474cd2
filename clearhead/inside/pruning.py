"""Pruning: a smaller and faster model without some heads. It computes what the whole model does when these heads are zeroed.

smaller = prune(model, {3: [0, 5], "blocks.7.attention": [2]})
ch.save(smaller, path)                        # loads again: its config lists the pruned heads
savings(model, smaller, tokens)               # parameters, and seconds of a call
head_seconds(model, tokens)                   # of one head of each attention, in a call
"""

from __future__ import annotations

import fnmatch
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.config import Config
from clearhead.errors import InputError, did_you_mean
from clearhead.kernels import Packed
from clearhead.models import Model, build
from clearhead.quantization.model_weights import example_weight


@dataclass(frozen=True)
class Savings:
    """Parameters and time of a pruned model and of the whole one."""

    parameters: int
    parameters_before: int
    seconds: float  # of a call, the median of several in turns
    seconds_before: float


def prune(model: Model, heads: Mapping[int | str, Sequence[int]]) -> Model:
    """A new model without these heads; the given one is unchanged.

    `heads` maps a layer's number, or an attention's name ("decoder.blocks.2.cross"), to numbers of heads. In a model that was
    pruned before, heads are numbered as they are now. Grouped heads share keys and values, and must be removed in whole groups.
    """
    if any(isinstance(module, Packed) for module in model.modules()):
        raise InputError(
            "this model's weights are quantised, and rows of them can not be taken out; prune, then quantise"
        )
    config = model.config
    gone = set(config.pruned_heads)
    for key, numbers in heads.items():
        place = _place(key, config)
        now = config.kept_heads(place)
        wrong = [head for head in numbers if not 0 <= head < len(now)]
        if wrong:
            raise InputError(f"{place!r} has heads 0 .. {len(now) - 1}; got {wrong[0]}; name some of these")
        gone |= {f"{place}.{now[head]}" for head in numbers}
    known = [f"{place}.{head}" for place in config.attentions for head in range(config.n_heads)]
    smaller = Config.from_dict({**config.to_dict(), "pruned_heads": tuple(name for name in known if name in gone)})
    pruned = build(smaller, device="meta", dtype=example_weight(model).dtype)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for place in config.attentions:
        _cut(state, place, config, smaller)
    pruned.load_state_dict(state, assign=True)
    pruned.generation, pruned.extras = model.generation, model.extras
    return pruned.train(model.training)


@torch.no_grad()
def savings(whole: Model, pruned: Model, *inputs: Tensor, rounds: int = 5, **options: Any) -> Savings:
    """Parameters, and seconds of a call with these inputs; both models are timed in turns."""
    before, after = (statistics.median(each) for each in _in_turns((whole, pruned), inputs, options, rounds))
    n_after, n_before = (sum(p.numel() for p in model.parameters()) for model in (pruned, whole))
    return Savings(n_after, n_before, after, before)


@torch.no_grad()
def head_seconds(model: Model, *inputs: Tensor, rounds: int = 7, **options: Any) -> dict[str, float | None]:
    """The seconds of one head of each attention, in a call with these inputs; None if noise is larger.

    Measured, not derived: half of the heads of all attentions of a kind are pruned, and both models run in turns. Each head has
    an equal share of the median difference, which counts if it is positive in three of four rounds.
    """
    config, found = model.config, dict[str, float | None]()
    group = config.n_heads // config.n_kv_heads
    for kind in ("encoder.*", "decoder.*.attention", "decoder.*.cross", "blocks.*"):
        places = fnmatch.filter(config.attentions, kind)
        gone = {place: len(config.kept_heads(place)) // group // 2 * group for place in places}
        found |= dict.fromkeys(places)
        if not sum(gone.values()):
            continue
        fewer = prune(model, {place: range(n) for place, n in gone.items()})
        times = _in_turns((model, fewer), inputs, options, rounds)
        saved = [before - after for before, after in zip(*times, strict=True)]
        low, middle, _ = statistics.quantiles(saved, n=4, method="inclusive")
        found |= dict.fromkeys(places, middle / sum(gone.values()) if low > 0 else None)
    return found


def _in_turns(
    models: Sequence[Model], inputs: tuple[Tensor, ...], options: dict[str, Any], rounds: int
) -> list[list[float]]:
    """For each model, the seconds of its call in each round."""
    times: list[list[float]] = [[] for _ in models]
    for _ in range(rounds + 1):
        for model, seconds in zip(models, times, strict=True):
            began = time.perf_counter()
            model(*inputs, **options)
            if example_weight(model).is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    return [seconds[1:] for seconds in times]  # the first round is for warming up


def parameters_of_head(config: Config) -> int:
    """The parameters of one head: its part of q and of the output projection, and its share of k and v."""
    each = {"q": 1.0, "k": 1 / (config.n_heads // config.n_kv_heads), "v": 1 / (config.n_heads // config.n_kv_heads)}
    biases = sum(share for letter, share in each.items() if letter in config.attention_bias)
    return round(config.d_head * ((sum(each.values()) + 1) * config.d_model + biases))


def _place(key: int | str, config: Config) -> str:
    if isinstance(key, str):
        if key not in config.attentions:
            raise InputError(f"this model has no attention {key!r}; {did_you_mean(key, config.attentions)}")
        return key
    if config.shape == "encoder-decoder":
        raise InputError(
            f"layer {key} of an encoder-decoder has several attentions; name one, such as 'decoder.blocks.{key}.cross'"
        )
    if not 0 <= key < config.n_layers:
        raise InputError(f"this model has layers 0 .. {config.n_layers - 1}; got {key}; name one of these")
    return f"blocks.{key}.attention"


def _cut(state: dict[str, Tensor], place: str, before: Config, after: Config) -> None:
    """Keep only the rows of q, k and v and the columns of the output projection of the remaining heads."""
    was, stays = before.kept_heads(place), after.kept_heads(place)
    if was == stays:
        return
    group = before.n_heads // before.n_kv_heads
    heads = [was.index(head) for head in stays]
    keys = [head // group for head in heads[::group]]
    for name, which, axis in (("q_proj", heads, 0), ("k_proj", keys, 0), ("v_proj", keys, 0), ("o_proj", heads, 1)):
        weight = state[f"{place}.{name}.weight"]
        state[f"{place}.{name}.weight"] = _pick(weight, which, axis, before.d_head)
        bias = f"{place}.{name}.bias"
        if axis == 0 and bias in state:
            state[bias] = _pick(state[bias], which, 0, before.d_head)


def _pick(x: Tensor, heads: list[int], axis: int, d_head: int) -> Tensor:
    at = torch.tensor(heads, device=x.device)
    return x.unflatten(axis, (-1, d_head)).index_select(axis, at).flatten(axis, axis + 1).contiguous()
