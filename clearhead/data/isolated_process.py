"""Processes apart, for code of strangers that may run for ever or take all memory: chat templates, grammars of clients.

A handler is a file with a function `answer(request)`. It imports nothing of ours, so that its process starts fast and stays small.
Requests and answers are JSON, one a line. A process that takes too long for a request ends itself; the next request gets a new one.

This file is also what the process runs, with the handler's path, the seconds and the megabytes as arguments.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import re
import runpy
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The current folder must not be searched for modules: a file there may be anyone's.
_BOOT = "import sys, runpy; sys.path[:1] == [''] and sys.path.pop(0); runpy.run_path(sys.argv[1], run_name='__main__')"


class IsolatedError(Exception):
    """The request had no answer. The message says why, to follow "it" in a sentence."""


class HandlerError(Exception):
    """The handler raised an error: its type and its message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class IsolatedProcesses:
    """Up to `n` processes that answer requests, each within `seconds` and with `megabytes` more memory than at its start.

    `first` is a request that each new process gets before its first one, without limits. Several threads may call.
    """

    def __init__(self, handler: Path, *, seconds: float, megabytes: int, n: int = 1, first: Any = None) -> None:
        self.command = [sys.executable, "-c", _BOOT, __file__, str(handler), str(seconds), str(megabytes)]
        self.seconds, self.megabytes, self.first = seconds, megabytes, first
        self.slots, self.idle = threading.BoundedSemaphore(n), list[subprocess.Popen[str]]()
        weakref.finalize(self, _end, self.idle)

    def call(self, request: Any) -> Any:
        """The handler's answer. HandlerError if it raises an error, IsolatedError if it takes too long or too much memory."""
        line = json.dumps({"request": request, "is_limited": True})
        with self.slots:
            process = self._take()
            began = time.monotonic()
            try:
                said = _exchange(process, line)
            except BaseException:  # its answer would be read as that to the next request
                process.kill()
                _end([process])
                raise
            if not said:
                took, status = time.monotonic() - began, process.wait()
                _end([process])
                if took >= self.seconds:
                    raise IsolatedError(f"took more than {self.seconds:g} seconds")
                raise IsolatedError(f"crashed, or took more than {self.megabytes} MB of memory (status {status})")
            self.idle.append(process)
        answer = json.loads(said)
        if "error" not in answer:
            return answer["answer"]
        kind, message = answer["error"]
        if kind == "MemoryError":
            raise IsolatedError(f"took more than {self.megabytes} MB of memory")
        raise HandlerError(kind, message)

    def _take(self) -> subprocess.Popen[str]:
        while self.idle:
            process = self.idle.pop()
            if process.poll() is None:
                return process
            _end([process])
        pipe = subprocess.PIPE
        process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        first = json.dumps({"request": self.first, "is_limited": False})
        if self.first is not None and not _exchange(process, first):
            _end([process])
            raise IsolatedError("could not be started in a process of its own")
        return process


def _exchange(process: subprocess.Popen[str], line: str) -> str:
    """The answer to a line; nothing if the process ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline()


def _end(processes: list[subprocess.Popen[str]]) -> None:
    """Each ends when its input does."""
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        process.wait()


# In the process itself.


def main(handler: str, seconds: str, megabytes: str) -> None:
    answer: Callable[[Any], Any] = runpy.run_path(handler)["answer"]
    requests, answers = sys.stdin, sys.stdout
    sys.stdout = sys.stderr  # what a handler prints is no answer
    has_limit = False
    for line in requests:
        given = json.loads(line)
        if given["is_limited"]:
            if not has_limit:
                limit_memory(int(megabytes))
                has_limit = True
            # Ends the process from a thread of C, whatever Python or a library is doing.
            faulthandler.dump_traceback_later(float(seconds), exit=True)
        try:
            said = json.dumps({"answer": answer(given["request"])})
        except Exception as error:
            said = json.dumps({"error": [type(error).__name__, str(error)[:2000]]})
        faulthandler.cancel_dump_traceback_later()
        answers.write(said + "\n")
        answers.flush()


def limit_memory(megabytes: int) -> None:
    """Allow the process so much memory more than it has. Linux only: elsewhere the system has no such limit."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    import resource

    found = re.search(r"VmData:\s+(\d+) kB", status.read_text())
    most = int(found[1]) * 1024 + megabytes * 2**20 if found else megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    main(*sys.argv[2:])
