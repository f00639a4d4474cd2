"""From nothing to the first token: a fresh process imports, loads GPT-2 124M (float32, 500 MB) and writes one token after 32.

    .venv-bench/bin/python benchmarks/cpu/first_token.py              a table, and results/first_token.json
    .venv-bench/bin/python benchmarks/cpu/first_token.py --shared     others use this computer too: one thread, CPU time

The models are random, made once and kept in --folder; every file is read once before anything is timed, so that it comes from the
page cache for all. Processes run in turns, and all must write the same token.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise

IDS = [(7919 * place) % 50_000 for place in range(1, 33)]
PROMPT = " ".join(f"t{id}" for id in IDS)
PHASES = ("import", "load", "token")


def clearhead(folder: str) -> tuple[Callable[[], object], Callable[[object], int]]:
    import clearhead as ch

    load, generate = ch.load, ch.generate  # looked up when first used: this is their import

    def first(model: object) -> int:
        return generate(model, [IDS], max_new_tokens=1, eos=())[0][0]  # type: ignore[call-overload]

    return lambda: load(folder), first


def ctranslate2(folder: str) -> tuple[Callable[[], object], Callable[[object], int]]:
    import ctranslate2  # pyright: ignore[reportMissingImports]

    threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count()

    def first(model: object) -> int:
        found = model.generate_batch(  # type: ignore[attr-defined]
            [PROMPT.split()], max_length=1, min_length=1, include_prompt_in_result=False, sampling_topk=1, end_token=[]
        )
        return found[0].sequences_ids[0][0]

    return lambda: ctranslate2.Generator(folder, intra_threads=threads, compute_type="float32"), first


def transformers(folder: str) -> tuple[Callable[[], object], Callable[[object], int]]:
    import torch
    from transformers import GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()

    def first(model: object) -> int:
        found = model.generate(torch.tensor([IDS]), max_new_tokens=1, do_sample=False, pad_token_id=0)  # type: ignore[attr-defined]
        return int(found[0, -1])

    return lambda: GPT2LMHeadModel.from_pretrained(folder), first


def torch(_: str) -> tuple[Callable[[], object], Callable[[object], int]]:
    """What nobody who computes with torch can be faster than."""
    import torch as _torch  # noqa: F401

    return lambda: None, lambda _: -1


CHILDREN = {each.__name__: each for each in (clearhead, ctranslate2, transformers, torch)}
CONTENDERS = {  # what runs, and the folder it reads
    "clearhead": ("clearhead", "hf"),
    "clearhead, its own files": ("clearhead", "ours"),
    "clearhead generate": ("", "text"),
    "CTranslate2": ("ctranslate2", "ct2"),
    "transformers": ("transformers", "hf"),
    "import torch, and nothing else": ("torch", "hf"),
}


def child(name: str, folder: str) -> None:
    """One contender, in a process of its own; it says when each phase was over."""
    load, first = CHILDREN[name](folder)
    stamps = [(time.monotonic(), time.process_time())]
    model = load()
    stamps.append((time.monotonic(), time.process_time()))
    token = first(model)
    print(token, flush=True)
    stamps.append((time.monotonic(), time.process_time()))
    print(*(f"{wall} {cpu}" for wall, cpu in stamps), flush=True)
    os._exit(0)  # the first token is there; how long leaving takes is another question


def main() -> None:
    import argparse
    import json
    import statistics
    import tempfile
    from pathlib import Path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shared", action="store_true", help="others use this computer too: one thread, CPU time")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "clearhead-first-token")
    args = parser.parse_args()
    if not args.folder.is_dir():
        make(args.folder)
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled; here the first round does it
    if args.shared:
        environment["OMP_NUM_THREADS"] = "1"
    times: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    tokens: dict[str, int] = {}
    for round_ in range(-1, args.rounds):  # the first one reads the files in, and is not counted
        first = round_ % len(CONTENDERS)
        for name in (*list(CONTENDERS)[first:], *list(CONTENDERS)[:first]):
            kind, place = CONTENDERS[name]
            run = run_child if kind else run_command
            stamps, token = run(kind, str(args.folder / place), environment, args.shared)
            if token >= 0:
                tokens[name] = token
            if round_ >= 0:
                times[name].append(stamps)
    if len(set(tokens.values())) > 1:
        raise SystemExit(f"they do not write the same token: {tokens}")
    from rich.console import Console

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from benchmarks.common.results import Table, save

    def middle(name: str, phase: int | None = None) -> float:
        each = (sum(stamps) if phase is None else stamps[phase] for stamps in times[name])
        return statistics.median(each)

    rows: list[list[str]] = []
    for name in CONTENDERS:
        phases = [f"{middle(name, at):.2f}" for at in range(len(PHASES))] if CONTENDERS[name][0] else ["", "", ""]
        after = statistics.median(sum(stamps[1:]) for stamps in times[name])
        rows.append([name, *phases, f"{after:.2f}" if CONTENDERS[name][0] else "", f"{middle(name):.2f}"])
    table = Table(
        title="from nothing to the first token, seconds",
        columns=["", *PHASES, "load + token", "in all"],
        rows=rows,
        note=f"GPT-2 124M, float32, 32 tokens read; medians of {args.rounds} fresh processes in turns"
        + (", one thread, CPU time" if args.shared else ""),
        raw={"times": times, "tokens": tokens},
    )
    table.show(Console())
    save("first_token", [table], seconds=sum(sum(map(sum, each)) for each in times.values()))
    print(json.dumps({name: round(middle(name) / middle("CTranslate2"), 2) for name in CONTENDERS}), "x CTranslate2's")


def run_child(name: str, folder: str, environment: dict[str, str], shared: bool) -> tuple[list[float], int]:
    import subprocess

    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, "child", name, folder], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    token, stamps = done.stdout.splitlines()
    numbers = list(map(float, stamps.split()))
    ends = [0.0, *numbers[1::2]] if shared else [start, *numbers[::2]]
    return [after - before for before, after in pairwise(ends)], int(token)


def run_command(_: str, folder: str, environment: dict[str, str], shared: bool) -> tuple[list[float], int]:
    """`clearhead generate`, until it shows more than its prompt."""
    import subprocess

    command = [sys.executable, "-m", "clearhead", "generate", folder, PROMPT, "-n", "1", "--temperature", "0"]
    start = time.monotonic()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        seen = process.stdout.read(len(PROMPT) + 1)
        seconds = cpu_time(process.pid) if shared else time.monotonic() - start
        seen += process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    token = seen.decode().removeprefix(PROMPT).strip().removeprefix("t")
    return [seconds, 0.0, 0.0], int(token)


def cpu_time(process: int) -> float:
    """Of a process that is still there, to a hundredth of a second; Linux only."""
    with open(f"/proc/{process}/stat") as stat:
        user, system = stat.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def make(folder: object) -> None:
    """The same random GPT-2 as each of them keeps it, and for the command a tokenizer, whose words are numbers."""
    import shutil
    from pathlib import Path

    import ctranslate2.converters.transformers as converters  # pyright: ignore[reportMissingImports]
    import tokenizers
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import clearhead as ch

    assert isinstance(folder, Path)
    work = folder.with_name(folder.name + ".new")
    shutil.rmtree(work, ignore_errors=True)
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config()).eval()
    theirs.save_pretrained(work / "hf")
    ours = ch.load(work / "hf")
    ch.save(ours, work / "ours")
    shutil.copytree(work / "hf", work / "text")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"t{id}": id for id in range(50_257)}, unk_token="t50256")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    words.save(str(work / "text" / "tokenizer.json"))
    spec = converters.GPT2Loader().get_model_spec(theirs)
    spec.register_vocabulary([f"t{id}" for id in range(theirs.config.vocab_size)])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "t50256"
    spec.validate()
    spec.optimize(quantization=None)
    (work / "ct2").mkdir()
    spec.save(str(work / "ct2"))
    work.rename(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    else:
        main()
