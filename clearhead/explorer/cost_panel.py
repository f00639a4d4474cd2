"""The cost panel: `cost`, a forecast for the model or one of other sizes, and `measure`, seconds on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from typing import Any

import numpy as np
import torch

from clearhead.config import Config
from clearhead.costs.flops import check_lengths
from clearhead.costs.forecast import PARTS, Cost, cost
from clearhead.costs.hardware import measure_peak
from clearhead.costs.measurement import make_inputs
from clearhead.errors import InputError
from clearhead.explorer.fields import Fields
from clearhead.explorer.forward_passes import ForwardPasses
from clearhead.explorer.model_inputs import MAX_TOKENS
from clearhead.explorer.wire_format import pack
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.quantization.model_weights import example_weight

MAX_LENGTH = 2**24  # tokens, of a forecast
MAX_SIZES = {"n_layers": 1024, "d_model": 2**17, "n_heads": 1024, "d_ff": 2**20}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "float32"},
    "bf16": {"precision": "bfloat16"},
    "int8": {"precision": "float32", "quantize": "int8"},
    "int4": {"precision": "float32", "quantize": "int4"},
}
MEASURE_SECONDS = 10.0  # the longest measurement: the machine is slower for others meanwhile
FORWARD: dict[str, Any] = {"batch": 1, "mode": "forward", "precision": "float32"}
KINDS = {
    "weights": "weight_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "activations": "activation_bytes",
    "cache": "kv_cache_bytes",
    "peak": "peak_bytes",
}


def forecast(passes: ForwardPasses, fields: Fields) -> bytes:
    """Operations, memory and seconds for each length, of the model or of one of other sizes."""
    lengths = fields.integers("lengths", 2, MAX_LENGTH, 64, (16, 64, 256, 1024, 4096))
    if not lengths:
        raise InputError("lengths is empty; got []; give one at least")
    config = _changed(passes.model.config, fields)
    options: dict[str, Any] = {
        "batch": fields.integer("batch", 1, 2**16, 1),
        "mode": fields.choice("mode", ("forward", "train", "decode"), "forward"),
        **PRECISIONS[fields.choice("precision", list(PRECISIONS), "fp32")],
    }
    found = [_cost(config, length, options) for length in lengths]
    flops = np.array([[each.parts["flops"][part] for each in found] for part in PARTS], dtype=np.float32)
    memory = np.array([[getattr(each, field) for each in found] for field in KINDS.values()], dtype=np.float32)
    rate = measure_peak(passes.inputs.device)
    seconds = np.array([each.seconds(rate) for each in found], dtype=np.float32)
    answer = {
        "params": found[0].params,
        "crossover": _crossover(config, options),
        "parts": list(PARTS),
        "kinds": list(KINDS),
    }
    return pack({**answer, "lengths": lengths, "rate": rate}, flops=flops, bytes=memory, seconds=seconds)


def _changed(config: Config, fields: Fields) -> Config:
    """The config with other sizes; sizes that depend on a changed one are derived from it."""
    given = fields.nested("changes") if fields.has("changes") else Fields({})
    changes = {name: given.integer(name, 1, most) for name, most in MAX_SIZES.items() if given.has(name)}
    if not changes:
        return config
    changed = {**config.to_dict(), "pruned_heads": (), **changes}
    if "n_layers" in changes and config.n_decoder_layers:
        changed["n_decoder_layers"] = changes["n_layers"]
    if "d_model" in changes or "n_heads" in changes:
        changed["d_head"] = 0
    if "d_model" in changes and "d_ff" not in changes:
        changed["d_ff"] = max(1, round(config.d_ff / config.d_model * changes["d_model"]))
    if "n_heads" in changes:
        group = config.n_heads // config.n_kv_heads
        changed["n_kv_heads"] = changes["n_heads"] // group if changes["n_heads"] % group == 0 else changes["n_heads"]
    return Config.from_dict(changed)


def _cost(config: Config, length: int, options: dict[str, Any]) -> Cost:
    sizes = config.to_dict()
    if config.inputs == "patches":  # a longer sequence is a larger picture
        side = max(1, round(math.sqrt(length - 1)))
        sizes |= {"image_size": side * config.patch_size, "max_len": 0, "max_source_len": 0}
        return cost(Config.from_dict(sizes), **options)
    sizes["max_len"] = max(config.max_len, length)
    source: int | None = None
    if config.shape == "encoder-decoder" and config.inputs == "tokens":
        source = length
        sizes["max_source_len"] = max(config.max_source_len, length)
    return cost(Config.from_dict(sizes), length=length, source_length=source, **options)


def _crossover(config: Config, options: dict[str, Any]) -> int | None:
    """The length from which attention takes at least half of all operations; None if that is beyond MAX_LENGTH."""

    def is_past(length: int) -> bool:
        parts = _cost(config, length, options).parts["flops"]
        return 2 * parts["attention"] >= sum(parts.values())

    if not is_past(MAX_LENGTH):
        return None
    low, high = 1, MAX_LENGTH
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if is_past(max(middle, 2)) else (middle, high)
    return high


def measure(passes: ForwardPasses, fields: Fields) -> Generator[None, None, bytes]:
    """Seconds of the model on one row of random tokens of each length: the fastest of three calls.

    It begins with the shortest and ends before a call that would exceed MEASURE_SECONDS. The answer says which were measured.
    """
    config, device = passes.model.config, passes.inputs.device
    if config.inputs == "patches":
        raise InputError(f"a model of pictures has one length, {config.max_len}; measure a model of texts")
    longest = min(
        MAX_TOKENS, config.max_len, config.max_source_len if config.shape == "encoder-decoder" else MAX_TOKENS
    )
    lengths = sorted(set(fields.integers("lengths", 1, longest, 12)))
    until, rate, measured = time.perf_counter() + MEASURE_SECONDS, measure_peak(device), dict[int, float]()
    for length, forward in zip(lengths, [_cost(config, each, FORWARD) for each in lengths], strict=True):
        slowest = max((seconds / flops for flops, seconds in measured.items()), default=0.0)
        expected = max(forward.seconds(rate), forward.flops * slowest)
        if time.perf_counter() + expected > until:
            break
        inputs = _inputs(passes, length)
        seconds = _time(passes, inputs)
        for _ in range(2):
            yield
            if time.perf_counter() + seconds < until:
                seconds = min(seconds, _time(passes, inputs))
        measured[forward.flops] = seconds
    if lengths and not measured:
        raise InputError(
            f"a call of {lengths[0]} tokens takes more than {MEASURE_SECONDS:g} seconds here, the most that is measured; "
            f"got lengths {lengths}; ask for shorter ones"
        )
    found = np.array(list(measured.values()), dtype=np.float32)
    return pack({"lengths": lengths[: len(found)]}, seconds=found)


def _inputs(passes: ForwardPasses, length: int) -> tuple[torch.Tensor, ...]:
    config, like = passes.model.config, example_weight(passes.model).dtype
    source = length if config.shape == "encoder-decoder" and config.inputs == "tokens" else None
    inputs = make_inputs(config, 1, check_lengths(config, length, source), str(passes.inputs.device))
    return tuple(x.to(like) if x.is_floating_point() else x for x in inputs)


def _time(passes: ForwardPasses, inputs: tuple[torch.Tensor, ...]) -> float:
    began = time.perf_counter()
    with eval_mode(passes.model):
        passes.model(*inputs)
    if passes.inputs.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
