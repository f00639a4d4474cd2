"""A student's files: written once, graded in a process apart, and remembered when solved (progress.py)."""

from __future__ import annotations

import inspect
import json
import re
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.checkpoint.durable_files import write_new, write_text
from clearhead.data.isolated_process import HandlerError, IsolatedError, IsolatedProcesses
from clearhead.errors import InputError
from clearhead.lessons.catalogue import CATALOGUE, Entry
from clearhead.lessons.exercise import Exercise
from clearhead.lessons.progress import FOLDER, SOLVED, hash_of, read_solved

MEGABYTES = 4096
TRIAL = Path(__file__).with_name("trial.py")
IMPORTS = """from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
"""
OF_MODELS = """
import clearhead as ch
from clearhead import Decoder
"""


def remember(folder: Path, name: str, content: str) -> None:
    """That a file of this hash has passed."""
    write_text(folder / SOLVED, json.dumps(read_solved(folder) | {name: content}, indent=2) + "\n")


def start(exercise: Exercise, entry: Entry, folder: Path) -> Path:
    """Write the student's file. One that is there already is never touched."""
    file = folder / f"{exercise.name}.py"
    if file.exists():
        raise InputError(f"{file} is there already and is left as it is; to start anew, rename it first")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_new(file, starter(exercise, entry, folder).encode())
    except OSError as error:
        raise InputError(f"{file} can not be written: {error}; choose another folder") from None
    return file


def starter(exercise: Exercise, entry: Entry, folder: Path) -> str:
    """The file that a student gets: the stub's own source, what its letters mean, and how to go on from where it lies."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(exercise.stub)))
    used = set(re.findall(r"\b([A-Z])\b", source))
    letters = ", ".join(f"{letter} {meaning}" for letter, meaning in legend().items() if letter in used)
    place = CATALOGUE.index(entry) + 1
    head = f'''"""Exercise {place} of {len(CATALOGUE)}: {entry.name} (chapter: {entry.chapter}).

{entry.teaches[0].upper()}{entry.teaches[1:]}.
'''
    head += f"\nShapes: {letters}.\n" if letters else ""
    elsewhere = "" if folder == FOLDER else f" --in {folder}"
    head += f'''
To check it:    clearhead learn check {entry.name}{elsewhere}
For a hint:     clearhead learn hint {entry.name}
"""
'''
    imports = IMPORTS + (OF_MODELS if "model: Decoder" in source else "")
    return f"{head}\n{imports}\n\n{source}"


def legend() -> dict[str, str]:
    """What each letter of a shape means, as layers/ says it."""
    import clearhead.layers

    found = re.findall(r"\b([A-Z])  (\S+(?: \S+)*)", clearhead.layers.__doc__ or "")
    return dict(found)


@dataclass(frozen=True)
class Trial:
    """What came of one check of a student's file."""

    name: str
    passed: bool
    findings: list[dict[str, str]]  # words, outcome, detail
    diagnosis: str | None = None
    trace: str | None = None  # where an error was raised, in the student's own lines
    printed: str = ""  # what the student's code has printed


def check(entry: Entry, file: Path) -> Trial:
    """Grade the student's file in a process apart: it may run for ever, take all memory or end the process."""
    try:
        source = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} can not be read: {error}") from None
    name, seconds = entry.name, entry.seconds
    processes = IsolatedProcesses(TRIAL, seconds=seconds, megabytes=MEGABYTES, first={"prepare": name})
    with tempfile.TemporaryDirectory(prefix="clearhead-learn-") as work:
        printed, stack = Path(work) / "printed", Path(work) / "stack"
        request = {"name": name, "file": str(file.resolve()), "seconds": seconds}
        request |= {"printed": str(printed), "stack": str(stack)}
        try:
            answer: dict[str, Any] = processes.call(request)
        except (IsolatedError, HandlerError) as error:
            answer = unfinished(str(error), stack, file)
        said = printed.read_text(encoding="utf-8", errors="replace") if printed.exists() else ""
    trial = Trial(name, printed=said, **answer)
    if trial.passed and file.name == f"{name}.py" and file.read_bytes() == source:
        remember(file.parent, name, hash_of(source))
    return trial


def unfinished(why: str, stack: Path, file: Path) -> dict[str, Any]:
    """What is said of a file whose process gave no answer: where it was at the end, if it was stopped for its time."""
    lines = stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else ""
    own = re.findall(rf'File "{re.escape(str(file.resolve()))}", line (\d+) in (\w+)', lines)
    where = f"; it was in line {own[0][0]}, in {own[0][1]}" if own else ""
    advice = "; is there a loop without an end, or is the machine busy?" if "seconds" in why else ""
    finding = {"words": "your code ends", "outcome": "fail", "detail": f"it {why}{where}{advice}"}
    return {"passed": False, "findings": [finding], "diagnosis": finding["detail"]}
