"""The fields of a recipe: type, meaning and default of each. `--show-recipe` prints the meanings. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from clearhead.config import Config

Names = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data, and how it is read."""

    files: Annotated[Names, "texts or tables; for pictures one folder with a subfolder for each class"] = ()
    source: Annotated[Names, "translate: line n of the source belongs to line n of the target"] = ()
    target: Annotated[Names, "translate: what the lines of the source become"] = ()
    valid: Annotated[Names, "held-out files; without any, valid_share of the data is held out"] = ()
    valid_source: Annotated[Names, "translate: held-out source"] = ()
    valid_target: Annotated[Names, "translate: held-out target"] = ()
    valid_share: Annotated[float, "the share of the data that is held out, if no files are"] = 0.05
    embedded: Annotated[Literal["", "dates", "code", "digits"], "data that needs no file"] = ""
    columns: Annotated[Names, "the columns of a table; [] is text, or source and target, or text and label"] = ()
    documents: Annotated[Literal["file", "line", "paragraph"], "what one document is, in a text file"] = "file"
    tokenizer: Annotated[str, "a kind to train (bpe, unigram, wordpiece, bytes, chars), or the path of one"] = "bpe"
    vocab_size: Annotated[int, "of a tokenizer that is trained: at most so many tokens"] = 8192
    split_digits: Annotated[bool, "a trained tokenizer has one token for each digit and none for longer numbers"] = (
        False
    )
    lowercase: Annotated[bool, "texts are lower-cased first"] = False
    length: Annotated[int, "tokens of a window (language, mask), else the longest text, source or target"] = 256
    bad_bytes: Annotated[Literal["error", "replace", "drop"], "bytes that are not UTF-8"] = "error"
    empty: Annotated[Literal["error", "drop", "keep"], "empty lines and texts"] = "drop"
    too_long: Annotated[Literal["error", "drop", "cut"], "texts of more than `length` tokens"] = "error"
    unequal: Annotated[Literal["error", "cut"], "a source and a target of different line counts"] = "error"
    leave_out: Annotated[float, "texts to classify: the share of tokens dropped in training, others each time"] = 0.0
    shift: Annotated[int, "pictures are shifted by up to so many pixels, at random"] = 0
    flip: Annotated[bool, "pictures are mirrored half of the time"] = False
    cache: Annotated[str, 'the folder for tokenised data; "" is `data` beside the run\'s folder'] = ""


@dataclass(frozen=True, kw_only=True)
class Train:
    """How the model is trained."""

    steps: Annotated[int, "updates of the weights"] = 1000
    batch_tokens: Annotated[int, "of one step: with padding, of all processes and accumulated parts together"] = 4096
    accumulate: Annotated[
        int, "gradient accumulation: a step's batch is computed in so many parts, to fit in memory"
    ] = 1
    batch_doublings: Annotated[
        int,
        "language, mask: so often the batch doubles until it is batch_tokens; 1: it starts with half. 0: it is constant",
    ] = 0
    length_doublings: Annotated[
        int, "language, mask: so often the windows double until they are data.length; shorter ones are parts of these"
    ] = 0
    growth: Annotated[float, "the share of steps, from the start, over which batch and length double"] = 0.5
    optimizer: Annotated[Literal["adamw", "muon"], "muon: for the matrices of the blocks, AdamW for the rest"] = "adamw"
    lr: Annotated[float, "AdamW's highest learning rate; 0 with schedule noam is the paper's"] = 1e-3
    muon_lr: Annotated[float, "Muon's highest learning rate"] = 0.02
    weight_decay: Annotated[float, "of matrices only"] = 0.1
    betas: Annotated[tuple[float, float], "AdamW's"] = (0.9, 0.95)
    momentum: Annotated[float, "Muon's"] = 0.95
    muon_iteration: Annotated[
        Literal["quintic", "polar"], "Muon: five steps of one quintic, or Polar Express: each step has its best one"
    ] = "quintic"
    muon_beta2: Annotated[
        float, "NorMuon: rows of Muon's step are divided by the running mean of their squares; 0: they are not"
    ] = 0.0
    cautious_decay: Annotated[bool, "weight decay only where the step goes towards zero, too"] = False
    schedule: Annotated[Literal["constant", "cosine", "noam", "wsd"], "of the learning rate"] = "cosine"
    warmup: Annotated[int, "steps in which the rate rises, at the start"] = 100
    decay: Annotated[float, "wsd: the share of steps in which the rate falls, at the end"] = 0.2
    min_lr: Annotated[float, "the last rate of cosine and wsd, as a share of the highest"] = 0.0
    clip: Annotated[float, "the largest norm of the gradients; 0: no clipping"] = 1.0
    max_skips: Annotated[
        int, "so many steps in a row whose gradient is NaN or infinite change nothing; one more ends the run"
    ] = 10
    label_smoothing: Annotated[float, "the share of the target's probability that is spread over all tokens"] = 0.0
    mask_share: Annotated[float, "mask: the share of tokens to predict"] = 0.15
    average: Annotated[
        int, "the result is the mean of so many last checkpoints (section 6.1 of the paper); 0: no averaging"
    ] = 0
    keep: Annotated[Literal["best", "last"], "without averaging: which weights are the result"] = "best"
    best: Annotated[Literal["loss", "accuracy", "bleu", "chrf", "exact"], "the metric that decides which are best"] = (
        "loss"
    )
    patience: Annotated[int, "stop after so many evaluations without a better one; 0: never"] = 0
    lora_rank: Annotated[int, "0: train all weights; n: LoRA of rank n for the matrices of the blocks"] = 0
    lora_alpha: Annotated[float, "LoRA: additions are scaled by lora_alpha / lora_rank"] = 16.0
    precision: Annotated[
        Literal["auto", "float32", "bfloat16", "fp8"],
        "of products; auto: bfloat16 on a GPU that has it; fp8: bfloat16 with the blocks' products in 8 bits",
    ] = "auto"
    stream: Annotated[
        Literal["auto", "float32", "bfloat16"],
        "what blocks hand on, where products are bfloat16; less memory, less exact; auto: bfloat16 in a compiled step on a GPU",
    ] = "auto"
    compile: Annotated[
        Literal["auto", True, False], "torch.compile; auto: on one GPU, where it saves more time than it takes"
    ] = "auto"
    record: Annotated[bool, "on a GPU, if batches have one shape, or few: replay the step as a CUDA graph"] = True
    checkpointing: Annotated[bool, "activation checkpointing: less memory, a third more time"] = False
    deterministic: Annotated[bool, "on a GPU: only kernels that sum in a fixed order"] = False
    parallel: Annotated[Literal["ddp", "fsdp"], "with several processes: copies of the model, or shards"] = "ddp"
    device: Annotated[str, "cpu, cuda, cuda:1 ...; auto: a GPU if there is one"] = "auto"
    threads: Annotated[int, "on a CPU; another number gives other last bits. 0: as torch has it"] = 0
    seed: Annotated[int, "of the weights, the order of the data and dropout"] = 0
    log_every: Annotated[int, "steps"] = 10
    evaluate_every: Annotated[int, "steps"] = 200
    evaluate_rows: Annotated[
        int, "at most so many held-out rows; 0: all; -1: so many that evaluations take about a tenth of the time"
    ] = -1
    checkpoint_every: Annotated[int, "steps"] = 200
    samples: Annotated[int, "held-out examples shown at each evaluation"] = 5
    score_rows: Annotated[int, "translate: held-out rows decoded for BLEU, chrF and exact matches; 0: none"] = 200
    beams: Annotated[int, "translate: for decoding with the result; during training decoding is greedy"] = 1
    tensorboard: Annotated[bool, "if it is installed"] = True


MODEL: Mapping[str, str] = MappingProxyType(
    {
        "preset": "a named size (clearhead presets), instead of the fields below",
        "from": "the model to start from",
        "shape": "decoder: language; encoder: mask, classify; encoder-decoder: translate",
        "inputs": "what the model reads",
        "image_size": "pixels of a picture's side, after resizing",
        "patch_size": "pixels of a patch's side: each patch is a token",
        "n_channels": "3: colours; 1: grey",
        "n_mels": "rows of a spectrogram",
        "n_layers": "blocks of each stack",
        "n_decoder_layers": "blocks of the decoder, in an encoder-decoder; 0: n_layers",
        "d_model": "the width: numbers for each token",
        "n_heads": "attention heads of each block; they divide d_model",
        "d_ff": "the width inside the feed-forward; 0: 4 d_model",
        "vocab_size": "tokens; 0 in a recipe: those of the tokenizer",
        "positions": "how the model knows the order of tokens",
        "rotary_base": "rotary: the longest wavelength is about 2 pi times it",
        "rotary_factor": "rotary_scaling: positions or frequencies are divided by it",
        "rotary_original_len": "llama3: the length before the scaling",
        "t5_buckets": "t5: so many biases for each head",
        "t5_max_distance": "t5: larger distances share a bucket",
        "norm": "what keeps the residual stream in range",
        "norm_eps": "added under the root of a norm",
        "norm_first": "norm before each step, as in most models; false: after it, as in the paper",
        "qk_norm": "norm of queries and keys: steadier training",
        "bias": "whether linear maps add a vector",
        "feedforward": "the activation",
        "gated": "a third matrix whose product gates the others'",
        "tie_embeddings": "one table for the tokens that come in and those that go out",
        "init_residual": "how projections that write to the residual stream start",
        "init_std": "the standard deviation of random weights (normal, truncated)",
        "dropout": "the share of numbers set to 0 in training, against overfitting",
        "attention_dropout": "the same, of attention weights",
        "pool": "classify: from the states of all tokens to one",
    }
)


def explain(part: str, name: str) -> str:
    """The meaning of a field, and its choices if it has few."""
    kind = {"data": Data, "train": Train}.get(part, Config)
    hint: Any = get_type_hints(kind, include_extras=True).get(name)
    meaning = MODEL.get(name, "") if kind is Config else get_args(hint)[1]
    plain = get_type_hints(kind).get(name)
    choices = ", ".join(filter(None, map(spell, get_args(plain)))) if get_origin(plain) is Literal else ""
    return "; ".join(filter(None, [meaning, f"one of: {choices}" if choices else ""]))


def spell(choice: str | bool) -> str:
    """A choice as TOML spells it, a string without its quotes."""
    return str(choice).lower() if isinstance(choice, bool) else choice
