"""Measurement of a call, a training step or a generated token on this machine: time, memory, FLOPs.

A forecast of time needs one run of the same model, at another length, on the same machine (`Calibration`). The profiler splits
its time into matrix products, attention, the optimizer and the rest. The first two grow with their FLOPs, the third is
constant, the last grows with the tokens. The time of decoding grows with the bytes read: weights and cache.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from clearhead.config import Config
from clearhead.costs.capacity import largest
from clearhead.costs.flops import Lengths, check_lengths, count_forward, count_training
from clearhead.costs.forecast import cost
from clearhead.errors import InputError
from clearhead.kernels import require_memory
from clearhead.models import Encoder, Model, build
from clearhead.quantization.integer import quantize as quantize_model

KINDS = {  # words in an operator's name; the first kind that matches counts
    "attention": ("attention", "bmm"),  # only attention multiplies batches of matrices
    "fixed": ("adam", "sgd"),
    "products": ("mm", "linear", "conv"),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is run: the arguments of `cost`."""

    config: Config
    batch: int
    length: int | None = None
    source_length: int | None = None
    mode: str = "forward"
    precision: str = "float32"
    checkpointing: bool = False
    optimizer: str = "adamw"
    quantize: str | None = None
    device: str = "cpu"

    @property
    def lengths(self) -> Lengths:
        return check_lengths(self.config, self.length, self.source_length)

    def operations(self) -> dict[str, int]:
        """The quantity that each kind's time is proportional to."""
        at, c = self.lengths, self.config
        if self.mode == "decode":
            asked = cost(
                c,
                batch=self.batch,
                length=at.target,
                source_length=at.source or None,
                mode="decode",
                precision=self.precision,
                quantize=self.quantize,
            )
            return {"reading": asked.weight_bytes + asked.kv_cache_bytes}
        if self.mode == "train":
            parts = count_training(c, self.batch, at, pairs="allowed", checkpointing=self.checkpointing)
        else:
            parts = count_forward(c, self.batch, at, pairs="allowed")
        attention = parts.pop("attention")
        tokens = self.batch * (at.target + at.source)
        return {"attention": attention, "products": sum(parts.values()), "rest": tokens, "fixed": 1}

    def shorter(self) -> Workload:
        """The same at half the length, or with half the batch if the length is fixed: a run to calibrate with."""
        if self.config.inputs == "patches":
            return replace(self, batch=max(1, self.batch // 2))
        at = self.lengths
        source = max(1, at.source // 2) if at.source and self.config.inputs == "tokens" else self.source_length
        return replace(self, length=max(1, at.target // 2), source_length=source)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The numbers of one run."""

    params: int
    flops: int | None  # None for decoding
    weight_bytes: int
    kv_cache_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    seconds: float  # of the fastest run: the least disturbed
    seconds_of: Mapping[str, float]  # by kind of operator; they add up to `seconds`


@dataclass(frozen=True)
class Calibration:
    """One run, to forecast other runs of the same model from."""

    work: Workload
    measured: Measured

    def seconds(self, work: Workload) -> float:
        then, now = self.work.operations(), work.operations()
        return sum(s * now[kind] / then[kind] for kind, s in self.measured.seconds_of.items() if then[kind])


def measure(*workloads: Workload, repeats: int = 5) -> list[Measured]:
    """Run each workload of one model: once to warm up, `repeats` times for its time, once for its memory.

    Timed runs take turns, so that other work of this machine disturbs all of them alike.
    """
    for work in workloads:
        if work.mode == "train" and work.optimizer not in ("adamw", "sgd"):
            raise InputError(
                f"a run can be measured with optimizer 'adamw' or 'sgd'; got {work.optimizer!r}; forecast it alone"
            )
    first = workloads[0]
    _check_memory(max(workloads, key=_forecast_peak))
    prepared = _prepare(first)
    steps = [_step(work, prepared) for work in workloads]
    for begin, step in steps:
        step(begin())
    seconds = [
        min(times) for times in zip(*([_time(*s, first.device) for s in steps] for _ in range(repeats)), strict=True)
    ]
    return [
        _report(work, prepared, step, fastest) for work, step, fastest in zip(workloads, steps, seconds, strict=True)
    ]


def repeat_step(work: Workload) -> Callable[[], object]:
    """A function that runs the workload once more."""
    begin, step = _step(work, _prepare(work))
    return lambda: step(begin())


def _forecast_peak(work: Workload) -> int:
    given = {
        field.name: getattr(work, field.name) for field in fields(Workload) if field.name not in ("config", "device")
    }
    return cost(work.config, **given, device="cuda" if work.device.startswith("cuda") else "cpu").peak_bytes


def _check_memory(work: Workload) -> None:
    """Refuse what does not fit before anything is built. Quantised weights are made from whole ones."""
    whole = _forecast_peak(replace(work, quantize=None)) if work.quantize else _forecast_peak(work)

    def advise(free: int) -> str:
        given = {name: getattr(work, name) for name in ("mode", "precision", "checkpointing", "optimizer")}
        length = work.length if work.config.inputs == "tokens" else None
        batch = largest(work.config, free, "batch", length=length, source_length=work.source_length, **given)
        if batch:
            return f"batch={batch} fits"
        half = "" if work.precision == "bfloat16" else "precision bfloat16, "
        return f"try {half}a smaller length or a smaller model; the forecast alone needs no memory"

    require_memory(whole, work.device, f"measuring batch={work.batch}, mode={work.mode!r} of this model", advise)


def make_inputs(config: Config, batch: int, at: Lengths, device: str = "cpu") -> tuple[Tensor, ...]:
    """Random inputs for a model."""
    if config.inputs == "patches":
        return (torch.randn(batch, config.n_channels, config.image_size, config.image_size, device=device),)
    target = torch.randint(0, config.vocab_size, (batch, at.target), device=device)
    if config.shape != "encoder-decoder":
        return (target,)
    if config.inputs == "frames":
        return torch.randn(batch, config.n_mels, 2 * at.source, device=device), target
    return torch.randint(0, config.source_vocab_size or config.vocab_size, (batch, at.source), device=device), target


Step = tuple[Callable[[], Any], Callable[[Any], object]]  # makes the state that a step changes; the step


@dataclass(frozen=True)
class Prepared:
    """A model, shared by all runs of it."""

    model: Model
    params: int
    weight_bytes: int
    state_bytes: int = 0
    optimizer: torch.optim.Optimizer | None = None


def _prepare(work: Workload) -> Prepared:
    dtype = torch.bfloat16 if work.precision == "bfloat16" and work.mode != "train" else torch.float32
    model = build(work.config, device=work.device, dtype=dtype).train(work.mode == "train")
    params = sum(p.numel() for p in model.parameters())
    if work.quantize:
        model = quantize_model(model, work.quantize)
    weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    if work.mode != "train":
        return Prepared(model, params, weights)
    learns = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.nbytes for p in learns)
    if work.optimizer == "adamw":
        return Prepared(model, params, weights, 2 * size, torch.optim.AdamW(learns, fused=True))
    return Prepared(model, params, weights, size, torch.optim.SGD(learns, lr=1e-3, momentum=0.9, fused=True))


def _step(work: Workload, prepared: Prepared) -> Step:
    given = make_inputs(work.config, work.batch, work.lengths, work.device)
    match work.mode:
        case "train":
            return lambda: None, lambda _: _train(work, prepared, given)
        case "decode":
            return _decoding(prepared.model, given)
        case _:
            return lambda: None, lambda _: _call(prepared.model, *given)


def _call(model: Model, *given: Any, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(*given, **more)


def _train(work: Workload, prepared: Prepared, given: tuple[Tensor, ...]) -> None:
    assert prepared.optimizer is not None
    with torch.autocast(work.device, torch.bfloat16) if work.precision == "bfloat16" else nullcontext():
        out = prepared.model(*given, checkpointing=work.checkpointing)
    if work.config.head == "none":
        loss = out.float().square().mean()
    else:
        scores = out.float().flatten(0, -2)
        del out
        loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64, device=work.device))
        del scores
    loss.backward()
    prepared.optimizer.step()
    prepared.optimizer.zero_grad()


def _decoding(model: Model, given: tuple[Tensor, ...]) -> Step:
    *source, tokens = given
    if isinstance(model, Encoder) or tokens.shape[1] < 2:
        raise InputError(
            f"decoding is measured after one token or more, in a decoder; got length={tokens.shape[1]}; give 4 or more"
        )
    cache = model.new_cache(batch=tokens.shape[0], max_len=tokens.shape[1])
    _call(model, *source, tokens[:, :-1], cache=cache)
    nothing = [None] * len(source)
    return lambda: copy.deepcopy(cache), lambda cache: _call(model, *nothing, tokens[:, -1:], cache=cache)


def _report(work: Workload, prepared: Prepared, step: Step, seconds: float) -> Measured:
    cache = step[0]()
    held = prepared.weight_bytes + prepared.state_bytes + (cache.nbytes if cache else 0)
    peak, shares = _profile(step, work.device, held)
    return Measured(
        params=prepared.params,
        flops=_count(work),
        weight_bytes=prepared.weight_bytes,
        kv_cache_bytes=cache.nbytes if cache else 0,
        optimizer_bytes=prepared.state_bytes,
        peak_bytes=peak,
        seconds=seconds,
        seconds_of={kind: seconds * s for kind, s in ({"reading": 1.0} if cache else shares).items()},
    )


def _time(begin: Callable[[], Any], step: Callable[[Any], object], device: str) -> float:
    """Seconds of one step: of processor time for one thread on a CPU, as other programs hardly change it; else by the clock."""
    alone = not device.startswith("cuda") and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    state = begin()
    _wait(device)
    began = clock()
    step(state)
    _wait(device)
    return clock() - began


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def _profile(step: Step, device: str, held: int) -> tuple[int, dict[str, float]]:
    """The peak of bytes held, and the shares of time by kind of operator."""
    on_gpu = device.startswith("cuda")
    state = step[0]()
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with profile(activities=kinds, profile_memory=not on_gpu) as seen:
        step[1](state)
        _wait(device)
    spent = dict.fromkeys((*KINDS, "rest"), 0.0)
    for event in seen.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "rest")
        spent[kind] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
    total = sum(spent.values())
    shares = {kind: microseconds / total for kind, microseconds in spent.items()}
    if on_gpu:
        return torch.cuda.max_memory_allocated(), shares
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events: list[Any] = seen.profiler.kineto_results.events()
    highest = held
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        held += change
        highest = max(highest, held)
    return highest, shares


def _count(work: Workload) -> int | None:
    """FLOPs as torch counts them, on the meta device. With kernel="explicit": on a CPU torch does not count fused attention."""
    if work.mode == "decode":
        return None
    model = build(replace(work.config, kernel="explicit"), device="meta")
    given = make_inputs(work.config, work.batch, work.lengths, "meta")
    with FlopCounterMode(display=False) as counter:
        out = model(*given, checkpointing=work.checkpointing)
        if work.mode == "train":
            out.sum().backward()
    return counter.get_total_flops()
