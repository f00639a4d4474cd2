"""Config: a frozen dataclass that defines a model completely. Its fields are checked when it is made.

Every difference between families is a field here; no code depends on a family's name. A size of 0 means "derive it" and is
replaced at construction, so a config always holds the final numbers (0, because TOML recipes have no null).
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from clearhead.display import html_table, short_repr, short_value
from clearhead.errors import ConfigError, did_you_mean
from clearhead.sparsity import Pattern

# Far above any model. A larger number is a broken file's, and would take memory before any weight is read.
MOST = {
    **dict.fromkeys(("n_layers", "n_decoder_layers"), 10_000),
    **dict.fromkeys(("n_heads", "n_kv_heads"), 2**16),
    **dict.fromkeys(("d_model", "d_head", "d_ff", "n_classes", "n_segments", "n_mels", "n_channels"), 2**26),
    **dict.fromkeys(("image_size", "patch_size", "t5_buckets"), 2**20),
    **dict.fromkeys(("vocab_size", "source_vocab_size", "max_len", "max_source_len", "window"), 2**40),
    **dict.fromkeys(("rotary_original_len", "t5_max_distance"), 2**40),
}
# Other names of what some fields mean.
KNOWN_AS = {
    "swiglu": "write feedforward='silu', gated=True",
    "geglu": "write feedforward='gelu', gated=True",
    "reglu": "write feedforward='relu', gated=True",
    "rope": "write positions='rotary'",
}

# Fields that a config fills in from the others.
DERIVED = (
    "n_decoder_layers",
    "n_kv_heads",
    "d_head",
    "d_ff",
    "max_len",
    "max_source_len",
    "n_classes",
    "head",
    "attention_bias",
    "problem",
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The definition of a model. `ch.preset(name, **changes)` makes one; `ch.build(config)` makes its model."""

    shape: Literal["decoder", "encoder", "encoder-decoder"]
    family: str = "custom"  # the module in families/ that reads and writes its checkpoints

    # Sizes.
    d_model: int
    n_layers: int  # of each stack, in an encoder-decoder
    n_decoder_layers: int = 0  # 0: n_layers
    n_heads: int
    n_kv_heads: int = 0  # 0: n_heads; fewer: grouped-query; 1: multi-query
    d_head: int = 0  # 0: d_model / n_heads
    pruned_heads: tuple[str, ...] = ()  # heads that were removed, such as "decoder.blocks.2.cross.5"
    d_ff: int = 0  # 0: 4 d_model
    vocab_size: int = 0
    source_vocab_size: int = 0  # 0: source and target share one embedding
    max_len: int = 0  # 0: for images, the number of patches and 1
    max_source_len: int = 0  # 0: max_len

    # Inputs.
    inputs: Literal["tokens", "patches", "frames"] = "tokens"
    embedding_scale: bool = False  # times sqrt(d_model), section 3.4 of the paper
    embedding_norm: bool = False  # BERT
    n_segments: int = 0  # BERT's token types
    dropped_token: int = -1  # ESM-2's mask token: its embedding is zeros, and the others are scaled up; -1: none
    image_size: int = 224
    patch_size: int = 16
    n_channels: int = 3
    n_mels: int = 80

    # Positions.
    positions: Literal["sinusoidal", "learned", "rotary", "alibi", "t5", "none"] = "sinusoidal"
    sinusoid_halves: bool = False  # all sines, then all cosines (Marian); False: alternating, as in the paper
    rotary_base: float = 10_000.0
    rotary_interleaved: bool = False  # pairs (0, 1), (2, 3) ... instead of (i, i + d_head / 2)
    rotary_scaling: Literal["none", "linear", "llama3"] = "none"
    rotary_factor: float = 1.0
    rotary_low: float = (
        1.0  # llama3: frequencies with fewer periods in rotary_original_len are divided by rotary_factor
    )
    rotary_high: float = 4.0  # llama3: frequencies with more periods in rotary_original_len stay as they are
    rotary_original_len: int = 8192
    rotary_precision: Literal["float32", "float16", "bfloat16"] = "float32"  # of the frequencies (ESM-2)
    t5_buckets: int = 32
    t5_max_distance: int = 128

    # Norm, attention, feed-forward.
    norm: Literal["layer", "rms", "none"] = "layer"
    norm_first: bool = False  # norm before each step, as in most models; False: after it, as in the paper
    norm_eps: float = 1e-5
    bias: bool = True
    attention_bias: str = "auto"  # which of q k v o have a bias, e.g. "qkv"; auto: all or none, as `bias` says
    qk_norm: bool = False
    attention_scale: float = 0.0  # 0: 1 / sqrt(d_head)
    window: int = 0  # 0: none; n: a token sees itself and the n - 1 before it (and after it, in an encoder)
    sparsity: str = (
        ""  # a pattern of sparse attention, such as "block=64, window=2, n_global=1, n_random=3" (sparsity.py)
    )
    feedforward: Literal["relu", "gelu", "gelu_tanh", "silu", "relu2"] = "relu"
    gated: bool = False
    dropout: float = 0.0  # on the embeddings and on the output of each step
    attention_dropout: float = 0.0
    kernel: Literal["auto", "explicit", "fused", "flex"] = "auto"

    # Outputs.
    head: Literal["auto", "none", "tokens", "classes"] = "auto"  # auto: none for an encoder, else tokens
    tie_embeddings: bool = False
    head_bias: Literal["none", "learned", "fixed"] = "none"
    head_transform: bool = False  # BERT's dense + activation + norm before the output projection
    head_scale: bool = False  # states times 1 / sqrt(d_model) before the output projection (T5 with a tied head)
    n_classes: int = 0  # 0: the number of labels
    labels: tuple[str, ...] = ()  # the names of the classes, if they have names
    # An input has one of the classes, or any number of them; or they are numbers. auto: one; a single class is a number.
    problem: Literal["auto", "single_label", "multi_label", "regression"] = "auto"
    pool: Literal["first", "mean", "max"] = "first"
    pooler: bool = False  # BERT's dense + tanh on the pooled state
    pool_normed: bool = False  # the pooled state scaled to length 1 (sentence embeddings)

    # Initialisation.
    init: Literal["normal", "truncated", "xavier", "fan_in"] = "normal"
    init_std: float = 0.02
    init_residual: Literal["same", "scaled", "zero"] = "same"  # projections that write to the residual stream

    def __post_init__(self) -> None:
        _check_types(self)
        self._derive()
        self._check_sizes()
        self._check_inputs()
        self._check_head()
        self._check_pruned()

    def __repr__(self) -> str:
        return short_repr("Config", self.given())

    def _repr_html_(self) -> str:
        given = self.given()
        note = f"{len(fields(self)) - len(given)} more fields have their defaults, or follow from these"
        return html_table("Config", ("field", "value"), ((name, short_value(v)) for name, v in given.items()), note)

    def given(self) -> dict[str, Any]:
        """The fields that define this config: those that are neither defaults nor follow from the others."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        for name in DERIVED:
            rest = {field: value for field, value in found.items() if field != name}
            with suppress(ConfigError):  # it does not follow: a text's max_len, for one
                found = rest if Config(**rest) == self else found
        return found

    def kept_heads(self, place: str) -> tuple[int, ...]:
        """The heads that an attention, such as "blocks.2.attention", still has."""
        pruned = {int(head) for at, _, head in (name.rpartition(".") for name in self.pruned_heads) if at == place}
        return tuple(head for head in range(self.n_heads) if head not in pruned)

    @property
    def attentions(self) -> tuple[str, ...]:
        """The names of all attentions."""
        if self.shape != "encoder-decoder":
            return tuple(f"blocks.{i}.attention" for i in range(self.n_layers))
        encoder = tuple(f"encoder.blocks.{i}.attention" for i in range(self.n_layers))
        steps = ("attention", "cross")
        return encoder + tuple(f"decoder.blocks.{i}.{step}" for i in range(self.n_decoder_layers) for step in steps)

    @property
    def depth(self) -> str:
        """The number of layers as text: "12", or "6+6" for an encoder-decoder."""
        return f"{self.n_layers}+{self.n_decoder_layers}" if self.n_decoder_layers else str(self.n_layers)

    @property
    def patterns(self) -> tuple[Pattern, ...]:
        """The pattern that `sparsity` describes; none: ()."""
        return (Pattern.parse(self.sparsity),) if self.sparsity else ()

    @property
    def n_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The config with these fields. Unknown and missing fields are errors; for an unknown one the nearest is named."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"the config has no field {name!r} (value {values[name]!r}); {did_you_mean(name, known)}"
                )
        missing = [name for name in ("shape", "d_model", "n_layers", "n_heads") if name not in values]
        if missing:
            raise ConfigError(f"a config needs {', '.join(missing)}; got {sorted(values)}; add what is missing")
        # JSON and TOML have lists where the fields are tuples.
        exact: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**exact)

    def _derive(self) -> None:
        for name, most in MOST.items():  # first of all: tuples of heads, layers and labels are built of these
            self._at_most(name, most)
        for name in ("d_model", "n_layers", "n_heads"):
            self._at_least(name, 1)
        if self.d_head == 0:
            if self.d_model % self.n_heads:
                raise ConfigError(
                    f"d_model={self.d_model} does not split into n_heads={self.n_heads} equal heads; "
                    f"nearest that does: n_heads={nearest_divisor(self.d_model, self.n_heads)}, or set d_head"
                )
            self._fill("d_head", self.d_model // self.n_heads)
        self._fill("n_kv_heads", self.n_heads)
        self._fill("n_decoder_layers", self.n_layers if self.shape == "encoder-decoder" else 0)
        self._fill("d_ff", 4 * self.d_model)
        if self.inputs == "patches":
            self._at_least("patch_size", 1)
            self._fill("max_len", self.n_patches + 1)
        self._fill("max_source_len", self.max_len)
        self._fill("n_classes", len(self.labels))
        if self.head == "auto":
            object.__setattr__(self, "head", "none" if self.shape == "encoder" else "tokens")
        if self.problem == "auto" and self.head == "classes":
            object.__setattr__(self, "problem", "single_label" if self.n_classes != 1 else "regression")
        if self.attention_bias == "auto":
            object.__setattr__(self, "attention_bias", "qkvo" if self.bias else "")
        if self.patterns:  # in one way of writing, so that equal models have equal configs
            object.__setattr__(self, "sparsity", str(self.patterns[0]))

    def _check_sizes(self) -> None:
        for name in ("n_kv_heads", "d_head", "d_ff", "max_len", "max_source_len", "n_channels", "n_mels"):
            self._at_least(name, 1)
        for name in ("window", "n_segments", "n_classes", "vocab_size", "source_vocab_size", "n_decoder_layers"):
            self._at_least(name, 0)
        self._at_least("rotary_original_len", 1)
        if self.n_decoder_layers and self.shape != "encoder-decoder":
            raise ConfigError(
                f"n_decoder_layers={self.n_decoder_layers} is for shape='encoder-decoder'; got shape={self.shape!r}; use n_layers"
            )
        if self.n_segments and self.shape != "encoder":
            raise ConfigError(
                f"n_segments={self.n_segments} is for shape='encoder'; got shape={self.shape!r}; leave it out"
            )
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"n_heads={self.n_heads} does not split into n_kv_heads={self.n_kv_heads} equal groups; "
                f"nearest that does: n_kv_heads={nearest_divisor(self.n_heads, self.n_kv_heads)}"
            )
        if self.positions == "rotary" and self.d_head % 2:
            raise ConfigError(f"rotary positions turn pairs, and d_head={self.d_head} is odd; take {self.d_head + 1}")
        if self.rotary_scaling == "llama3" and self.rotary_low >= self.rotary_high:
            raise ConfigError(
                f"rotary_low={self.rotary_low} must be below rotary_high={self.rotary_high}; LLaMA 3 has 1.0 and 4.0"
            )
        # Whisper's encoder has sinusoids too, in its table of positions.
        if (self.positions == "sinusoidal" or self.inputs == "frames") and self.d_model % 2:
            raise ConfigError(
                f"sinusoidal positions come in pairs, and d_model={self.d_model} is odd; take {self.d_model + 1}"
            )
        if self.positions == "t5" and (
            self.t5_buckets < 4 or self.t5_buckets % 2 or self.t5_max_distance <= self.t5_buckets
        ):
            raise ConfigError(
                f"t5 positions need an even t5_buckets of at least 4, below t5_max_distance; got t5_buckets="
                f"{self.t5_buckets}, t5_max_distance={self.t5_max_distance}; the paper has 32 and 128"
            )
        if self.window and self.sparsity:
            raise ConfigError(
                f"sparsity={self.sparsity!r} has a window of its own; got window={self.window} beside it; leave one out"
            )
        if not set(self.attention_bias) <= set("qkvo"):
            raise ConfigError(
                f"attention_bias={self.attention_bias!r} holds more than the letters q k v o; try 'qkvo' or ''"
            )
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not a probability below 1; 0.1 is usual")
        for name in ("norm_eps", "rotary_base", "rotary_factor", "init_std"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0; the default is {_default(name)}")

    def _check_inputs(self) -> None:
        if self.inputs == "patches":
            if self.shape != "encoder":
                raise ConfigError(
                    f"inputs='patches' is for shape='encoder'; got shape={self.shape!r}; change one of them"
                )
            if self.image_size < self.patch_size or self.image_size % self.patch_size:
                whole = max(1, round(self.image_size / self.patch_size)) * self.patch_size
                raise ConfigError(
                    f"image_size={self.image_size} is no whole number of patches of {self.patch_size}; nearest: {whole}"
                )
            if self.max_len != self.n_patches + 1:
                raise ConfigError(
                    f"max_len={self.max_len}, but {self.n_patches} patches and a class token need {self.n_patches + 1}; "
                    f"leave max_len out"
                )
        if self.inputs == "frames" and self.shape != "encoder-decoder":
            raise ConfigError(
                f"inputs='frames' is for shape='encoder-decoder'; got shape={self.shape!r}; change one of them"
            )
        if self.vocab_size == 0 and (self.inputs != "patches" or self.head == "tokens"):
            raise ConfigError("vocab_size=0, but tokens enter or leave this model; set it to the tokenizer's size")
        over_tokens = self.shape == "encoder" and self.inputs == "tokens"
        if self.dropped_token != -1 and not (over_tokens and 0 <= self.dropped_token < self.vocab_size):
            raise ConfigError(
                f"dropped_token={self.dropped_token} is for encoders over tokens, and an id below vocab_size; got shape="
                f"{self.shape!r}, inputs={self.inputs!r}, vocab_size={self.vocab_size}; give the mask token's id, or -1"
            )
        if self.source_vocab_size and (self.shape != "encoder-decoder" or self.inputs != "tokens"):
            raise ConfigError(
                f"source_vocab_size={self.source_vocab_size} is for encoder-decoders over tokens; "
                f"got shape={self.shape!r}, inputs={self.inputs!r}; leave it out"
            )

    def _check_head(self) -> None:
        if self.shape != "encoder" and self.head != "tokens":
            raise ConfigError(f"shape={self.shape!r} ends in head='tokens'; got head={self.head!r}; leave head out")
        if self.head == "classes" and self.n_classes < 1:
            raise ConfigError(f"head='classes' needs n_classes of at least 1; got {self.n_classes}; set n_classes")
        if self.problem != "auto" and self.head != "classes":
            raise ConfigError(f"problem={self.problem!r} is for head='classes'; got head={self.head!r}; leave it out")
        if self.labels and len(self.labels) != self.n_classes:
            raise ConfigError(
                f"n_classes={self.n_classes}, but there are {len(self.labels)} labels: {', '.join(self.labels[:5])}; "
                f"name each class, or none"
            )
        if self.tie_embeddings and (self.head != "tokens" or self.inputs == "patches"):
            raise ConfigError(
                f"tie_embeddings ties the token embedding to head='tokens'; got head={self.head!r}, "
                f"inputs={self.inputs!r}; leave tie_embeddings out"
            )

    def _check_pruned(self) -> None:
        if not self.pruned_heads:
            return
        group, known = (
            self.n_heads // self.n_kv_heads,
            {f"{at}.{h}" for at in self.attentions for h in range(self.n_heads)},
        )
        for name in self.pruned_heads:
            if name not in known or self.pruned_heads.count(name) > 1:
                raise ConfigError(
                    f"pruned_heads names {name!r} {'twice' if name in known else 'which this model has not'}; "
                    f"{'name it once' if name in known else did_you_mean(name, known)}"
                )
        for place in {name.rpartition(".")[0] for name in self.pruned_heads}:
            kept = self.kept_heads(place)
            if not kept:
                raise ConfigError(f"pruned_heads leaves {place!r} none of its {self.n_heads} heads; keep at least one")
            partial = [k for k in range(self.n_kv_heads) if 0 < sum(head // group == k for head in kept) < group]
            if partial:
                raise ConfigError(
                    f"{place!r} has {group} heads for each of keys and values, which go together; pruned_heads takes some of heads "
                    f"{partial[0] * group} .. {partial[0] * group + group - 1}; take all of them, or none"
                )

    def _fill(self, name: str, value: int) -> None:
        if getattr(self, name) == 0:
            object.__setattr__(self, name, value)

    def _at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ConfigError(f"{name}={getattr(self, name)} is too small; nearest valid: {name}={least}")

    def _at_most(self, name: str, most: int) -> None:
        if getattr(self, name) > most:
            raise ConfigError(f"{name}={getattr(self, name)} is too large; the largest valid: {name}={most}")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How a checkpoint's model starts, ends and pads its texts. A loaded model has it as `model.generation`."""

    bos: int | None = None
    eos: tuple[int, ...] = ()  # any of them ends a text
    pad: int | None = None
    decoder_start: int | None = None
    forced_bos: int | None = None  # the token that an encoder-decoder must write first
    forced_start: tuple[
        int | None, ...
    ] = ()  # the tokens to write first, if there are several; None: a free choice (Whisper)
    forced_eos: int | None = None  # the last token of a text that reaches the length limit
    max_length: int | None = (
        None  # the most tokens of a text, prompt or start token included, if the caller does not say
    )
    suppress: tuple[int, ...] = ()  # never written
    begin_suppress: tuple[int, ...] = ()  # never written first
    alignment_heads: tuple[
        tuple[int, int], ...
    ] = ()  # (layer, head) of cross-attention that shows when a word is said (Whisper)

    def __repr__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return short_repr("Generation", given)


def nearest_divisor(whole: int, wish: int) -> int:
    """The divisor of `whole` that is nearest to `wish`; of two equally near ones, the smaller."""
    # Divisors up to the square root, each with its partner. The bound limits the time for huge sizes, which only broken files have.
    small = [d for d in range(1, min(math.isqrt(whole), 100_000) + 1) if whole % d == 0]
    return min([*small, *(whole // d for d in small)], key=lambda d: (abs(d - wish), d))


def _default(name: str) -> Any:
    return next(field.default for field in fields(Config) if field.name == name)


def _check_types(config: Config) -> None:
    """Refuse fields of the wrong type, before they cause an error elsewhere."""
    for name, kind in get_type_hints(Config).items():
        value = getattr(config, name)
        if get_origin(kind) is Literal:
            if value not in get_args(kind):
                advice = KNOWN_AS.get(str(value).lower()) or did_you_mean(str(value), get_args(kind))
                raise ConfigError(f"{name}={value!r} is not known; {advice}")
        elif kind is float:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(
                    f"{name}={value!r} is a {type(value).__name__}; give a number such as {_default(name)}"
                )
            object.__setattr__(config, name, float(value))
        elif get_origin(kind) is tuple:
            if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
                raise ConfigError(f"{name}={value!r} is no list of texts; give one such as ['no', 'yes']")
        elif type(value) is not kind:
            raise ConfigError(f"{name}={value!r} is a {type(value).__name__}; give a value of type {kind.__name__}")
