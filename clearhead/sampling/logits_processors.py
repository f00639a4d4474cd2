"""What is done to logits before a token is chosen: penalties, biases, forbidden and forced tokens.

Each function is pure, over (B, V), and each row stands alone. A row's history is the ids of its prompt and of its text so far,
in order, then ABSENT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.layers.masks import ABSENT
from clearhead.models import Decoder, EncoderDecoder
from clearhead.quantization.model_weights import example_weight
from clearhead.sampling.strategy import Logits, Number, Strategy
from clearhead.sampling.token_ids import check_ids

History = Int[Tensor, "B _"]
Rows = Bool[Tensor, " B"]


def count_ids(history: History, vocab_size: int) -> Int[Tensor, "B V"]:
    """How often each token occurs in each row."""
    counts = history.new_zeros(len(history), vocab_size + 1)  # the last column counts ABSENT
    at = torch.where(history == ABSENT, vocab_size, history)
    return counts.scatter_add_(1, at, torch.ones_like(at))[:, :vocab_size]


def penalise_repetition(logits: Logits, history: History, penalty: Number) -> Logits:
    """Divide positive logits of tokens in the history by `penalty`, multiply negative ones by it (Keskar et al. 2019)."""
    seen = count_ids(history, logits.shape[-1]) > 0
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def penalise_counts(logits: Logits, written: History, presence: Number, frequency: Number) -> Logits:
    """Subtract from tokens of the text so far (without the prompt) `presence` once, and `frequency` for each occurrence."""
    counts = count_ids(written, logits.shape[-1])
    return logits - presence * (counts > 0) - frequency * counts


def forbid_ngrams(logits: Logits, history: History, n: int) -> Logits:
    """Forbid each token that would complete an n-gram that is in the history already."""
    if history.shape[1] < n:
        return logits
    counts = (history != ABSENT).sum(-1, keepdim=True)
    last = (counts - n + 1 + torch.arange(n - 1, device=history.device)).clamp(min=0)
    windows = history.unfold(1, n, 1)  # (B, places, n); windows past the end hold ABSENT, and forbid nothing
    same = (windows[..., :-1] == history.gather(1, last)[:, None]).all(-1)
    return logits.masked_fill(count_ids(torch.where(same, windows[..., -1], ABSENT), logits.shape[-1]) > 0, -math.inf)


def bias_vector(biases: Mapping[int, Number], vocab_size: int, device: torch.device) -> Float[Tensor, " V"]:
    """One number to add to each token's logit: 0 where none is given, -inf to forbid the token."""
    bias = torch.zeros(vocab_size)
    bias[list(biases)] = torch.tensor(list(biases.values()), dtype=bias.dtype)
    return bias.to(device)


def force_token(logits: Logits, token: int, rows: Rows) -> Logits:
    """In these rows, allow this token only, with log-probability 0."""
    if rows.device.type == "cpu" and not rows.any():  # on a GPU, `any` would wait for the device
        return logits
    only = torch.full_like(logits, -math.inf)
    only[:, token] = 0.0
    return torch.where(rows[:, None], only, logits)


def upcast(logits: Logits) -> Logits:
    """At least float32: the 8 or 11 significant bits of 16-bit logits make many tokens equal."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class LogitsProcessor:
    """A strategy and the checkpoint's own rules (`model.generation`), prepared for one model.

    Called with the logits of each row's new token number `steps` of at most `limits`, it returns the logits to choose from. With
    `in_place` it may write to the logits that it is given. The history is needed only if `needs_history`; with `only_biases` the
    same `bias` is added to all logits, and with `is_identity` they never change. `ends` are the ids that end a text: those given as
    `eos`, or the checkpoint's own.
    """

    def __init__(self, model: Decoder | EncoderDecoder, eos: int | Sequence[int] | None, strategy: Strategy) -> None:
        self.strategy, rules = strategy, model.generation
        self.settings = strategy, rules, eos  # what it was made from
        self.ends = rules.eos if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
        vocab_size, device = model.config.vocab_size, example_weight(model).device
        self.vocab_size = vocab_size
        biases = {**strategy.logit_bias, **dict.fromkeys(strategy.suppress, -math.inf)}
        check_ids(self.ends, vocab_size, "eos")
        check_ids(list(biases), vocab_size, "logit_bias or suppress")
        check_ids((*rules.suppress, *rules.begin_suppress), vocab_size, "the checkpoint's suppress or begin_suppress")

        def forbid(ids: Sequence[int]) -> Tensor | None:
            return bias_vector(dict.fromkeys(ids, -math.inf), vocab_size, device) if ids else None

        biases |= dict.fromkeys(rules.suppress, -math.inf)
        self.bias = bias_vector(biases, vocab_size, device) if biases else None
        self.first_bias = forbid(rules.begin_suppress)  # on the first token that is not forced
        self.early_bias = forbid(self.ends) if strategy.min_new_tokens else None
        # Tokens that a checkpoint forces on an encoder-decoder: after its start token (by position), and as the last one.
        start = (
            ()
            if strategy.timestamps
            else rules.forced_start or (() if rules.forced_bos is None else (rules.forced_bos,))
        )
        is_pair = model.config.shape == "encoder-decoder"
        self.forced_start = {at: token for at, token in enumerate(start) if token is not None} if is_pair else {}
        self.forced_last = rules.forced_eos if is_pair else None
        penalised = strategy.repetition_penalty != 1 or strategy.presence_penalty or strategy.frequency_penalty
        self.needs_history = bool(penalised or strategy.no_repeat_ngram or strategy.timestamps)
        steps = (self.first_bias, self.early_bias, self.forced_last)
        self.only_biases = not self.needs_history and not self.forced_start and all(step is None for step in steps)
        self.is_identity = self.only_biases and self.bias is None

    @property
    def nbytes(self) -> int:
        """The memory it takes, about: its vectors, and what a strategy's own numbers take in Python."""
        vectors = (self.bias, self.first_bias, self.early_bias)
        numbers = 100 * (len(self.strategy.logit_bias) + len(self.strategy.suppress))
        return 2000 + numbers + sum(vector.nbytes for vector in vectors if vector is not None)

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
        if self.bias is not None:
            # For many rows, allocating the result takes longer than the addition.
            logits = logits.add_(self.bias) if in_place else logits + self.bias
        if history is not None:
            if s.repetition_penalty != 1:
                logits = penalise_repetition(logits, history, s.repetition_penalty)
            if s.presence_penalty or s.frequency_penalty:
                is_new = torch.arange(history.shape[1], device=history.device) >= n_prompt[:, None]
                written = torch.where(is_new, history, ABSENT)
                logits = penalise_counts(logits, written, s.presence_penalty, s.frequency_penalty)
            if s.no_repeat_ngram:
                logits = forbid_ngrams(logits, history, s.no_repeat_ngram)
        if self.early_bias is not None:
            logits = torch.where((steps < s.min_new_tokens)[:, None], logits + self.early_bias, logits)
        if self.first_bias is not None:
            first = (max(self.forced_start, default=-1) + 2 - n_prompt).clamp(min=0) if self.forced_start else 0
            logits = torch.where((steps == first)[:, None], logits + self.first_bias, logits)
        if s.timestamps is not None and history is not None:
            logits = s.timestamps.apply(logits, history, n_prompt, steps)
        for at, token in self.forced_start.items():
            logits = force_token(logits, token, steps + n_prompt - 1 == at)
        if self.forced_last is not None:
            logits = force_token(logits, self.forced_last, steps + 1 == limits)
        return logits
