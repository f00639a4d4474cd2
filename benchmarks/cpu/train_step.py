"""One training step of a small GPT: forward, backward, AdamW. Sizes of nanoGPT's character recipe, batches of 16, float32.

Before they are timed, all contenders get the same weights, and their losses on one batch must agree. Without dropout each runs as
it comes and compiled, all in the same turns.
"""

from __future__ import annotations

import statistics
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.common.gpt_contenders import Contender, Size, config, contenders
from benchmarks.common.results import Table
from benchmarks.common.timing import (
    choose_threads,
    how_timed,
    in_fresh_process,
    interleave,
    product_peak,
    ratio,
    spread,
    utilisation,
)
from clearhead.costs import cost

SIZE, BATCH = Size(), 16
EAGER, COMPILED = "", ", compiled"
SETTINGS = ((0.0, (EAGER, COMPILED)), (0.2, (EAGER,)))  # dropout, ways


def measure(options: Namespace) -> Iterator[Table]:
    rounds = 3 if options.quick else 4
    for dropout, ways in SETTINGS[: 1 if options.quick else None]:
        yield in_fresh_process(time_setting, dropout, ways, rounds, options.shared, options.nanogpt)


def time_setting(dropout: float, ways: tuple[str, ...], rounds: int, shared: bool, nanogpt: str | None) -> Table:
    """All contenders in turns, in all ways."""
    warnings.filterwarnings("ignore")  # of other libraries, at each compilation
    # Contenders share code; one that fell back to eager in silence would be timed as what it is not.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    choose_threads(shared)
    everyone = contenders(SIZE, dropout=dropout, nanogpt=nanogpt)
    check_same(everyone)
    runs = {one.name + way: one for one in sorted(everyone, key=lambda one: one.biases) for way in ways}
    steps = {name: training_step(one, compiled=name.endswith(COMPILED)) for name, one in runs.items()}
    times = interleave(steps, rounds=rounds, warmup=2, shared=shared)
    rows: list[list[str]] = []
    peak = product_peak(shared)
    flops = cost(config(SIZE), batch=BATCH, mode="train").useful_flops
    raw: dict[str, Any] = {"times": times, "ratio": {}, "parameters": {one.name: one.n_parameters for one in everyone}}
    raw |= {"flops": flops, "peak": peak}
    tokens = BATCH * SIZE.max_len
    for name, one in runs.items():
        ours = next(c.name for c in everyone if c.library == "clearhead" and c.biases == one.biases)
        raw["ratio"][name] = ahead = ratio(times, ours, name)
        rows.append(
            [
                name,
                f"{tokens / statistics.median(times[name]):,.0f}",
                f"{1000 * statistics.median(times[name]):,.0f} ms",
                f"{1000 * min(times[name]):,.0f} ms",
                f"{spread(times[name]):.1%}",
                utilisation(flops, statistics.median(times[name]), peak),
                "" if name == ours else f"{ahead:.3f} x",
            ]
        )
    return Table(
        title=f"training step, dropout {dropout}",
        columns=["model", "tokens/s", "step", "best", "spread", "MFU", "clearhead is"],
        rows=rows,
        note=f"{SIZE.n_layers} layers, {SIZE.n_heads} heads, width {SIZE.d_model}, context {SIZE.max_len}, batch {BATCH}, "
        f"float32, fused AdamW; {how_timed(rounds, shared)}; MFU: useful operations over this machine's best product, "
        f"{peak / 1e9:.0f} GFLOP/s; last column: clearhead's speed as it comes, with as many biases, over this one's",
        raw=raw,
    )


def training_step(one: Contender, *, compiled: bool) -> Callable[[], None]:
    one.model.train()
    loss = torch.compile(one.loss) if compiled else one.loss
    optimizer = torch.optim.AdamW(one.model.parameters(), lr=1e-3, fused=True)
    tokens, targets = batch()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss(tokens, targets).backward()
        optimizer.step()

    return step


@torch.no_grad()
def check_same(everyone: list[Contender]) -> None:
    """The same weights must give the same loss, or the contenders do not do the same work."""
    tokens, targets = batch()
    losses = {one.name: float(one.model.eval() and one.loss(tokens, targets)) for one in everyone}
    first = next(iter(losses.values()))
    # float32, six layers, a loss near 4: only the order of summation differs
    if any(abs(loss - first) > 1e-4 for loss in losses.values()):
        raise SystemExit(
            f"the contenders disagree on one batch's loss, so comparing their speed means nothing: {losses}"
        )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, SIZE.vocab_size, (BATCH, SIZE.max_len + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
