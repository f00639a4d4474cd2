"""How the next token is chosen from logits: temperature, top-k, top-p, min-p, and the draw itself.

Each function is pure, over (B, V), and each row stands alone: its token depends on its own logits and seed only. So a request
gives the same text whatever else is in the batch, as far as its logits do (docs/generation.md, The engine).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import Parameter, signature
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead import kernels
from clearhead.errors import InputError, did_you_mean
from clearhead.sampling.timestamps import Timestamps

Logits = Float[Tensor, "B V"]
Number = float | int
LIKELY = 128, 1024  # tokens of a row that top-p looks at before it sorts all


def keep_top_k(logits: Logits, k: int) -> Logits:
    """Keep the k likeliest tokens, and all that tie with the last of them."""
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(logits: Logits, p: Number) -> Logits:
    """Keep the fewest likeliest tokens whose probabilities sum to p (Holtzman et al. 2019)."""
    probs = logits.softmax(-1)
    if not logits.is_cpu:
        return _keep_top_p_by_sorting(logits, probs, p)
    kept, left = torch.full_like(logits, -math.inf), torch.arange(len(logits))
    # To find some likely tokens takes a small part of the time of sorting all. Of equally likely ones the sort keeps the first.
    for n in LIKELY:
        if not len(left) or logits.shape[-1] <= 4 * n:
            break
        is_all = len(left) == len(logits)  # no copy of the usual case
        top, ids = (logits if is_all else logits[left]).topk(n)
        drop = _is_beyond((probs if is_all else probs[left]).gather(1, ids), p)
        border = drop.int().argmax(-1, keepdim=True).clamp(min=1)
        reached = (drop[:, -1:] & (top.gather(1, border - 1) > top.gather(1, border)))[:, 0]
        kept[left[reached, None], ids[reached]] = top.masked_fill(drop, -math.inf)[reached]
        left = left[~reached]
    if len(left):
        kept[left] = _keep_top_p_by_sorting(logits[left], probs[left], p)
    return kept


def _keep_top_p_by_sorting(logits: Logits, probs: Logits, p: Number) -> Logits:
    ids = logits.argsort(descending=True, stable=True)
    drop = _is_beyond(probs.gather(1, ids), p)
    return logits.masked_fill(drop.scatter(1, ids, drop), -math.inf)


def _is_beyond(probs: Logits, p: Number) -> Bool[Tensor, "B _"]:
    """Whether the likelier tokens already reach p; of the likeliest never."""
    return F.pad(probs.cumsum(-1)[:, :-1], (1, 0), value=-1.0) >= p


def keep_min_p(logits: Logits, p: Number) -> Logits:
    """Keep tokens at least p times as likely as the likeliest."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -math.inf)


def sample(logits: Logits, seeds: Int[Tensor, " B"], steps: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """One token for each row, drawn with the probabilities softmax(logits): the largest logit after Gumbel noise.

    The noise is a pure function of (seed, step, token): no generator to keep, and the same numbers on every device.
    """
    drawn = kernels.draw(logits, seeds, steps)
    if drawn is not None:
        return drawn
    exact = kernels.to_float64(logits)
    keys = _scramble(_scramble(seeds.to(exact.device)) + steps.to(exact.device))
    if exact.is_cpu and 4 * int((possible := exact != -math.inf).count_nonzero()) < exact.numel():  # few are left
        rows, tokens = possible.nonzero(as_tuple=True)
        noisy = exact.index_put((rows, tokens), _noise(keys[rows] + tokens), accumulate=True)
    else:
        noisy = exact + _noise(keys[:, None] + torch.arange(exact.shape[-1], device=exact.device))
    return noisy.argmax(-1).to(logits.device)


def _noise(keys: Int[Tensor, "*_"]) -> Float[Tensor, "*_"]:
    """A number for each key, as if drawn from the Gumbel distribution."""
    bits = _scramble(keys)
    uniform = ((bits >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _scramble(x: Tensor) -> Tensor:
    """SplitMix64 (Steele et al. 2014): neighbouring numbers become 64 unrelated bits each. int64 wraps, as it must."""
    x = x * -0x61C8864680B583EB + 0x1234567  # the constant added keeps 0 from mapping to 0
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the next token is chosen. Each field does nothing at its default; temperature 0 is greedy.

    `timestamps` are Whisper's rules for a text with times; the scores of such a text are log-probabilities after these rules.
    """

    temperature: Number = 0.0
    top_k: int = 0
    top_p: Number = 1.0
    min_p: Number = 0.0
    repetition_penalty: Number = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    no_repeat_ngram: int = 0
    logit_bias: Mapping[int, Number] = field(default_factory=dict[int, Number])
    suppress: Sequence[int] = ()
    min_new_tokens: int = 0
    timestamps: Timestamps | None = None

    def __post_init__(self) -> None:
        for name, (low, high, whole, advice) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "whole number" if whole else "number"
                raise InputError(f"{name} is a {kind}; got {value!r}; {advice}")
            if name == "temperature" and 0 < value < MIN_TEMPERATURE:
                raise InputError(f"a temperature above 0 is at least {MIN_TEMPERATURE}; got {value}; 0 is greedy")
            if not (low <= value <= high and value < math.inf):
                least = f"{low:g} or more" if low != ABOVE_0 else "above 0"
                most = "" if high == math.inf else f" and at most {high:g}"
                raise InputError(f"{name} must be {least}{most}; got {value}; {advice}")
        biases: list[Any] = list(self.logit_bias.values())
        if not all(isinstance(one, int | float) and one < math.inf for one in biases):
            raise InputError(f"a logit_bias is a number, or -inf; got {dict(self.logit_bias)}; 5 makes a token likely")

    @classmethod
    def of(cls, options: Mapping[str, Any], function: Callable[..., Any] | None = None) -> Strategy:
        """The strategy with these fields; an unknown name is an error that suggests the nearest.

        `function` was called with them; its own options are suggested, too.
        """
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                own = signature(function).parameters if function is not None else {}
                choices = [*known, *(each for each in own if own[each].kind is Parameter.KEYWORD_ONLY)]
                raise InputError(
                    f"there is no option {name!r} (value {options[name]!r}); {did_you_mean(name, choices)}"
                )
        return cls(**options)

    def choose(self, logits: Logits, seeds: Int[Tensor, " B"], steps: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
        """The next token of each row."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits / self.temperature
        if self.top_k:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p < 1:
            logits = keep_top_p(logits, self.top_p)
        if self.min_p:
            logits = keep_min_p(logits, self.min_p)
        return sample(logits, seeds, steps)


MIN_TEMPERATURE = 1e-6  # below it, logits divided by it may not be finite
ABOVE_0 = 5e-324  # the smallest float

# Lowest, highest, whether whole, advice.
RANGES: dict[str, tuple[float, float, bool, str]] = {
    "temperature": (0, math.inf, False, "0 is greedy, 1 the model's own probabilities, 0.7 is usual"),
    "top_k": (0, math.inf, True, "0 is off, 50 is usual"),
    "top_p": (ABOVE_0, 1, False, "1 is off, 0.95 is usual"),
    "min_p": (0, 1, False, "0 is off, 0.05 is usual"),
    "repetition_penalty": (ABOVE_0, math.inf, False, "1 is off, 1.1 is usual"),
    "presence_penalty": (-100, 100, False, "0 is off, 0.5 is usual"),
    "frequency_penalty": (-100, 100, False, "0 is off, 0.5 is usual"),
    "no_repeat_ngram": (0, math.inf, True, "0 is off, 3 is usual"),
    "min_new_tokens": (0, math.inf, True, "0 is off"),
}
