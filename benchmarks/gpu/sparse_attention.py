"""Sparse patterns on one GPU: a density of 1/8 beside dense attention at 32,768 tokens, also causal, and growth.

The growth is that of a Longformer-like pattern from 8k to 128k tokens.

    python3 benchmarks/gpu/sparse_attention.py --out sparse.json --plot sparse.png
    python3 benchmarks/gpu/sparse_attention.py --device cpu --tiny          the same on a CPU, small, to see that it runs
    python3 benchmarks/gpu/sparse_attention.py --replot sparse.json --plot sparse.png

Dense is torch's scaled_dot_product_attention, by the faster of cuDNN and flash. Each length is one compilation of flex_attention,
forward and backward; lengths that would come after --seconds are left out, and said so. The plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clearhead.layers.attention import attend, lower
from clearhead.layers.masks import Mask, causal, sparse
from clearhead.sparsity import Pattern

EIGHTH = "block=128, window=8, n_global=2, n_random=7"  # at 256 blocks
LONGFORMER = "window=257, n_global=16"  # 256 tokens to each side
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Bench:
    def __init__(self, device: str, tiny: bool) -> None:
        self.device, self.tiny = torch.device(device), tiny
        self.H, self.E = (2, 16) if tiny else (16, 128)
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.began = time.perf_counter()

    def inputs(self, T: int) -> list[Tensor]:
        made = (torch.randn(1, self.H, T, self.E, device=self.device, dtype=self.dtype) for _ in range(3))
        return [x.requires_grad_() for x in made]

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def median_ms(self, run: Callable[[], object]) -> float:
        run()
        times: list[float] = []
        for _ in range(2 if self.tiny else 5):
            self.wait()
            start = time.perf_counter()
            run()
            self.wait()
            times.append(1000 * (time.perf_counter() - start))
        return statistics.median(times)

    def time(self, work: Callable[[], Tensor], qkv: list[Tensor]) -> dict[str, float]:
        """Milliseconds forward without gradients, and forward and backward."""

        def both() -> None:
            out = work()
            torch.autograd.grad(out, qkv, torch.ones_like(out))

        with torch.no_grad():
            forward = self.median_ms(work)
        return {"forward ms": forward, "forward + backward ms": self.median_ms(both)}

    def dense(self, T: int, is_causal: bool) -> dict[str, Any]:
        qkv, found = self.inputs(T), dict[str, Any]()
        work = partial(F.scaled_dot_product_attention, *qkv, is_causal=is_causal)
        if self.device.type == "cpu":
            return self.time(work, qkv)
        for name, backend in BACKENDS.items():
            try:
                with sdpa_kernel(backend):
                    found[name] = self.time(work, qkv)
            except RuntimeError as error:
                found[name] = f"{type(error).__name__}: {str(error)[:200]}"
        timed = [each for each in found.values() if isinstance(each, dict)]
        return found | {what: min(each[what] for each in timed) for what in timed[0]}

    def sparse(self, T: int, mask: Mask) -> dict[str, Any]:
        qkv = self.inputs(T)
        lowered = self.median_ms(lambda: lower(mask, None, T=T, S=T, like=qkv[0]))
        how = lower(mask, None, T=T, S=T, like=qkv[0])
        start = time.perf_counter()
        found = self.time(lambda: attend(*qkv, how), qkv)
        peak = {}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            attend(*qkv, how).sum().backward()
            peak = {"peak MB beyond q k v": (torch.cuda.max_memory_allocated() - held) / 2**20}
        (pattern,) = mask.patterns
        density = pattern.count_pairs(T, T, causal=mask.causal) / (T * T)
        rest = {"kernel": how.kernel, "density": density, "lowered once ms": lowered}
        return {**found, **rest, **peak, "seconds in all": time.perf_counter() - start}


def agree(bench: Bench) -> dict[str, float]:
    """The largest difference from the explicit equation in float32, of the result and the gradients, over the largest number."""
    T, mask = (1100 if bench.tiny else 4096), causal() & sparse("block=96, window=2, n_global=1, n_random=2, stride=7")
    bench_qkv = bench.inputs(T)
    out = attend(*bench_qkv, mask)
    found = [out, *torch.autograd.grad(out, bench_qkv, torch.ones_like(out))]
    wide = [x.detach().float().requires_grad_() for x in bench_qkv]
    out = attend(*wide, mask, kernel="explicit")
    expected = [out, *torch.autograd.grad(out, wide, torch.ones_like(out))]
    pairs = zip(("out", "dq", "dk", "dv"), found, expected, strict=True)
    return {name: float((a.detach().float() - b.detach()).abs().max() / b.detach().abs().max()) for name, a, b in pairs}


def measure(bench: Bench, seconds: float) -> dict[str, Any]:
    T = 2048 if bench.tiny else 32_768
    results: dict[str, Any] = {"agree": agree(bench)}
    print("agree", results["agree"], flush=True)
    eighth = Pattern.parse("block=128, window=1, n_random=1" if bench.tiny else EIGHTH)
    for suffix, mask in (("", sparse(eighth)), (", causal", causal() & sparse(eighth))):
        dense, eighth_of = bench.dense(T, mask.causal), bench.sparse(T, mask)
        shares = {what: eighth_of[what] / dense[what] for what in ("forward ms", "forward + backward ms")}
        both = {f"dense{suffix}": dense, f"eighth{suffix}": eighth_of | {"share of dense": shares}}
        results |= both
        print(f"T = {T:,}", json.dumps(both, indent=1), flush=True)
    results["longformer"] = {}
    for T in (1024, 4096, 2048) if bench.tiny else (8192, 131_072, 32_768, 65_536, 16_384):
        if time.perf_counter() - bench.began > seconds:
            results["longformer"][T] = f"left out after {seconds:.0f} s"
        else:
            results["longformer"][T] = bench.sparse(T, sparse(LONGFORMER))
        print(f"longformer, T = {T:,}", results["longformer"][T], flush=True)
    return results


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    timed = {int(T): each for T, each in results["longformer"].items() if isinstance(each, dict)}
    lengths = sorted(timed)
    if not lengths:
        sys.exit("no length was measured: give it more --seconds; a second run finds what was compiled")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for what, color in (("forward ms", "#3b6ea5"), ("forward + backward ms", "#c0562f")):
        axes.plot(lengths, [timed[T][what] for T in lengths], "o-", color=color, label=what.removesuffix(" ms"))
        first = timed[lengths[0]][what]
        axes.plot(lengths, [first * T / lengths[0] for T in lengths], ":", color=color, linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms", title=f"{LONGFORMER}; dotted: linear growth")
    axes.set_xticks(lengths, [f"{T // 1024}k" for T in lengths])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes")
    parser.add_argument("--seconds", type=float, default=110.0, help="no new length after so many seconds")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw the growth into this PNG file")
    parser.add_argument("--replot", type=Path, help="measure nothing: draw the figures of this JSON file")
    args = parser.parse_args()
    if args.replot:
        plot(json.loads(args.replot.read_text()), args.plot)
        return
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    results = {"device": name, "torch": torch.__version__, **measure(Bench(args.device, args.tiny), args.seconds)}
    if args.out:
        args.out.write_text(json.dumps(results, indent=2) + "\n")
    if args.plot:
        try:
            plot(results, args.plot)
        except ImportError:
            print("matplotlib is not here: draw later with --replot")


if __name__ == "__main__":
    main()
