"""Exercise warmup: the learning rate of the paper."""

from __future__ import annotations

from collections.abc import Sequence

from clearhead.lessons import references
from clearhead.lessons.exercise import Exercise, Function, Mistake
from clearhead.training.recipe import Train
from clearhead.training.schedules import lr_factor, max_lr


def warmup(step: int, d_model: int, n_warmup: int) -> float:
    """The learning rate at a step, counted from 1 (section 5.3 of the paper).

    Equation: D^-0.5 * min(step^-0.5, step * n_warmup^-1.5)

    It rises in a line for n_warmup steps, then falls as one over the root of the step.

    The law: these numbers; the highest rate is at step n_warmup.
    """
    raise NotImplementedError("both terms of the min are equal at step n_warmup")


def answer(step: int, d_model: int, n_warmup: int) -> float:
    train = Train(schedule="noam", lr=0.0, warmup=n_warmup)
    return lr_factor(step - 1, train) * max_lr(train, d_model)


def observe(function: Function, steps: Sequence[int], d_model: int, n_warmup: int) -> list[float]:
    return [float(function(step, d_model, n_warmup)) for step in steps]


def reference(steps: Sequence[int], d_model: int, n_warmup: int) -> list[float]:
    return [references.noam(step, d_model, n_warmup) for step in steps]


def highest_at_the_end_of_the_rise(function: Function) -> str | None:
    rates = [function(step, 64, 17) for step in range(1, 60)]
    best = rates.index(max(rates)) + 1
    return f"with n_warmup = 17 your highest rate is at step {best}" if best != 17 else None


def cases() -> dict[str, tuple[list[int], int, int]]:
    return {
        "the paper's: D = 512, 4,000 steps": ([1, 100, 4000, 4001, 100_000], 512, 4000),
        "the rise": ([1, 2, 5, 10], 64, 11),
        "the fall": ([11, 12, 50, 1000], 64, 11),
        "a rise of one step": ([1, 2, 3], 100, 1),
    }


EXERCISE = Exercise(
    stub=warmup,
    answer=answer,
    reference=reference,
    observe=observe,
    cases=cases,
    laws={"the highest rate is at step n_warmup": highest_at_the_end_of_the_rise},
    mistakes=(
        Mistake(
            "max stands where min is meant: the rate falls first and then grows without end",
            lambda step, D, n: D**-0.5 * max(step**-0.5, step * n**-1.5),
        ),
        Mistake("the width is not used: D^-0.5 is missing", lambda step, D, n: min(step**-0.5, step * n**-1.5)),
        Mistake(
            "the rate grows with the width: D^-0.5, not D^0.5",
            lambda step, D, n: D**0.5 * min(step**-0.5, step * n**-1.5),
        ),
        Mistake(
            "after the rise the rate stays; it falls as step^-0.5",
            lambda step, D, n: D**-0.5 * min(n**-0.5, step * n**-1.5),
        ),
        Mistake(
            "the two terms do not meet at step n_warmup: its exponent is -1.5, not -0.5",
            lambda step, D, n: D**-0.5 * min(step**-0.5, step * n**-0.5),
        ),
        Mistake(
            "there is no rise: the rate starts at its highest",
            lambda step, D, n: D**-0.5 * step**-0.5,
        ),
        Mistake(
            "steps are counted from 0: at step 1 you give the rate of step 2",
            lambda step, D, n: D**-0.5 * min((step + 1) ** -0.5, (step + 1) * n**-1.5),
        ),
        Mistake("1 / D stands where 1 / sqrt(D) is meant", lambda step, D, n: min(step**-0.5, step * n**-1.5) / D),
    ),
    hints=(
        "At step = n_warmup both terms are n_warmup^-0.5.",
        "Before it, step * n_warmup**-1.5 is the smaller one: a line through 0.",
        "d_model**-0.5 * min(step**-0.5, step * n_warmup**-1.5)",
    ),
    proves="the schedule of the paper, from the first step on",
    sources=(lr_factor, max_lr),
)
