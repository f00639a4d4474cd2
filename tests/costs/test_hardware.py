"""This machine's speed: tests can only bound it."""

from __future__ import annotations

import pytest
import torch

from clearhead.costs import hardware


def test_the_speed_of_a_product_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware.measure_peak.cache_clear()
    first = hardware.measure_peak("cpu", torch.float32)
    assert 1e8 < first < 1e15
    monkeypatch.setattr(hardware, "_time_product", lambda a, b: pytest.fail("measured again"))
    assert hardware.measure_peak("cpu", torch.float32) == first
