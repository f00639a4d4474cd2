"""The parts of a model, listed from its config: what the drawings show (diagram.py, text_diagram.py)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from clearhead.config import Config
from clearhead.costs.flops import Lengths, count_steps
from clearhead.costs.units import spell_count

# Which panel of the page shows what a part does.
PANELS = {
    "embedding": "geometry",
    "positions": "positions",
    "norm": "follow",
    "attention": "heads",
    "cross": "heads",
    "feedforward": "intervene",
    "head": "lens",
}
ACTS = {"relu": "ReLU", "gelu": "GELU", "gelu_tanh": "GELU", "silu": "SiLU", "relu2": "ReLU²"}


@dataclass(frozen=True)
class Part:
    """One kind of part of a stack: `n` of them, with `params` parameters and `flops` operations in all of them together."""

    stack: str  # "encoder" or "decoder"
    kind: str  # embedding, positions, norm, attention, cross, feedforward, head
    name: str
    words: str
    params: int = 0
    n: int = 1
    of_step: bool = False  # a norm inside a block
    is_sparse: bool = False  # attention of a pattern, which is drawn below the words
    flops: int = 0  # of one forward pass

    @property
    def panel(self) -> str:
        return PANELS[self.kind]

    @property
    def in_block(self) -> bool:
        return self.kind in ("attention", "cross", "feedforward") or (self.kind == "norm" and self.of_step)


def short(n: int) -> str:
    """124,439,808 as "124 M"."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= size:
            return f"{float(f'{n / size:.3g}'):g} {letter}"
    return str(n)


def parts_of(config: Config, at: Lengths) -> dict[str, list[Part]]:
    """The parts of each stack, in the order in which a forward pass meets them. Parameters and FLOPs sum to the model's."""
    counted, flops = _count(config), Counter[tuple[str, str]]()
    for (stack, step, _), n in count_steps(config, 1, at).items():
        flops[stack, step] += n
    stacks = {"encoder-decoder": ("encoder", "decoder")}.get(config.shape, (config.shape,))
    found = {stack: [_with_flops(part, flops) for part in _stack(config, stack, counted)] for stack in stacks}
    left = +counted or +flops
    assert not left, f"without a part: {dict(left)}"
    return found


def _with_flops(part: Part, flops: Counter[tuple[str, str]]) -> Part:
    return replace(part, flops=flops.pop((part.stack, part.kind), 0))


def _count(config: Config) -> Counter[tuple[str, str]]:
    """Parameters by stack and part, of a model without memory."""
    from clearhead.models import build  # loads torch

    counted: Counter[tuple[str, str]] = Counter()
    for name, weight in build(config, device="meta").named_parameters():
        found = re.fullmatch(r"(?:(encoder|decoder)\.)?(?:blocks\.\d+\.)?(\w+)\..*", name)
        assert found, name
        # Outside the stacks of an encoder-decoder are the target's embedding and head, and what reads the source.
        outside = {"source": "encoder"}.get(found[2], "decoder") if config.shape == "encoder-decoder" else config.shape
        # Norms of queries and keys are counted with the norm before them.
        part = f"{found[2]}_norm" if re.search(r"\.[qk]_norm\.", name) else found[2]
        counted[found[1] or outside, part] += weight.numel()
    return counted


def _stack(c: Config, stack: str, counted: Counter[tuple[str, str]]) -> list[Part]:
    def take(*names: str) -> int:
        return sum(counted.pop((stack, name), 0) for name in names)

    pair = c.shape == "encoder-decoder"
    n_layers = c.n_decoder_layers if pair and stack == "decoder" else c.n_layers
    parts = [Part(stack, "embedding", *_embedding(c, stack), take("tokens", "source", "segments"))]
    if c.positions in ("sinusoidal", "learned"):
        longest = c.max_source_len if pair and stack == "encoder" else c.max_len
        parts.append(
            Part(stack, "positions", f"{c.positions} positions", f"{longest:,} × {c.d_model:,}", take("positions"))
        )
    if norm := take("embedding_norm"):
        parts.append(Part(stack, "norm", f"{c.norm} norm", f"{c.d_model:,}", norm))
    if buckets := take("positions"):
        parts.append(
            Part(stack, "positions", "t5 positions", f"{c.t5_buckets} × {c.n_heads}, added to scores", buckets)
        )
    steps = ("attention", "cross", "feedforward") if pair and stack == "decoder" else ("attention", "feedforward")
    for step in steps:
        kind = f"{c.norm} norm" + (", q and k too" if c.qk_norm and step != "feedforward" else "")
        norm = Part(stack, "norm", kind, f"{c.d_model:,}", take(f"{step}_norm"), n_layers, of_step=True)
        is_sparse = step == "attention" and bool(c.sparsity)
        body = Part(stack, step, *_step(c, stack, step), take(step), n_layers, is_sparse=is_sparse)
        parts += [body] if not norm.params else [norm, body] if c.norm_first else [body, norm]
    if norm := take("norm"):
        parts.append(Part(stack, "norm", f"{c.norm} norm", f"{c.d_model:,}", norm))
    if not pair or stack == "decoder":
        head = take("pool", "head")
        if c.head != "none" or head:
            parts.append(Part(stack, "head", *_head(c), head))
    return parts


def _embedding(c: Config, stack: str) -> tuple[str, str]:
    is_source = c.shape == "encoder-decoder" and stack == "encoder"
    if c.inputs == "patches":
        return "patch projection", f"{c.n_channels} × {c.patch_size} × {c.patch_size} → {c.d_model:,}"
    if c.inputs == "frames" and is_source:
        return "two convolutions", f"{c.n_mels} mel bands → {c.d_model:,}"
    if is_source and not c.source_vocab_size:
        return "token embedding", "the decoder's, shared"
    return "token embedding", f"{c.source_vocab_size if is_source else c.vocab_size:,} × {c.d_model:,}"


def _step(c: Config, stack: str, step: str) -> tuple[str, str]:
    if step == "feedforward":
        return (
            "feed-forward",
            f"{c.d_model:,} → {c.d_ff:,} → {c.d_model:,}, {ACTS[c.feedforward]}{', gated' if c.gated else ''}",
        )
    heads = f"{c.n_heads} heads of {c.d_head}"
    if c.n_kv_heads != c.n_heads:
        heads += f", {c.n_kv_heads} kv"
    if step == "cross":
        return "cross-attention", heads
    kind = "causal attention" if stack == "decoder" else "attention"
    more = [each for each in (c.positions,) if each in ("rotary", "alibi", "t5")]
    more += [f"window {c.window:,}"] if c.window else ["sparse"] if c.sparsity else []
    return kind, ", ".join([heads, *more])


def _head(c: Config) -> tuple[str, str]:
    if c.head == "classes":
        return "classes", f"{c.pool} of all tokens → {c.n_classes}"
    if c.head == "none":
        return "pooler", f"{c.d_model:,} → {c.d_model:,}"
    return "output projection", f"{c.d_model:,} → {c.vocab_size:,}{', the embedding again' if c.tie_embeddings else ''}"


def input_of(config: Config, stack: str) -> str:
    """What a stack reads, in words."""
    c, is_source = config, config.shape == "encoder-decoder" and stack == "encoder"
    if c.inputs == "patches":
        return f"a picture of {c.image_size} × {c.image_size}: {c.n_patches} patches"
    if c.inputs == "frames" and is_source:
        return f"sound: up to {c.max_source_len:,} frames"
    return f"up to {c.max_source_len if is_source else c.max_len:,} tokens"


def output_of(config: Config, stack: str) -> str:
    """What a stack gives, in words."""
    c = config
    if c.shape == "encoder-decoder" and stack == "encoder":
        return f"memory: S × {c.d_model:,}"
    sizes = {"none": f"states: T × {c.d_model:,}", "tokens": f"logits: T × {c.vocab_size:,}"}
    return sizes.get(c.head, f"one score for each of {c.n_classes:,} classes")


def is_passed(config: Config, parts: list[Part], i: int) -> bool:
    """Whether the residual stream goes through this part, instead of around it with the part's output added."""
    kind = parts[i].kind
    if kind == "head":
        return config.head != "none"  # a pooler reads the stream, which ends in states all the same
    return kind == "embedding" or (kind == "norm" and not is_before(config, parts[i]))


def is_before(config: Config, part: Part) -> bool:
    """Whether this is the norm at the start of a step: the step reads it, the stream does not."""
    return part.kind == "norm" and config.norm_first and part.in_block


def figures(part: Part) -> str:
    """Parameters and FLOPs; parameters alone where there are no FLOPs, and nothing where there are neither."""
    if part.flops:
        return f"{short(part.params)} · {spell_count(part.flops, '').rstrip()}"
    return short(part.params) if part.params else ""


def measure(at: Lengths) -> str:
    """What the figures of a drawing are, in words."""
    rows = f"{at.source:,} and {at.target:,} tokens" if at.source else f"{at.target:,} tokens"
    return f"on each part: parameters · operations for {rows}"
