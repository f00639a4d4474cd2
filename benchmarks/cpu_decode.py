"""What a few rows cost on the CPU: each kernel's reading speed beside torch's, and tokens a second of GPT-2 beside other programs.

    .venv-bench/bin/python benchmarks/cpu_decode.py                 kernels, then GPT-2 (124M, random weights)
    .venv-bench/bin/python benchmarks/cpu_decode.py --kernels       kernels alone
    .venv-bench/bin/python benchmarks/cpu_decode.py --rounds 9

Contenders run in turns; GB/s counts the bytes that the weights are stored in.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import how_timed, interleave
from torch import Tensor

import clearhead as ch
from clearhead.layers import native
from clearhead.layers.quantized import Int4, Int8, quantize

SHAPES = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]  # of GPT-2's blocks
LAYERS = 12


def kernels(rounds: int, shared: bool) -> None:
    weights = [torch.randn(n, d) for _ in range(LAYERS) for n, d in SHAPES]
    packed = {kind.kind: [kind(weight) for weight in weights] for kind in (Int8, Int4)}
    fbgemm = [torch.ao.nn.quantized.dynamic.Linear.from_float(_with_config(weight)) for weight in weights]
    sizes = {
        "ours fp32": sum(w.nbytes for w in weights),
        "ours int8": sum(t.nbytes for p in packed["int8"] for t in (p.q, p.scales)),
        "ours int4": sum(t.nbytes for p in packed["int4"] for t in (p.q, p.scales, p.mins)),
        "torch fp32": sum(w.nbytes for w in weights),
        "torch int8 (fbgemm, dynamic)": sum(w.numel() for w in weights),
    }
    print(f"GPT-2's 48 matrices, {torch.get_num_threads()} threads; native: {native.why_not() or 'yes'}")
    for rows in (1, 2, 4, 8, 16, 32, 64, 128):
        inputs = [torch.randn(rows, d) for _ in range(LAYERS) for _, d in SHAPES]
        contenders = {
            "ours fp32": _each(lambda x, i: native.linear(x, weights[i], None), inputs),
            "torch fp32": _each(lambda x, i: F.linear(x, weights[i]), inputs),
            "ours int8": _each(lambda x, i: packed["int8"][i].product(x, None), inputs),
            "torch int8 (fbgemm, dynamic)": _each(lambda x, i: fbgemm[i](x), inputs),
            "ours int4": _each(lambda x, i: packed["int4"][i].product(x, None), inputs),
        }
        times = interleave(contenders, rounds=rounds, shared=shared)
        for name in contenders:
            middle, best = statistics.median(times[name]), min(times[name])
            print(
                f"{rows:4} rows  {name:30} {middle * 1e3:8.2f} ms (best {best * 1e3:7.2f})  "
                f"{sizes[name] / middle / 1e9:6.1f} GB/s (best {sizes[name] / best / 1e9:5.1f})"
            )


def gpt2(rounds: int, shared: bool) -> None:
    """32 tokens read, 128 written, one text; the same random weights everywhere."""
    from transformers import GPT2Config, GPT2LMHeadModel

    prompt, new = torch.randint(0, 50257, (32,), generator=torch.Generator().manual_seed(0)), 128
    theirs = GPT2LMHeadModel(GPT2Config()).eval()
    theirs.generation_config.pad_token_id = theirs.generation_config.eos_token_id = None
    contenders: dict[str, Callable[[], object]] = {
        "transformers fp32": lambda: theirs.generate(prompt[None], max_new_tokens=new, do_sample=False)
    }
    for kind in ("fp32", "int8", "int4"):
        model = ch.build(ch.preset("gpt2"), seed=0).eval()
        if kind != "fp32":
            quantize(model, kind)
        contenders[f"clearhead {kind}"] = functools.partial(
            ch.generate, model, [prompt.tolist()], max_new_tokens=new, eos=()
        )
    times = interleave(contenders, rounds=rounds, shared=shared)
    print(f"GPT-2 124M, batch 1, 32 + {new} tokens, {torch.get_num_threads()} threads, {how_timed(rounds, shared)}")
    for name in contenders:
        print(f"{name:20} {new / statistics.median(times[name]):7.1f} tokens/s (best {new / min(times[name]):6.1f})")


def _each(call: Callable[[Tensor, int], Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    def run() -> None:
        for i, x in enumerate(inputs):
            call(x, i)

    return run


def _with_config(weight: Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    layer.qconfig = torch.ao.quantization.default_dynamic_qconfig  # type: ignore[assignment]
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kernels", action="store_true", help="leave GPT-2 out")
    parser.add_argument("--shared", action="store_true", help="others use this computer too: one thread, CPU time")
    args = parser.parse_args()
    if args.shared:
        torch.set_num_threads(1)
    with torch.inference_mode():
        kernels(args.rounds, args.shared)
        if not args.kernels:
            gpt2(args.rounds, args.shared)


if __name__ == "__main__":
    main()
