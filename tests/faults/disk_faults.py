"""Every call that changes the disk fails once, in turn, or kills the process: afterwards there is the old state or the new one.

.venv/bin/python -m tests.faults.disk_faults                        # all calls of all operations: minutes
.venv/bin/python -m tests.faults.disk_faults --trials 12 --seed 3   # some calls of each, drawn from this seed
.venv/bin/python -m tests.faults.disk_faults --kills 100             # also SIGKILL at so many random times

Operations: a model saved over another, in our layout and in Hugging Face's, also in several files; a model loaded; one exported; a
checkpoint of a run written; a whole run, from its data to its result. Faults: ENOSPC once, EIO from that call on, SIGKILL. After a
save or a checkpoint the folder holds the old state or the new one, the new one if the operation said that it succeeded; the next
save clears what is left. An export is whole or not there. After a run that failed, resuming it ends with the bytes of a run that
was left alone. An operation that fails says so in one line.

The calls are counted in the C library, by failing_calls.c, which needs a C compiler. Each trial is a forked process.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import clearhead as ch
from clearhead.checkpoint import load, save
from clearhead.checkpoint import saving as saving_module
from clearhead.checkpoint.run_checkpoint import describe
from clearhead.errors import ClearheadError
from clearhead.exports import export
from clearhead.training import train
from clearhead.training.checkpoints import Checkpoints, State
from clearhead.training.distributed import Processes
from tests.training.tiny_runs import make_recipe, metrics, weights

SOURCE = Path(__file__).with_name("failing_calls.c")
FAULTS = {"ENOSPC": (errno.ENOSPC, False), "EIO, and all after it": (errno.EIO, True), "SIGKILL": (0, False)}
DONE, REFUSED, BROKEN, NOT_REACHED = 0, 3, 4, 5  # how a trial's process ends


@dataclass(frozen=True)
class Operation:
    """`prepare` makes the folder before a trial, `run` is what fails, `check` looks at what is left, told if `run` succeeded."""

    name: str
    prepare: Callable[[Path], None]
    run: Callable[[Path], object]
    check: Callable[[Path, bool], None]


def tiny_model(seed: int, n_layers: int = 1) -> Any:
    return ch.build(
        ch.preset("gpt2", n_layers=n_layers, d_model=12, n_heads=3, d_ff=20, vocab_size=31, max_len=17), seed=seed
    )


OLD, NEW, LAST = tiny_model(0), tiny_model(1, 2), tiny_model(2, 3)
LLAMA = ch.build(ch.preset("llama-7b", n_layers=1, d_model=12, n_heads=3, d_ff=20, vocab_size=262, max_len=17), seed=0)


def same(a: Any, b: Any) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def saving(format: Any, shard_bytes: int) -> Operation:
    def check(folder: Path, is_done: bool) -> None:
        found = load(folder)
        assert same(found, NEW) or (same(found, OLD) and not is_done), "neither the old model nor the new one"
        save(LAST, folder)  # goes on from whatever is left, and clears it away
        assert same(load(folder), LAST)
        assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]

    options: Any = dict(format=format, shard_bytes=shard_bytes)
    name = f"save, {format}" + (", several files" if shard_bytes < 2**20 else "")
    return Operation(
        name, lambda folder: save(OLD, folder) and None, lambda folder: save(NEW, folder, **options), check
    )


def loading() -> Operation:
    def run(folder: Path) -> None:
        assert same(load(folder), OLD)

    return Operation("load", lambda folder: save(OLD, folder) and None, run, lambda folder, _: run(folder))


def exporting(to: str, type: str, model: Any) -> Operation:
    """Without verification, which only reads. The next export, of the same name, clears away what a killed one left."""
    words = ch.train_tokenizer(texts=["ab cd"], kind="bpe", vocab_size=262)

    def run(folder: Path) -> None:
        export(model, folder / "out", to=to, type=type, tokenizer=words, verify=False)

    def check(folder: Path, is_done: bool) -> None:
        out = folder / "out"
        if out.exists():
            assert same(load(out), model), "half an export"
            _ = shutil.rmtree(out) if out.is_dir() else out.unlink()
        else:
            assert not is_done, "no export is left"
        run(folder)
        assert [path.name for path in folder.iterdir()] == ["out"], "something is left"

    return Operation(f"export, {to}", lambda folder: folder.mkdir(), run, check)


def checkpointing() -> Operation:
    tensors = [{f"model.{name}": p.detach() for name, p in tiny_model(seed).named_parameters()} for seed in (0, 1, 2)]

    def checkpoints(folder: Path) -> Checkpoints:
        return Checkpoints(folder, Processes(torch.device("cpu")), describes=describe(OLD), note=lambda _: None)

    def write(folder: Path, at: int) -> None:
        checkpoints(folder).write(State(step=at + 1), tensors[at])

    def check(folder: Path, is_done: bool) -> None:
        found = checkpoints(folder).newest()
        assert found is not None, "no checkpoint is left"
        at = found[1].step - 1
        assert at == 1 or (at == 0 and not is_done), f"the newest is of step {at + 1}"
        into = {name: torch.empty_like(tensor) for name, tensor in tensors[0].items()}
        checkpoints(folder).read(found[0], into)
        assert all(torch.equal(into[name], tensors[at][name]) for name in into), "neither the old one nor the new one"
        write(folder, 2)
        assert [path.name for path in sorted(folder.iterdir())][-1] == "step-00000003"
        assert not list(folder.glob(".*")), "something is left"

    return Operation("checkpoint", lambda folder: write(folder, 0), lambda folder: write(folder, 1), check)


def running(base: Path) -> Operation:
    recipe = make_recipe("language", base, steps=4, checkpoint_every=2, evaluate_every=2)
    alone = train(recipe, base / "alone").folder

    def check(folder: Path, is_done: bool) -> None:
        out = folder / "run"
        if is_done:
            assert load(out) is not None
        train(recipe, out, resume=(out / "recipe.toml").is_file())
        assert weights(out) == weights(alone), "another model"
        assert metrics(out) == metrics(alone), "other metrics"

    return Operation("run", lambda folder: folder.mkdir(), lambda folder: train(recipe, folder / "run"), check)


def attempt(operation: Operation, folder: Path, n: int, fault: str) -> int:
    """One trial in a process of its own; returns how it ended, after checking what is left."""
    shutil.rmtree(folder, ignore_errors=True)
    operation.prepare(folder)
    number, lasts = FAULTS[fault]
    if (child := os.fork()) == 0:
        code = BROKEN
        try:
            faults = ctypes.CDLL(None)
            faults.faults_arm(str(folder).encode(), ctypes.c_long(n), number, lasts)
            operation.run(folder)
            code = DONE if faults.faults_count() >= n else NOT_REACHED
        except ClearheadError as error:
            code = REFUSED if "\n" not in str(error) else BROKEN
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (DONE, REFUSED, NOT_REACHED, -signal.SIGKILL), f"it ended with {code}, and no line for the user"
    operation.check(folder, code in (DONE, NOT_REACHED))
    return code


def duration(operation: Operation, folder: Path) -> float:
    """Seconds of an operation that is left alone."""
    shutil.rmtree(folder, ignore_errors=True)
    operation.prepare(folder)
    began, child = time.monotonic(), os.fork()
    if child == 0:
        operation.run(folder)
        os._exit(0)
    os.waitpid(child, 0)
    return time.monotonic() - began


def kill_in_time(operation: Operation, folder: Path, seconds: float, rng: random.Random) -> bool:
    """SIGKILL at a random time of an operation; returns whether it was still running."""
    shutil.rmtree(folder, ignore_errors=True)
    operation.prepare(folder)
    if (child := os.fork()) == 0:
        operation.run(folder)
        os._exit(0)
    time.sleep(rng.uniform(0, seconds))
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"it ended with {code}"
    operation.check(folder, code == 0)
    return code != 0


def run_kills(operations: list[Operation], folder: Path, kills: int, seed: int) -> Counter[str]:
    """So many kills, of the operations in turn; one that came after the end is tried again at another time."""
    ends: Counter[str] = Counter()
    seconds = {operation.name: duration(operation, folder) for operation in operations}
    for number in range(kills):
        operation, rng = operations[number % len(operations)], random.Random(f"{seed} {number}")
        try:
            while not kill_in_time(operation, folder, seconds[operation.name], rng):
                ends["came too late and were tried again"] += 1
        except BaseException:
            print(f"failed: {operation.name}, killed in time; again: --trials -1 --kills {number + 1} --seed {seed}")
            raise
        ends["hit"] += 1
    return ends


def count_calls(operation: Operation, folder: Path) -> int:
    """How many calls an operation makes without a fault."""
    shutil.rmtree(folder, ignore_errors=True)
    operation.prepare(folder)
    end, start = os.pipe()
    if (child := os.fork()) == 0:
        faults = ctypes.CDLL(None)
        faults.faults_arm(str(folder).encode(), ctypes.c_long(10**9), 0, 0)
        operation.run(folder)
        os.write(start, str(faults.faults_count()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(end, 20))


def run_operation(operation: Operation, folder: Path, trials: int, seed: int) -> Counter[str]:
    ends: Counter[str] = Counter()
    words = {DONE: "done", REFUSED: "refused", -signal.SIGKILL: "killed"}
    n_calls = count_calls(operation, folder)
    for fault in FAULTS:
        rng = random.Random(f"{operation.name} {fault} {seed}")
        places = range(1, n_calls + 1)
        for n in places if not trials or trials >= n_calls else sorted(rng.sample(places, trials)):
            try:
                ends[words[attempt(operation, folder, n, fault)]] += 1
            except KeyError:
                continue  # the number of calls differs from run to run by a few
            except BaseException:
                print(f"failed: {operation.name}, call {n} of {n_calls}, {fault}; again: {again(operation, n, fault)}")
                raise
    ends["calls"] = n_calls
    return ends


def again(operation: Operation, n: int, fault: str) -> str:
    return f'python -m tests.faults.disk_faults --only "{operation.name}" --call {n} --fault "{fault}"'


def install_carelessly(path: Path) -> None:
    """What a save must not do: files replace the old ones one by one, without a whole save to fall back on."""
    for file in sorted((path / saving_module.SAVED).iterdir()):
        file.replace(path / file.name)
    (path / saving_module.SAVED).rmdir()


def preload() -> None:
    """Start this program again with the compiled failing_calls.c loaded first."""
    library = Path(tempfile.mkdtemp()) / "failing_calls.so"
    compiler = os.environ.get("CC") or "cc"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    more = {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "CLEARHEAD_FAULTS": str(library.parent)}
    os.execve(sys.executable, [sys.executable, "-m", "tests.faults.disk_faults", *sys.argv[1:]], os.environ | more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trials", type=int, default=0, help="so many calls of each operation and fault; 0: all, -1: none"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0, help="SIGKILL at so many random times")
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--call", type=int, help="one call of one operation")
    parser.add_argument("--fault", choices=FAULTS, default="ENOSPC")
    parser.add_argument("--careless", action="store_true", help="with a save that must fail here: is it found?")
    args = parser.parse_args()
    if "CLEARHEAD_FAULTS" not in os.environ:
        preload()
    if args.careless:
        saving_module._install = install_carelessly
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began, total = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as made:
        base = Path(made).resolve()
        operations = [
            saving("clearhead", 2**30),
            saving("clearhead", 2000),
            saving("hf", 2**30),
            loading(),
            exporting("hf", "stored", NEW),
            exporting("gguf", "F32", LLAMA),
            checkpointing(),
            *([running(base)] if args.only in "run" else []),
        ]
        for operation in operations:
            if args.only not in operation.name or args.trials < 0:
                continue
            if args.call:
                print(operation.name, attempt(operation, base / "trial", args.call, args.fault))
                continue
            ends = run_operation(operation, base / "trial", args.trials, args.seed)
            calls = ends.pop("calls")
            total += ends
            shown = ", ".join(f"{n} {end}" for end, n in sorted(ends.items()))
            print(
                f"disk: {operation.name}: {calls} calls, {ends.total()} faults ({shown}); old state or new", flush=True
            )
        if args.kills:
            chosen = [each for each in operations if each.name != "load" and args.only in each.name]
            ends = run_kills(chosen, base / "trial", args.kills, args.seed)
            total += ends
            shown = ", ".join(f"{n} {end}" for end, n in sorted(ends.items()))
            print(
                f"disk: {args.kills} kills at random times of training, saving, exporting ({shown}); old state or new"
            )
    shutil.rmtree(os.environ["CLEARHEAD_FAULTS"], ignore_errors=True)
    print(f"disk: {total.total()} faults survived, seed {args.seed}, in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
