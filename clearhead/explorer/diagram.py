"""A model drawn from its config, as in Figure 1 of the paper: the residual stream is the spine, each part stands beside it.

`parts_of` lists the parts with their sizes and parameters; `draw_model` is an SVG of them. The page's Model panel and
`clearhead draw` share both.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from html import escape

from clearhead.config import Config
from clearhead.models import build

# Which panel of the page shows what a part does.
PANELS = {"embedding": "geometry", "positions": "positions", "attention": "heads", "cross": "heads", "head": "lens"}
ACTS = {"relu": "ReLU", "gelu": "GELU", "gelu_tanh": "GELU", "silu": "SiLU", "relu2": "ReLU²"}


@dataclass(frozen=True)
class Part:
    """One kind of part of a stack: `n` of them, with `params` parameters in all of them together."""

    stack: str  # "encoder" or "decoder"
    kind: str  # embedding, positions, norm, attention, cross, feedforward, head
    name: str
    words: str
    params: int = 0
    n: int = 1
    of_step: bool = False  # a norm inside a block

    @property
    def panel(self) -> str:
        return PANELS.get(self.kind, "cost")

    @property
    def in_block(self) -> bool:
        return self.kind in ("attention", "cross", "feedforward") or (self.kind == "norm" and self.of_step)

    @property
    def high(self) -> int:
        """Of its box in the drawing."""
        return SLIM if self.kind == "norm" else HIGH


def short(n: int) -> str:
    """124,439,808 as "124 M"."""
    for size, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= size:
            return f"{float(f'{n / size:.3g}'):g} {letter}"
    return str(n)


def parts_of(config: Config) -> dict[str, list[Part]]:
    """The parts of each stack, in the order in which a forward pass meets them. The parameters sum to the model's."""
    counted = _count(config)
    stacks = {"encoder-decoder": ("encoder", "decoder")}.get(config.shape, (config.shape,))
    found = {stack: _stack(config, stack, counted) for stack in stacks}
    left = +counted
    assert not left, f"parameters without a part: {dict(left)}"
    return found


def _count(config: Config) -> Counter[tuple[str, str]]:
    """Parameters by stack and part, of a model without memory."""
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
            Part(stack, "positions", f"{c.positions} positions", f"{longest:,} × {c.d_model}", take("positions"))
        )
    if norm := take("embedding_norm"):
        parts.append(Part(stack, "norm", f"{c.norm} norm", f"{c.d_model}", norm))
    if buckets := take("positions"):
        parts.append(
            Part(stack, "positions", "t5 positions", f"{c.t5_buckets} × {c.n_heads}, added to scores", buckets)
        )
    steps = ("attention", "cross", "feedforward") if pair and stack == "decoder" else ("attention", "feedforward")
    for step in steps:
        kind = f"{c.norm} norm" + (", queries and keys too" if c.qk_norm and step != "feedforward" else "")
        norm = Part(stack, "norm", kind, f"{c.d_model}", take(f"{step}_norm"), n_layers, of_step=True)
        body = Part(stack, step, *_step(c, stack, step), take(step), n_layers)
        parts += [body] if not norm.params else [norm, body] if c.norm_first else [body, norm]
    if norm := take("norm"):
        parts.append(Part(stack, "norm", f"{c.norm} norm", f"{c.d_model}", norm))
    if not pair or stack == "decoder":
        head = take("pool", "head")
        if c.head != "none" or head:
            parts.append(Part(stack, "head", *_head(c), head))
    return parts


def _embedding(c: Config, stack: str) -> tuple[str, str]:
    is_source = c.shape == "encoder-decoder" and stack == "encoder"
    if c.inputs == "patches":
        return "patch projection", f"{c.n_channels} × {c.patch_size} × {c.patch_size} → {c.d_model}"
    if c.inputs == "frames" and is_source:
        return "two convolutions", f"{c.n_mels} mel bands → {c.d_model}"
    if is_source and not c.source_vocab_size:
        return "token embedding", "the decoder's, shared"
    return "token embedding", f"{c.source_vocab_size if is_source else c.vocab_size:,} × {c.d_model}"


def _step(c: Config, stack: str, step: str) -> tuple[str, str]:
    if step == "feedforward":
        return (
            "feed-forward",
            f"{c.d_model} → {c.d_ff} → {c.d_model}, {ACTS[c.feedforward]}{', gated' if c.gated else ''}",
        )
    heads = f"{c.n_heads} heads of {c.d_head}"
    if c.n_kv_heads != c.n_heads:
        heads += f", {c.n_kv_heads} for k and v"
    if step == "cross":
        return "cross-attention", heads
    kind = "causal attention" if stack == "decoder" else "attention"
    more = [each for each in (c.positions,) if each in ("rotary", "alibi", "t5")]
    more += [f"window {c.window}"] if c.window else []
    return kind, ", ".join([heads, *more])


def _head(c: Config) -> tuple[str, str]:
    if c.head == "classes":
        return "classes", f"{c.pool} of all tokens → {c.n_classes}"
    if c.head == "none":
        return "pooler", f"{c.d_model} → {c.d_model}"
    return "output projection", f"{c.d_model} → {c.vocab_size:,}{', the embedding again' if c.tie_embeddings else ''}"


# The drawing. Figures are in SVG's units; a column is one stack.
COLUMN, SPINE, LEFT, WIDE, HIGH, SLIM, GAP = 392, 62, 104, 268, 48, 24, 18
STYLE = """<style>
svg { font: 14px system-ui, sans-serif; color: #191b20; background: #fff }
.part rect { fill: #e2eff2; stroke: #146a80 } .norm rect { fill: #f0eeea; stroke: #8b8f97 }
.frame { fill: none; stroke: #8b8f97; stroke-dasharray: 4 4 } .spine { stroke: #146a80; stroke-width: 3; fill: none }
.way { stroke: #8b8f97; fill: none } .plus { fill: #fff; stroke: #146a80 } text { fill: currentColor }
.small { font-size: 12px; fill: #5c616b } .end { text-anchor: end }
@media (prefers-color-scheme: dark) { svg { color: #eceae4; background: #181a1f } .part rect { fill: #1c3338; stroke: #6cc5b9 }
  .norm rect { fill: #22252c } .spine { stroke: #6cc5b9 } .plus { fill: #181a1f; stroke: #6cc5b9 } .small { fill: #a0a5af } }
</style>"""


def draw_model(config: Config, *, style: bool = True) -> str:
    """An SVG of the model, bottom to top. Each part is a link with `data-panel`, the page's panel that shows it.

    style   with its own colours; the page has them in its style sheet
    """
    stacks = parts_of(config)
    columns = [_Column(config, stack, parts, at * COLUMN) for at, (stack, parts) in enumerate(stacks.items())]
    height = max(column.height for column in columns)
    drawn = [line for column in columns for line in column.draw(height)]
    if len(columns) == 2:  # from the encoder's output to the decoder's cross-attention
        (x, y), (to_x, to_y) = columns[0].top, columns[1].cross
        drawn.insert(0, f'<path class="spine" d="M{x} {y}H{COLUMN - 2}V{to_y}H{to_x}"/>')
    size = f'viewBox="0 0 {COLUMN * len(columns)} {height}" width="{COLUMN * len(columns)}" height="{height}"'
    kind = "pair" if len(columns) == 2 else "single"
    open_tag = f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" {size} role="group" aria-label="The model, part by part">'
    return "\n".join([open_tag, *([STYLE] if style else []), *drawn, "</svg>"])


class _Column:
    """One stack, drawn upwards from `y`. The spine is the residual stream."""

    def __init__(self, config: Config, stack: str, parts: list[Part], x: int) -> None:
        self.config, self.stack, self.parts, self.x = config, stack, parts, x
        self.spine, self.left = x + SPINE, x + LEFT
        self.top = self.cross = (0, 0)
        self.height = 96 + sum(_room(part) for part in parts)

    def draw(self, height: int) -> list[str]:
        y = height - 36
        lines = [_text(self.left, y + 20, self._input(), "small")]
        stream, ends = f"M{self.spine} {y + 12}", list[int]()
        for i, part in enumerate(self.parts):
            if len(ends) == (0 if part.in_block else 1):  # here the blocks begin, or end
                ends.append(y)
            top = y - GAP // 2 - part.high
            if self._is_passed(i):
                stream += f"V{top + part.high - 6}H{self.left}M{self.left} {top + 6}H{self.spine}"
            else:
                lines += self._way(i, top)
            lines += self._box(part, top)
            if part.kind == "cross":
                self.cross = (self.left, top + part.high - 9)
            y -= _room(part)
        ends += [y] * (2 - len(ends))
        self.top = (self.spine, y - 8)
        box = f'x="{self.x + 12}" y="{ends[1] - 2}" width="{COLUMN - 24}" height="{ends[0] - ends[1]}" rx="10"'
        count = _text(self.spine - 16, (ends[0] + ends[1]) // 2, f"× {self._depth()}", "small end")
        lines.append(_text(self.left, y - 14, self._output(), "small"))
        return [f'<rect class="frame" {box}/>', f'<path class="spine" d="{stream}V{y - 8}"/>', *lines, count]

    def _is_passed(self, i: int) -> bool:
        """Whether the stream goes through this part, instead of around it with the part's output added."""
        kind = self.parts[i].kind
        if kind == "head":
            return self.config.head != "none"  # a pooler reads the stream, which ends in states all the same
        return kind == "embedding" or (kind == "norm" and not self._is_before(i))

    def _is_before(self, i: int) -> bool:
        """Whether this is the norm at the start of a step: the step reads it, the stream does not."""
        return self.parts[i].kind == "norm" and self.config.norm_first and self.parts[i].in_block

    def _way(self, i: int, top: int) -> list[str]:
        """From the spine into a step, or through its norm, and from the step back to a plus on the spine."""
        part, (x, left) = self.parts[i], (self.spine, self.left)
        middle, bottom = top + part.high // 2, top + part.high
        if self._is_before(i):
            return [f'<path class="way" d="M{x} {middle}H{left}M{left + 24} {top}v{-GAP}"/>']
        if part.kind == "positions" and self.config.positions == "t5":
            return []  # added to the scores, not to the stream
        if part.kind == "head":
            return [f'<path class="way" d="M{x} {middle}H{left}"/>']
        into = "" if part.kind == "positions" or self._is_before(i - 1) else f"M{x} {bottom + 7}H{left + 24}V{bottom}"
        plus = f'<circle class="plus" cx="{x}" cy="{middle}" r="9"/>'
        return [
            f'<path class="way" d="{into}M{left} {middle}H{x}"/>',
            plus,
            f'<path class="way" d="M{x - 5} {middle}h10M{x} {middle - 5}v10"/>',
        ]

    def _box(self, part: Part, top: int) -> list[str]:
        pair = self.config.shape == "encoder-decoder"
        group = "cross" if part.kind == "cross" else part.stack if pair else "attention"
        opens = f'data-panel="{part.panel}" data-attention="{group}"'
        kind = "norm" if part.kind == "norm" else "part"
        line = top + (17 if kind == "norm" else 20)
        lines = [_text(self.left + 12, line, part.name, "small" if kind == "norm" else "")]
        if kind == "part":
            words = part.words + (f"; in {part.n} layers" if part.n > 1 else "")
            lines.append(_text(self.left + 12, top + 38, words, "small"))
        lines.append(_text(self.left + WIDE - 12, line, short(part.params), "small end"))
        rect = f'<rect x="{self.left}" y="{top}" width="{WIDE}" height="{part.high}" rx="8"/>'
        return [f'<g class="{kind}" role="link" tabindex="0" {opens}>', rect, *lines, "</g>"]

    def _depth(self) -> int:
        return max(part.n for part in self.parts)

    def _input(self) -> str:
        c, is_source = self.config, self.config.shape == "encoder-decoder" and self.stack == "encoder"
        if c.inputs == "patches":
            return f"a picture of {c.image_size} × {c.image_size}: {c.n_patches} patches"
        if c.inputs == "frames" and is_source:
            return f"sound: up to {c.max_source_len:,} frames"
        return f"up to {c.max_source_len if is_source else c.max_len:,} tokens"

    def _output(self) -> str:
        c = self.config
        if c.shape == "encoder-decoder" and self.stack == "encoder":
            return f"memory: T × {c.d_model}"
        sizes = {"none": f"states: T × {c.d_model}", "tokens": f"logits: T × {c.vocab_size:,}"}
        return sizes.get(c.head, f"one score for each of {c.n_classes} classes")


def _room(part: Part) -> int:
    return part.high + GAP


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind or "name"}">{escape(words)}</text>'
