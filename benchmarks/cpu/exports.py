"""Exports of your models: verified as `clearhead export` does it, and timed beside our own, in turns, in processor time.

    python benchmarks/cpu/exports.py runs/dates-1 runs/digits-1 MODEL      every format that holds the model
    python benchmarks/cpu/exports.py MODEL --to gguf onnx                  these formats only

A decoder or an encoder-decoder writes 12 greedy tokens after each of three prompts; ours by the engine. An encoder computes three
rows. One thread each; the fastest of five rounds. A format that refuses the model is named with its reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import clearhead as ch
from clearhead.cli.export import find_tokenizer
from clearhead.errors import ClearheadError
from clearhead.exports import ctranslate2_export, executorch_export, export, gguf_export, hugging_face, onnx_export
from clearhead.exports.verification import LENGTH, Verification
from clearhead.laws.decoding_laws import NEW, prompts_of
from clearhead.laws.subject import ROWS, make_subject
from clearhead.models import Encoder

FORMATS = [
    ("hf", None),
    ("gguf", "F32"),
    ("gguf", "Q8_0"),
    ("gguf", "Q4_0"),
    ("ctranslate2", "float32"),
    ("ctranslate2", "int8"),
]
FORMATS += [("onnx", "float32"), ("onnx", "int8"), ("executorch", "float32")]
MODULES: list[Any] = [ctranslate2_export, executorch_export, gguf_export, hugging_face, onnx_export]
ROUNDS = 5


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def in_turns(model: Any, runtime: Any) -> tuple[float, float]:
    """The fastest round there, and here."""
    subject = make_subject(model, length=LENGTH)
    if isinstance(model, Encoder):
        there, here = lambda: runtime.outputs(subject.args), lambda: model(*subject.args)
    else:
        prompts = prompts_of(subject)
        sources = [[x[row : row + 1] for x in subject.source] for row in range(ROWS)]

        def there() -> None:
            for source, prompt in zip(sources, prompts, strict=True):
                runtime.write(source, prompt, NEW)

        def here() -> None:
            for source, prompt in zip(sources, prompts, strict=True):
                write_ours(model, source, prompt)

    with torch.no_grad():
        times = [(seconds(there), seconds(here)) for _ in range(ROUNDS)]
    return min(t for t, _ in times), min(h for _, h in times)


def write_ours(model: Any, source: Sequence[torch.Tensor], prompt: list[int]) -> None:
    if source:
        ch.translate(model, [source[0][0].tolist()], beams=1, max_new_tokens=NEW, eos=())
    else:
        ch.generate(model, [prompt], max_new_tokens=NEW, temperature=0, eos=())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--to", nargs="+", choices=sorted({to for to, _ in FORMATS}), default=[to for to, _ in FORMATS])
    args = parser.parse_args()
    torch.set_num_threads(1)
    times: list[tuple[float, float]] = []

    def timed(compare: Callable[..., Verification]) -> Callable[..., Verification]:
        def run(model: Any, runtime: Any, *more: Any, **options: Any) -> Verification:
            found = compare(model, runtime, *more, **options)
            times.append(in_turns(model.float().eval(), runtime))
            return found

        return run

    for module in MODULES:
        module.compare = timed(module.compare)
    ctranslate2_export.verify_translator = timed(ctranslate2_export.verify_translator)
    print("model | format | program | greedy tokens equal | largest difference | MB | there, here (s) | there / here")
    for path in map(Path, args.models):
        for to, kind in FORMATS:
            if to not in args.to:
                continue
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = export(
                        ch.load(path), Path(folder) / "out", to=to, type=kind, tokenizer=find_tokenizer(path)
                    )
                except ClearheadError as error:
                    print(f"{path.name} | {to} {kind or ''} | refused: {error!s:.300}", flush=True)
                    continue
            assert found is not None
            there, here = times.pop()
            tokens = f"{found.n_equal} of {found.n_tokens}" if found.n_tokens else "-"
            print(
                f"{path.name} | {to} {kind or ''} | {found.runtime} | {tokens} | {found.error:.1e} | {found.nbytes / 1e6:.2f} | "
                f"{there:.4f}, {here:.4f} | {there / here:.2f}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
