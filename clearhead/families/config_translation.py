"""Functions that the family modules share to translate config.json of other libraries to our fields, and back.

Each `read` begins with `refuse` (allowed_fields.py): a field that is not supported is an error; it is never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clearhead.config import Config
from clearhead.errors import CheckpointError, did_you_mean
from clearhead.families.allowed_fields import fields

# A row of a table of config fields, read both ways: theirs, ours, and the value where the file has none (else it must).
FieldRow = tuple[str, str] | tuple[str, str, Any]
# A row of a table of tensor names: theirs, ours, and optionally the layout (see checkpoint/tensor_names.py).
NameRow = tuple[str, str | tuple[str, ...]] | tuple[str, str | tuple[str, ...], str]

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu2",
    "relu_squared": "relu2",
}


class Keys(dict[str, str]):
    """The tensors of a file: name in the tables -> key in the file. `tensor` reads one whose numbers the config depends on."""

    def __init__(self, keys: Mapping[str, str], read: Callable[[str], Any]) -> None:
        super().__init__(keys)
        self._read = read

    def tensor(self, name: str) -> Any:
        return self._read(self[name])


def both(theirs: str, ours: str) -> list[NameRow]:
    """The two rows of a module that has a weight and a bias."""
    return [(f"{theirs}.weight", f"{ours}.weight"), (f"{theirs}.bias", f"{ours}.bias")]


def take(theirs: Mapping[str, Any], field: str, default: Any = None) -> Any:
    """The value of a field. It must be there, unless a default is given."""
    value = theirs.get(field, default)
    if value is None and default is None:
        raise CheckpointError(f"config.json has no {field!r}; it has {sorted(theirs)[:12]}; is it this model's own?")
    return default if value is None else value


def take_layers(theirs: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """A number of layers. 0 is refused: our config would take it for "as many as the encoder has"."""
    layers = take(theirs, field, default)
    if layers == 0:
        raise CheckpointError(f"config.json's {field}=0 is a model without these layers; supported are 1 or more")
    return layers


def read_fields(theirs: Mapping[str, Any], table: Sequence[FieldRow]) -> dict[str, Any]:
    """Our fields, from theirs."""
    return {row[1]: take(theirs, row[0], *row[2:]) for row in table}


def write_fields(config: Config, table: Sequence[FieldRow]) -> dict[str, Any]:
    """Their fields, from ours."""
    return {row[0]: getattr(config, row[1]) for row in table}


def names_of(table: Sequence[FieldRow]) -> frozenset[str]:
    """The names of their fields."""
    return frozenset(row[0] for row in table)


BERT_SIZES: list[FieldRow] = [  # also those of ESM and ViT
    ("hidden_size", "d_model"),
    ("num_hidden_layers", "n_layers"),
    ("num_attention_heads", "n_heads"),
    ("intermediate_size", "d_ff"),
    ("layer_norm_eps", "norm_eps", 1e-12),
    ("hidden_dropout_prob", "dropout", 0.0),
    ("attention_probs_dropout_prob", "attention_dropout", 0.0),
]

BART_SIZES: list[FieldRow] = [  # of Marian and Whisper, both descendants of BART
    ("d_model", "d_model"),
    ("encoder_layers", "n_layers"),
    ("decoder_layers", "n_decoder_layers"),
    ("dropout", "dropout", 0.0),
    ("attention_dropout", "attention_dropout", 0.0),
    ("tie_word_embeddings", "tie_embeddings", True),
]
BART_FIELDS = names_of(BART_SIZES) | fields(
    "encoder_attention_heads decoder_attention_heads encoder_ffn_dim decoder_ffn_dim activation_function",
    "activation_dropout encoder_layerdrop decoder_layerdrop num_hidden_layers",
)


def read_bart(theirs: Mapping[str, Any]) -> dict[str, Any]:
    take_layers(theirs, "decoder_layers")
    return dict(
        **read_fields(theirs, BART_SIZES),
        n_heads=same(theirs, "encoder_attention_heads", "decoder_attention_heads"),
        d_ff=same(theirs, "encoder_ffn_dim", "decoder_ffn_dim"),
        feedforward=activation(theirs, "activation_function"),
    )


def write_bart(config: Config) -> dict[str, Any]:
    return dict(
        **write_fields(config, BART_SIZES),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), config.n_heads),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), config.d_ff),
        activation_function=write_activation(config),
        is_encoder_decoder=True,
    )


def activation(theirs: Mapping[str, Any], field: str, default: str | None = None) -> str:
    name = take(theirs, field, default)
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json's {field}={name!r} is not an activation we have; {did_you_mean(str(name), ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def write_activation(config: Config) -> str:
    return {"gelu_tanh": "gelu_new", "silu": "silu", "relu2": "relu2"}.get(config.feedforward, config.feedforward)


PROBLEMS = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}


def labels(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The number of classes, their names unless they are the default LABEL_0, LABEL_1 ..., and what they mean."""
    named: Mapping[str, str] = theirs.get("id2label") or {}
    n_classes = theirs.get("num_labels") or len(named) or 2
    plain = n_classes != len(named) or all(name == f"LABEL_{i}" for i, name in named.items())
    problem = theirs.get("problem_type")
    if problem is not None and problem not in PROBLEMS:
        raise CheckpointError(
            f"config.json's problem_type={problem!r} is not known; {did_you_mean(str(problem), PROBLEMS)}"
        )
    return dict(
        n_classes=n_classes,
        labels=() if plain else tuple(named.get(str(i), "") for i in range(n_classes)),
        problem="auto" if problem is None else PROBLEMS[problem],
    )


def write_labels(config: Config) -> dict[str, Any]:
    if config.head != "classes":
        return {}
    names = config.labels or [f"LABEL_{i}" for i in range(config.n_classes)]
    ids = dict(id2label={str(i): name for i, name in enumerate(names)}, label2id={n: i for i, n in enumerate(names)})
    return dict(**ids, problem_type=next(theirs for theirs, ours in PROBLEMS.items() if ours == config.problem))


def pooling(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The pooling that sentence-transformers' modules define, in place of the model's own pooler; {} without such modules."""
    if "modules" not in theirs:
        return {}
    found: dict[str, Any] = dict(pooler=False)
    for module in theirs["modules"]:
        match module.get("type"):
            case "Transformer":
                pass
            case "Pooling":
                found["pool"] = _pool_of(module)
            case "Normalize":
                found["pool_normed"] = True
            case other:
                raise CheckpointError(
                    f"modules.json's {other!r} changes the embeddings and is not supported; supported: Pooling, Normalize"
                )
    return found


POOLS = {"mean": "mean", "mean_tokens": "mean", "cls": "first", "cls_token": "first", "max": "max", "max_tokens": "max"}


def _pool_of(module: Mapping[str, Any]) -> str:
    """The pooling mode. Older files have a boolean for each mode, newer ones a single field with its name."""
    switches = [name.removeprefix("pooling_mode_") for name, value in module.items() if value is True]
    modes = [mode for mode in [module.get("pooling_mode"), *switches] if mode not in (None, "include_prompt")]
    if len(modes) != 1 or modes[0] not in POOLS:
        raise CheckpointError(f"1_Pooling/config.json's pooling_mode is {modes}; supported is one of cls, mean, max")
    return POOLS[modes[0]]


def write_pooling(config: Config) -> dict[str, Any]:
    """The modules of a model without a head and without a pooler."""
    if config.head != "none" or config.pooler:
        return {}
    modes = dict(cls_token="first", mean_tokens="mean", max_tokens="max")
    switches = {f"pooling_mode_{mode}": config.pool == kind for mode, kind in modes.items()}
    pool = dict(type="Pooling", word_embedding_dimension=config.d_model, **switches)
    return dict(modules=[dict(type="Transformer"), pool, *([dict(type="Normalize")] if config.pool_normed else [])])


def same(theirs: Mapping[str, Any], *names: str) -> Any:
    """The value of several fields that must be equal, because we have one field for all of them."""
    values = [theirs.get(name) for name in names]
    if None in values or any(value != values[0] for value in values):
        raise CheckpointError(
            f"config.json has {', '.join(f'{n}={theirs.get(n)!r}' for n in names)}; they must be there and equal"
        )
    return values[0]


class NoPlaceError(CheckpointError):
    """A layout can not express a config. `misfits` says which fields are in its way, and what the layout can hold instead."""

    def __init__(self, target: str, misfits: dict[str, str]) -> None:
        self.target, self.misfits = target, misfits
        super().__init__(f"{target} has no place for {', '.join(misfits.values())}; save with format='clearhead'")


def refuse_to_write(config: Config, target: str, **expressible: Any) -> None:
    """Raise an error if some of these fields have values that the target's layout can not express."""
    misfits: dict[str, str] = {}
    for field, value in expressible.items():
        actual = getattr(config, field)
        values = value if isinstance(value, tuple) else (value,)
        if actual not in values:
            misfits[field] = f"{field}={actual!r} (it can only hold {' or '.join(map(repr, values))})"
    if misfits:
        raise NoPlaceError(target, misfits)
