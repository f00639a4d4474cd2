"""Exercise multiply_adds: what a decoder's forward pass costs."""

from __future__ import annotations

from clearhead.costs.flops import Lengths, count_forward
from clearhead.families import preset
from clearhead.lessons.exercise import Exercise, Function, Mistake


def multiply_adds(n_layers: int, d_model: int, d_ff: int, vocab_size: int, length: int) -> int:
    """Multiply-adds of one forward pass of a decoder over `length` tokens: one row, no cache, all pairs of tokens.

    A product of an (m, k) and a (k, n) matrix takes m k n. Each layer has the projections of queries, keys, values and output, the
    two products of attention, and the two of a feed-forward layer that is not gated. The head gives logits at every place.

    The law: these numbers; with the length doubled, only attention grows fourfold.
    """
    raise NotImplementedError(
        "list the matrix products of a layer with their three sizes, then those outside the layers"
    )


def answer(n_layers: int, d_model: int, d_ff: int, vocab_size: int, length: int) -> int:
    config = preset(
        "gpt2", n_layers=n_layers, d_model=d_model, n_heads=1, d_ff=d_ff, vocab_size=vocab_size, max_len=length
    )
    return sum(count_forward(config, 1, Lengths(length)).values()) // 2


def reference(n_layers: int, d_model: int, d_ff: int, vocab_size: int, length: int) -> int:
    """Every product by its sizes."""
    T, D = length, d_model
    layer = [(T, D, D)] * 4 + [(T, D, T), (T, T, D), (T, D, d_ff), (T, d_ff, D)]
    products = layer * n_layers + [(T, D, vocab_size)]
    return sum(m * k * n for m, k, n in products)


def variant(
    *,
    projections: int = 4,
    scores: int = 2,
    up_down: int = 2,
    heads: int | None = None,
    twice: int = 1,
    deep: bool = True,
) -> Function:
    def function(n_layers: int, d_model: int, d_ff: int, vocab_size: int, length: int) -> int:
        T, D = length, d_model
        layer = projections * T * D * D + scores * T * T * D + up_down * T * D * d_ff
        return twice * (layer * (n_layers if deep else 1) + (T if heads is None else heads) * D * vocab_size)

    return function


def causal_pairs(n_layers: int, d_model: int, d_ff: int, vocab_size: int, length: int) -> int:
    hidden = length * (length - 1) // 2
    return reference(n_layers, d_model, d_ff, vocab_size, length) - n_layers * 2 * hidden * d_model


def grows_fourfold(function: Function) -> str | None:
    once, twice = (function(3, 11, 41, 97, length) for length in (100, 200))
    found, expected = twice - 2 * once, 2 * 3 * 2 * 100**2 * 11
    words = (
        f"from 100 to 200 tokens your count grows by {twice - once:,}, of which {found:,} is more than the doubled rest"
    )
    return None if found == expected else f"{words}; expected {expected:,}: 2 T^2 D a layer"


def cases() -> dict[str, tuple[int, int, int, int, int]]:
    return {
        "GPT-2, 1,024 tokens": (12, 768, 3072, 50_257, 1024),
        "one token": (12, 768, 3072, 50_257, 1),
        "a long text": (2, 64, 256, 128, 4096),
        "sizes that are primes": (3, 11, 41, 97, 13),
    }


EXERCISE = Exercise(
    stub=multiply_adds,
    answer=answer,
    reference=reference,
    cases=cases,
    laws={"attention alone grows with the square": grows_fourfold},
    mistakes=(
        Mistake("these are FLOPs, in which a multiply and an add count 2; a multiply-add counts 1", variant(twice=2)),
        Mistake("the output projection is missing: attention has four products of T D^2", variant(projections=3)),
        Mistake("attention's own products are missing: q k^T and weights v, T^2 D each", variant(scores=0)),
        Mistake("one of attention's two products is missing: q k^T and weights v", variant(scores=1)),
        Mistake("only pairs that a causal mask allows are counted; here all T^2 pairs are", causal_pairs),
        Mistake("the feed-forward layer has two products, up and down", variant(up_down=1)),
        Mistake("this feed-forward layer is gated: three products; yours to count has two", variant(up_down=3)),
        Mistake("the head is missing: T D V", variant(heads=0)),
        Mistake("the head is counted for one place; logits are computed at all T", variant(heads=1)),
        Mistake("one layer is counted; there are n_layers", variant(deep=False)),
    ),
    hints=(
        "x (T, D) times a (D, D) matrix: T D D. There are four of these in a layer.",
        "q k^T is (T, D) times (D, T) over all heads together, and weights v is (T, T) times (T, D).",
        "n_layers * (4 T D^2 + 2 T^2 D + 2 T D F) + T D V",
    ),
    proves="you can say what a model costs before it runs",
    sources=(count_forward,),
)
