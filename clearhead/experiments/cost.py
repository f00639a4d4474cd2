"""The paper's table 1, counted and measured: attention, an LSTM and a convolution of one width, over the length."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import clearhead.costs as costs
from clearhead.config import Config
from clearhead.experiments.fitting import build, small
from clearhead.experiments.result import Cell, Chart, Curve, Result, Table, decide, judge, middle, spell

LAYERS = ("attention", "attention, T x T kept", "LSTM", "convolution, 3 wide")
FUSED, PLAIN, LSTM, CONVOLUTION = LAYERS
ORDERS = {  # operations, steps that must wait for each other, what backward needs
    FUSED: ("O(T² d + T d²)", "O(1)", "O(T d)"),
    PLAIN: ("O(T² d + T d²)", "O(1)", "O(T² + T d)"),
    LSTM: ("O(T d²)", "O(T)", "O(T d)"),
    CONVOLUTION: ("O(T d²)", "O(1)", "O(T d)"),
}


@dataclass(frozen=True)
class Size:
    width: int = 64
    lengths: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048)
    rounds: int = 3


SIZES = {
    "quick": Size(width=16, lengths=(8, 64), rounds=1),
    "usual": Size(),
    "full": Size(width=128, lengths=(32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), rounds=5),
}


@dataclass(frozen=True)
class Measured:
    """By layer and length, for one row: forward and backward."""

    width: int
    seconds: dict[str, dict[int, list[float]]]  # of processor time, the best of `rounds`; one a seed
    macs: dict[str, dict[int, int]]  # multiply-adds of the forward pass, in closed form
    kept: dict[str, dict[int, int]]  # bytes kept for the backward pass, measured
    params: dict[str, int]


def measure(size: Size, seeds: range) -> Measured:
    def table() -> dict[str, dict[int, list[float]]]:
        return {layer: {n: [] for n in size.lengths} for layer in LAYERS}

    seconds, kept = table(), table()
    params: dict[str, int] = {}
    for seed in seeds:
        layers = make_layers(size.width, seed)
        params = {name: sum(p.numel() for p in module.parameters()) for name, (module, _) in layers.items()}
        generator = torch.Generator().manual_seed(seed)
        for length in size.lengths:
            x = torch.randn(1, length, size.width, generator=generator)
            # In turns, so that a busy moment of the machine meets all of them.
            for _ in range(size.rounds):
                for name, (module, call) in layers.items():
                    seconds[name][length].append(step_seconds(module, call, x))
            for name, (_, call) in layers.items():
                best = min(seconds[name][length][-size.rounds :])
                seconds[name][length][-size.rounds :] = [best]
                kept[name][length] = [kept_bytes(call, x)]
    macs = {name: {n: count(name, n, size.width) for n in size.lengths} for name in LAYERS}
    whole = {name: {n: int(values[0]) for n, values in each.items()} for name, each in kept.items()}
    return Measured(size.width, seconds, macs, whole, params)


def make_layers(width: int, seed: int) -> dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """Each layer, and how it is called."""
    torch.manual_seed(seed)
    found: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {}
    for name, kernel in ((FUSED, "fused"), (PLAIN, "explicit")):
        model = build(attention_config(width, kernel=kernel), seed)
        found[name] = (attention := model.get_submodule("blocks.0.attention"), attention)
    lstm = nn.LSTM(width, width, batch_first=True)
    convolution = nn.Conv1d(width, width, 3, padding=1)
    found[LSTM] = lstm, lambda x: lstm(x)[0]
    found[CONVOLUTION] = convolution, lambda x: convolution(x.transpose(1, 2))
    return found


def attention_config(width: int, **fields: str) -> Config:
    heads = max(width // 32, 1)
    return small(
        shape="encoder",
        n_layers=1,
        d_model=width,
        n_heads=heads,
        d_ff=1,
        vocab_size=8,
        max_len=8192,
        tie_embeddings=False,
        **fields,
    )


def step_seconds(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    began = time.process_time()
    call(x).square().mean().backward()
    spent = time.process_time() - began
    module.zero_grad()
    return spent


def kept_bytes(call: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """What autograd keeps for the backward pass, each storage once; parameters are not counted."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not tensor.is_leaf:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call(x)
    del out
    return sum(found.values()) + x.nbytes


def count(name: str, length: int, width: int) -> int:
    """Multiply-adds of one forward pass over one row."""
    if name == LSTM:
        return 8 * length * width**2  # four gates, each from the input and from the state
    if name == CONVOLUTION:
        return 3 * length * width**2
    flops = costs.cost(attention_config(width), batch=1, length=length).parts["flops"]
    return (flops["projections"] + flops["attention"]) // 2


def conclude(m: Measured) -> Result:
    lengths = list(m.seconds[FUSED])
    longest = lengths[-1]
    slope = {name: growth(m, name) for name in LAYERS}
    faster = [n for n in lengths if middle(m.seconds[LSTM][n]) < middle(m.seconds[FUSED][n])]
    fewer = [n for n in lengths if m.macs[LSTM][n] < m.macs[FUSED][n]]
    times = [(n, *(spell([1e3 * s for s in m.seconds[name][n]], 2) for name in LAYERS)) for n in lengths]
    macs: list[tuple[Cell, ...]] = [(n, *(m.macs[name][n] for name in LAYERS)) for n in lengths]
    kept = [(n, *(f"{m.kept[name][n] / 1e3:,.0f}" for name in LAYERS)) for n in lengths]
    orders = [(name, *ORDERS[name], f"{m.params[name]:,}") for name in LAYERS]
    memory = {name: m.kept[name][longest] / m.kept[name][lengths[-2]] for name in LAYERS}
    return Result(
        tables=(
            Table(
                "Orders, T tokens of width d",
                ("layer", "operations", "waits", "kept", f"parameters, d = {m.width}"),
                tuple(orders),
            ),
            Table(f"Multiply-adds, forward, d = {m.width}", ("length", *LAYERS), tuple(macs)),
            Table("Milliseconds, forward and backward", ("length", *LAYERS), tuple(times)),
            Table("kB kept for the backward pass", ("length", *LAYERS), tuple(kept)),
        ),
        charts=(
            Chart("Multiply-adds, forward", "length", "multiply-adds", curves(m.macs), log_x=True, log_y=True),
            Chart(
                "Time, forward and backward",
                "length",
                "s of processor time",
                curves({name: {n: middle(values) for n, values in m.seconds[name].items()} for name in LAYERS}),
                log_x=True,
                log_y=True,
            ),
            Chart("Kept for the backward pass", "length", "bytes", curves(m.kept), log_x=True, log_y=True),
        ),
        findings=(
            decide(
                "A recurrent layer is faster where it has fewer operations.",
                f"The LSTM has fewer operations than attention {spell_lengths(fewer)} (from T = 2 d = {2 * m.width}); it was "
                f"faster {spell_lengths(faster)}, on one thread of a CPU.",
                faster == fewer,
            ),
            judge(
                "Attention's time grows with the square of the length, an LSTM's in proportion.",
                f"From {lengths[-2]} to {longest} tokens the time grows as T^{spell(slope[FUSED], 2)} for attention and "
                f"T^{spell(slope[LSTM], 2)} for the LSTM (its operations as T^{order(m.macs[FUSED], lengths):.2f} and T^1).",
                more=slope[FUSED],
                less=[1.3, *slope[LSTM]],
                margin=0.1,
            ),
            decide(
                "Attention needs memory that grows with the square of the length.",
                f"From {lengths[-2]} to {longest} tokens what is kept grows {memory[PLAIN]:.1f}-fold by the plain equation, and "
                f"{memory[FUSED]:.1f}-fold by the fused kernel (the length {longest / lengths[-2]:.1f}-fold).",
                memory[FUSED] > 1.25 * longest / lengths[-2],
            ),
        ),
    )


def order(values: dict[int, int], lengths: list[int]) -> float:
    """The power of the length by which a number grows between the last two lengths."""
    a, b = lengths[-2:]
    return math.log(values[b] / values[a]) / math.log(b / a)


def growth(m: Measured, name: str) -> list[float]:
    a, b = list(m.seconds[name])[-2:]
    pairs = zip(m.seconds[name][a], m.seconds[name][b], strict=True)
    return [math.log(after / before) / math.log(b / a) for before, after in pairs]


def curves(values: dict[str, dict[int, float]] | dict[str, dict[int, int]]) -> tuple[Curve, ...]:
    return tuple(Curve(name, tuple(each), tuple(map(float, each.values()))) for name, each in values.items())


def spell_lengths(lengths: list[int]) -> str:
    return f"at {', '.join(map(str, lengths))} tokens" if lengths else "at no length tried"
