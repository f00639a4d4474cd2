"""Configs that no family has, drawn by hypothesis: any combination of fields that Config accepts.

What is drawn are the fields; the test makes the config of them. (The shape checks look at a random item of a tuple, and
hypothesis allows no other randomness while it draws.)
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Fields = dict[str, Any]

POSITIONS = ["sinusoidal", "learned", "rotary", "alibi", "t5", "none"]
SPARSITY = [
    "block=3, window=1, n_random=2",
    "window=3, dilation=2, n_global=1",
    "block=2, window=1, stride=3, n_random=1, seed=7",
    "block=16, window=1",
]
BIASES = ["auto", "", "q", "kv", "qkv", "qvo", "o"]


@st.composite
def fields(
    draw: st.DrawFn,
    *,
    shapes: tuple[str, ...] = ("decoder", "encoder", "encoder-decoder"),
    only_tokens: bool = False,
    **fixed: Any,
) -> Fields:
    """The fields of a small config. `fixed` fields are not drawn; with `only_tokens`, neither pictures nor sound enter."""

    def pick(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    shape = fixed.get("shape") or pick(*shapes)
    positions = fixed.get("positions") or pick(*POSITIONS)
    n_kv_heads = pick(1, 2, 3)
    drawn = dict(
        shape=shape,
        positions=positions,
        d_model=pick(22, 26) if positions == "sinusoidal" else pick(11, 13, 22),
        n_layers=pick(1, 2),
        n_heads=n_kv_heads * pick(1, 2, 3),
        n_kv_heads=n_kv_heads,
        d_head=pick(2, 6, 10) if positions == "rotary" else pick(1, 5, 7),
        d_ff=pick(17, 37),
        vocab_size=53,
        max_len=31,
        embedding_scale=draw(st.booleans()),
        embedding_norm=draw(st.booleans()),
        norm=pick("layer", "rms", "none"),
        norm_first=draw(st.booleans()),
        bias=draw(st.booleans()),
        attention_bias=pick(*BIASES),
        qk_norm=draw(st.booleans()),
        attention_scale=pick(0.0, 1.0, 0.3),
        window=pick(0, 0, 1, 2, 5),
        feedforward=pick("relu", "gelu", "gelu_tanh", "silu", "relu2"),
        gated=draw(st.booleans()),
    )
    if not (drawn | fixed)["window"]:
        drawn |= dict(sparsity=pick("", "", *SPARSITY))
    if positions == "rotary":
        drawn |= dict(rotary_interleaved=draw(st.booleans()), rotary_original_len=7, rotary_base=pick(1e4, 30.0))
        drawn |= dict(rotary_scaling=pick("none", "linear", "llama3"), rotary_factor=pick(1.0, 3.0))
        drawn |= dict(rotary_precision=pick("float32", "float16"))
    if positions == "sinusoidal":
        drawn |= dict(sinusoid_halves=draw(st.booleans()))
    if positions == "t5":
        drawn |= dict(t5_buckets=pick(4, 6, 8), t5_max_distance=11)
    if shape == "encoder":
        drawn |= draw(encoder_fields(fixed.get("head")))
    else:
        drawn |= dict(tie_embeddings=draw(st.booleans()), head_bias=pick("none", "learned", "fixed"))
        drawn |= dict(head_transform=draw(st.booleans()), head_scale=draw(st.booleans()))
    if shape == "encoder-decoder":
        drawn |= dict(n_decoder_layers=pick(0, 1, 3), source_vocab_size=pick(0, 59), max_source_len=pick(0, 29))
    if not only_tokens and shape == "encoder" and draw(st.booleans()):
        drawn |= dict(inputs="patches", image_size=15, patch_size=5, n_channels=2, max_len=0)
        drawn |= dict(tie_embeddings=False, dropped_token=-1)
    if not only_tokens and shape == "encoder-decoder" and draw(st.booleans()):
        drawn |= dict(inputs="frames", n_mels=5, source_vocab_size=0, d_model=22)  # a table of sinusoids: pairs
    return drawn | fixed


@st.composite
def encoder_fields(draw: st.DrawFn, head: str | None = None) -> Fields:
    """What an encoder ends in."""
    head = head or draw(st.sampled_from(["none", "tokens", "classes"]))
    drawn = dict(head=head, pool=draw(st.sampled_from(["first", "mean", "max"])), pooler=draw(st.booleans()))
    drawn |= dict(n_segments=draw(st.sampled_from([0, 2])), pool_normed=draw(st.booleans()))
    drawn |= dict(dropped_token=draw(st.sampled_from([-1, 5])))
    if head == "tokens":
        drawn |= dict(tie_embeddings=draw(st.booleans()), head_transform=draw(st.booleans()))
    if head == "classes":
        drawn |= dict(n_classes=7)
    return drawn


def pieces(length: int) -> st.SearchStrategy[list[int]]:
    """Ways to cut `length` tokens into pieces, one token each included."""
    cuts = st.sets(st.integers(1, length - 1), max_size=length - 1).map(sorted)
    return cuts.map(lambda at: [b - a for a, b in zip([0, *at], [*at, length], strict=True)])
