"""Exercise verdict: whether a change of a model has made a difference."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean

from clearhead.lessons.exercise import Exercise, Function, Mistake


def verdict(before: list[float], after: list[float]) -> str:
    """Whether a change has helped: "better", "worse" or "alike", from losses with several seeds each.

    It has helped if every loss after it is below every loss before it, and harmed if every one is above. If they overlap, or touch,
    the difference may be chance: "alike". (With 3 seeds each, chance alone gives "better" once in 20.)

    The law: these words; before and after changed places, "better" becomes "worse".
    """
    raise NotImplementedError("compare the largest loss of the one with the smallest of the other")


def answer(before: list[float], after: list[float]) -> str:
    if max(after) < min(before):
        return "better"
    return "worse" if min(after) > max(before) else "alike"


def reference(before: list[float], after: list[float]) -> str:
    """Pair by pair."""
    if all(new < old for new in after for old in before):
        return "better"
    return "worse" if all(new > old for new in after for old in before) else "alike"


def by(number: Callable[[list[float]], float]) -> Function:
    """Compares one number of each side."""

    def function(before: list[float], after: list[float]) -> str:
        old, new = number(before), number(after)
        return "better" if new < old else "worse" if new > old else "alike"

    return function


def higher_is_better(before: list[float], after: list[float]) -> str:
    return answer(after, before)


def one_sided(before: list[float], after: list[float]) -> str:
    return "better" if max(after) < min(before) else "worse"


def touching(before: list[float], after: list[float]) -> str:
    return "better" if max(after) <= min(before) else "worse" if min(after) >= max(before) else "alike"


def against_the_mean(before: list[float], after: list[float]) -> str:
    middle = mean(before)
    return "better" if max(after) < middle else "worse" if min(after) > middle else "alike"


def changes_places(function: Function) -> str | None:
    first, second = [2.3, 2.31, 2.28], [2.2, 2.21, 2.25]
    found = function(first, second), function(second, first)
    return None if found == ("better", "worse") else f'changed places give {found}; expected ("better", "worse")'


def cases() -> dict[str, tuple[list[float], list[float]]]:
    return {
        "all below": ([2.30, 2.31, 2.28], [2.21, 2.25, 2.20]),
        "all above": ([2.30, 2.31, 2.28], [2.35, 2.33, 2.40]),
        "overlapping, with a lower mean": ([2.30, 2.31, 2.28], [2.29, 2.20, 2.21]),
        "overlapping, with a higher mean": ([2.30, 2.31, 2.28], [2.29, 2.50, 2.60]),
        "one seed touches": ([2.30, 2.31, 2.28], [2.28, 2.20, 2.21]),
        "all equal": ([2.30, 2.30], [2.30, 2.30]),
        "below the mean, and not below all": ([2.0, 2.8, 3.0], [2.1, 2.2, 2.3]),
        "one seed after": ([2.30, 2.31, 2.28], [2.10]),
    }


EXERCISE = Exercise(
    stub=verdict,
    answer=answer,
    reference=reference,
    cases=cases,
    laws={"it can be turned round": changes_places},
    mistakes=(
        Mistake("you compare the means alone: two seeds of the same model differ in theirs, too", by(mean)),
        Mistake("you compare the best seeds alone: the luckier side wins", by(min)),
        Mistake("you compare the first seeds alone", by(lambda losses: losses[0])),
        Mistake("better and worse are swapped: a lower loss is better", higher_is_better),
        Mistake('"alike" is never said: what is not proven better is not therefore worse', one_sided),
        Mistake("losses that touch count as different: compare with < and >", touching),
        Mistake("you compare with the mean of the losses before; their spread is chance", against_the_mean),
    ),
    hints=(
        "Every loss after is below every loss before: the largest of the one against the smallest of the other.",
        'max(after) < min(before) is "better".',
        'min(after) > max(before) is "worse"; all else is "alike".',
    ),
    proves="you do not take chance for progress",
)
