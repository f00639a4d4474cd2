"""Some bytes of our own files, changed one at a time; `make test-faults` changes every one."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.byte_flips import KINDS, flip_all

SHARES = {"model": 0.02, "checkpoint": 0.01, "store": 0.2, "tokenizer": 0.02}


@pytest.mark.filterwarnings("ignore:the given buffer is not writable")
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_byte_is_refused(kind: str, tmp_path: Path) -> None:
    ends = flip_all(*KINDS[kind](tmp_path / "x"), SHARES[kind], random.Random(0))
    total = sum(ends.values(), Counter())
    assert total["undetected"] == 0, ends
    assert total["refused"] > 30
    assert all(count["refused"] for count in ends.values()) or kind == "store"


def test_a_reader_without_checks_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x"
    file.write_text("plain")
    ends = flip_all([file], lambda: file.read_bytes(), 1.0, random.Random(0))
    assert ends["x"] == {"undetected": 5}
    assert "undetected: byte 0 of x: 112 became" in capsys.readouterr().out
