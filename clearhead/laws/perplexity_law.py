"""Quantised weights against full ones: the perplexity of a text. Not a law but a price; the limits are what is usual."""

from __future__ import annotations

import copy

from clearhead.laws.finding import Finding, Skip
from clearhead.laws.subject import Subject, perplexity
from clearhead.models import Decoder
from clearhead.quantization.integer import quantize

LIMITS = {"int8": 0.02, "w8a8": 0.03, "int4": 0.15, "w4a8": 0.16}  # of the perplexity


def check_quantized(subject: Subject, kind: str) -> Finding:
    model = subject.model
    if not isinstance(model, Decoder):
        raise Skip("perplexity of a text is for decoders; measure this one with: clearhead evaluate --quantize")
    if len(subject.text) < 2:
        raise Skip("there is no text to measure on; give one with --text")
    full, packed = subject.perplexity, perplexity(quantize(copy.deepcopy(model), kind), subject.measured_text)
    change, limit = packed / full - 1, LIMITS[kind]
    reason = f"perplexity {full:.3f} -> {packed:.3f} on {len(subject.measured_text):,} tokens"
    # nan is no change that could be allowed
    return Finding("pass" if change <= limit else "fail", reason, change, limit)
