"""What fits in memory: the largest batch or length, and the number of devices that a model needs."""

from __future__ import annotations

from typing import Any

from clearhead.config import Config
from clearhead.costs.forecast import cost
from clearhead.errors import ConfigError

MOST = 2**40  # the search ends here
MOST_DEVICES = 2**20


def largest(config: Config, memory: int, vary: str, **given: Any) -> int:
    """The largest "batch" or "length" (`vary`) whose forecast peak fits in `memory` bytes; 0 if not even 1 fits.

    `given`: the other arguments of `cost`. In an encoder-decoder the source length grows with the length unless it is given.
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
    """The number of devices of `memory` bytes that are needed; None if no number is enough, as each has its own activations.

    In training they share weights, gradients and optimizer state (FSDP), each with its own batch. Else all is split evenly.
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
