"""What a call, a training step or a generated token will cost, before anything is built (and without torch).

    cost(config, batch=8, length=1024, mode="train", precision="bfloat16").peak_bytes

Exact: parameters, operations, weights, gradients, the cache. What training keeps for the backward pass is exact to a few
percent (activations.py says how it comes about). The peak is a sum of these and of what is at work at the worst moment; an
allocator's rounding, a compiled graph's own choices and what torch itself takes are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from clearhead.config import Config
from clearhead.costs.activations import Setting, count_blocks, count_copies, count_saved
from clearhead.costs.flops import Lengths, check_lengths, count_forward, count_training
from clearhead.costs.parameters import count_heads, count_matrices, count_parameters, count_weight_bytes, heads_at
from clearhead.errors import ConfigError, did_you_mean
from clearhead.limits import LOSS_CHUNK

PARTS: tuple[str, ...] = ("embedding", "projections", "attention", "feedforward", "norm", "head")

CHOICES = {
    "mode": ("forward", "train", "decode"),
    "precision": ("float32", "bfloat16"),
    "optimizer": ("adamw", "muon", "sgd", "none"),
    "parallel": ("fsdp", "ddp"),
    "quantize": ("int8", "int4"),
    "device": ("cpu", "cuda"),
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A forecast, for one device. `parts` holds each of its numbers part by part: `cost.parts["flops"]["attention"]`.

    The parts: "embedding" with positions, "projections" (q, k, v and output), "attention" (all that grows with the square of
    the length, and the cache), "feedforward", "norm" with the residual stream it reads, "head".

    `flops` are what operators count: all pairs of attention, and what checkpointing computes again. `useful_flops` are the
    work the result needs: allowed pairs, everything once. Utilisation is useful_flops / seconds / the machine's peak;
    papers that count all pairs (PaLM's way) use `flops` without checkpointing, and come out a little higher.
    """

    params: int
    flops: int
    useful_flops: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int  # training: kept for the backward pass; else: what is at work at the widest place
    kv_cache_bytes: int
    peak_bytes: int
    parts: Mapping[str, Mapping[str, int]]

    def seconds(self, rate: float, bandwidth: float = math.inf) -> float:
        """The time at `rate` operations a second; no less than weights and cache take to be read, at `bandwidth` bytes a second."""
        return max(self.flops / rate, (self.weight_bytes + self.kv_cache_bytes) / bandwidth)


def cost(
    config: Config,
    *,
    batch: int,
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

    "forward" is one call without gradients, "train" one forward and backward pass and the optimizer's state, "decode" one more
    token a row with a cache that then holds `length`. Lengths not given are the longest the config allows; for sound,
    `source_length` counts what the convolutions leave, half the frames. In training, weights are float32 and "bfloat16"
    means autocast; elsewhere the weights themselves are bfloat16, or with `quantize` int8 or int4 (layers/quantized.py).

    `shards` devices work on a batch each. With "fsdp" they share weights, gradients and optimizer state, and gather for a
    moment what they compute with: two blocks, and all that is in no block. With "ddp" each holds everything, and the gradients
    once more to exchange them. With `accumulation` above 1 the gradients of one pass are still there in the next.
    """
    _check_choices(mode=mode, precision=precision, optimizer=optimizer, parallel=parallel, device=device)
    _check_counts(batch=batch, shards=shards, accumulation=accumulation)
    if quantize is not None:
        _check_choices(quantize=quantize)
        if mode == "train":
            raise ConfigError(f"quantised weights can not be trained; got quantize={quantize!r}; use mode='forward'")
    if mode == "decode" and config.shape == "encoder":
        raise ConfigError("mode='decode' is for models that write; got shape='encoder'; use mode='forward'")
    at = check_lengths(config, length, source_length)
    if mode == "decode":
        at = Lengths(1, at.source, past=at.target - 1)
    setting = Setting(half=precision == "bfloat16", cuda=device == "cuda")
    divided = shards if parallel == "fsdp" else 1
    whole = _parts(count_weight_bytes(config, 4 if mode == "train" else setting.size, quantize))
    figures = {"params": _parts(count_parameters(config)), "weight_bytes": _share(whole, divided)}
    kept_logits = 0 if chunked_loss else batch * at.target
    nothing = dict.fromkeys(PARTS, 0)
    gradients = state = exchanged = kv_cache = nothing
    if mode == "train":
        flops = count_training(config, batch, at, checkpointing=checkpointing)
        useful = count_training(config, batch, at, pairs="allowed")
        activations = count_saved(config, batch, at, setting, logits=kept_logits, checkpointing=checkpointing)
        working = _working(config, batch, at, setting, kept_logits, checkpointing=checkpointing)
        gradients = _share({part: 4 * n for part, n in _trained(config).items()}, divided)
        state = _share(_optimizer(config, optimizer), divided)
        exchanged = gradients if parallel == "ddp" and shards > 1 else nothing
        moving = _sum(activations, working)
        # A tied table's gradients come last: one of each end, and their sum.
        ending = _sum(gradients, {"embedding": 8 * config.vocab_size * config.d_model if config.tie_embeddings else 0})
        # Gradients come as activations go: both are whole at once only where earlier passes left gradients.
        moving = _sum(moving, gradients) if accumulation > 1 else dict(_largest([moving, ending]))
    else:
        flops, useful = (count_forward(config, batch, at, pairs=pairs) for pairs in ("all", "allowed"))
        moving = activations = _widest(config, batch, at, setting)
        kv_cache = nothing | {"attention": _kv_cache(config, batch, at, setting)} if mode == "decode" else nothing
    gathered = _gathered(config, whole, divided)
    figures |= {
        "flops": _sum(flops),
        "useful_flops": _sum(useful),
        "gradient_bytes": _sum(gradients, exchanged),
        "optimizer_bytes": state,
        "activation_bytes": _sum(activations),
        "kv_cache_bytes": kv_cache,
        "peak_bytes": _sum(figures["weight_bytes"], gathered, state, exchanged, kv_cache, moving),
    }
    return Cost(**{name: _total(parts) for name, parts in figures.items()}, parts=figures)


def _check_choices(**choices: str) -> None:
    for name, value in choices.items():
        if value not in CHOICES[name]:
            raise ConfigError(f"{name}={value!r} is not known; {did_you_mean(value, CHOICES[name])}")


def _check_counts(**counts: int) -> None:
    for name, n in counts.items():
        if n < 1:
            raise ConfigError(f"{name}={n} is too small; nearest valid: {name}=1")


def _parts(counted: Mapping[str, int]) -> dict[str, int]:
    """Numbers of parameters under our parts' names: all that attention learns is in its projections."""
    names = {"attention": "projections"}
    return _sum({names.get(part, part): n for part, n in counted.items()})


def _sum(*all_parts: Mapping[str, int]) -> dict[str, int]:
    return {part: sum(parts.get(part, 0) for parts in all_parts) for part in PARTS}


def _share(parts: Mapping[str, int], shards: int) -> dict[str, int]:
    return {part: -(-n // shards) for part, n in parts.items()}


def _total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def _largest(choices: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    return max(choices, key=_total)


def _trained(c: Config) -> dict[str, int]:
    """All parameters, but Whisper's table of sinusoids."""
    fixed = c.max_source_len * c.d_model if c.inputs == "frames" and c.positions == "learned" else 0
    parts = _parts(count_parameters(c))
    return parts | {"embedding": parts["embedding"] - fixed}


def _optimizer(c: Config, optimizer: str) -> dict[str, int]:
    """AdamW keeps two float32 moments a parameter, SGD one; Muon one for the blocks' matrices, and AdamW has the rest."""
    moments = {"adamw": 2, "muon": 2, "sgd": 1, "none": 0}[optimizer]
    state = {part: 4 * moments * n for part, n in _trained(c).items()}
    if optimizer == "muon":
        matrices = _parts(count_matrices(c))
        for part in ("projections", "feedforward"):
            state[part] -= 4 * matrices[part]
    return state


def _gathered(c: Config, whole: Mapping[str, int], shards: int) -> dict[str, int]:
    """What FSDP holds for a moment beyond its share."""
    layers = c.n_layers + c.n_decoder_layers
    held = {part: n * min(2, layers) // layers for part, n in whole.items()} | {
        part: whole[part] for part in ("embedding", "head")
    }
    return {part: n * (shards - 1) // shards for part, n in held.items()}


def _kv_cache(c: Config, batch: int, at: Lengths, setting: Setting) -> int:
    """Keys and values of every layer that writes: of what was written, within the window; of the source, all."""
    slots = min(c.window, at.past + 1) if c.window else at.past + 1
    is_pair = c.shape == "encoder-decoder"
    written = slots * count_heads(c, "decoder.*.attention" if is_pair else "*")[1]
    read = at.source * count_heads(c, "decoder.*.cross")[1]
    return 2 * setting.size * batch * (written + read) * c.d_head


def _widest(c: Config, batch: int, at: Lengths, setting: Setting) -> Mapping[str, int]:
    """Without gradients: the stream and a step's input, and q k v and the result, or the feed-forward's; or the logits.

    While the feed-forward works, the block's own input is still there, beside the stream that attention has added to. On a CPU
    a product and its activation may be one kernel, which takes less than is counted here.
    """
    held = 3 if c.gated or setting.cuda else 2
    d_q, d_kv = (n * c.d_head for n in max(heads_at(c, place) for place in c.attentions))
    tokens = setting.size * batch * max(at.target, at.source if at.past == 0 else 0)
    stream = {"norm": 2 * c.d_model * tokens}
    scores = c.d_model + c.vocab_size if c.head == "tokens" else 0
    return _largest(
        [
            stream | {"projections": (2 * d_q + 2 * d_kv) * tokens},
            {"norm": held * c.d_model * tokens, "feedforward": c.d_ff * (4 if c.gated else 2) * tokens},
            {"head": setting.size * batch * scores * at.target},
        ]
    )


def _working(
    c: Config, batch: int, at: Lengths, setting: Setting, kept_logits: int, *, checkpointing: bool
) -> dict[str, int]:
    """What is at work beside all that is kept, at the worst moment of the backward pass.

    The most of: the loss (`_losing`), with checkpointing beside the blocks' copies of weights, which autocast holds until then;
    the gradient of the head's weight with the last block's gradients of the feed-forward's width, beside all of that block
    where checkpointing computes it again.
    """
    vocabulary = c.vocab_size if c.head == "tokens" else 0
    tokens = batch * max(at.target, at.source)
    # The log-probabilities, if kept, go with the head.
    head = {"head": 4 * vocabulary * c.d_model - 4 * kept_logits * vocabulary}
    inside = _sum(head, {"feedforward": setting.size * tokens * c.d_ff * (3 if c.gated else 2)})
    work = [{"head": _losing(c, vocabulary, batch * at.target, kept_logits, setting)}, inside]
    if checkpointing:
        work += [_sum(inside, block) for _, block in count_blocks(c, batch, at, setting)]
        copies = count_copies(c, setting)
        if kept_logits:  # their loss comes after autocast has let the copies go
            work.append(_sum({"head": 4 * vocabulary * c.d_model}, copies))
        else:
            work[0] = _sum(work[0], {part: copies.get(part, 0) for part in ("projections", "feedforward")})
    return _sum(_largest([_sum(each) for each in work]))


def _losing(c: Config, vocabulary: int, tokens: int, kept_logits: int, setting: Setting) -> int:
    """What the loss has at work: as much as logits and their gradients weigh at the worst of its moments.

    All logits at once come in three forms, of which one is kept. Chunk by chunk (kernels/cross_entropy.py), either the exponentials
    are made: logits, differences and these, the last chunk's gradient and that of the weight so far; or the weight's
    gradient: logits' gradient, a chunk's product, and the sum before and after; or it is multiplied by the loss's own.
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
