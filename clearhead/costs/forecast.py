"""What a call, a training step or a generated token will cost, before anything is built (and without torch).

    cost(config, batch=8, length=1024, mode="train", precision="bfloat16").peak_bytes

Exact: parameters, operations, weights, gradients, the cache. What training keeps for the backward pass is exact to a few
percent (activations.py says how it comes about). The peak is a sum of these and of what is at work at the worst moment; an
allocator's rounding, a compiled graph's own choices and what torch itself takes are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clearhead.config import Config
from clearhead.costs.activations import Setting, count_blocks, count_saved
from clearhead.costs.operations import Lengths, check_lengths, count_forward, count_training
from clearhead.costs.parameters import count_matrices, count_parameters
from clearhead.errors import ConfigError, did_you_mean

LOSS_CHUNK = 2**26  # logits that a chunked loss holds at once: as in training/losses.py

CHOICES = {
    "mode": ("forward", "train", "decode"),
    "precision": ("float32", "bfloat16"),
    "optimizer": ("adamw", "muon", "sgd", "none"),
    "device": ("cpu", "cuda"),
}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A forecast. `parts` holds the same numbers part by part: `cost.parts["flops"]["attention"]`.

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
    chunked_loss: bool = True,
    accumulation: int = 1,
    device: str = "cpu",
) -> Cost:
    """The forecast for `batch` rows of `length` tokens on one device.

    "forward" is one call without gradients, "train" one forward and backward pass and the optimizer's state, "decode" one more
    token a row with a cache that then holds `length`. Lengths not given are the longest the config allows; for sound,
    `source_length` counts what the convolutions leave, half the frames. In training, weights are float32 and "bfloat16"
    means autocast; elsewhere the weights themselves are bfloat16. `shards` devices share weights, gradients and optimizer
    state (FSDP), each with a batch of its own; what FSDP gathers for a moment is not counted. With `accumulation` above 1
    the gradients of one pass are still there in the next.
    """
    _check_choices(mode=mode, precision=precision, optimizer=optimizer, device=device)
    _check_counts(batch=batch, shards=shards, accumulation=accumulation)
    if mode == "decode" and config.shape == "encoder":
        raise ConfigError("mode='decode' is for models that write; got shape='encoder'; use mode='forward'")
    at = check_lengths(config, length, source_length)
    if mode == "decode":
        at = Lengths(1, at.source, past=at.target - 1)
    setting = Setting(half=precision == "bfloat16", cuda=device == "cuda")
    params = count_parameters(config)
    if mode == "train":
        kept_logits = 0 if chunked_loss else batch * at.target
        flops = count_training(config, batch, at, checkpointing=checkpointing)
        useful = count_training(config, batch, at, pairs="allowed")
        activations = count_saved(config, batch, at, setting, logits=kept_logits, checkpointing=checkpointing)
        working = _working(config, batch, at, setting, kept_logits, checkpointing=checkpointing)
    else:
        flops, useful = (count_forward(config, batch, at, pairs=pairs) for pairs in ("all", "allowed"))
        activations, working = {"widest": _widest(config, batch, at, setting)}, 0
    size = 4 if mode == "train" else setting.size
    weights = -(-sum(params.values()) * size // shards)
    kv_cache = _kv_cache(config, batch, at, setting) if mode == "decode" else 0
    gradients = state = 0
    kept = sum(activations.values())
    moving = kept + working
    if mode == "train":
        gradients, state = -(-4 * _trained(config) // shards), -(-_optimizer(config, optimizer) // shards)
        # Gradients come as activations go: both are whole at once only where earlier passes left gradients.
        moving = moving + gradients if accumulation > 1 else max(moving, gradients)
    return Cost(
        params=sum(params.values()),
        flops=sum(flops.values()),
        useful_flops=sum(useful.values()),
        weight_bytes=weights,
        gradient_bytes=gradients,
        optimizer_bytes=state,
        activation_bytes=kept,
        kv_cache_bytes=kv_cache,
        peak_bytes=weights + state + kv_cache + moving,
        parts={
            "params": params,
            "flops": flops,
            "useful_flops": useful,
            "weight_bytes": {part: n * size // shards for part, n in params.items()},
            "activation_bytes": activations,
        },
    )


def _check_choices(**choices: str) -> None:
    for name, value in choices.items():
        if value not in CHOICES[name]:
            raise ConfigError(f"{name}={value!r} is not known; {did_you_mean(value, CHOICES[name])}")


def _check_counts(**counts: int) -> None:
    for name, n in counts.items():
        if n < 1:
            raise ConfigError(f"{name}={n} is too small; nearest valid: {name}=1")


def _trained(c: Config) -> int:
    """All parameters, but Whisper's table of sinusoids."""
    fixed = c.max_source_len * c.d_model if c.inputs == "frames" and c.positions == "learned" else 0
    return sum(count_parameters(c).values()) - fixed


def _optimizer(c: Config, optimizer: str) -> int:
    """AdamW keeps two float32 moments a parameter, SGD one; Muon one for the blocks' matrices, and AdamW has the rest."""
    match optimizer:
        case "adamw":
            return 8 * _trained(c)
        case "muon":
            matrices = count_matrices(c)
            return 8 * _trained(c) - 4 * (matrices["attention"] + matrices["feedforward"])
        case "sgd":
            return 4 * _trained(c)
        case _:
            return 0


def _kv_cache(c: Config, batch: int, at: Lengths, setting: Setting) -> int:
    """Keys and values of every layer that writes: of what was written, within the window; of the source, all."""
    slots = min(c.window, at.past + 1) if c.window else at.past + 1
    layers = c.n_decoder_layers if c.shape == "encoder-decoder" else c.n_layers
    return 2 * setting.size * batch * layers * (slots + at.source) * c.n_kv_heads * c.d_head


def _widest(c: Config, batch: int, at: Lengths, setting: Setting) -> int:
    """Without gradients: the stream and a step's input, and q k v and the result, or the feed-forward's; or the logits."""
    d_q, d_kv = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    step = 2 * c.d_model + max(2 * d_q + 2 * d_kv, c.d_ff * (4 if c.gated else 2))
    reading = at.source if at.past == 0 else 0
    scores = c.d_model + c.vocab_size if c.head == "tokens" else 0
    return setting.size * batch * max(step * max(at.target, reading), scores * at.target)


def _working(c: Config, batch: int, at: Lengths, setting: Setting, kept_logits: int, *, checkpointing: bool) -> int:
    """What is at work beside all that is kept, at the worst moment of the backward pass.

    The gradient of the head's weight, and the most of: the logits of a chunk or of all, in three forms; the last block's
    gradients of the feed-forward's width, beside all of that block where checkpointing computes it again; and, with
    checkpointing, the copies of all weights that autocast holds through the forward pass.
    """
    vocabulary = c.vocab_size if c.head == "tokens" else 0
    logits = kept_logits * vocabulary or min(LOSS_CHUNK, batch * at.target * vocabulary)
    gone = 4 * kept_logits * vocabulary  # one of the three forms is kept, until the head is done
    a_chunks_gradient = 0 if kept_logits else setting.size * vocabulary * c.d_model
    inside = setting.size * batch * max(at.target, at.source) * c.d_ff * (3 if c.gated else 2) - gone
    work = [12 * logits - gone + a_chunks_gradient, inside]
    if checkpointing:
        work += [inside + sum(block.values()) for _, block in count_blocks(c, batch, at, setting)]
        work.append(2 * sum(count_matrices(c).values()) if setting.half else 0)
    return 4 * vocabulary * c.d_model + max(work)
