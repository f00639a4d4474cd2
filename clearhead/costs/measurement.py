"""What a call, a training step or a generated token really takes here: run, timed, and its memory followed.

A forecast of time needs one run of the same model, at another length, on the same machine (`Calibration`). The profiler tells
how much of it went into products of matrices, into attention, into the optimizer, and into all else; of these the first two
grow with their operations, the third not at all and the last with the tokens. Decoding is bound by what is read a token:
weights and cache.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from clearhead.config import Config
from clearhead.costs.flops import Lengths, check_lengths, count_forward, count_training
from clearhead.costs.forecast import cost
from clearhead.errors import InputError
from clearhead.kernels import Packed
from clearhead.models import Encoder, Model, build
from clearhead.quantization.integer import quantize as hold_in_fewer_bits

KINDS = {  # what an operator's name holds; the first that fits
    "attention": ("attention", "bmm"),  # only attention multiplies batches of matrices
    "fixed": ("adam", "sgd"),
    "products": ("mm", "linear", "conv"),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is run: the same words as `cost` has."""

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
        """What each kind of operator's time grows with."""
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

    def shorter(self) -> Work:
        """The same at half the length, or where that is fixed with half the batch: a run to calibrate with."""
        if self.config.inputs == "patches":
            return replace(self, batch=max(1, self.batch // 2))
        at = self.lengths
        source = max(1, at.source // 2) if at.source and self.config.inputs == "tokens" else self.source_length
        return replace(self, length=max(1, at.target // 2), source_length=source)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run took."""

    params: int
    flops: int | None  # not counted where tokens are decoded
    weight_bytes: int
    kv_cache_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    seconds: float  # the fastest of some: the least disturbed
    seconds_of: Mapping[str, float]  # by kind of operator; they add up to `seconds`


@dataclass(frozen=True)
class Calibration:
    """One run, to foretell others of the same model from."""

    work: Work
    measured: Measured

    def seconds(self, work: Work) -> float:
        then, now = self.work.operations(), work.operations()
        return sum(s * now[kind] / then[kind] for kind, s in self.measured.seconds_of.items() if then[kind])


def measure(*works: Work, repeats: int = 5) -> list[Measured]:
    """Run each, of one model: once to warm up, `repeats` times in turns for its time, once for its memory.

    In turns, so that what else this machine does falls on all alike.
    """
    for work in works:
        if work.mode == "train" and work.optimizer not in ("adamw", "sgd"):
            raise InputError(
                f"a run can be measured with optimizer 'adamw' or 'sgd'; got {work.optimizer!r}; forecast it alone"
            )
    first = works[0]
    together = _prepare(first)
    steps = [_step(work, together) for work in works]
    for begin, step in steps:
        step(begin())
    seconds = [
        min(times) for times in zip(*([_time(*s, first.device) for s in steps] for _ in range(repeats)), strict=True)
    ]
    return [_report(work, together, step, fastest) for work, step, fastest in zip(works, steps, seconds, strict=True)]


def make_inputs(config: Config, batch: int, at: Lengths, device: str = "cpu") -> tuple[Tensor, ...]:
    """What the model is called with, at random."""
    if config.inputs == "patches":
        return (torch.randn(batch, config.n_channels, config.image_size, config.image_size, device=device),)
    target = torch.randint(0, config.vocab_size, (batch, at.target), device=device)
    if config.shape != "encoder-decoder":
        return (target,)
    if config.inputs == "frames":
        return torch.randn(batch, config.n_mels, 2 * at.source, device=device), target
    return torch.randint(0, config.source_vocab_size or config.vocab_size, (batch, at.source), device=device), target


Step = tuple[Callable[[], Any], Callable[[Any], object]]  # makes what a step changes; the step


@dataclass(frozen=True)
class Together:
    """What runs of one model share."""

    model: Model
    params: int
    weight_bytes: int
    state_bytes: int = 0
    optimizer: torch.optim.Optimizer | None = None


def _prepare(work: Work) -> Together:
    dtype = torch.bfloat16 if work.precision == "bfloat16" and work.mode != "train" else torch.float32
    model = build(work.config, device=work.device, dtype=dtype).train(work.mode == "train")
    params = sum(p.numel() for p in model.parameters())
    if work.quantize:
        model = hold_in_fewer_bits(model, work.quantize)
    packed = [x for module in model.modules() if isinstance(module, Packed) for x in module.buffers(recurse=False)]
    weights = sum(x.nbytes for x in (*model.parameters(), *packed))
    if work.mode != "train":
        return Together(model, params, weights)
    learns = [p for p in model.parameters() if p.requires_grad]
    size = sum(p.nbytes for p in learns)
    if work.optimizer == "adamw":
        return Together(model, params, weights, 2 * size, torch.optim.AdamW(learns, fused=True))
    return Together(model, params, weights, size, torch.optim.SGD(learns, lr=1e-3, momentum=0.9, fused=True))


def _step(work: Work, together: Together) -> Step:
    given = make_inputs(work.config, work.batch, work.lengths, work.device)
    match work.mode:
        case "train":
            return lambda: None, lambda _: _train(work, together, given)
        case "decode":
            return _decoding(together.model, given)
        case _:
            return lambda: None, lambda _: _call(together.model, *given)


def _call(model: Model, *given: Any, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(*given, **more)


def _train(work: Work, together: Together, given: tuple[Tensor, ...]) -> None:
    assert together.optimizer is not None
    with torch.autocast(work.device, torch.bfloat16) if work.precision == "bfloat16" else nullcontext():
        out = together.model(*given, checkpointing=work.checkpointing)
    if work.config.head == "none":
        loss = out.float().square().mean()
    else:
        scores = out.float().flatten(0, -2)
        del out
        loss = F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64, device=work.device))
        del scores
    loss.backward()
    together.optimizer.step()
    together.optimizer.zero_grad()


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


def _report(work: Work, together: Together, step: Step, seconds: float) -> Measured:
    cache = step[0]()
    held = together.weight_bytes + together.state_bytes + (cache.nbytes if cache else 0)
    peak, shares = _follow(step, work.device, held)
    return Measured(
        params=together.params,
        flops=_count(work),
        weight_bytes=together.weight_bytes,
        kv_cache_bytes=cache.nbytes if cache else 0,
        optimizer_bytes=together.state_bytes,
        peak_bytes=peak,
        seconds=seconds,
        seconds_of={kind: seconds * s for kind, s in ({"reading": 1.0} if cache else shares).items()},
    )


def _time(begin: Callable[[], Any], step: Callable[[Any], object], device: str) -> float:
    """One thread on a CPU is timed by what the processor gave it, which other programs hardly change; the rest by the clock."""
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


def _follow(step: Step, device: str, held: int) -> tuple[int, dict[str, float]]:
    """The most bytes held at once, and the shares of time by kind of operator."""
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


def _count(work: Work) -> int | None:
    """Operations as torch counts them, on the meta device and by the explicit kernel: fused ones it does not see on a CPU."""
    if work.mode == "decode":
        return None
    model = build(replace(work.config, kernel="explicit"), device="meta")
    given = make_inputs(work.config, work.batch, work.lengths, "meta")
    with FlopCounterMode(display=False) as counter:
        out = model(*given, checkpointing=work.checkpointing)
        if work.mode == "train":
            out.sum().backward()
    return counter.get_total_flops()
