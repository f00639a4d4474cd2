"""The law compiled = eager, on a sound model and on one that the compiler reads differently."""

from __future__ import annotations

import torch
from models.tiny import tiny

from clearhead.laws import LAWS, check_model


def outcome(model: object) -> tuple[str, str]:
    found = check_model(model, length=11, skip=LAWS.keys() - {"compiled"})  # type: ignore[arg-type]
    finding = next(each for each in found if each.law == "compiled = eager")
    return finding.outcome, finding.reason


def test_a_sound_model_passes() -> None:
    assert outcome(tiny("gpt2", n_layers=1, dtype=torch.float32))[0] == "pass"


def test_a_model_that_computes_something_else_when_compiled_fails() -> None:
    model = tiny("gpt2", n_layers=1, dtype=torch.float32)
    model.norm.register_forward_hook(lambda _, __, x: x * 1.01 if torch.compiler.is_compiling() else x)
    result, reason = outcome(model)
    assert result == "fail"
    assert "in the output" in reason
