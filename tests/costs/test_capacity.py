"""Parsed sizes, and capacities: the answer fits, and one more does not."""

from __future__ import annotations

from typing import Any

import pytest

import clearhead as ch
from clearhead.costs import cost
from clearhead.costs.capacity import devices_needed, largest
from clearhead.costs.units import parse_rate, parse_size, spell_count, spell_seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("80 GiB", 80 * 2**30), ("1.5e9", 1_500_000_000), ("24gb", 24 * 10**9), ("512MiB", 2**29)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_unit_that_was_forgotten() -> None:
    with pytest.raises(
        ch.ClearheadError, match=r"'80' is a number without a unit, so 80 bytes; for gigabytes say 80GB"
    ):
        parse_size("80")


@pytest.mark.parametrize("text", ["400T", "400TFLOP/s", "400 tflops", "4e14", "400000 GFLOP/s"])
def test_rates(text: str) -> None:
    assert parse_rate(text) == 4e14
    assert parse_rate("3.3TB/s", "B/s") == 3.3e12


@pytest.mark.parametrize("text", ["80XB", "GB", "-3GB", "0", "1.2.3GB", "80GB/s", ""])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ch.ClearheadError, match=r"is not a size in bytes such as 80GB or 80GiB"):
        parse_size(text)
    with pytest.raises(ch.ClearheadError, match=r"'x' is not a rate such as 400T"):
        parse_rate("x")


def test_numbers_are_spelled_as_people_read_them() -> None:
    assert [spell_count(n, "B") for n in (0, 999, 1000, 2_570_000_000, 1.2e18)] == [
        *("0 B", "999 B", "1 kB", "2.57 GB", "1,200 PB")
    ]
    assert [spell_seconds(s) for s in (2e-6, 0.0015, 1.5, 90, 300, 7200, 1e6)] == [
        *("2 µs", "1.5 ms", "1.5 s", "90 s", "5 min", "2 h", "11.6 days")
    ]


@pytest.mark.parametrize("vary", ["batch", "length"])
@pytest.mark.parametrize(("name", "mode"), [("gpt2", "train"), ("llama-3-8b", "decode"), ("t5-small", "forward")])
def test_the_largest_fits_and_one_more_does_not(name: str, mode: str, vary: str) -> None:
    config, memory = ch.preset(name), parse_size("40GB")
    given: dict[str, Any] = dict(mode=mode, batch=1, length=128, precision="bfloat16", device="cuda")
    n = largest(config, memory, vary, **given)
    both = vary == "length" and config.shape == "encoder-decoder"

    def peak(n: int) -> int:
        asked: dict[str, Any] = given | {vary: n} | ({"source_length": n} if both else {})
        return cost(config, **asked).peak_bytes

    assert peak(n) <= memory < peak(n + 1)


def test_what_does_not_fit_at_all() -> None:
    assert largest(ch.preset("gpt3-175b"), 10**9, "batch", length=8) == 0
    with pytest.raises(ch.ClearheadError, match=r"vary='width' is not known; choose 'batch' or 'length'"):
        largest(ch.preset("gpt2"), 10**9, "width", batch=1)


def test_as_many_devices_as_it_takes() -> None:
    gpt3 = ch.preset("gpt3-175b")
    given: dict[str, Any] = dict(batch=1, length=2048, precision="bfloat16")
    # 175 billion parameters of 2 bytes are 350 GB.
    assert devices_needed(gpt3, parse_size("80GB"), **given) == 5
    training: dict[str, Any] = dict(batch=1, length=2048, mode="train", checkpointing=True)
    n = devices_needed(gpt3, parse_size("80GB"), **training)
    assert n is not None
    assert cost(gpt3, **training, shards=n).peak_bytes <= 80e9 < cost(gpt3, **training, shards=n - 1).peak_bytes
    # What each keeps for its own batch, no number of devices makes less.
    assert devices_needed(gpt3, parse_size("8GB"), **training) is None
