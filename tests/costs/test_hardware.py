"""This machine's speed and memory: tests can only bound them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from clearhead.costs import hardware


def test_the_speed_of_a_product_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hardware.measure_peak.cache_clear()
    first = hardware.measure_peak("cpu", torch.float32)
    assert 1e8 < first < 1e15
    monkeypatch.setattr(hardware, "_time_product", lambda a, b: pytest.fail("measured again"))
    assert hardware.measure_peak("cpu", torch.float32) == first


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CGROUP", ())
    free = hardware.available_memory("cpu")
    assert 2**20 < free < 2**50
    (tmp_path / "most").write_text("1000000\n")
    (tmp_path / "used").write_text("400000\n")
    monkeypatch.setattr(hardware, "CGROUP", ((str(tmp_path / "most"), str(tmp_path / "used")),))
    assert hardware.available_memory("cpu") == 600_000
    (tmp_path / "most").write_text("max\n")
    assert hardware.available_memory("cpu") > 600_000
