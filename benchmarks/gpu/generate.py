"""Writing on one CUDA GPU: the work of docs/generation.md's table, ours and, with --peers, Hugging Face transformers beside it.

    python3 benchmarks/gpu/generate.py [names ...] [--peers] [--out results.json] [--rounds 3] [--check] [--profile]

Random weights, bfloat16, greedy, no end: every text has all its tokens. Figures are new tokens a second, prompts included in the
time, medians of the rounds after one that warms up (which records CUDA graphs and compiles kernels). `--check` compares the ids
of a small model with those on the CPU first, `--profile` says where the time goes.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from clearhead.config import Config, Generation
from clearhead.families import preset
from clearhead.generation import Engine, Request, generate, translate
from clearhead.models import Decoder, EncoderDecoder, build

GPU = torch.device("cuda")
PEER_SECONDS, PEER_TOKENS = 60, 64
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


def engine_for(model: Any, work: str) -> tuple[Engine, list[Request]]:
    """An engine with room for all of a work's requests, and those."""
    _, batch, _, new, beams = WORK[work]
    texts = prompts(work, model.config.vocab_size)
    common: dict[str, Any] = dict(max_new_tokens=new, eos=(), beams=beams)
    if isinstance(model, EncoderDecoder):
        requests = [Request(source=text, **common) for text in texts]
    else:
        requests = [Request(prompt=text, **common) for text in texts]
    tokens = sum(len(text) + beams * (new + 32) for text in texts)
    return Engine(model, max_tokens=tokens, max_rows=batch * beams, prefixes=False), requests


def write(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        engine.submit(request)
    engine.run()


def ours(model: Any, work: str, rounds: int) -> float:
    _, batch, _, new, beams = WORK[work]
    if isinstance(model, EncoderDecoder):
        texts = prompts(work, model.config.vocab_size)
        options: dict[str, Any] = dict(beams=beams, max_new_tokens=new, eos=(), batch_tokens=1 << 18)
        return measure(lambda: translate(model, texts, **options), batch * new, rounds)
    engine, requests = engine_for(model, work)
    return measure(lambda: write(engine, requests), batch * new, rounds)


def profile(model: Any, work: str) -> None:
    """Where the time of one run goes: the CPU's by the engine's parts, the GPU's alone, the CPU's alone, and by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    def milliseconds(run: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    engine, requests = engine_for(model, work)
    write(engine, requests)
    runner: Any = engine.runner
    spent: dict[str, float] = {}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {"prefill": [], "decode": []}

    def timed(holder: Any, name: str) -> None:
        inner = getattr(holder, name)

        def outer(*args: Any, **options: Any) -> Any:
            between = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start = time.perf_counter()
            if name in events:
                between[0].record()
            result = inner(*args, **options)
            if name in events:
                between[1].record()
                events[name].append(between)
            spent[name] = spent.get(name, 0.0) + 1e3 * (time.perf_counter() - start)
            return result

        setattr(holder, name, outer)

    for name in ("submit", "_prefill", "_start", "_decode", "_launch", "_receive", "_sweep"):
        timed(engine, name)
    for name in events:
        timed(runner, name)
    whole = milliseconds(lambda: write(engine, requests))
    print(f"{work}: {whole:.1f} ms")
    print("  CPU ms in: " + ", ".join(f"{name} {ms:.1f}" for name, ms in spent.items()), flush=True)
    for name, pairs in events.items():
        ms = [start.elapsed_time(end) for start, end in pairs]
        print(f"  GPU in {name}: {len(ms)} times, {sum(ms):.1f} ms, median {statistics.median(ms):.3f}", flush=True)

    for size, (graph, *_) in runner.graphs.graphs.items():
        ms = milliseconds(lambda graph=graph: [graph.replay() for _ in range(30)]) / 30
        print(f"  GPU alone, step of {size}: {ms:.3f} ms", flush=True)

    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        write(engine, requests)
    print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=24, max_name_column_width=70)[:9000])

    class Nothing:
        def replay(self) -> None: ...

    for size, (_, *rest) in list(runner.graphs.graphs.items()):
        runner.graphs.graphs[size] = (Nothing(), *rest)
    ms = milliseconds(lambda: write(engine, requests))
    print(f"  CPU alone, reading included: {ms:.1f} ms", flush=True)


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


def their_model(name: str) -> Any:
    """transformers' model of the same shape."""
    import transformers as tr

    config = SHAPES[name]()
    common: dict[str, Any] = dict(vocab_size=config.vocab_size)
    sizes: dict[str, Any]
    torch.set_default_dtype(torch.bfloat16)
    try:
        with GPU:
            if name == "gpt2":
                model: Any = tr.GPT2LMHeadModel(tr.GPT2Config(**common))
            elif name == "base":
                sizes = dict(d_model=512, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=2048)
                sizes |= dict(decoder_ffn_dim=2048, encoder_attention_heads=8, decoder_attention_heads=8)
                sizes |= dict(max_position_embeddings=512, pad_token_id=0, decoder_start_token_id=1)
                model = tr.MarianMTModel(tr.MarianConfig(**common, **sizes))
            else:
                sizes = dict(hidden_size=config.d_model, num_hidden_layers=config.n_layers)
                sizes |= dict(num_attention_heads=config.n_heads, num_key_value_heads=config.n_kv_heads)
                model = tr.LlamaForCausalLM(tr.LlamaConfig(**common, **sizes, intermediate_size=config.d_ff))
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval()


def peers(model: Any, work: str, rounds: int) -> dict[str, float]:
    """transformers' generate as it comes; of decoders also with a static cache, compiled, or its continuous batching.

    What takes longer than PEER_SECONDS is left out. Continuous batching writes PEER_TOKENS a request: its rate is about the
    same at any length, and it is slow.
    """
    import transformers as tr

    name, batch, _, new, beams = WORK[work]
    texts = prompts(work, SHAPES[name]().vocab_size)
    options: dict[str, Any] = dict(max_new_tokens=new, min_new_tokens=new, num_beams=beams, do_sample=False)
    if len({len(text) for text in texts}) > 1:
        said = tr.GenerationConfig(max_new_tokens=PEER_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
        model.set_attn_implementation("paged|sdpa")
        start = time.perf_counter()
        with at_most(PEER_SECONDS):
            model.generate_batch(texts, said)
            return {"transformers continuous": batch * PEER_TOKENS / (time.perf_counter() - start)}
        return {}
    ids = torch.tensor(texts, device=GPU)
    options |= dict(pad_token_id=0, attention_mask=torch.ones_like(ids))
    found: dict[str, float] = {}
    for way, more in {"dynamic": {}, "static": dict(cache_implementation="static")}.items():
        if way == "dynamic" or name != "base":
            with at_most(PEER_SECONDS):
                run = partial(model.generate, ids, **options, **more)
                found[f"transformers {way}"] = measure(run, batch * new, rounds if name != "7b" else 1)
    return found


@contextmanager
def at_most(seconds: int) -> Generator[None, None, None]:
    """What takes longer, or fails, is told and left out."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    except Exception as error:
        print(f"  not measured: {type(error).__name__}: {str(error)[:200]}", flush=True)
    finally:
        signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--only-peers", action="store_true", help="not ours; results join those in --out")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("generate.py needs a CUDA GPU, and torch sees none here; cpu/decode.py measures the CPU")
    chosen = [work for work in WORK if not given.names or any(work.startswith(name) for name in given.names)]
    if given.check:
        check()
    results: dict[str, dict[str, float]] = {}
    if given.out and given.out.exists():
        results = json.loads(given.out.read_text())["tokens_per_second"]
    for name in dict.fromkeys(WORK[work][0] for work in chosen):
        works = [work for work in chosen if WORK[work][0] == name]
        for whose in ("clearhead", "transformers"):
            if given.only_peers if whose == "clearhead" else not (given.peers or given.only_peers):
                continue
            model = make(name) if whose == "clearhead" else their_model(name)
            for work in works:
                if given.profile:
                    profile(model, work)
                    continue
                begun = time.perf_counter()
                new = (
                    {whose: ours(model, work, given.rounds)}
                    if whose == "clearhead"
                    else peers(model, work, given.rounds)
                )
                results[work] = results.get(work, {}) | new
                line = ", ".join(f"{who} {figure:,.0f}" for who, figure in new.items())
                print(f"{work}: {line} tokens/s ({time.perf_counter() - begun:.0f} s)", flush=True)
                if given.out:
                    facts = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, tokens_per_second=results)
                    given.out.write_text(json.dumps(facts, indent=2) + "\n")
            del model
            gc.collect()  # an engine and its recordings know each other
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
