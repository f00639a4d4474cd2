"""Quantised weights against full ones: the perplexity of a text. Not a law but a price; the limits are what is usual."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F

from clearhead.laws.finding import Finding, Skip
from clearhead.laws.subject import Subject
from clearhead.models import Decoder
from clearhead.quantization.integer import quantize

MOST_TOKENS, WINDOW = 4096, 512
LIMITS = {"int8": 0.02, "int4": 0.15}  # of the perplexity


@torch.no_grad()
def perplexity(model: Decoder, text: tuple[int, ...]) -> float:
    """Of a text, in windows that do not overlap; the first token of each is given."""
    width, total, n = min(WINDOW, model.config.max_len), 0.0, 0
    for start in range(0, len(text) - 1, width):
        window = torch.tensor([text[start : start + width]])
        if window.shape[1] > 1:
            logits = model(window)[0, :-1].float()
            total += float(F.cross_entropy(logits, window[0, 1:], reduction="sum"))
            n += window.shape[1] - 1
    return math.exp(total / n)


def check_quantized(subject: Subject, kind: str) -> Finding:
    model, law = subject.model, f"{kind} against full weights"
    if not isinstance(model, Decoder):
        raise Skip("perplexity of a text is for decoders; measure this one with: clearhead evaluate --quantize")
    text = subject.text[:MOST_TOKENS]
    if len(text) < 2:
        raise Skip("there is no text to measure on; give one with --text")
    full = perplexity(model, text)
    packed = perplexity(quantize(copy.deepcopy(model), kind), text)
    change, limit = packed / full - 1, LIMITS[kind]
    reason = f"perplexity {full:.3f} -> {packed:.3f} on {len(text):,} tokens"
    # nan is no change that could be allowed
    return Finding(law, "pass" if change <= limit else "fail", reason, change, limit)
