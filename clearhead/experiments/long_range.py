"""Long range: an LSTM and a Transformer with equally many parameters, on copying after a pause and on recall, over the length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clearhead.experiments.fitting import Batches, accuracy, build, fit, small
from clearhead.experiments.result import (
    Cell,
    Chart,
    Curve,
    Finding,
    Result,
    Table,
    if_learnt,
    judge,
    middle,
    percent,
    spell,
)
from clearhead.experiments.tasks import copying, recall

MODELS = ("Transformer", "LSTM")
TASKS = ("copying", "recall")
VOCAB = 8  # tokens are 0, noise; then keys and values, or letters and the sign to begin
N_TOKENS = 2 * VOCAB + 2
SOLVED = 0.05  # nats: training ends below this loss


@dataclass(frozen=True)
class Size:
    lengths: tuple[int, ...] = (12, 50, 100, 200)  # the first is one at which an LSTM learns, too
    steps: int = 250
    rows: int = 16


SIZES = {
    "quick": Size(lengths=(20, 30), steps=3, rows=4),
    "usual": Size(),
    "full": Size(lengths=(12, 50, 100, 200, 500, 1_000, 2_000), steps=2_000, rows=32),
}


@dataclass(frozen=True)
class Measured:
    """By task, model and length, one number a seed."""

    right: dict[str, dict[str, dict[int, list[float]]]]
    steps: dict[str, dict[str, dict[int, list[float]]]]  # of training, fewer if it was solved before
    most: int
    params: dict[str, int]


class Recurrent(nn.Module):
    """Embedding, LSTM, head: called as a Decoder is."""

    def __init__(self, vocab: int, width: int, n_layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, n_layers, batch_first=True)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def make(name: str, seed: int, length: int) -> nn.Module:
    transformer = build(small(vocab_size=N_TOKENS, positions="rotary", max_len=length), seed)
    if name == "Transformer":
        return transformer
    # From the widths around, the one whose LSTM has the nearest number of parameters. Its weights are torch's usual ones.
    width = min(range(16, 128), key=lambda n: abs(16 * n * (n + 1) + 2 * N_TOKENS * n + N_TOKENS - count(transformer)))
    return seeded(width, seed)


def seeded(width: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Recurrent(N_TOKENS, width)


def data_of(task: str, rows: int, length: int) -> Batches:
    return (copying if task == "copying" else recall)(rows=rows, length=length, vocab=VOCAB)


def measure(size: Size, seeds: range) -> Measured:
    def table() -> dict[str, dict[str, dict[int, list[float]]]]:
        return {task: {name: {n: [] for n in size.lengths} for name in MODELS} for task in TASKS}

    right, steps = table(), table()
    for seed in seeds:
        for task in TASKS:
            for length in size.lengths:
                for name in MODELS:
                    data, model = data_of(task, size.rows, length), make(name, seed, length)
                    losses = fit(model, data, steps=size.steps, seed=seed, enough=SOLVED)
                    right[task][name][length].append(accuracy(model, data, seed=seed))
                    steps[task][name][length].append(float(len(losses)))
    params = {name: count(make(name, 0, size.lengths[0])) for name in MODELS}
    return Measured(right, steps, size.steps, params)


def conclude(m: Measured) -> Result:
    lengths = list(m.right["copying"]["LSTM"])
    rows: list[tuple[Cell, ...]] = [
        (
            f"{task}, {n}",
            *(cell for name in MODELS for cell in (percent(m.right[task][name][n]), spell(m.steps[task][name][n], 0))),
        )
        for task in TASKS
        for n in lengths
    ]
    same = ", ".join(f"{name} {m.params[name]:,}" for name in MODELS)
    return Result(
        tables=(
            Table(
                f"Right after at most {m.most} steps ({1 / VOCAB:.0%} by guessing); parameters: {same}",
                ("task, length", *(f"{name}{what}" for name in MODELS for what in ("", ", steps"))),
                tuple(rows),
            ),
        ),
        charts=tuple(
            Chart(
                task.capitalize(),
                "length",
                "share right",
                tuple(
                    Curve(name, tuple(lengths), tuple(middle(m.right[task][name][n]) for n in lengths))
                    for name in MODELS
                ),
                log_x=True,
            )
            for task in TASKS
        ),
        findings=tuple(reach(task, m) for task in TASKS) + tuple(far(task, m) for task in TASKS),
    )


def reach(task: str, m: Measured) -> Finding:
    """At the longest length, is the Transformer better? If the LSTM fails at the shortest, too, that is no question of reach."""
    shortest, longest = min(m.right[task]["LSTM"]), max(m.right[task]["LSTM"])
    ours, other = (m.right[task][name][longest] for name in MODELS)
    near = m.right[task]["LSTM"][shortest]
    finding = judge(
        f"A Transformer reaches further back than an LSTM of equal size ({task}).",
        f"At length {longest} the Transformer is right for {percent(ours)}, the LSTM for {percent(other)} "
        f"(at {shortest} for {percent(near)}).",
        more=ours,
        less=other,
        margin=0.1,
    )
    return if_learnt(min(near) > 0.3, finding)


def far(task: str, m: Measured) -> Finding:
    """Does distance cost the Transformer nothing? From the shortest to the longest length."""
    short, long = min(m.right[task]["Transformer"]), max(m.right[task]["Transformer"])
    before, after = (m.right[task]["Transformer"][n] for n in (short, long))
    words = f"Its share right is {percent(before)} at length {short} and {percent(after)} at {long}, with equally many steps."
    claim = f"For a Transformer distance does not matter ({task})."
    finding = judge(claim, words, more=after, less=[value - 0.1 for value in before], margin=0.0)
    return if_learnt(min(before) > 0.5, finding)
