"""The peak of a call without gradients, forecast and measured. Run by test_measurement.py."""

from __future__ import annotations

from typing import Any

import pytest

import clearhead as ch
from clearhead.costs import cost
from clearhead.costs.measurement import Workload, measure

# Of two layers, at lengths at which temporary tensors weigh as much as the weights.
FORWARD: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "t5, long source": ("t5-small", {}, dict(length=64, source_length=512)),
    "t5, long target": ("t5-small", {}, dict(length=512, source_length=64)),
    "t5, in strips": ("t5-small", {}, dict(length=8, source_length=2048)),
    "t5, bfloat16": ("t5-small", {}, dict(length=64, source_length=512, precision="bfloat16")),
    "t5, gated": ("t5-v1.1-small", {}, dict(length=64, source_length=256)),
    "alibi": ("gpt2", dict(positions="alibi"), dict(length=512)),
    "alibi, both ways": ("bert-base", dict(positions="alibi"), dict(length=512)),
    "causal": ("gpt2", {}, dict(length=512)),
    "causal, bfloat16": ("gpt2", {}, dict(length=512, precision="bfloat16")),
    "window": ("gpt2", dict(window=300), dict(length=512)),
    "sparse": ("gpt2", dict(sparsity="block=32, window=2, n_global=1, n_random=1"), dict(length=512)),
    "explicit": ("bert-base", dict(kernel="explicit"), dict(length=512)),
    "post-norm": ("bert-base", {}, dict(length=512)),
    "rotary, gated": ("smollm2-135m", {}, dict(length=512)),
    "marian": ("opus-mt-en-de", {}, dict(length=64, source_length=512)),
}


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("case", FORWARD)
def test_a_forward_call_holds_what_is_said(case: str) -> None:
    name, changes, asked = FORWARD[case]
    n_layers = dict(n_layers=2) | (dict(n_decoder_layers=2) if "source_length" in asked else {})
    config = ch.preset(name, **n_layers, vocab_size=503, dropout=0.0, attention_dropout=0.0, **changes)
    (found,) = measure(Workload(config=config, batch=1, **asked), repeats=1)
    said = cost(config, batch=1, **asked)
    assert found.weight_bytes == said.weight_bytes
    assert said.peak_bytes == pytest.approx(found.peak_bytes, rel=0.01)
    # Of temporary tensors alone: what a kernel works in is not counted, some 0.3 MB.
    assert said.activation_bytes == pytest.approx(found.peak_bytes - found.weight_bytes, rel=0.05)
