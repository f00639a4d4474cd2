"""Sizes, rates and times as people write them: parsed from text, and printed."""

from __future__ import annotations

import re

from clearhead.errors import InputError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
LEAST = 10**6  # bytes of memory that anybody means who writes no unit


def parse_size(text: str) -> int:
    """ "80GB" is 80e9 bytes, "80GiB" 80 * 2^30."""
    size = round(_parse(text, "B", UNITS | BINARY, "a size in bytes such as 80GB or 80GiB"))
    if size < LEAST and text.strip()[-1].isdigit():
        raise InputError(f"{text!r} is a number without a unit, so {size} bytes; for gigabytes say {text.strip()}GB")
    return size


def parse_rate(text: str, unit: str = "FLOP/s") -> float:
    """ "400TFLOP/s", or just "400T", is 400e12 a second."""
    return _parse(text, unit, UNITS, f"a rate such as 400T or 3.3e12, in {unit}")


def _parse(text: str, unit: str, units: dict[str, int], wanted: str) -> float:
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmgtp]?i?)\s*(\S*)\s*", text, re.IGNORECASE)
    spellings = {"", unit.lower(), "flops", "flop"} if unit == "FLOP/s" else {"", unit.lower()}
    try:
        assert found is not None
        assert found[3].lower() in spellings
        value = float(found[1]) * units[found[2].lower()]
        assert value > 0
    except (AssertionError, ValueError, KeyError):
        raise InputError(f"{text!r} is not {wanted}") from None
    return value


def spell_count(n: float | int, unit: str = "") -> str:
    """A number with a decimal prefix: 3.14 T."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:,.3g} {prefix}{unit}" if n / size < 1000 else f"{n / size:,.0f} {prefix}{unit}"
    return f"{n:.3g} {unit}".rstrip()


def spell_seconds(seconds: float | int) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if seconds >= 2 * size or (unit in ("s", "ms") and seconds >= size):
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
