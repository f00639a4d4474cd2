"""How large it may be: sizes as people write them, the largest batch or length that fits, and how many devices it takes."""

from __future__ import annotations

import re
from typing import Any

from clearhead.config import Config
from clearhead.costs.forecast import cost
from clearhead.errors import ConfigError, InputError

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
MOST = 2**40  # where a search for the largest ends: nothing real is larger
MOST_DEVICES = 2**20


def parse_size(text: str) -> int:
    """ "80GB" is 80e9 bytes, "80GiB" 80 * 2^30."""
    return round(_parse(text, "B", UNITS | BINARY, "a size in bytes such as 80GB or 80GiB"))


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
    """A number as people read it: 3.14 T."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:,.3g} {prefix}{unit}" if n / size < 1000 else f"{n / size:,.0f} {prefix}{unit}"
    return f"{n:.3g} {unit}".rstrip()


def spell_seconds(seconds: float | int) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if seconds >= 2 * size or (unit in ("s", "ms") and seconds >= size):
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def largest(config: Config, memory: int, vary: str, **given: Any) -> int:
    """The largest `vary`, "batch" or "length", with which the forecast's peak stays within `memory` bytes; 0: not even 1.

    `given` is what else `cost` takes. In an encoder-decoder the source grows with the length, where it is not given.
    """
    if vary not in ("batch", "length"):
        raise ConfigError(f"vary={vary!r} is not known; choose 'batch' or 'length'")
    both = vary == "length" and config.shape == "encoder-decoder" and config.inputs == "tokens"
    varied = [vary, "source_length"] if both and given.get("source_length") is None else [vary]

    def fits(n: int) -> bool:
        asked: dict[str, Any] = given | dict.fromkeys(varied, n)
        return cost(config, **asked).peak_bytes <= memory

    low, high = 0, 1
    while high <= MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def devices_needed(config: Config, memory: int, **given: Any) -> int | None:
    """How many devices of `memory` bytes it takes; None: no number of them is enough, as each needs its own activations.

    Training shares weights, gradients and state among them (FSDP), each with a batch of its own. Elsewhere all is split evenly.
    """
    if given.get("mode") != "train":
        return -(-cost(config, **given).peak_bytes // memory)

    def fits(n: int) -> bool:
        asked: dict[str, Any] = given | {"shards": n, "parallel": "fsdp"}
        return cost(config, **asked).peak_bytes <= memory

    low, high = 0, 1
    while not fits(high):
        low, high = high, 2 * high
        if high > MOST_DEVICES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
