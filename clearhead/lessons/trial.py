"""A student's file, loaded and graded: the handler of a process apart (data/isolated_process.py)."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import inspect
import io
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from clearhead.errors import did_you_mean
from clearhead.lessons.catalogue import load_exercise
from clearhead.lessons.grading import Finding, Grade, grade

MOST_PRINTED = 20_000  # characters


class Printed(io.TextIOBase):
    """A file for what a student prints, up to a limit: an endless loop may print without end."""

    def __init__(self, path: str) -> None:
        self.stream, self.left = open(path, "w", encoding="utf-8", buffering=1), MOST_PRINTED  # noqa: SIM115

    def write(self, text: str) -> int:
        if self.left > 0:
            self.stream.write(text[: self.left])
            self.left -= len(text)
            if self.left <= 0:
                self.stream.write("\n... and more\n")
        return len(text)


def answer(request: dict[str, Any]) -> dict[str, Any] | None:
    """Import what the exercise needs (`prepare`), or grade a file."""
    if "prepare" in request:
        load_exercise(request["prepare"])
        torch.set_num_threads(
            1
        )  # models of this size gain nothing from more, and on a busy machine they wait for each other
        return None
    # In the place of the process's own watch: this one leaves the stack of where it was.
    with open(request["stack"], "w", encoding="utf-8") as stack:
        faulthandler.dump_traceback_later(request["seconds"], exit=True, file=stack)
        printed = Printed(request["printed"])
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return grade_file(request["name"], Path(request["file"]))


def grade_file(name: str, file: Path) -> dict[str, Any]:
    exercise = load_exercise(name)
    try:
        function = load_function(name, file)
    except LookupError as error:
        return as_answer(Grade([Finding(f"the file has a function {name}", "fail", str(error.args[0]))]), file)
    except (Exception, SystemExit) as error:
        broken = Grade([Finding("the file can be imported", "error", describe(error))], error=error)
        return as_answer(broken, file)
    wrong = signature_difference(exercise.stub, function)
    if wrong is not None:
        return as_answer(Grade([Finding("the function takes its arguments", "fail", wrong)]), file)
    found = grade(exercise, function)
    if isinstance(found.error, NotImplementedError):
        where = own_frames(found.error, file)
        what = f"{Path(where[-1].filename).name} is " if where and Path(where[-1].filename) != file else ""
        detail = f"{what}not written yet; {found.error}"
        return as_answer(Grade([Finding("the function is written", "fail", detail)]), file)
    return as_answer(found, file)


def load_function(name: str, file: Path) -> Callable[..., Any]:
    sys.path.append(str(file.parent))  # an exercise may import those solved before
    spec = importlib.util.spec_from_file_location(f"exercise_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        near = did_you_mean(name, own) if own else "it has no function of its own"
        raise LookupError(f"{file.name} has no function {name!r}; {near}")
    return function


def signature_difference(stub: Callable[..., Any], function: Callable[..., Any]) -> str | None:
    """Whether the arguments are still those of the stub; further ones may be added if they have defaults."""
    try:
        ours, theirs = inspect.signature(stub), inspect.signature(function)
        placed = [value.name for value in theirs.parameters.values()][: len(ours.parameters)]
    except (TypeError, ValueError):
        return None
    wanted = list(ours.parameters)
    if placed != wanted:
        return f"its arguments are ({', '.join(theirs.parameters)}), expected ({', '.join(wanted)})"
    more = [value.name for value in list(theirs.parameters.values())[len(wanted) :] if value.default is value.empty]
    return f"it needs more arguments than ({', '.join(wanted)}): {', '.join(more)}" if more else None


def describe(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}: {(error.text or '').strip()}"
    return f"{type(error).__name__}: {error}"


def own_frames(error: BaseException, file: Path) -> list[traceback.FrameSummary]:
    """The frames of a traceback that are in files of the student's, from the call to where it was raised."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == file.parent]


def own_lines(error: BaseException | None, file: Path) -> str | None:
    """The same as text, the last five."""
    frames = [] if error is None else own_frames(error, file)[-5:]
    lines = [f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames]
    return "\n".join(lines) or None


def as_answer(found: Grade, file: Path) -> dict[str, Any]:
    return {
        "passed": found.passed,
        "findings": [asdict(finding) for finding in found.findings],
        "diagnosis": found.diagnosis,
        "trace": own_lines(found.error, file),
    }
