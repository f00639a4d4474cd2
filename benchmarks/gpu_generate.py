"""Writing on one CUDA GPU: the work of docs/generation.md's table, ours and, with --peers, Hugging Face transformers beside it.

    python3 benchmarks/gpu_generate.py [names ...] [--peers] [--out results.json] [--rounds 3]

Random weights, bfloat16, greedy, no end: every text has all its tokens. Figures are new tokens a second, prompts included in the
time, medians of the rounds after one that warms up (which records CUDA graphs and compiles kernels). `--check` compares the ids
of a small model with those on the CPU first.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from clearhead.config import Config, Generation
from clearhead.families import preset
from clearhead.generation import Engine, Request, generate, translate
from clearhead.models import Decoder, EncoderDecoder, build

GPU = torch.device("cuda")
B1 = dict(n_layers=22, d_model=2048, n_heads=32, n_kv_heads=4, d_ff=5632, vocab_size=32_000)
SHAPES: dict[str, Callable[[], Config]] = {
    "7b": lambda: preset("llama-2-7b"),
    "1b": lambda: preset("llama-2-7b", **B1),
    "gpt2": lambda: preset("gpt2"),
    "base": lambda: preset("transformer-base", vocab_size=32_000, norm_first=False),
}
# name: model, batch, prompt or source, new tokens, beams
WORK: dict[str, tuple[str, int, tuple[int, int], int, int]] = {
    "7b, batch 1": ("7b", 1, (32, 32), 256, 1),
    "gpt2, batch 1": ("gpt2", 1, (32, 32), 128, 1),
    "gpt2, batch 64": ("gpt2", 64, (32, 32), 128, 1),
    "7b, 256 requests": ("7b", 256, (16, 512), 256, 1),
    "1b, 256 requests": ("1b", 256, (16, 512), 256, 1),
    "base, batch 1, greedy": ("base", 1, (32, 32), 32, 1),
    "base, batch 1, beam 4": ("base", 1, (32, 32), 32, 4),
    "base, batch 256, greedy": ("base", 256, (32, 32), 32, 1),
    "base, batch 256, beam 4": ("base", 256, (32, 32), 32, 4),
}


def prompts(work: str, vocab_size: int) -> list[list[int]]:
    _, batch, (low, high), _, _ = WORK[work]
    draw = random.Random(0)
    return [[draw.randrange(5, vocab_size) for _ in range(draw.randint(low, high))] for _ in range(batch)]


def make(name: str) -> Any:
    model = build(SHAPES[name](), device=GPU, dtype=torch.bfloat16).eval()
    model.generation = Generation(bos=1, decoder_start=1)
    return model


def measure(run: Callable[[], object], n_tokens: int, rounds: int) -> float:
    run()
    seconds: list[float] = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return n_tokens / statistics.median(seconds)


def ours(model: Any, work: str, rounds: int) -> float:
    _, batch, _, new, beams = WORK[work]
    texts = prompts(work, model.config.vocab_size)
    if isinstance(model, EncoderDecoder):
        options: dict[str, Any] = dict(beams=beams, max_new_tokens=new, eos=(), batch_tokens=1 << 18)
        return measure(lambda: translate(model, texts, **options), batch * new, rounds)
    tokens = sum(len(text) + new + 16 for text in texts)
    engine = Engine(model, max_tokens=tokens, max_rows=batch, prefixes=False)

    def run() -> None:
        for text in texts:
            engine.submit(Request(prompt=text, max_new_tokens=new, eos=()))
        engine.run()

    return measure(run, batch * new, rounds)


def profile(model: Any, work: str) -> None:
    """Where the time of one run goes, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    ours(model, work, 1)
    with watch(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        ours(model, work, 1)
    print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=18, max_name_column_width=60))


def check() -> None:
    """A small model of each kind writes on the GPU what it writes on the CPU, in float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    small: dict[str, Any] = dict(n_layers=3, d_model=128, n_heads=4, vocab_size=500)
    for name in ("gpt2", "llama-2-7b", "mistral-7b", "transformer-base", "t5-small"):
        changes = dict(small, d_ff=256, max_len=256)
        if name != "gpt2":
            changes["d_head"] = 32
        if name in ("llama-2-7b", "mistral-7b"):
            changes["n_kv_heads"] = 2
        if name == "mistral-7b":
            changes["window"] = 24
        model: Any = build(preset(name, **changes, init_std=0.3)).eval()
        model.generation = Generation(bos=1, decoder_start=1)
        texts = [[random.Random(i).randrange(5, 500) for _ in range(3 + 7 * i)] for i in range(9)]
        plain: dict[str, Any] = dict(max_new_tokens=40, eos=7)
        if isinstance(model, Decoder):
            ways: list[dict[str, Any]] = [{}, dict(temperature=0.9, top_p=0.9)]
            ways.append(dict(repetition_penalty=1.3, no_repeat_ngram=2))
        else:
            ways = [dict(beams=k) for k in (1, 2, 4)]
        write: Any = generate if isinstance(model, Decoder) else translate
        tries = [partial(write, model, texts, **plain, **way) for way in ways]
        wanted = [one() for one in tries]
        model.to(GPU)
        found = [one() for one in tries]
        again = [one() for one in tries]
        same = [sum(a == b for a, b in zip(x, y, strict=True)) for x, y in zip(wanted, found, strict=True)]  # type: ignore[call-overload]
        print(f"check {name}: {same} of {len(texts)} texts as on the CPU; repeated alike: {found == again}", flush=True)


def peers(work: str, rounds: int) -> dict[str, float]:
    """transformers' generate on a model of the same shape, with a static cache and compiled, and as it comes."""
    import transformers as tr

    name, batch, _, new, beams = WORK[work]
    config = SHAPES[name]()
    common: dict[str, Any] = dict(vocab_size=config.vocab_size)
    with torch.device(GPU):
        torch.set_default_dtype(torch.bfloat16)
        if name == "gpt2":
            model: Any = tr.GPT2LMHeadModel(tr.GPT2Config(**common))
        elif name == "base":
            sizes = dict(d_model=512, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=2048, decoder_ffn_dim=2048)
            sizes |= dict(encoder_attention_heads=8, decoder_attention_heads=8, max_position_embeddings=512)
            model = tr.MarianMTModel(tr.MarianConfig(**common, **sizes, pad_token_id=0, decoder_start_token_id=1))
        else:
            sizes = dict(hidden_size=config.d_model, num_hidden_layers=config.n_layers, intermediate_size=config.d_ff)
            sizes |= dict(num_attention_heads=config.n_heads, num_key_value_heads=config.n_kv_heads)
            model = tr.LlamaForCausalLM(tr.LlamaConfig(**common, **sizes))
        torch.set_default_dtype(torch.float32)
    model.eval()
    texts = prompts(work, config.vocab_size)
    options: dict[str, Any] = dict(
        max_new_tokens=new, min_new_tokens=new, num_beams=beams, do_sample=False, pad_token_id=0
    )
    if len({len(text) for text in texts}) > 1:
        model.set_attn_implementation("paged|sdpa")
        said = tr.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        return {"transformers continuous": measure(lambda: model.generate_batch(texts, said), batch * new, 1)}
    ids = torch.tensor(texts, device=GPU)
    return {"transformers dynamic": measure(lambda: model.generate(ids, **options), batch * new, rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    chosen = [work for work in WORK if not given.names or any(work.startswith(name) for name in given.names)]
    if given.check:
        check()
    results: dict[str, dict[str, float]] = {}
    model: Any = None
    held = ""
    for work in chosen:
        began = time.perf_counter()
        if WORK[work][0] != held:
            model = None
            torch.cuda.empty_cache()
            held = WORK[work][0]
            model = make(held)
        if given.profile:
            profile(model, work)
            continue
        results[work] = {"clearhead": ours(model, work, given.rounds)}
        if given.peers:
            results[work] |= peers(work, given.rounds)
        line = ", ".join(f"{name} {figure:,.0f}" for name, figure in results[work].items())
        print(f"{work}: {line} tokens/s ({time.perf_counter() - began:.0f} s)", flush=True)
        if given.out:
            facts = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, tokens_per_second=results)
            given.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
