"""The core on one CUDA GPU: kernels agree, every family compiles in one graph, windows skip work, memory grows with T.

    python3 benchmarks/gpu/core.py [--out results.json]

Needs torch with CUDA; nothing else of the project's extras.
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

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clearhead.families import preset
from clearhead.layers.attention import attend, lower
from clearhead.layers.masks import Mask, causal, documents, padding, window
from clearhead.layers.relative_positions import Alibi, RelativeBuckets
from clearhead.models import build

GPU = torch.device("cuda")


def median_ms(run: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def draw(B: int, H: int, K: int, T: int, E: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(B, h, T, E, device=GPU, dtype=dtype, requires_grad=True) for h in (H, K, K))


def kernels_agree() -> dict[str, float]:
    """The largest difference of output and gradients from the explicit kernel in float64, over the reference's norm."""
    found: dict[str, float] = {}
    B, H, K, T, E = 2, 6, 2, 389, 64
    real = torch.rand(B, T, device=GPU) > 0.3
    real[0, :50] = False
    ids = (torch.arange(T, device=GPU) // 97).expand(B, T)
    masks: dict[str, Mask] = {
        "none": Mask(),
        "causal": causal(),
        "causal+window": causal() & window(61),
        "causal+padding": causal() & padding(real),
        "padding": padding(real),
        "causal+documents": causal() & documents(ids),
        "causal+window+padding": causal() & window(61) & padding(real),
    }
    biases = {"": None, "+alibi": Alibi(n_heads=H), "+t5": RelativeBuckets(n_heads=H).to(GPU)}
    for mask_name, mask in masks.items():
        for bias_name, bias in biases.items():
            for dtype in (torch.float32, torch.bfloat16):
                q, k, v = draw(B, H, K, T, E, dtype)
                exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
                wanted = attend(*exact, mask, bias=bias, kernel="explicit")
                wanted_grads = torch.autograd.grad(wanted.square().sum(), exact)
                for kernel in ("explicit", "fused", "flex"):
                    if kernel == "flex" and bias_name and dtype == torch.float32:
                        continue  # each costs a compilation; bfloat16 has them all
                    out = attend(q, k, v, mask, bias=bias, kernel=kernel)
                    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
                    pairs = [(out, wanted), *zip(grads, wanted_grads, strict=True)]
                    worst = max(((a.double() - b).norm() / b.norm()).item() for a, b in pairs)
                    assert worst == worst, (mask_name, bias_name, kernel, "NaN")
                    key = f"{kernel} {str(dtype)[6:]}"
                    found[key] = max(found.get(key, 0.0), worst)
    return found


def families_compile() -> dict[str, str]:
    """torch.compile(fullgraph=True), forward and backward, for one tiny model of each family, against eager."""
    found: dict[str, str] = {}
    names = [
        "transformer-base",
        "gpt2",
        "mistral-7b",
        "bert-base",
        "esm2-8m",
        "vit-b-16",
        "t5-small",
        "opus-mt-en-de",
        "whisper-tiny",
    ]
    for name in names:
        torch._dynamo.reset()
        config = preset(name, n_layers=2, d_model=64, n_heads=4, d_head=16, d_ff=128, n_kv_heads=2, dropout=0.0)
        model = build(config, device=GPU)
        tokens = torch.randint(0, 33, (2, 16), device=GPU)
        first = {
            "tokens": tokens,
            "patches": torch.rand(2, 3, 224, 224, device=GPU),
            "frames": torch.rand(2, 80, 200, device=GPU),
        }
        inputs = (first[config.inputs], tokens) if config.shape == "encoder-decoder" else (first[config.inputs],)
        start = time.perf_counter()
        compiled = torch.compile(model, fullgraph=True)
        out, wanted = compiled(*inputs), model(*inputs)
        out.square().mean().backward()
        difference = (out - wanted).abs().max().item()
        found[name] = f"{difference:.1e} in {time.perf_counter() - start:.0f} s"
    return found


def speeds() -> dict[str, float]:
    found: dict[str, float] = {}
    for T in (2048, 8192, 16_384):
        q, k, v = draw(1, 16, 16, T, 128, torch.bfloat16)
        flops = 2 * T * T * 16 * 128
        with torch.no_grad():
            ours = median_ms(partial(attend, q, k, v, causal()))
            plain = median_ms(partial(F.scaled_dot_product_attention, q, k, v, is_causal=True))
        found[f"T={T} causal, ours, TFLOP/s"] = flops / ours / 1e9
        found[f"T={T} causal, torch's default, TFLOP/s"] = flops / plain / 1e9
    T = 16_384
    q, k, v = draw(1, 16, 4, T, 128, torch.bfloat16)
    grad = torch.randn_like(q)
    for name, mask in (("dense causal", causal()), ("causal window 512", causal() & window(512))):
        lowering = partial(lower, mask, None, T=T, S=T, like=q)
        found[f"T={T} {name}, mask made once a model ms"] = median_ms(lowering)
        made = lowering()
        with torch.no_grad():
            found[f"T={T} {name}, forward ms"] = median_ms(partial(attend, q, k, v, made))
        found[f"T={T} {name}, forward+backward ms"] = median_ms(
            lambda made=made: torch.autograd.grad(attend(q, k, v, made), (q, k, v), grad)
        )
    return found


def memory() -> dict[str, float]:
    """Peak MB of forward + backward above the inputs, at T and 2T."""
    found: dict[str, float] = {}
    for name in ("causal", "causal+padding", "causal+window"):
        for T in (4096, 8192):
            torch.cuda.empty_cache()
            q, k, v = draw(1, 8, 8, T, 64, torch.bfloat16)
            real = torch.ones(1, T, dtype=torch.bool, device=GPU)
            real[:, :100] = False
            mask = {
                "causal": causal(),
                "causal+padding": causal() & padding(real),
                "causal+window": causal() & window(512),
            }[name]
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            attend(q, k, v, mask, kernel="fused").sum().backward()
            found[f"{name} T={T}, MB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
            del q, k, v
    return found


def train_gpt2() -> dict[str, float]:
    """GPT-2 124M, T 1,024, batch 32, bf16 autocast, fused AdamW, compiled: tokens a second and peak GB."""
    torch._dynamo.reset()
    torch.set_float32_matmul_precision("high")
    model = build(preset("gpt2", vocab_size=50_304), device=GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step_loss = torch.compile(
        lambda tokens: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    )
    tokens = torch.randint(0, 50_257, (32, 1025), device=GPU)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = step_loss(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - start
    ms = median_ms(step)
    return {
        "tokens/s": 32 * 1024 / ms * 1000,
        "peak GB": torch.cuda.max_memory_allocated() / 2**30,
        "first step s": compile_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the figures to this JSON file")
    parser.add_argument("parts", nargs="*", help="which parts to run (default: all)")
    args = parser.parse_args()
    results: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(results["device"], results["torch"])
    for part in (kernels_agree, speeds, memory, families_compile, train_gpt2):
        if args.parts and part.__name__ not in args.parts:
            continue
        print(f"\n{part.__name__}: {(part.__doc__ or '').strip()}", flush=True)
        try:
            figures = part()
        except Exception as error:  # the other parts still have something to say
            figures = {"failed": f"{type(error).__name__}: {str(error)[:600]}"}
        results[part.__name__] = figures
        for name, value in figures.items():
            print(f"  {name:48} {value if isinstance(value, str) else f'{value:.4g}'}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
