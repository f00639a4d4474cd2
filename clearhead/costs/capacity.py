"""What fits in memory: the largest batch or length, and the number of devices that a model needs."""

from __future__ import annotations

from typing import Any

from clearhead.config import Config
from clearhead.costs.forecast import cost
from clearhead.errors import ConfigError

MOST = 2**40  # where a search for the largest ends: nothing real is larger
MOST_DEVICES = 2**20


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
