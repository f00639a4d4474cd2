"""A pytest plugin: the tests are imported once; each mutant is a forked process, which runs the tests that execute its lines.

First each test runs alone with a trace of the lines that it executes, and of its time. A mutant's process then puts the code of
the changed function in the place of the function's (so nothing is imported again), and runs these tests, those that name the
module first, then the quick ones, until one fails.
"""

from __future__ import annotations

import ast
import collections
import gc
import gzip
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from benchmarks.correctness.mutants import ROOMS, ROOT, Mutant

KILLED, CUT, IMPOSSIBLE = 1, 3, 4
MEMORY = 12 << 30  # that a mutant may take beyond what is mapped
Lines = dict[str, set[int]]


def sources() -> dict[str, str]:
    """The path of each file that can be mutated, and its short name."""
    files = [file for room in ROOMS for file in (ROOT / "clearhead" / room).glob("*.py")]
    return {str(file): f"{file.parent.name}/{file.name}" for file in files}


class Tracer:
    """The lines of these files that are executed between start and stop, in all threads."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files, self.lines = files, collections.defaultdict[str, set[int]](set)

    def start(self) -> None:
        self.lines.clear()
        if sys.version_info < (3, 12):
            threading.settrace(self.on_call)
            sys.settrace(self.on_call)
            return
        tool, events = sys.monitoring.COVERAGE_ID, sys.monitoring.events.LINE
        if sys.monitoring.get_tool(tool) is None:
            sys.monitoring.use_tool_id(tool, "mutation")
            sys.monitoring.register_callback(tool, events, self.on_line)
            sys.monitoring.set_events(tool, events)
        sys.monitoring.restart_events()

    def stop(self) -> Lines:
        if sys.version_info < (3, 12):
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
        return {self.files[file]: lines for file, lines in list(self.lines.items())}

    def on_line(self, code: CodeType, line: int) -> Any:
        if code.co_filename in self.files:
            self.lines[code.co_filename].add(line)
        return sys.monitoring.DISABLE  # once in a test

    def on_call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self.on_event if frame.f_code.co_filename in self.files else None

    def on_event(self, frame: FrameType, event: str, arg: object) -> Any:
        self.lines[frame.f_code.co_filename].add(frame.f_lineno)
        return self.on_event


class Server:
    """The plugin. `ended` is called with each mutant's end, and the test that noticed it."""

    def __init__(
        self,
        mutants: list[Mutant],
        *,
        jobs: int,
        seconds: float,
        trace: Path,
        ended: Callable[[Mutant, str, str], None],
    ) -> None:
        self.mutants, self.jobs, self.seconds, self.trace, self.ended = mutants, jobs, seconds, trace, ended
        self.outcome = ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        print(f"{len(self.items):,} tests collected", flush=True)
        self.work = Path(tempfile.mkdtemp(prefix="mutation-"))
        self.functions = functions_of(sources())
        gc.freeze()
        self.tests = self.measure()
        self.run_mutants()
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.skipped and self.outcome != "failed"):
            self.outcome = report.outcome

    def run_item(self, item: pytest.Item, then: pytest.Item | None) -> str:
        self.outcome = "passed"
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=then)
        return self.outcome

    def fork(self, number: int) -> int:
        """As os.fork; the child is quiet, in a process group of its own, with temporary files of its own."""
        if (child := os.fork()) == 0:
            os.setsid()
            quiet = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(quiet, stream)
            folder = self.work / str(number)
            factory = next(iter(self.items.values())).config._tmp_path_factory  # type: ignore[attr-defined]
            factory._given_basetemp = folder
            os.environ["TMPDIR"] = tempfile.tempdir = str(self.work)
        return child

    # What each test executes.

    def measure(self) -> dict[str, tuple[float, Lines]]:
        """Of each test that passes: its time and its lines. What is in the file already is not measured again."""
        known: dict[str, Any] = {}
        if self.trace.is_file():
            known = json.loads(gzip.decompress(self.trace.read_bytes()))
        keys = {nodeid: digest([item.path, *map(Path, sources())]) for nodeid, item in self.items.items()}
        left = [nodeid for nodeid in self.items if known.get(nodeid, {}).get("key") != keys[nodeid]]
        began = time.monotonic()
        for file in self.trace_all([left[at : at + 12] for at in range(0, len(left), 12)]):
            for line in file.read_text(encoding="utf-8").splitlines():
                one = json.loads(line)
                known[one.pop("test")] = one
        for nodeid in left:
            known.setdefault(nodeid, {"outcome": "ended the process", "seconds": 0.0, "lines": {}})["key"] = keys[
                nodeid
            ]
        self.trace.write_bytes(gzip.compress(json.dumps(known).encode(), 6))
        ends = collections.Counter(known[nodeid]["outcome"] for nodeid in self.items)
        print(f"{len(left):,} tests traced in {time.monotonic() - began:.0f} s; all: {dict(ends)}", flush=True)
        for nodeid in self.items:
            if known[nodeid]["outcome"] not in ("passed", "skipped"):
                print(f"left out, as it fails without a mutant: {nodeid}", flush=True)
        return {
            nodeid: (one["seconds"], {file: unpack(lines) for file, lines in one["lines"].items()})
            for nodeid in self.items
            if (one := known[nodeid])["outcome"] == "passed"
        }

    def trace_all(self, shares: list[list[str]]) -> list[Path]:
        """Each share of the tests in some process; a process that a test ends is replaced, and that share is not finished."""
        following = multiprocessing.Value("i", 0)
        running: set[int] = set()
        files: list[Path] = []
        while running or following.value < len(shares):
            while len(running) < self.jobs and following.value < len(shares):
                files.append(self.work / f"trace-{len(files)}.jsonl")
                files[-1].touch()
                if (child := self.fork(-len(files))) == 0:
                    self.trace_shares(shares, following, files[-1])
                running.add(child)
            child, _ = os.wait()
            running.discard(child)
        return files

    def trace_shares(self, shares: list[list[str]], following: Any, file: Path) -> None:
        tracer = Tracer(sources())
        with file.open("a", encoding="utf-8") as log:
            while True:
                with following.get_lock():
                    at, following.value = following.value, following.value + 1
                if at >= len(shares):
                    os._exit(0)
                items = [self.items[nodeid] for nodeid in shares[at]]
                for item, then in zip(items, [*items[1:], None], strict=True):
                    limit(300, 600)
                    began = time.process_time()
                    tracer.start()
                    outcome = self.run_item(item, then)
                    lines = {name: pack(found) for name, found in tracer.stop().items()}
                    one = {
                        "test": item.nodeid,
                        "outcome": outcome,
                        "seconds": time.process_time() - began,
                        "lines": lines,
                    }
                    print(json.dumps(one), file=log, flush=True)

    # Mutants.

    def run_mutants(self) -> None:
        """So many at a time, each until a test fails."""
        running: dict[int, tuple[Mutant, Path]] = {}
        waiting = collections.deque(self.mutants)
        texts = {item.path: item.path.read_text(encoding="utf-8") for item in self.items.values()}
        while running or waiting:
            while waiting and len(running) < self.jobs:
                mutant = waiting.popleft()
                tests = self.tests_of(mutant, texts)
                if not tests:
                    self.ended(mutant, "no test", "")
                    continue
                note = self.work / f"{len(waiting)}.txt"
                if (child := self.fork(len(waiting))) == 0:
                    self.run_mutant(mutant, tests, note)
                running[child] = mutant, note
            if running:
                child, status = os.wait()
                if child in running:
                    mutant, note = running.pop(child)
                    end_group(child)
                    by = note.read_text(encoding="utf-8").splitlines() if note.is_file() else []
                    self.ended(mutant, end_of(status), by[-1] if by else "")

    def tests_of(self, mutant: Mutant, texts: dict[Path, str]) -> list[str]:
        """The tests that execute the changed lines: first those that name the module, then the others; the quick ones first."""
        lines, stem = lines_of(mutant), Path(mutant.file).stem
        found = [nodeid for nodeid, (_, hit) in self.tests.items() if not lines.isdisjoint(hit.get(mutant.file, ()))]
        return sorted(found, key=lambda nodeid: (stem not in texts[self.items[nodeid].path], self.tests[nodeid][0]))

    def run_mutant(self, mutant: Mutant, tests: list[str], note: Path) -> None:
        try:
            put_in_place(mutant, self.functions)
        except (ValueError, SyntaxError) as error:
            note.write_text(str(error), encoding="utf-8")
            os._exit(IMPOSSIBLE)
        resource.setrlimit(resource.RLIMIT_AS, (mapped() + MEMORY, resource.RLIM_INFINITY))
        began = time.process_time()
        with note.open("a", encoding="utf-8") as log:
            for nodeid, then in zip(tests, [*tests[1:], None], strict=True):
                print(nodeid, file=log, flush=True)
                if time.process_time() - began > self.seconds:
                    os._exit(CUT)
                usual = self.tests[nodeid][0]
                limit(10 + 10 * usual, 120 + 40 * usual)
                if self.run_item(self.items[nodeid], self.items[then] if then else None) == "failed":
                    os._exit(KILLED)
        os._exit(0)


def limit(cpu: float, wall: float) -> None:
    """End this process after so many seconds more."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + cpu) + 1, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, wall)


def end_of(status: int) -> str:
    if os.WIFSIGNALED(status):
        is_time = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGALRM)
        return "time limit" if is_time else "crashed"
    ends = {0: "survived", KILLED: "killed", CUT: "survived so far", IMPOSSIBLE: "not run"}
    return ends.get(os.WEXITSTATUS(status), "crashed")


def end_group(leader: int) -> None:
    """What a mutant's tests left running."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def digest(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()[:16]


def pack(lines: set[int]) -> str:
    return hex(sum(1 << line for line in lines))


def unpack(lines: str) -> set[int]:
    bits = int(lines, 16)
    return {at for at in range(bits.bit_length()) if bits >> at & 1}


# Where a change is, and how it gets into a running process.


def functions_in(tree: ast.Module) -> list[tuple[str, ast.FunctionDef]]:
    """Functions of a module and methods of its classes, with their qualified names, in the file's order."""
    found: list[tuple[str, ast.FunctionDef]] = []

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((prefix + node.name, node))  # type: ignore[arg-type]
            elif isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")

    walk(tree.body, "")
    return found


def changed_function(mutant: Mutant, text: str) -> tuple[str, int, ast.FunctionDef]:
    """The function around the change: its qualified name, which of those with this name, its tree."""
    before: collections.Counter[str] = collections.Counter()
    for name, node in functions_in(ast.parse(text)):
        if node.lineno <= mutant.first <= (node.end_lineno or 0):
            return name, before[name], node
        before[name] += 1
    raise ValueError(f"no function around line {mutant.first}")


def lines_of(mutant: Mutant) -> set[int]:
    """The lines of the innermost statement around the change; of a function's head, all lines of the function."""
    text = (ROOT / "clearhead" / mutant.file).read_text(encoding="utf-8")
    _, _, function = changed_function(mutant, text)
    best = range(function.lineno, (function.end_lineno or 0) + 1)
    for node in ast.walk(function):
        if isinstance(node, ast.stmt | ast.match_case | ast.excepthandler) and node is not function:
            body = getattr(node, "body", None)
            first = node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno
            last = body[0].lineno - 1 if body else node.end_lineno
            lines = range(first, max(first, last or first) + 1)
            if lines[0] <= mutant.first and mutant.last <= lines[-1] and len(lines) < len(best):
                best = lines
    return set(best)


def functions_of(files: dict[str, str]) -> dict[tuple[str, str], list[list[FunctionType]]]:
    """By file and qualified name, in the file's order: the function objects that share a code."""
    codes: dict[tuple[str, str], dict[CodeType, list[FunctionType]]] = {}
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename in files:
            key = files[one.__code__.co_filename], one.__code__.co_qualname
            codes.setdefault(key, {}).setdefault(one.__code__, []).append(one)
    return {
        key: [found[code] for code in sorted(found, key=lambda code: code.co_firstlineno)]
        for key, found in codes.items()
    }


def put_in_place(mutant: Mutant, functions: dict[tuple[str, str], list[list[FunctionType]]]) -> None:
    """Change the function in this process. ValueError: it can not be done."""
    text = mutant.text()
    name, at, node = changed_function(mutant, text)
    old = changed_function(mutant, (ROOT / "clearhead" / mutant.file).read_text(encoding="utf-8"))[2]
    found = functions.get((mutant.file, name), [])
    if at >= len(found):
        raise ValueError(f"{name} is not in memory")
    path = found[at][0].__code__.co_filename
    codes = [code for code in all_codes(compile(text, path, "exec")) if code.co_qualname == name]
    for function in found[at]:
        function.__code__ = codes[at]
        defaults = list(function.__defaults__ or ())
        for number, (before, after) in enumerate(zip(old.args.defaults, node.args.defaults, strict=True)):
            if ast.dump(before) != ast.dump(after):
                defaults[number] = value_of(after, function)
        function.__defaults__ = tuple(defaults) or None
        for argument, before, after in zip(
            node.args.kwonlyargs, old.args.kw_defaults, node.args.kw_defaults, strict=True
        ):
            if before is not None and after is not None and ast.dump(before) != ast.dump(after):
                function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), argument.arg: value_of(after, function)}


def value_of(node: ast.expr, function: FunctionType) -> Any:
    return eval(compile(ast.Expression(node), "default", "eval"), function.__globals__)


def all_codes(code: CodeType) -> list[CodeType]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [*inner, *(each for one in inner for each in all_codes(one))]
