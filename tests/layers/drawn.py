"""What hypothesis draws for the tests of this folder."""

from __future__ import annotations

from hypothesis import strategies as st

from clearhead.sparsity import Pattern

from .reference import Facts


@st.composite
def facts(draw: st.DrawFn, B: int, S: int) -> Facts:
    """Any mask over B rows of S keys; rows without a real token are among them."""
    flags = st.lists(st.booleans(), min_size=S, max_size=S)
    ids = st.lists(st.integers(0, 2), min_size=S, max_size=S)
    return Facts(
        causal=draw(st.booleans()),
        window=draw(st.one_of(st.just(0), st.integers(1, S + 1))),
        real=draw(st.one_of(st.none(), st.lists(flags, min_size=B, max_size=B))),
        documents=draw(st.lists(st.lists(ids, min_size=B, max_size=B), max_size=2)),
        patterns=draw(st.lists(patterns(), max_size=2)),
    )


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    """Any sparse pattern for a text of some ten tokens."""
    window, n_random = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    return Pattern(
        block=draw(st.integers(1, 4)),
        window=window,
        dilation=draw(st.integers(1, 3)) if window > 1 else 1,
        n_global=draw(st.integers(0, 2)),
        stride=draw(st.sampled_from([0, 0, 2, 3, 5])),
        n_random=n_random,
        seed=draw(st.integers(0, 99)) if n_random else 0,
    )
