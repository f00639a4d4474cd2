"""What a server costs beside its engine: the device only takes time, everything else is real.

    python benchmarks/cpu/serving_share.py                                     256 streams, 4 front ends, steps of 60 ms
    python benchmarks/cpu/serving_share.py --alone --step-ms 0                 the engine alone: CPU time of a step
    python benchmarks/cpu/serving_share.py --whole                             whole answers

HTTP, front ends, links, scheduler, block tables and sampling are those of a server on a GPU. Only the CUDA graphs are not: a step
and a prefill each take a fixed time of a device that works in order, while the CPU goes on, and every text is the same word again
and again. Calls that would start a kernel run on the CPU with tensors of one layer, which costs about as much.

Told are the time on the cores, by process and thread, what wakes them, how many rows a step has, and how long a request waits. With
long steps nothing is saturated, so that these hold also on a computer in use. Seconds depend on it; steps and shares do not.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import re
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import clearhead as ch
from benchmarks.common.http_load import Answer, Load, at, load
from benchmarks.gpu.serve import make_model, prompts
from clearhead.engine import sampler
from clearhead.engine.runner import DeviceTables
from clearhead.engine.scheduler import HOLD_STEPS
from clearhead.engine.transfer import HostCopy
from clearhead.engine.warm_up import prompt_sizes
from clearhead.explorer import tokenizer_of
from clearhead.generation import Engine, Request
from clearhead.serving import link, model_worker
from clearhead.serving.front_ends import run_front_ends
from clearhead.serving.guards import Limits
from clearhead.serving.model_worker import ModelWorker

WORD = 10  # the token that every text repeats
COUNTS = ("steps", "rows", "prefills", "prompts", "messages", "sent", "wait_us")  # of the engine's process


class Device:
    """Does its work in order, each piece in a fixed time; who asks for a result waits for it."""

    def __init__(self, step: float, counts: Any) -> None:
        self.step, self.counts, self.free_at = step, counts, 0.0
        self.is_hooked = False  # as of `CudaGraphs`

    def run(
        self, key: Hashable, work: Callable[[], Tensor], *, switch: Tensor, changed: Sequence[Tensor] = ()
    ) -> Tensor:
        """In place of `CudaGraphs.run`: takes a step's time, and returns logits."""
        assert isinstance(key, tuple)
        is_prefill = key[0] == "prefill"
        rows = key[1] if is_prefill else key[0]
        self.count("prefills" if is_prefill else "steps", 1)
        self.free_at = max(self.free_at, time.perf_counter()) + self.step
        return self.logits(rows)

    @functools.cache  # noqa: B019
    def logits(self, rows: int) -> Tensor:
        logits = torch.zeros(rows, 304)
        logits[:, WORD] = 1
        return logits

    def count(self, name: str, n: int) -> None:
        self.counts[COUNTS.index(name)] += n


class DeviceCopy(HostCopy):
    """A copy from the device, complete when the work before it is."""

    device: Device

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.ready_at = self.device.free_at

    def wait(self) -> Sequence[Tensor]:
        began = time.perf_counter()
        if self.ready_at > began:
            time.sleep(self.ready_at - began)
        self.device.count("wait_us", int(1e6 * (time.perf_counter() - began)))
        return super().wait()


def simulate(device: Device) -> type[Engine]:
    """The engine as it is on a GPU, with this device."""
    DeviceCopy.device = device
    sampler.HostCopy = DeviceCopy

    class Simulated(Engine):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, prefill_tokens=16_384)
            runner: Any = self.runner
            self.runs_async = runner.has_paths = True
            self.scheduler.hold_steps = HOLD_STEPS
            runner.graphs = runner.prompts.graphs = device
            runner.device_tables, runner.prompts.recorded = DeviceTables(runner), prompt_sizes(self)
            runner.tokens.fill_(WORD)
            decode, prefill = runner.decode, runner.prefill

            def counted_decode(*args: Any) -> Tensor:
                device.count("rows", runner.n - len(self.scheduler.over))
                return decode(*args)

            def counted_prefill(sequences: Any, T: int) -> Tensor:
                device.count("prompts", len(sequences))
                return prefill(sequences, T)

            runner.decode, runner.prefill = counted_decode, counted_prefill

    return Simulated


def serve(place: str, port: int, asked: argparse.Namespace, counts: Any, thread: Any) -> None:
    """The engines' process."""
    torch.set_num_threads(1)
    device = Device(asked.step_ms / 1e3, counts)
    model_worker.Engine = simulate(device)  # pyright: ignore[reportPrivateImportUsage]
    send = link.Link._try  # pyright: ignore[reportPrivateUsage]

    def counted(self: Any, data: Any) -> int:
        device.count("messages", 1)
        device.count("sent", len(data))
        return send(self, data)

    link.Link._try = counted  # pyright: ignore[reportPrivateUsage]
    model: Any = ch.load(place)
    worker = ModelWorker("gpt2", model, tokenizer_of(Path(place), model), path=Path(place), max_rows=asked.rows)
    thread.value = next(each.native_id or 0 for each in threading.enumerate() if each.name.startswith("engine"))
    run_front_ends({"gpt2": worker}, Limits(streams=4096), 1.0, asked.front_ends, host="127.0.0.1", port=port)


class Task(NamedTuple):
    """What a thread has used: seconds on a core, times that it waited, times that it was made to."""

    seconds: float
    waits: int
    preempted: int

    def since(self, before: Task) -> Task:
        return Task(self.seconds - before.seconds, self.waits - before.waits, self.preempted - before.preempted)


@dataclass
class Look:
    """The state at one time."""

    when: float
    tasks: dict[int, dict[int, Task]]  # by process and thread
    counts: list[int]
    waited: tuple[float, float]  # seconds of requests in the queue, and how many

    def __sub__(self, other: Look) -> Look:
        tasks = {
            pid: {tid: task.since(other.tasks[pid].get(tid, Task(0, 0, 0))) for tid, task in own.items()}
            for pid, own in self.tasks.items()
        }
        counts = [a - b for a, b in zip(self.counts, other.counts, strict=True)]
        waited = self.waited[0] - other.waited[0], self.waited[1] - other.waited[1]
        return Look(self.when - other.when, tasks, counts, waited)


def look(pid: int, port: int, counts: Any) -> Look:
    told = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    found = dict(re.findall(r"wait_seconds_(sum|count){\S+} (\S+)", told))
    waited = float(found.get("sum", 0)), float(found.get("count", 0))
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fronts = [int(each) for each in children if b"front_end" in Path(f"/proc/{each}/cmdline").read_bytes()]
    return Look(time.perf_counter(), {each: tasks(each) for each in (pid, *fronts)}, list(counts), waited)


def tasks(pid: int) -> dict[int, Task]:
    found: dict[int, Task] = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        switches = re.findall(r"ctxt_switches:\s+(\d+)", (folder / "status").read_text())
        found[int(folder.name)] = Task(int((folder / "schedstat").read_text().split()[0]) / 1e9, *map(int, switches))
    return found


def served(place: str, asked: argparse.Namespace) -> dict[str, float]:
    """One load against a server of its own."""
    context = multiprocessing.get_context("spawn")
    counts, thread = context.Array("q", len(COUNTS), lock=False), context.Value("i", 0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = context.Process(target=serve, args=(place, port, asked, counts, thread))
    process.start()
    assert process.pid is not None
    pid = process.pid
    try:
        until = time.monotonic() + 120
        while not is_ready(port):
            assert process.is_alive(), "the server has ended"
            assert time.monotonic() < until, "the server has not started"
            time.sleep(0.2)
        one = Load(asked.streams, asked.clients, 32, asked.new, asked.warm, not asked.whole)
        load(port, one, lambda: None, forks=True)
        one = Load(asked.streams, asked.clients, 32, asked.new, asked.seconds, not asked.whole)
        answers, before, after = load(port, one, lambda: look(pid, port, counts), forks=True)
    finally:
        process.terminate()
        process.join()
    return figures(asked, answers, after - before, pid, thread.value)


def is_ready(port: int) -> bool:
    try:
        return urlopen(f"http://127.0.0.1:{port}/readyz").status == 200
    except OSError:
        return False


def figures(asked: argparse.Namespace, answers: list[Answer], used: Look, pid: int, engine: int) -> dict[str, float]:
    own, fronts = used.tasks[pid], [each for process, each in used.tasks.items() if process != pid]
    count = dict(zip(COUNTS, used.counts, strict=True))
    steps, rows = count["steps"], count["rows"]
    step = used.when / steps
    front = sum(task.seconds for each in fronts for task in each.values())
    rest = sum(task.seconds for tid, task in own.items() if tid not in (pid, engine))
    firsts = [answer.first for answer in answers]
    return {
        "engine's thread, ms of CPU a step": 1e3 * own[engine].seconds / steps,
        "link's thread, ms of CPU a step": 1e3 * own[pid].seconds / steps,
        "other threads of that process, ms a step": 1e3 * rest / steps,
        "front ends, us of CPU a token, all together": 1e6 * front / rows,
        "engine's thread: waits a step": own[engine].waits / steps,
        "link's thread: waits a step": own[pid].waits / steps,
        "front ends: waits a step, each": sum(t.waits for each in fronts for t in each.values()) / steps / len(fronts),
        "messages from the engine a step": count["messages"] / steps,
        "bytes of them a token": count["sent"] / rows,
        "tokens a second": rows / used.when,
        "ms of a step, on the clock": 1e3 * step,
        "  of these waiting for the device": count["wait_us"] / 1e3 / steps,
        "rows of a step, share of the streams": rows / steps / asked.streams,
        "prefills a step": count["prefills"] / steps,
        "prompts a prefill": count["prompts"] / max(1, count["prefills"]),
        "in the queue, steps": used.waited[0] / max(1.0, used.waited[1]) / step,
        "first piece, steps, p50": at(firsts, 0.5) / step,
        "first piece, steps, p99": at(firsts, 0.99) / step,
        "lost answers": sum(answer.n_tokens == 0 for answer in answers),
    }


def alone(place: str, asked: argparse.Namespace) -> dict[str, float]:
    """The engine without HTTP: each text that ends makes room for the next."""
    torch.set_num_threads(1)
    counts = [0] * len(COUNTS)
    model: Any = ch.load(place)
    engine = simulate(Device(asked.step_ms / 1e3, counts))(model.eval(), max_rows=asked.rows)
    waiting, n_open, n_left = iter(prompts(100_000, 32, 1)), 0, 400
    lengths = iter(range(10**9))
    began = used = 0.0
    while n_left:
        while n_open < asked.streams:
            n_new = asked.new // 2 + next(lengths) * 37 % (asked.new + 1)
            engine.submit(Request(prompt=next(waiting), max_new_tokens=n_new, client="one" if asked.named else None))
            n_open += 1
        n_open -= sum(token is None for _, token in engine.step())
        n_left -= 1
        if n_left == 300:
            began, used, counts[:] = time.perf_counter(), time.thread_time(), [0] * len(COUNTS)
    count = dict(zip(COUNTS, counts, strict=True))
    steps, seconds = count["steps"], time.perf_counter() - began
    return {
        "engine's thread, ms of CPU a step": 1e3 * (time.thread_time() - used) / steps,
        "tokens a second": count["rows"] / seconds,
        "ms of a step, on the clock": 1e3 * seconds / steps,
        "rows of a step, share of the streams": count["rows"] / steps / asked.streams,
        "prefills a step": count["prefills"] / steps,
        "prompts a prefill": count["prompts"] / max(1, count["prefills"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--clients", type=int, default=1, help="processes of streams; all have one address")
    parser.add_argument("--front-ends", type=int, default=4)
    parser.add_argument("--rows", type=int, default=256, help="texts that the engine writes at once (--max-texts)")
    parser.add_argument(
        "--new", type=int, default=128, help="tokens of an answer, half to one and a half times as many"
    )
    parser.add_argument("--step-ms", type=float, default=60.0, help="of a decode step, and of a prefill")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--warm", type=float, default=8.0, help="seconds of load before")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--whole", action="store_true", help="whole answers, not streams")
    parser.add_argument("--alone", action="store_true", help="the engine without HTTP")
    parser.add_argument(
        "--named", action="store_true", help="of --alone: all requests are of one client that has a name"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = str(make_model(Path(folder), "tiny", "cpu"))
        found = [(alone if asked.alone else served)(place, asked) for _ in range(asked.rounds)]
    print(f"{asked}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; median of {asked.rounds} (all)")
    for name in found[0]:
        values = [each[name] for each in found]
        print(f"{statistics.median(values):10.2f}  {name}  ({' '.join(f'{value:.2f}' for value in values)})")


if __name__ == "__main__":
    main()
