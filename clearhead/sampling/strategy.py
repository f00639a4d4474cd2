"""What is done to logits before a token is chosen, and how it is chosen. Each is a pure function over (B, V).

Rows do not know each other: what a row becomes depends on its own logits, history and seed alone, so a request gives the
same text whatever else is in the batch. A history holds the ids that a row has read and written, in order, then ABSENT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.engine.batches import check_ids
from clearhead.errors import InputError, did_you_mean
from clearhead.layers.masks import ABSENT
from clearhead.models import Decoder, EncoderDecoder

Logits = Float[Tensor, "B V"]
History = Int[Tensor, "B _"]
Rows = Bool[Tensor, " B"]
Number = float | int


def keep_top_k(logits: Logits, k: int) -> Logits:
    """Only the k likeliest tokens; all that tie with the last of them stay."""
    least = logits.topk(min(k, logits.shape[-1])).values[:, -1:]
    return logits.masked_fill(logits < least, -math.inf)


def keep_top_p(logits: Logits, p: Number) -> Logits:
    """The fewest likeliest tokens whose probabilities sum to p (Holtzman et al. 2019)."""
    ordered, ids = logits.sort(descending=True, stable=True)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    before[:, 0] = -1.0  # the likeliest always stays
    drop = before >= p
    return logits.masked_fill(drop.scatter(1, ids, drop), -math.inf)


def keep_min_p(logits: Logits, p: Number) -> Logits:
    """Only tokens at least p times as likely as the likeliest."""
    probs = logits.softmax(-1)
    return logits.masked_fill(probs < p * probs.amax(-1, keepdim=True), -math.inf)


def count_ids(history: History, vocab_size: int) -> Int[Tensor, "B V"]:
    """How often each token stands in each row."""
    counts = history.new_zeros(len(history), vocab_size + 1)  # the last column takes what is absent
    at = torch.where(history == ABSENT, vocab_size, history)
    return counts.scatter_add_(1, at, torch.ones_like(at))[:, :vocab_size]


def penalise_repetition(logits: Logits, history: History, penalty: Number) -> Logits:
    """Tokens of the prompt or the text so far: positive logits divided, negative ones multiplied (Keskar et al. 2019)."""
    seen = count_ids(history, logits.shape[-1]) > 0
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def penalise_counts(logits: Logits, written: History, presence: Number, frequency: Number) -> Logits:
    """Tokens of the text so far, without the prompt: `presence` off once, `frequency` off for each time."""
    counts = count_ids(written, logits.shape[-1])
    return logits - presence * (counts > 0) - frequency * counts


def forbid_ngrams(logits: Logits, history: History, n: int) -> Logits:
    """No token that would complete n in a row that stand in the history already."""
    if history.shape[1] < n:
        return logits
    counts = (history != ABSENT).sum(-1, keepdim=True)
    last = (counts - n + 1 + torch.arange(n - 1, device=history.device)).clamp(min=0)
    windows = history.unfold(1, n, 1)  # (B, places, n); those not yet full end in ABSENT, and complete nothing
    same = (windows[..., :-1] == history.gather(1, last)[:, None]).all(-1)
    return logits.masked_fill(count_ids(torch.where(same, windows[..., -1], ABSENT), logits.shape[-1]) > 0, -math.inf)


def offset(biases: Mapping[int, Number], vocab_size: int, device: torch.device) -> Float[Tensor, " V"]:
    """One number to add to each token's logit, 0 where none is given; -inf forbids."""
    made = torch.zeros(vocab_size)
    made[list(biases)] = torch.tensor(list(biases.values()), dtype=made.dtype)
    return made.to(device)


def force(logits: Logits, token: int, rows: Rows) -> Logits:
    """This token and no other, with log-probability 0, in these rows."""
    if rows.device.type == "cpu" and not rows.any():  # a GPU would have to be waited for
        return logits
    only = torch.full_like(logits, -math.inf)
    only[:, token] = 0.0
    return torch.where(rows[:, None], only, logits)


def sample(logits: Logits, seeds: Int[Tensor, " B"], steps: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """One token a row, as likely as softmax(logits) says: the largest logit after Gumbel noise.

    The noise is a pure function of (seed, step, token): no generator to keep, and the same numbers on every device.
    """
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    bits = _scramble(_scramble(_scramble(seeds) + steps)[:, None] + tokens)
    uniform = ((bits >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53
    return (logits.double() - (-uniform.log()).log()).argmax(-1)


def _scramble(x: Tensor) -> Tensor:
    """SplitMix64 (Steele et al. 2014): neighbouring numbers become 64 unrelated bits each. int64 wraps, as it should."""
    x = x * -0x61C8864680B583EB + 0x1234567  # the golden ratio's odd step; the start keeps 0 from staying 0
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the next token is chosen. Each field does nothing at its default, and temperature 0 is greedy."""

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

    def __post_init__(self) -> None:
        for name, (low, high, whole, advice) in RANGES.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                kind = "whole number" if whole else "number"
                raise InputError(f"{name} is a {kind}; got {value!r}; {advice}")
            if not (low <= value <= high and value < math.inf):
                least = f"{low:g} or more" if low != ABOVE_0 else "above 0"
                most = "" if high == math.inf else f" and at most {high:g}"
                raise InputError(f"{name} must be {least}{most}; got {value}; {advice}")
        biases: list[Any] = list(self.logit_bias.values())
        if not all(isinstance(one, int | float) and one < math.inf for one in biases):
            raise InputError(f"a logit_bias is a number, or -inf; got {dict(self.logit_bias)}; 5 makes a token likely")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Strategy:
        """The strategy with these fields; an unknown one is an error that names the nearest."""
        known = [each.name for each in fields(cls)]
        for name in options:
            if name not in known:
                raise InputError(f"there is no option {name!r} (value {options[name]!r}); {did_you_mean(name, known)}")
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


class Shaper:
    """A strategy and a checkpoint's own rules, made ready for one model.

    `shaper(logits, history, n_prompt, steps, limits)` gives the logits to choose from for each row's new token number `steps`
    of at most `limits`; `in_place` may change the ones given: of many rows, new memory takes longer than what is done in it.
    `ends` are the ids that end a text: those asked for, or the checkpoint's own. Only with `looks_back` is the history looked at.
    """

    def __init__(self, model: Decoder | EncoderDecoder, eos: int | Sequence[int] | None, strategy: Strategy) -> None:
        self.strategy, told = strategy, model.generation
        self.ends = told.eos if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        vocab_size, device = model.config.vocab_size, next(model.parameters()).device
        self.vocab_size = vocab_size
        asked = {**strategy.logit_bias, **dict.fromkeys(strategy.suppress, -math.inf)}
        check_ids(self.ends, vocab_size, "eos")
        check_ids(list(asked), vocab_size, "logit_bias or suppress")

        def forbid(ids: Sequence[int]) -> Tensor | None:
            return offset(dict.fromkeys(ids, -math.inf), vocab_size, device) if ids else None

        never = dict.fromkeys(told.suppress, -math.inf)
        self.always = offset(asked | never, vocab_size, device) if asked or never else None
        self.first = forbid(told.begin_suppress)
        self.early = forbid(self.ends) if strategy.min_new_tokens else None
        # What a checkpoint makes an encoder-decoder write after its start (each place with its token) and last.
        start = told.forced_start or (() if told.forced_bos is None else (told.forced_bos,))
        is_pair = model.config.shape == "encoder-decoder"
        self.forced = {at: token for at, token in enumerate(start) if token is not None} if is_pair else {}
        self.last = told.forced_eos if is_pair else None
        penalised = strategy.repetition_penalty != 1 or strategy.presence_penalty or strategy.frequency_penalty
        self.looks_back = bool(penalised or strategy.no_repeat_ngram)
        self.is_plain = not self.looks_back and not self.forced
        self.is_plain &= all(each is None for each in (self.always, self.first, self.early, self.last))

    def __call__(
        self,
        logits: Logits,
        history: History | None,
        n_prompt: Int[Tensor, " B"],
        steps: Int[Tensor, " B"],
        limits: Int[Tensor, " B"],
        *,
        in_place: bool = False,
    ) -> Logits:
        s = self.strategy
        if self.always is not None:
            logits = logits.add_(self.always) if in_place else logits + self.always
        if history is not None:
            if s.repetition_penalty != 1:
                logits = penalise_repetition(logits, history, s.repetition_penalty)
            if s.presence_penalty or s.frequency_penalty:
                is_new = torch.arange(history.shape[1], device=history.device) >= n_prompt[:, None]
                written = torch.where(is_new, history, ABSENT)
                logits = penalise_counts(logits, written, s.presence_penalty, s.frequency_penalty)
            if s.no_repeat_ngram:
                logits = forbid_ngrams(logits, history, s.no_repeat_ngram)
        if self.early is not None:
            logits = torch.where((steps < s.min_new_tokens)[:, None], logits + self.early, logits)
        if self.first is not None:
            first = (max(self.forced, default=-1) + 2 - n_prompt).clamp(min=0) if self.forced else 0
            logits = torch.where((steps == first)[:, None], logits + self.first, logits)
        for at, token in self.forced.items():
            logits = force(logits, token, steps + n_prompt - 1 == at)
        if self.last is not None:
            logits = force(logits, self.last, steps + 1 == limits)
        return logits
