"""The decoding kernels on one CUDA GPU: each checked against float64, then timed in a CUDA graph beside torch's own.

    python3 benchmarks/gpu/decode_kernels.py [--out results.json]

Every timed call in a graph has its own weights or pool, several times the cache in all: as in a model, nothing is read twice.
Errors are ‖found - expected‖ / ‖expected‖; bfloat16 keeps 8 bits, so about 2e-3 is one rounding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clearhead.kernels import gpu

GPU = torch.device("cuda")
BF16 = torch.bfloat16
BYTES = 300e6  # what the calls of one graph read together
LINEARS = {
    "7B qkv": (12288, 4096), "7B out": (4096, 4096), "7B gate_up": (22016, 4096), "7B down": (4096, 11008),
    "7B head": (32000, 4096), "11008x4096": (11008, 4096), "1.1B qkv": (2560, 2048), "1.1B gate_up": (11264, 2048),
    "1.1B down": (2048, 5632), "gpt2 qkv": (2304, 768), "gpt2 out": (768, 768), "gpt2 up": (3072, 768),
    "gpt2 down": (768, 3072), "gpt2 head": (50257, 768), "base out": (512, 512), "base up": (2048, 512),
    "base down": (512, 2048),
}  # fmt: skip
ATTENTIONS = {  # rows, heads, key heads, head width, mean length
    "7B, 256 rows": (256, 32, 32, 128, 400), "1.1B, 256 rows": (256, 32, 4, 64, 400),
    "gpt2, 64 rows": (64, 12, 12, 64, 128), "7B, 1 row": (1, 32, 32, 128, 160), "1.1B, 1 row": (1, 32, 4, 64, 160),
    "gpt2, 1 row": (1, 12, 12, 64, 96), "7B, 1 long row": (1, 32, 32, 128, 3000), "base, 1024 rows": (1024, 8, 8, 64, 20),
}  # fmt: skip


def time_graph(calls: list[Callable[[], object]], replays: int = 7) -> float:
    """Seconds a call: the calls one after another in a graph, the median of its replays."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def matrices(N: int, D: int, dtype: torch.dtype = BF16, copies: int = 0) -> list[Tensor]:
    copies = copies or max(4, min(128, int(BYTES / (N * D * dtype.itemsize))))
    drawn = torch.randn(copies, N, D, device=GPU, dtype=dtype).mul_(D**-0.5)
    return [torch.nn.Parameter(w, requires_grad=False) for w in drawn]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Our kernel, or cuBLAS where `linear_plan` leaves it the product."""
    planned = gpu.linear_plan(len(x), *weight.shape, weight.dtype) is not None
    return gpu.linear(x, weight, bias) if planned else F.linear(x, weight, bias)


def linears(rows: tuple[int, ...] = (1, 2, 4, 8, 16)) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, (N, D) in LINEARS.items():
        weights = matrices(N, D)
        bias = torch.randn(N, device=GPU, dtype=BF16)
        for R in rows:
            x = torch.randn(R, D, device=GPU, dtype=BF16)
            expected = x.double() @ weights[0].double().T + bias.double()
            off = error(linear(x, weights[0], bias), expected)
            ours = time_graph([lambda w=w, x=x: linear(x, w) for w in weights])
            blas = time_graph([lambda w=w, x=x: F.linear(x, w) for w in weights])
            size = N * D * BF16.itemsize
            found.append(dict(what=name, N=N, D=D, R=R, us=ours * 1e6, TBs=size / ours / 1e12, blas_us=blas * 1e6,
                              blas_TBs=size / blas / 1e12, error=off))  # fmt: skip
    return found


def packed() -> list[dict[str, Any]]:
    """int8 and int4 weights, in the formats of clearhead/quantization/integer.py, beside cuBLAS on bfloat16 ones."""
    found: list[dict[str, Any]] = []
    for name in ("7B out", "7B gate_up", "7B down", "gpt2 up"):
        N, D = LINEARS[name]
        weights = matrices(N, D)
        copies = 2 * len(weights)
        q8 = torch.randint(-127, 128, (copies, N, D), dtype=torch.int8, device=GPU)
        q4 = torch.randint(0, 256, (2 * copies, N, D // 2), dtype=torch.uint8, device=GPU)
        s8 = torch.rand(N, -(-D // 64), device=GPU).half()
        s4, m4 = (torch.rand(N, D // 32, device=GPU).half() for _ in range(2))
        w8 = q8[0].double() * s8.double().repeat_interleave(64, 1)[:, :D]
        u = torch.stack([q4[0] & 15, q4[0] >> 4], -1).flatten(1).double()
        w4 = u * s4.double().repeat_interleave(32, 1) + m4.double().repeat_interleave(32, 1)
        for R in (1, 2, 4, 8):
            x = torch.randn(R, D, device=GPU, dtype=BF16)
            off8 = error(gpu.linear_int8(x, q8[0], s8), x.double() @ w8.T)
            off4 = error(gpu.linear_int4(x, q4[0], s4, m4), x.double() @ w4.T)
            int8 = time_graph([lambda q=q, x=x, s=s8: gpu.linear_int8(x, q, s) for q in q8])
            int4 = time_graph([lambda q=q, x=x, s=s4, m=m4: gpu.linear_int4(x, q, s, m) for q in q4])
            blas = time_graph([lambda w=w, x=x: F.linear(x, w) for w in weights])
            found.append(dict(what=name, R=R, int8_us=int8 * 1e6, int4_us=int4 * 1e6, blas_us=blas * 1e6,
                              int8_error=off8, int4_error=off4))  # fmt: skip
    return found


def new_pool(B: int, K: int, E: int, mean: int, slots: int = 16, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    """Rows of mixed lengths around the mean, their blocks scattered over one pool."""
    counts = torch.randint(mean // 8, 2 * mean - mean // 8 + 1, (B,), device=GPU, dtype=torch.int32)
    m = -(-2 * mean // slots)
    pool = torch.randn(B * m, 2, K, slots, E, device=GPU).to(dtype)
    table = torch.randperm(B * m, device=GPU).to(torch.int32).reshape(B, m)
    return dict(k=pool[:, 0], v=pool[:, 1], table=table, counts=counts)


def look(q: Tensor, k: Tensor, v: Tensor, table: Tensor, counts: Tensor) -> Tensor:
    """Rows one by one in float64."""
    rows: list[Tensor] = []
    group = q.shape[1] // k.shape[1]
    for b, count in enumerate(counts.tolist()):
        own = (pool[table[b].long()].transpose(0, 1).flatten(1, 2)[:, :count] for pool in (k, v))
        keys, values = (t.double().repeat_interleave(group, 0) for t in own)
        weights = (torch.einsum("he,hse->hs", q[b].double(), keys) * q.shape[-1] ** -0.5).softmax(-1)
        rows.append(torch.einsum("hs,hse->he", weights, values))
    return torch.stack(rows)


def attentions() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, (B, H, K, E, mean) in ATTENTIONS.items():
        first = new_pool(B, K, E, mean)
        size = int(first["counts"].sum()) * K * E * 2 * BF16.itemsize
        pools = [first, *(new_pool(B, K, E, mean) for _ in range(min(31, int(BYTES / size))))]
        size = sum(int(pool["counts"].sum()) for pool in pools) / len(pools) * K * E * 2 * BF16.itemsize
        q = torch.randn(B, H, E, device=GPU, dtype=BF16)
        scale = E**-0.5
        some = slice(0, 16)
        off = error(
            gpu.paged_attention(q, **first, scale=scale)[some],
            look(q[some], first["k"], first["v"], first["table"][some], first["counts"][some]),
        )
        ours = time_graph([lambda p=p, q=q, s=scale: gpu.paged_attention(q, **p, scale=s) for p in pools])
        found.append(dict(what=name, us=ours * 1e6, TBs=size / ours / 1e12, error=off))
    return found


def others() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def note(what: str, off: float, calls: list[Callable[[], object]], torchs: list[Callable[[], object]]) -> None:
        found.append(dict(what=what, us=time_graph(calls) * 1e6, torch_us=time_graph(torchs) * 1e6, error=off))

    for R, V, k in ((1, 32000, 8), (1024, 32000, 8), (1024, 32000, 32), (1024, 58101, 8), (64, 50257, 1)):
        logits = 3 * torch.randn(R, V, device=GPU, dtype=BF16)
        values, ids = gpu.top_log_probs(logits, k)
        expected = logits.double().log_softmax(-1)
        order = torch.sort(expected, descending=True, stable=True)
        off = error(values, order.values[:, :k]) if torch.equal(ids, order.indices[:, :k]) else float("nan")
        note(f"top {k} of {R} x {V}", off, [lambda x=logits, k=k: gpu.top_log_probs(x, k)] * 4,
             [lambda x=logits, k=k: x.float().log_softmax(-1).topk(k)] * 4)  # fmt: skip
    for R, width in ((1, 11008), (256, 11008), (256, 5632)):
        both = torch.randn(R, 2 * width, device=GPU, dtype=BF16)
        gate, up = both.double().chunk(2, -1)
        note(f"gated {R} x {width}", error(gpu.gated(both, "silu"), F.silu(gate) * up),
             [lambda x=both: gpu.gated(x, "silu")] * 20,
             [lambda x=both: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]] * 20)  # fmt: skip
    for R, D, kind in ((1, 4096, "rms"), (256, 4096, "rms"), (1, 768, "layer"), (64, 768, "layer")):
        x, y, w = (torch.randn(n, D, device=GPU, dtype=BF16) for n in (R, R, 1))
        norm: Any = F.rms_norm if kind == "rms" else lambda x, s, w, e: F.layer_norm(x, s, w, None, e)
        off = error(
            gpu.add_norm(x, y, w[0], None, 1e-5, kind)[1], norm(x.double() + y.double(), (D,), w[0].double(), 1e-5)
        )
        note(f"add_norm {R} x {D} {kind}", off, [lambda x=x, y=y, w=w[0], s=kind: gpu.add_norm(x, y, w, None, 1e-5, s)] * 20,
             [lambda x=x, y=y, w=w[0], D=D, n=norm: n(x + y, (D,), w, 1e-5)] * 20)  # fmt: skip
    for B, H, K, E in ((1, 32, 32, 128), (256, 32, 32, 128), (256, 32, 4, 64)):
        pool = new_pool(B, K, E, 100)
        q, k, v = torch.randn(B, H + 2 * K, E, device=GPU, dtype=BF16).split([H, K, K], 1)
        angles = torch.rand(B, E // 2, device=GPU) * 6
        cos, sin, at = angles.cos(), angles.sin(), pool["counts"]
        where = (pool["table"].gather(1, (at // 16).long()[:, None])[:, 0].long(), slice(None), (at % 16).long())

        def turn(x: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
            a, b = x.chunk(2, -1)
            c, s = cos[:, None], sin[:, None]
            return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)

        def plain(
            q: Tensor = q, k: Tensor = k, v: Tensor = v, pool: dict[str, Tensor] = pool, where: Any = where
        ) -> Tensor:
            pool["k"][where], pool["v"][where] = turn(k), v
            return turn(q)

        def fused(q: Tensor = q, k: Tensor = k, v: Tensor = v, pool: dict[str, Tensor] = pool, cos=cos, sin=sin, at=at):
            return gpu.rotate_store(q, k, v, cos, sin, pool["k"], pool["v"], pool["table"], at)

        fused()
        off = error(pool["k"][where], turn(k.double(), cos.double(), sin.double())) + float(
            (pool["v"][where] != v).sum()
        )
        note(f"rotate_store {B} x {H}/{K} x {E}", off, [fused] * 20, [plain] * 20)
    return found


MODELS = {  # layers, width, heads, key heads, feed-forward width, vocabulary, gated
    "7B": (32, 4096, 32, 32, 11008, 32000, True),
    "1.1B": (22, 2048, 32, 4, 5632, 32000, True),
    "gpt2": (12, 768, 12, 12, 3072, 50257, False),
}


def steps(length: int = 160) -> list[dict[str, Any]]:
    """One token through all layers of a model, batch 1, as a chain of these kernels; what the reads alone allow beside it."""
    found: list[dict[str, Any]] = []
    for name, (layers, D, H, K, width, V, is_gated) in MODELS.items():
        E = D // H
        shapes = [((H + 2 * K) * E, D), (D, D), (width * (1 + is_gated), D), (D, width)]
        weights = [[matrices(*s, copies=1)[0] for s in shapes] for _ in range(layers)]
        head, scale = matrices(V, D, copies=1)[0], torch.ones(D, device=GPU, dtype=BF16)
        pools = [new_pool(1, K, E, length) for _ in range(layers)]
        cos = sin = torch.full((1, E // 2), 0.5**0.5, device=GPU)
        at = torch.full((1,), length - 1, device=GPU, dtype=torch.int32)
        start = torch.randn(1, D, device=GPU, dtype=BF16)

        def step(weights=weights, pools=pools, start=start, head=head, scale=scale, cos=cos, sin=sin, at=at,
                 H=H, K=K, E=E, is_gated=is_gated) -> Tensor:  # fmt: skip
            x, y = start, start
            for (qkv, out, up, down), pool in zip(weights, pools, strict=True):
                x, normed = gpu.add_norm(y, x, scale, None, 1e-5, "rms")
                q, k, v = linear(normed, qkv).unflatten(1, (-1, E)).split([H, K, K], 1)
                q = gpu.rotate_store(q, k, v, cos, sin, pool["k"], pool["v"], pool["table"], at)
                y = linear(gpu.paged_attention(q, **pool, scale=E**-0.5).flatten(1), out)
                x, normed = gpu.add_norm(y, x, scale, None, 1e-5, "rms")
                hidden = linear(normed, up)
                y = linear(gpu.gated(hidden, "silu") if is_gated else F.gelu(hidden), down)
            x, normed = gpu.add_norm(y, x, scale, None, 1e-5, "rms")
            return gpu.top_log_probs(linear(normed, head), 1)[1]

        seconds = time_graph([step])
        size = sum(w.numel() for layer in weights for w in layer) + head.numel()
        found.append(dict(what=f"{name} step", us=seconds * 1e6, tokens_s=1 / seconds, TBs=2 * size / seconds / 1e12))
    return found


def table(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print("  ".join(f"{k} {v:.3g}" if isinstance(v, float) else str(v) for k, v in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    results: dict[str, list[dict[str, Any]]] = {}
    for part in (steps, attentions, others, packed, linears):
        results[part.__name__] = part()
        table(results[part.__name__])
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
