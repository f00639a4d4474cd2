"""What a model costs: `cost`, forecast for it or one like it, and `measure`, on this machine."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import torch

from clearhead.config import Config
from clearhead.costs.forecast import PARTS, Cost, cost
from clearhead.costs.machine import measure_peak
from clearhead.costs.measurement import make_inputs
from clearhead.costs.operations import check_lengths
from clearhead.errors import InputError
from clearhead.explorer.asking import Params
from clearhead.explorer.inputs import LONGEST
from clearhead.explorer.runs import Runs
from clearhead.inside.heads import still
from clearhead.inside.pages import pack

FURTHEST = 2**24  # tokens
MOST = {"n_layers": 1024, "d_model": 2**17, "n_heads": 1024, "d_ff": 2**20}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "float32"},
    "bf16": {"precision": "bfloat16"},
    "int8": {"precision": "float32", "quantize": "int8"},
    "int4": {"precision": "float32", "quantize": "int4"},
}
KINDS = {
    "weights": "weight_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "activations": "activation_bytes",
    "cache": "kv_cache_bytes",
    "peak": "peak_bytes",
}


def forecast(runs: Runs, params: Params) -> bytes:
    """Operations, memory and time over the length, of the model or of one of other sizes."""
    lengths = params.wholes("lengths", 2, FURTHEST, 64, (16, 64, 256, 1024, 4096))
    if not lengths:
        raise InputError("lengths is empty; got []; give one at least")
    config = _changed(runs.model.config, params)
    asked: dict[str, Any] = {
        "batch": params.whole("batch", 1, 2**16, 1),
        "mode": params.one_of("mode", ("forward", "train", "decode"), "forward"),
        **PRECISIONS[params.one_of("precision", list(PRECISIONS), "fp32")],
    }
    found = [_cost(config, length, asked) for length in lengths]
    flops = np.array([[each.parts["flops"][part] for each in found] for part in PARTS], dtype=np.float32)
    memory = np.array([[getattr(each, field) for each in found] for field in KINDS.values()], dtype=np.float32)
    rate = measure_peak(runs.inputs.device)
    seconds = np.array([each.seconds(rate) for each in found], dtype=np.float32)
    told = {"params": found[0].params, "crossover": _crossover(config, asked), "parts": PARTS, "kinds": list(KINDS)}
    return pack({**told, "lengths": lengths, "rate": rate}, flops=flops, bytes=memory, seconds=seconds)


def _changed(config: Config, params: Params) -> Config:
    """The config with other sizes; what follows from a size that changed is derived anew."""
    given = params.inner("changes") if params.has("changes") else Params({})
    changes = {name: given.whole(name, 1, most) for name, most in MOST.items() if given.has(name)}
    if not changes:
        return config
    told = {**config.to_dict(), "pruned_heads": (), **changes}
    if "n_layers" in changes and config.n_decoder_layers:
        told["n_decoder_layers"] = changes["n_layers"]
    if "d_model" in changes or "n_heads" in changes:
        told["d_head"] = 0
    if "d_model" in changes and "d_ff" not in changes:
        told["d_ff"] = max(1, round(config.d_ff / config.d_model * changes["d_model"]))
    if "n_heads" in changes:
        group = config.n_heads // config.n_kv_heads
        told["n_kv_heads"] = changes["n_heads"] // group if changes["n_heads"] % group == 0 else changes["n_heads"]
    return Config.from_dict(told)


def _cost(config: Config, length: int, asked: dict[str, Any]) -> Cost:
    told = config.to_dict()
    if config.inputs == "patches":  # a longer sequence is a larger picture
        side = max(1, round(math.sqrt(length - 1)))
        told |= {"image_size": side * config.patch_size, "max_len": 0, "max_source_len": 0}
        return cost(Config.from_dict(told), **asked)
    told["max_len"] = max(config.max_len, length)
    source: int | None = None
    if config.shape == "encoder-decoder" and config.inputs == "tokens":
        source = length
        told["max_source_len"] = max(config.max_source_len, length)
    return cost(Config.from_dict(told), length=length, source_length=source, **asked)


def _crossover(config: Config, asked: dict[str, Any]) -> int | None:
    """The length from which on attention takes more operations than all else."""

    def is_past(length: int) -> bool:
        parts = _cost(config, length, asked).parts["flops"]
        return 2 * parts["attention"] >= sum(parts.values())

    if not is_past(FURTHEST):
        return None
    low, high = 1, FURTHEST
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if is_past(max(middle, 2)) else (middle, high)
    return high


def measure(runs: Runs, params: Params) -> bytes:
    """Seconds that one row of random tokens takes the model here: the fastest of three."""
    config = runs.model.config
    if config.inputs == "patches":
        raise InputError(f"a model of pictures has one length, {config.max_len}; measure a model of texts")
    longest = min(LONGEST, config.max_len, config.max_source_len if config.shape == "encoder-decoder" else LONGEST)
    lengths = params.wholes("lengths", 1, longest, 12)
    seconds: list[float] = []
    with still(runs.model):
        for length in lengths:
            source = length if config.shape == "encoder-decoder" and config.inputs == "tokens" else None
            inputs = make_inputs(config, 1, check_lengths(config, length, source), str(runs.inputs.device))
            like = next(runs.model.parameters()).dtype
            inputs = tuple(x.to(like) if x.is_floating_point() else x for x in inputs)
            seconds.append(min(_time(runs, inputs) for _ in range(3)))
    return pack({"lengths": lengths}, seconds=np.array(seconds, dtype=np.float32))


def _time(runs: Runs, inputs: tuple[torch.Tensor, ...]) -> float:
    began = time.perf_counter()
    runs.model(*inputs)
    if runs.inputs.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
