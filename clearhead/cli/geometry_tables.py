"""Tables of `clearhead cost --geometry`: how many almost-orthogonal directions fit, and the angles of a model's embeddings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from clearhead.cli.console import plain_table, wide_console
from clearhead.config import Config

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.costs.geometry import Angles


def show_geometry(name: str | None, config: Config | None, *, as_json: bool) -> None:
    """The bounds on the number of directions; then a sample of random directions, or a model's embeddings."""
    sizes = (128, 768, 12288) if config is None else (config.d_model,)
    if as_json:
        angles = None if config is None or name is None else find_angles(name, config)
        found = {"bounds": list(bounds(sizes)), "angles": None if angles is None else asdict(angles)}
        typer.echo(json.dumps(found, indent=2))
        return
    console = wide_console()
    console.print("how many directions fit in n dimensions, all pairs within so many degrees of a right angle\n")
    console.print(bounds_table(sizes))
    console.print(
        "\nFrom below: union, greedy, structured, optimised; the truth lies between their best and the upper bound.\n"
        "The popular formula, 2^((n/2)(1 - ln(1/sin a))), is wrong: it is above what is proven impossible.",
    )
    if config is None or name is None:
        console.print(random_directions(n=768, count=2000))
    else:
        show_embeddings(name, config)


def bounds(sizes: Iterable[int]) -> Iterable[dict[str, Any]]:
    """How many directions fit: a row for each number of dimensions, and of degrees that a pair may be off a right angle."""
    from clearhead.costs import geometry as g

    for n in sizes:
        for degrees in (1, 2, 5):
            eps = math.sin(math.radians(degrees))
            yield dict(
                n=n,
                degrees=degrees,
                union=g.union_bound(n, eps),
                greedy=g.greedy_bound(n, eps),
                structured=g.structured_bound(n, eps),
                optimised=g.PACKED.get((n, degrees)),
                upper_bound=g.upper_bound(n, eps),
                popular_formula_log10=g.popular_formula(n, 90.0 - degrees) * math.log10(2),
            )


def bounds_table(sizes: Iterable[int]) -> Table:
    table = plain_table("n", "off 90°", "union", "greedy", "structured", "optimised", "upper bound", "popular formula")
    for row in bounds(sizes):
        cells = [_spell(row[name]) for name in ("union", "greedy", "structured")]
        cells += [f"{row['optimised']:,}" if row["optimised"] else "", _spell(row["upper_bound"])]
        popular = f"1e{row['popular_formula_log10']:,.0f}"
        table.add_row(f"{row['n']:,}", f"{row['degrees']}°", *cells, popular, end_section=row["degrees"] == 5)
    return table


def random_directions(n: int, count: int) -> str:
    """A sentence on the worst pair of `count` random directions in `n` dimensions."""
    from clearhead.costs import geometry as g

    worst, expected, least = g.sample_coherence(n, count), g.expected_coherence(n, count), g.least_coherence(n, count)
    return (
        f"{count:,} random directions in {n} dimensions: worst pair {_off(worst)} off 90° (expected {_off(expected)}; "
        f"no set of {count:,} can stay below {_off(least)})."
    )


def show_embeddings(name: str, config: Config) -> None:
    """What the vocabulary's size implies; with weights, also the angles that they have."""
    from clearhead.costs import geometry as g

    if config.vocab_size > 1:
        least = g.least_coherence(config.d_model, config.vocab_size)
        wide_console().print(
            f"{name}: {config.vocab_size:,} tokens in {config.d_model:,} dimensions must contain a pair at least "
            f"{_off(least)} off 90°.",
        )
    if (angles := find_angles(name, config)) is not None:
        show_angles(angles)


def find_angles(name: str, config: Config) -> Angles | None:
    """The angles of a model's embeddings; None where there are no weights, or no tokens."""
    if not Path(name).exists() or config.inputs != "tokens":
        return None
    from clearhead.checkpoint import load
    from clearhead.costs.geometry import embedding_angles

    return embedding_angles(load(Path(name)).get_parameter("tokens.weight"))


def show_angles(angles: Angles) -> None:
    """The histogram of pairwise angles, beside that of random directions."""
    from clearhead.costs import geometry as g

    console = wide_console()
    seen = [i for i, pairs in enumerate(angles.histogram) if pairs]
    step = max(1, -(-(seen[-1] - seen[0] + 1) // 20))
    starts = range(seen[0] // step * step, seen[-1] + 1, step)
    shares = [sum(angles.histogram[i : i + step]) / angles.pairs for i in starts]
    table = plain_table("angle", "pairs", "random")
    table.add_column("")
    for start, share in zip(starts, shares, strict=True):
        random = sum(g.angle_density(angles.n, start + (i + 0.5) / 10) / 10 for i in range(10 * step))
        bar = "█" * round(40 * share / max(shares))
        table.add_row(f"{start}-{start + step}°", f"{share:.2%}", f"{random:.2%}", bar)
    console.print()
    console.print(table)
    console.print(
        f"\n{angles.count:,} rows: mean angle {angles.mean:.1f}°, {angles.share_within(2):.1%} of pairs within 2° of 90°; the pair "
        f"furthest off is {_off(angles.coherence)} off, and at least {_off(angles.bound)} it must be.",
    )


def _off(eps: float) -> str:
    return f"{math.degrees(math.asin(eps)):.2f}°"


def _spell(n: float | int) -> str:
    return f"{n:.1f}" if n < 20 else f"{n:,.0f}" if n < 1e6 else f"{n:.3g}"
