"""What the pages share to read other libraries' config.json: translated fields, and refusals.

A field that would change the result and that we can not honour is an error, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from clearhead.config import Config
from clearhead.errors import CheckpointError, did_you_mean

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

# Fields of other models that change what a model computes, with the value that means "not used".
FOREIGN: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "query_pre_attn_scalar": (None,),
    "partial_rotary_factor": (None, 1.0),
    "attention_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "num_local_experts": (None, 0, 1),
    "num_experts": (None, 0, 1),
    "quantization_config": (None,),
    "is_decoder": (None, False),
    "add_cross_attention": (None, False),
    "use_parallel_residual": (None, False),
    "parallel_attn": (None, False),
    "attention_sinks": (None, False),
    "normalize_before": (None, False),
    "normalize_embedding": (None, False),
    "add_bias_logits": (None, False),
    "static_position_embeddings": (None, True),
}


class Keys(dict[str, str]):
    """What a file holds: each tensor's name in the tables, and its key in the file. `tensor` reads one that tells a fact."""

    def __init__(self, keys: Mapping[str, str], read: Callable[[str], Any]) -> None:
        super().__init__(keys)
        self._read = read

    def tensor(self, name: str) -> Any:
        return self._read(self[name])


def both(theirs: str, ours: str) -> list[NameRow]:
    """The two rows of a layer with a weight and a bias."""
    return [(f"{theirs}.weight", f"{ours}.weight"), (f"{theirs}.bias", f"{ours}.bias")]


def take(theirs: Mapping[str, Any], field: str, default: Any = None) -> Any:
    """A field that must be there, unless it has a default."""
    value = theirs.get(field, default)
    if value is None and default is None:
        raise CheckpointError(f"config.json has no {field!r}; it has {sorted(theirs)[:12]}; is it this model's own?")
    return default if value is None else value


def activation(theirs: Mapping[str, Any], field: str, default: str | None = None) -> str:
    name = take(theirs, field, default)
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"config.json's {field}={name!r} is not an activation we have; {did_you_mean(str(name), ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def write_activation(config: Config) -> str:
    return {"gelu_tanh": "gelu_new", "silu": "silu", "relu2": "relu2"}.get(config.feedforward, config.feedforward)


def refuse(theirs: Mapping[str, Any], **neutral: tuple[Any, ...]) -> None:
    """Each of these fields, and the foreign ones, must be absent or neutral."""
    for field, values in {**FOREIGN, **neutral}.items():
        if field in theirs and theirs[field] not in values:
            raise CheckpointError(
                f"config.json's {field}={theirs[field]!r} changes what the model computes and is not supported; "
                f"supported: {', '.join(map(repr, values))}"
            )


def labels(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The classes: their number, and their names where they are more than LABEL_0, LABEL_1 ..."""
    named: Mapping[str, str] = theirs.get("id2label") or {}
    n_classes = theirs.get("num_labels") or len(named) or 2
    plain = n_classes != len(named) or all(name == f"LABEL_{i}" for i, name in named.items())
    return dict(n_classes=n_classes, labels=() if plain else tuple(named.get(str(i), "") for i in range(n_classes)))


def write_labels(config: Config) -> dict[str, Any]:
    if config.head != "classes":
        return {}
    names = config.labels or [f"LABEL_{i}" for i in range(config.n_classes)]
    return dict(id2label={str(i): name for i, name in enumerate(names)}, label2id={n: i for i, n in enumerate(names)})


def pooling(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """What sentence-transformers' modules make of the states, in place of the model's own pooler; nothing where there are none."""
    if "modules" not in theirs:
        return {}
    fields: dict[str, Any] = dict(pooler=False)
    for module in theirs["modules"]:
        match module.get("type"):
            case "Transformer":
                pass
            case "Pooling":
                fields["pool"] = _pool_of(module)
            case "Normalize":
                fields["pool_normed"] = True
            case other:
                raise CheckpointError(
                    f"modules.json's {other!r} changes the embeddings and is not supported; supported: Pooling, Normalize"
                )
    return fields


POOLS = {"mean": "mean", "mean_tokens": "mean", "cls": "first", "cls_token": "first", "max": "max", "max_tokens": "max"}


def _pool_of(module: Mapping[str, Any]) -> str:
    """The one way of pooling; once there was a switch for each, today one field names it."""
    switched = [name.removeprefix("pooling_mode_") for name, value in module.items() if value is True]
    modes = [mode for mode in [module.get("pooling_mode"), *switched] if mode not in (None, "include_prompt")]
    if len(modes) != 1 or modes[0] not in POOLS:
        raise CheckpointError(f"1_Pooling/config.json's pooling_mode is {modes}; supported is one of cls, mean, max")
    return POOLS[modes[0]]


def write_pooling(config: Config) -> dict[str, Any]:
    """The modules, where the model ends in states or in what is pooled of them without a dense layer."""
    if config.head != "none" or config.pooler:
        return {}
    modes = dict(cls_token="first", mean_tokens="mean", max_tokens="max")
    switches = {f"pooling_mode_{mode}": config.pool == kind for mode, kind in modes.items()}
    pool = dict(type="Pooling", word_embedding_dimension=config.d_model, **switches)
    return dict(modules=[dict(type="Transformer"), pool, *([dict(type="Normalize")] if config.pool_normed else [])])


def same(theirs: Mapping[str, Any], *names: str) -> Any:
    """Fields that must agree, because one of ours stands for all of them."""
    values = [theirs[name] for name in names if theirs.get(name) is not None]
    if not values or any(value != values[0] for value in values):
        raise CheckpointError(
            f"config.json has {', '.join(f'{n}={theirs.get(n)!r}' for n in names)}; they must be there and equal"
        )
    return values[0]


def refuse_to_write(config: Config, target: str, **wanted: Any) -> None:
    """Each of these fields must have the one value that the target's layout can express."""
    for field, value in wanted.items():
        got = getattr(config, field)
        values = value if isinstance(value, tuple) else (value,)
        if got not in values:
            raise CheckpointError(
                f"{target} has no place for {field}={got!r}; it can only hold {' or '.join(map(repr, values))}; "
                f"save with format='clearhead'"
            )
