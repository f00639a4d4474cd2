"""A student's function against its exercise: every case and every law, and the likely mistake in words.

Nothing here reads the student's source. A mistake is found by computing: its variant gives the same results as the student.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from clearhead.lessons.exercise import Exercise, Function, Mistake

# Of the largest number expected. Inputs are float32 and sums have at most a few hundred terms, so that rounding stays below 1e-5,
# in any order of summation; every known mistake changes some case by more than 1e-3.
ALLOWED = 1e-4


@dataclass(frozen=True)
class Finding:
    """One case or law: "pass", or "fail" and why; "error" if the function raised one."""

    words: str
    outcome: Literal["pass", "fail", "error"]
    detail: str = ""


@dataclass
class Grade:
    """All findings, and the diagnosis: the likely mistake in words, if it is a known one."""

    findings: list[Finding] = field(default_factory=list[Finding])
    diagnosis: str | None = None
    error: BaseException | None = None  # what the function raised

    @property
    def passed(self) -> bool:
        return bool(self.findings) and all(finding.outcome == "pass" for finding in self.findings)


def grade(exercise: Exercise, function: Function) -> Grade:
    """Run every case, then every law. What raises an error ends it: the rest would most likely raise the same."""
    found, results = Grade(), dict[str, Any]()
    try:
        for words, args in exercise.cases().items():
            results[words], changed = run(exercise, function, args)
            assert exercise.reference is not None
            wrong = difference(results[words], exercise.reference(*copied(args)))
            wrong = wrong or (changed and f"your function changes its argument {changed} in place; return a new one")
            found.findings.append(Finding(words, "fail" if wrong else "pass", wrong or ""))
        for words, law in exercise.laws.items():
            wrong = law(function)
            found.findings.append(Finding(words, "fail" if wrong else "pass", wrong or ""))
    except (Exception, SystemExit) as error:
        found.error = error
        done = len(found.findings)
        words = [*exercise.cases(), *exercise.laws][done]
        found.findings.append(Finding(words, "error", describe_error(error)))
    if not found.passed:
        found.diagnosis = diagnose(exercise, function, found, results)
    return found


def diagnose(exercise: Exercise, function: Function, found: Grade, results: Mapping[str, Any]) -> str | None:
    """The likely mistake in words: chance, a known mistake, or the first law that fails."""
    if found.error is None and attempt(is_random, exercise, function, results) is True:
        return "the same inputs give other numbers each time: leave out dropout, and whatever else is random"
    mistake = find_mistake(exercise, results)
    if mistake is not None:
        return describe(mistake, function)
    laws = (
        finding.detail for finding in found.findings if finding.words in exercise.laws and finding.outcome == "fail"
    )
    return next(laws, None)


def is_random(exercise: Exercise, function: Function, results: Mapping[str, Any]) -> bool:
    """Whether in some case the same random seed gives the same result again, and another seed another one."""
    for words, args in exercise.cases().items():
        again, other = (run(exercise, function, args, seed=seed)[0] for seed in (0, 1))
        if same(again, results[words]) and not same(other, results[words]):
            return True
    return False


def describe_error(error: BaseException) -> str:
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch's words
        return "your function takes more memory than a check has; is a shape far too large?"
    return f"{type(error).__name__}: {error}"


def run(exercise: Exercise, function: Function, args: Sequence[Any], *, seed: int = 0) -> tuple[Any, str | None]:
    """What is observed on copies of the arguments; and the name of a tensor that a call of the function has changed.

    A function that returns None has the result None, also where `observe` can not go on with it.
    """
    names, changed, nothing = [*inspect.signature(exercise.stub).parameters], list[str](), list[None]()

    def watched(*given: Any) -> Any:
        before = [each.detach().clone() if isinstance(each, Tensor) else None for each in given]
        result = function(*given)
        pairs = zip(names, before, given, strict=False)
        changed.extend(name for name, old, new in pairs if old is not None and not same(new, old))
        nothing.extend([None] if result is None else [])
        return result

    torch.manual_seed(seed)
    try:
        result = exercise.observe(watched, *copied(args))
    except (TypeError, AttributeError):
        if not nothing:
            raise
        result = None
    return result, next(iter(changed), None)


def copied(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(copy.deepcopy(arg) for arg in args)


def find_mistake(exercise: Exercise, results: Mapping[str, Any]) -> Mistake | None:
    """The known mistake that gives the student's results most often, and in one case at least where they are wrong."""
    cases = {words: args for words, args in exercise.cases().items() if words in results}
    if exercise.reference is None:
        return None
    expected = {words: exercise.reference(*copied(args)) for words, args in cases.items()}
    wrong = {words for words in cases if difference(results[words], expected[words]) is not None}
    best, most = None, 0
    for mistake in exercise.mistakes:
        theirs = {words: attempt(run, exercise, mistake.variant, args) for words, args in cases.items()}
        equal = {
            words for words in cases if isinstance(theirs[words], tuple) and same(theirs[words][0], results[words])
        }
        if equal & wrong and len(equal) > most:
            best, most = mistake, len(equal)
    return best


def attempt(call: Callable[..., Any], *args: Any) -> Any:
    """The result, or the error itself: it equals no result."""
    try:
        return call(*args)
    except Exception as error:
        return error


def describe(mistake: Mistake, function: Function) -> str:
    """The mistake's sentence, and the number that shows it."""
    measure = mistake.measure
    measured = None if measure is None else attempt(measure, function)
    return f"{mistake.words}. Measured: {measured}" if isinstance(measured, str) else mistake.words


# Comparing.


def same(found: Any, expected: Any) -> bool:
    """Whether two results are equal but for rounding. NaN equals NaN: two functions may share a mistake."""
    return difference(found, expected, nan=True) is None


def difference(found: Any, expected: Any, *, nan: bool = False) -> str | None:
    """How a result differs from what is expected, in words; None: not, but for rounding."""
    if found is None and expected is not None:
        return "your function returns None; is there a `return`?"
    if isinstance(expected, float | Tensor):
        return tensor_difference(found, torch.as_tensor(expected), nan=nan)
    if isinstance(expected, tuple | list):
        return sequence_difference(found, expected, nan=nan)
    if isinstance(found, Tensor) and found.ndim == 0:  # a layer's number from argmax
        found = found.item()
    if type(found) is not type(expected) or found != expected:
        return f"yours is {short(found)}, expected {short(expected)}"
    return None


def sequence_difference(found: Any, expected: Sequence[Any], *, nan: bool) -> str | None:
    if not isinstance(found, tuple | list) or len(found) != len(expected):
        return f"yours is {short(found)}, expected {short(expected)}"
    if all(isinstance(each, float) for each in expected) and all(isinstance(each, float | int) for each in found):
        return tensor_difference(torch.tensor(found, dtype=torch.float64), torch.tensor(expected), nan=nan)
    for place, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if wrong := difference(ours, theirs, nan=nan):
            return f"result {place}: {wrong}"
    return None


def tensor_difference(found: Any, expected: Tensor, *, nan: bool) -> str | None:
    if isinstance(found, float | int) and not isinstance(found, bool):
        found = torch.tensor(float(found))
    if not isinstance(found, Tensor):
        return f"your function returns a {type(found).__name__}, expected a tensor of shape {tuple(expected.shape)}"
    if found.shape != expected.shape:
        return f"the shape is {tuple(found.shape)}, expected {tuple(expected.shape)}"
    if (found.dtype == torch.bool) != (expected.dtype == torch.bool):
        return f"the numbers are {found.dtype}, expected {expected.dtype}"
    ours, theirs = found.detach().double(), expected.detach().double()
    broken = ours.isnan() & ~theirs.isnan()
    if bool(broken.any()):
        return f"{int(broken.sum())} of {broken.numel()} numbers are NaN, the first at {place_of(broken)}"
    finite = theirs[theirs.isfinite()].abs()
    scale = float(finite.max()) if len(finite) and float(finite.max()) > 0 else 1.0
    gap = (ours - theirs).abs()
    gap[(ours == theirs) | (ours.isnan() & theirs.isnan() & torch.tensor(nan))] = 0.0  # infinities, too
    gap = gap.nan_to_num(torch.inf)
    if float(gap.max() if gap.numel() else 0) <= ALLOWED * scale:
        return None
    at = place_of(gap == gap.max())
    index = tuple(at)
    if found.dtype == torch.bool:
        return f"{int((gap > 0).sum())} of {gap.numel()} differ, the first at {at}: yours {bool(ours[index])}"
    few, many = ([f"{float(each[index]):.{digits}g}" for each in (ours, theirs)] for digits in (4, 7))
    yours, right = many if few[0] == few[1] else few
    coarse = found.dtype in (torch.float16, torch.bfloat16)
    return f"the largest difference is at {at}: yours {yours}, expected {right}" + (
        f"; your numbers are {found.dtype}, which has too few digits: compute in torch.float32" if coarse else ""
    )


def place_of(chosen: Tensor) -> list[int]:
    """The index of the first True."""
    return chosen.nonzero()[0].tolist()


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
