"""Positions: which token stood three places before? Asked of an encoder and of a decoder, with each kind of positions and without,
and on texts longer than those of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from clearhead.experiments.fitting import accuracy, build, fit, small
from clearhead.experiments.result import Chart, Curve, Finding, Result, Table, if_learnt, judge, middle, percent
from clearhead.experiments.tasks import looking_back

KINDS = ("none", "sinusoidal", "learned", "rotary", "alibi", "t5")
VOCAB, BACK = 16, 3
SOLVED = 0.02  # nats: training ends below this loss


@dataclass(frozen=True)
class Size:
    steps: int = 300
    rows: int = 16
    length: int = 24  # of training
    times: tuple[int, ...] = (1, 2, 4)  # test lengths, as multiples of it


SIZES = {
    "quick": Size(steps=4, rows=4, length=12, times=(1, 2)),
    "usual": Size(),
    "full": Size(steps=2_000, rows=32, length=32, times=(1, 2, 4, 8)),
}


@dataclass(frozen=True)
class Measured:
    encoder: dict[str, list[float]]  # by kind: the share right at the length of training, one a seed
    decoder: dict[
        str, dict[int, list[float]]
    ]  # by kind and length: at places beyond those of training, if there are any
    length: int


def measure(size: Size, seeds: range) -> Measured:
    encoder: dict[str, list[float]] = {kind: [] for kind in KINDS}
    lengths = [n * size.length for n in size.times]
    decoder: dict[str, dict[int, list[float]]] = {kind: {length: [] for length in lengths} for kind in KINDS}
    data = looking_back(BACK, rows=size.rows, length=size.length, vocab=VOCAB)
    for seed in seeds:
        for kind in KINDS:
            shared: dict[str, Any] = dict(positions=kind, vocab_size=VOCAB, max_len=max(lengths))
            model = build(small(shape="encoder", head="tokens", **shared), seed)
            fit(model, data, steps=size.steps, seed=seed, enough=SOLVED)
            encoder[kind].append(accuracy(model, data, seed=seed))
            model = build(small(**shared), seed)
            fit(model, data, steps=size.steps, seed=seed, enough=SOLVED)
            for length in lengths:
                first = size.length if length > size.length else 0
                test = looking_back(BACK, rows=size.rows, length=length, vocab=VOCAB, first=first)
                decoder[kind][length].append(accuracy(model, test, seed=seed))
    return Measured(encoder, decoder, size.length)


def conclude(m: Measured) -> Result:
    lengths = list(m.decoder["none"])
    rows = [
        (kind, percent(m.encoder[kind]), *(percent(m.decoder[kind][length]) for length in lengths)) for kind in KINDS
    ]
    longest = lengths[-1]
    curves = tuple(
        Curve(kind, tuple(lengths), tuple(middle(m.decoder[kind][length]) for length in lengths)) for kind in KINDS
    )
    guess = 1 / VOCAB
    best = max((m.encoder[kind] for kind in KINDS), key=max)
    return Result(
        tables=(
            Table(
                f"Share of right answers ({guess:.0%} by guessing), trained on length {m.length}",
                ("positions", f"encoder, {m.length}", *(f"decoder, {length}" for length in lengths)),
                tuple(rows),
            ),
        ),
        charts=(
            Chart(
                "Decoder, beyond the places of training",
                "length of the test",
                "share right",
                curves,
                log_x=True,
            ),
        ),
        findings=(
            judge(
                "Without positions attention can not see order (encoder).",
                f"Without positions an encoder is right for {percent(m.encoder['none'])}, guessing for {guess:.0%}, and the best "
                f"kind for {percent(best)}.",
                more=best,
                less=m.encoder["none"],
                margin=0.3,
            ),
            if_learnt(
                max(best) > 0.5,
                judge(
                    "Without positions attention can not see order (decoder).",
                    f"A decoder without positions is right for {percent(m.decoder['none'][m.length])}, an encoder for "
                    f"{percent(m.encoder['none'])}, guessing for {guess:.0%}.",
                    more=[guess + 0.1],
                    less=m.decoder["none"][m.length],
                    margin=0.0,
                ),
            ),
            longer(
                "Sinusoids work on texts longer than any in training (the paper hoped so).", "sinusoidal", m, longest
            ),
            longer(
                "Learned positions do not work beyond the places that were trained.", "learned", m, longest, fails=True
            ),
            *(longer(f"{name} works on longer texts.", kind, m, longest) for name, kind in RELATIVE),
        ),
    )


RELATIVE = (("Rotary", "rotary"), ("ALiBi", "alibi"), ("T5's bias", "t5"))


def longer(claim: str, kind: str, m: Measured, longest: int, *, fails: bool = False) -> Finding:
    """Whether the share right at the longest length is at least half of that at the length of training."""
    before, after = m.decoder[kind][m.length], m.decoder[kind][longest]
    words = f"{percent(before)} right at length {m.length}, {percent(after)} at length {longest}."
    kept = [later / max(value, 1e-9) for later, value in zip(after, before, strict=True)]
    more, less = ([0.5], kept) if fails else (kept, [0.5])
    return if_learnt(min(before) > 0.5, judge(claim, words, more=more, less=less, margin=0.1))
