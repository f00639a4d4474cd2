"""The forecast of what a call, a training step or a generated token costs, before anything is built (and without torch).

    cost(config, batch=8, length=1024, mode="train", precision="bfloat16").peak_bytes

Parameters, FLOPs, weights, gradients and cache are exact. What training keeps for the backward pass is exact to a few percent
(activations.py lists it). The peak is the sum of these and of temporary tensors at the worst moment; it does not include an
allocator's rounding, the choices of a compiled graph, and torch itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from clearhead.config import Config
from clearhead.costs.activations import Setting, count_blocks, count_copies, count_saved
from clearhead.costs.flops import Lengths, check_lengths, count_forward, count_training
from clearhead.costs.parameters import count_heads, count_matrices, count_parameters, count_weight_bytes
from clearhead.costs.temporaries import widest
from clearhead.costs.units import spell_count
from clearhead.display import html_table
from clearhead.errors import ConfigError, did_you_mean
from clearhead.limits import LOSS_CHUNK, QUANTIZATIONS

# The parts, and the figures of a cost, with the words that a table has for them.
PARTS = {
    "embedding": "embedding",
    "projections": "attention: projections",
    "attention": "attention: T²",
    "feedforward": "feed-forward",
    "norm": "norms and stream",
    "head": "head",
}
COLUMNS = {
    "params": "parameters",
    "flops": "operations",
    "weight_bytes": "weights",
    "gradient_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activation_bytes": "activations",
    "kv_cache_bytes": "cache",
    "peak_bytes": "peak memory",
}

CHOICES = {
    "mode": ("forward", "train", "decode"),
    "precision": ("float32", "bfloat16"),
    "optimizer": ("adamw", "muon", "sgd", "none"),
    "parallel": ("fsdp", "ddp"),
    "quantize": tuple(QUANTIZATIONS),
    "device": ("cpu", "cuda"),
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A forecast for one device. `parts` splits each number by part: `cost.parts["flops"]["attention"]`.

    The parts: "embedding" with positions, "projections" (q, k, v and output), "attention" (what grows with the square of the
    length, and the cache), "feedforward", "norm" with the residual stream it reads, "head".

    `flops` is what operators count: all pairs of attention, and what checkpointing computes again. `useful_flops` is the work
    that the result needs: allowed pairs, everything once. Utilisation is useful_flops / seconds / the machine's peak. Papers
    that count all pairs, as PaLM's, use `flops` without checkpointing: a little higher.
    """

    params: int
    flops: int
    useful_flops: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # training: kept for the backward pass; else: temporary tensors at the widest place
    kv_cache_bytes: int
    peak_bytes: int
    parts: Mapping[str, Mapping[str, int]]

    def __repr__(self) -> str:
        figures = {"params": self.params, "flops": self.flops, "peak_bytes": self.peak_bytes}
        return f"Cost({', '.join(f'{name}={value:,}' for name, value in figures.items())}, ...; .parts splits them)"

    def _repr_html_(self) -> str:
        shown = [name for name in COLUMNS if getattr(self, name)]
        rows = [
            (label, *(spell_figure(name, self.parts[name][part]) for name in shown)) for part, label in PARTS.items()
        ]
        rows.append(("all", *(spell_figure(name, getattr(self, name)) for name in shown)))
        return html_table("Cost", ("part", *(COLUMNS[name] for name in shown)), rows)

    def seconds(self, rate: float, bandwidth: float = math.inf) -> float:
        """The time at `rate` FLOP/s, but at least the time to read weights and cache at `bandwidth` bytes a second."""
        return max(self.flops / rate, (self.weight_bytes + self.kv_cache_bytes) / bandwidth)


def spell_figure(name: str, n: int) -> str:
    """A figure of a cost as a table shows it; nothing for 0."""
    if not n:
        return ""
    return f"{n:,}" if name == "params" else spell_count(n, "FLOP" if name == "flops" else "B")


def cost(
    config: Config,
    *,
    batch: int = 1,
    length: int | None = None,
    source_length: int | None = None,
    mode: str = "forward",
    precision: str = "float32",
    checkpointing: bool = False,
    optimizer: str = "adamw",
    shards: int = 1,
    parallel: str = "fsdp",
    quantize: str | None = None,
    chunked_loss: bool = True,
    accumulation: int = 1,
    device: str = "cpu",
) -> Cost:
    """The forecast for `batch` rows of `length` tokens on one device.

    mode: "forward" is one call without gradients; "train" one forward and backward pass, and the optimizer's state; "decode" one
    more token for each row, with a cache that then holds `length` tokens. Lengths that are not given are the longest that the
    config allows; for sound, `source_length` counts positions after the convolutions: half the frames. In training, weights are
    float32 and precision="bfloat16" means autocast; else the weights themselves are bfloat16, or int8 or int4 with `quantize`
    ("w8a8" and "w4a8" are held alike).

    `shards` devices work on one batch each. With parallel="fsdp" they share weights, gradients and optimizer state, and gather
    two blocks at a time, and all that is in no block. With "ddp" each holds everything, and a second copy of the gradients to
    exchange them. With `accumulation` above 1, gradients of earlier passes are there while activations are.
    """
    if not isinstance(config, Config):  # pyright: ignore[reportUnnecessaryIsInstance] - not every caller has types
        raise ConfigError(f"cost takes a Config, got {type(config).__name__}; make one with ch.preset(name)")
    _check_choices(mode=mode, precision=precision, optimizer=optimizer, parallel=parallel, device=device)
    _check_counts(batch=batch, shards=shards, accumulation=accumulation)
    _check_mode(config, mode, quantize)
    at = check_lengths(config, length, source_length)
    setting = Setting(half=precision == "bfloat16", cuda=device == "cuda")
    sharded = shards if parallel == "fsdp" else 1
    weights = _parts(count_weight_bytes(config, 4 if mode == "train" else setting.size, quantize))
    figures = {"params": _parts(count_parameters(config)), "weight_bytes": _share(weights, sharded)}
    if mode == "train":
        found, transient = _training(
            config,
            batch,
            at,
            setting,
            logits=0 if chunked_loss else batch * at.target,
            checkpointing=checkpointing,
            optimizer=optimizer,
            sharded=sharded,
            exchanges=parallel == "ddp" and shards > 1,
            accumulates=accumulation > 1,
        )
    else:
        found, transient = _inference(config, batch, at, setting, decodes=mode == "decode")
    figures |= found
    kept = (figures[name] for name in ("weight_bytes", "optimizer_bytes", "kv_cache_bytes"))
    figures["peak_bytes"] = _sum(*kept, _gathered(config, weights, sharded), transient)
    return Cost(**{name: _total(parts) for name, parts in figures.items()}, parts=figures)


def _check_mode(config: Config, mode: str, quantize: str | None) -> None:
    if quantize is not None:
        _check_choices(quantize=quantize)
        if mode == "train":
            raise ConfigError(f"quantised weights can not be trained; got quantize={quantize!r}; use mode='forward'")
    if mode == "decode" and config.shape == "encoder":
        raise ConfigError("mode='decode' is for models that write; got shape='encoder'; use mode='forward'")


def _training(
    c: Config,
    batch: int,
    at: Lengths,
    setting: Setting,
    *,
    logits: int,
    checkpointing: bool,
    optimizer: str,
    sharded: int,
    exchanges: bool,
    accumulates: bool,
) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """The figures of a training step, and what is held only at its worst moment. `logits`: how many positions keep theirs."""
    saved = count_saved(c, batch, at, setting, logits=logits, checkpointing=checkpointing)
    gradients = _share({part: 4 * n for part, n in _trained(c).items()}, sharded)
    exchanged = gradients if exchanges else _sum()
    transient = _sum(saved, _working(c, batch, at, setting, logits, checkpointing=checkpointing))
    # The gradients of a tied table come last: one from the embedding, one from the head, and their sum.
    last = _sum(gradients, {"embedding": 8 * c.vocab_size * c.d_model if c.tie_embeddings else 0})
    # Gradients grow while activations shrink: all of both are there only if an earlier pass left gradients.
    transient = _sum(transient, gradients) if accumulates else _largest([transient, last])
    figures = {
        "flops": _sum(count_training(c, batch, at, checkpointing=checkpointing)),
        "useful_flops": _sum(count_training(c, batch, at, pairs="allowed")),
        "gradient_bytes": _sum(gradients, exchanged),
        "optimizer_bytes": _share(_optimizer(c, optimizer), sharded),
        "activation_bytes": _sum(saved),
        "kv_cache_bytes": _sum(),
    }
    return figures, _sum(transient, exchanged)


def _inference(
    c: Config, batch: int, at: Lengths, setting: Setting, *, decodes: bool
) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """The figures of a call without gradients, or of one more token; and what is held only at its worst moment."""
    at = Lengths(1, at.source, past=at.target - 1) if decodes else at
    transient = _sum(widest(c, batch, at, setting))
    figures = {
        "flops": _sum(count_forward(c, batch, at, pairs="all")),
        "useful_flops": _sum(count_forward(c, batch, at, pairs="allowed")),
        "gradient_bytes": _sum(),
        "optimizer_bytes": _sum(),
        "activation_bytes": transient,
        "kv_cache_bytes": _sum({"attention": _kv_cache(c, batch, at, setting)} if decodes else {}),
    }
    return figures, transient


def _check_choices(**choices: str) -> None:
    for name, value in choices.items():
        if value not in CHOICES[name]:
            raise ConfigError(f"{name}={value!r} is not known; {did_you_mean(value, CHOICES[name])}")


def _check_counts(**counts: int) -> None:
    for name, n in counts.items():
        if n < 1:
            raise ConfigError(f"{name}={n} is too small; nearest valid: {name}=1")


def _parts(counted: Mapping[str, int]) -> dict[str, int]:
    """Counts of parameters by the names of PARTS: attention's parameters are all in its projections."""
    names = {"attention": "projections"}
    return _sum({names.get(part, part): n for part, n in counted.items()})


def _sum(*all_parts: Mapping[str, int]) -> dict[str, int]:
    """The sum, for every part; zeros if nothing is given."""
    return {part: sum(parts.get(part, 0) for parts in all_parts) for part in PARTS}


def _share(parts: Mapping[str, int], shards: int) -> dict[str, int]:
    return {part: -(-n // shards) for part, n in parts.items()}


def _total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def _largest(choices: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    return max(choices, key=_total)


def _trained(c: Config) -> dict[str, int]:
    """All parameters except Whisper's fixed table of sinusoids."""
    fixed = c.max_source_len * c.d_model if c.inputs == "frames" and c.positions == "learned" else 0
    parts = _parts(count_parameters(c))
    return parts | {"embedding": parts["embedding"] - fixed}


def _optimizer(c: Config, optimizer: str) -> dict[str, int]:
    """Bytes of float32 moments: AdamW 2 for each parameter, SGD 1; Muon 1 for the blocks' matrices and AdamW's for the rest."""
    moments = {"adamw": 2, "muon": 2, "sgd": 1, "none": 0}[optimizer]
    state = {part: 4 * moments * n for part, n in _trained(c).items()}
    if optimizer == "muon":
        matrices = _parts(count_matrices(c))
        for part in ("projections", "feedforward"):
            state[part] -= 4 * matrices[part]
    return state


def _gathered(c: Config, weights: Mapping[str, int], shards: int) -> dict[str, int]:
    """What FSDP gathers beyond its share: two blocks, the embedding and the head."""
    layers = c.n_layers + c.n_decoder_layers
    held = {part: n * min(2, layers) // layers for part, n in weights.items()} | {
        part: weights[part] for part in ("embedding", "head")
    }
    return {part: n * (shards - 1) // shards for part, n in held.items()}


def _kv_cache(c: Config, batch: int, at: Lengths, setting: Setting) -> int:
    """Keys and values of the decoder's layers: of the tokens within the window, and of the whole source."""
    slots = min(c.window, at.past + 1) if c.window else at.past + 1
    is_pair = c.shape == "encoder-decoder"
    written = slots * count_heads(c, "decoder.*.attention" if is_pair else "*")[1]
    read = at.source * count_heads(c, "decoder.*.cross")[1]
    return 2 * setting.size * batch * (written + read) * c.d_head


def _working(
    c: Config, batch: int, at: Lengths, setting: Setting, kept_logits: int, *, checkpointing: bool
) -> dict[str, int]:
    """Temporary tensors at the worst moment of the backward pass, beside all that is kept.

    The largest of two moments. In the loss (`_loss_bytes`); with checkpointing also autocast's copies of the blocks' weights,
    which live until then. In the last block: the gradients of the head's weight and of the feed-forward; with checkpointing
    also that whole block, which is computed again.
    """
    vocabulary = c.vocab_size if c.head == "tokens" else 0
    tokens = batch * max(at.target, at.source)
    # The log-probabilities, if kept, are freed by then.
    head = {"head": 4 * vocabulary * c.d_model - 4 * kept_logits * vocabulary}
    inside = _sum(head, {"feedforward": setting.size * tokens * c.d_ff * (3 if c.gated else 2)})
    work = [{"head": _loss_bytes(c, vocabulary, batch * at.target, kept_logits, setting)}, inside]
    if checkpointing:
        work += [_sum(inside, block) for _, block in count_blocks(c, batch, at, setting)]
        copies = count_copies(c, setting)
        if kept_logits:  # their loss comes after autocast has let the copies go
            work.append(_sum({"head": 4 * vocabulary * c.d_model}, copies))
        else:
            work[0] = _sum(work[0], {part: copies.get(part, 0) for part in ("projections", "feedforward")})
    return _sum(_largest([_sum(each) for each in work]))


def _loss_bytes(c: Config, vocabulary: int, tokens: int, kept_logits: int, setting: Setting) -> int:
    """Temporary tensors of the loss at the worst of its moments.

    With all logits at once there are three tensors of their size, one of them kept. In chunks (kernels/cross_entropy.py) the
    worst is one of three moments: the exponentials (logits, differences, exponentials, the last chunk's gradient, the weight's
    gradient so far); the weight's gradient (the logits' gradient, a chunk's product, the sum before and after); or the product
    of the weight's gradient with the loss's own.
    """
    if not vocabulary:
        return 0
    if kept_logits:
        return 8 * kept_logits * vocabulary + 4 * vocabulary * c.d_model
    chunks = -(-tokens // max(1, LOSS_CHUNK["cuda" if setting.cuda else "cpu"] // vocabulary))
    padded = vocabulary % 16 > 0 and setting.cuda
    wide = vocabulary + (-vocabulary % 64 if padded else 0)
    logits, table = -(-tokens // chunks) * wide, wide * c.d_model
    held = setting.size * table * int(padded)
    several = int(chunks > 1)
    exponentials = (setting.size + 8 if setting.half else 12) + setting.size * several
    return max(
        exponentials * logits + 4 * min(chunks - 1, 2) * table + held,
        2 * setting.size * logits + (12 if several else setting.size + 4) * table + held,
        (10 if setting.half else 8) * table,
    )
