"""`load`: a model from a path, whatever wrote it.

Every tensor of the file is used and every parameter of the model filled, or loading fails and says which are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from clearhead.checkpoint.files import Weights, open_weights, read_json
from clearhead.checkpoint.hub import download
from clearhead.checkpoint.names import Match, expand, matches_any, pair_up, read_all
from clearhead.config import Config, Generation
from clearhead.errors import CheckpointError, ConfigError, did_you_mean
from clearhead.families import PAGES, page_of
from clearhead.models import Model, build

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Found:
    """A checkpoint, described: what to build, where its weights are, and which is which."""

    config: Config
    weights: Weights
    matches: list[Match]
    spelling: Mapping[str, str]  # a table's name -> the file's key
    generation: Generation = Generation()
    unused: tuple[str, ...] = ()  # patterns of keys that are no weights
    extras: tuple[str, ...] = ()  # patterns of keys that are kept for saving, but not computed with


def load(path: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Model:
    """The model at `path`, in eval mode.

    `path` is a folder of ours, a Hugging Face folder, or a name on its hub. Weights go straight to `device` and `dtype`: by
    default the CPU, and the type they are stored in.
    """
    found = describe(Path(path) if Path(path).exists() else download(str(path)))
    if found.config.n_layers + found.config.n_decoder_layers > len(found.weights.shapes):
        raise CheckpointError(
            f"the config asks for {found.config.n_layers + found.config.n_decoder_layers} layers, but the file holds only "
            f"{len(found.weights.shapes)} tensors; do they belong together?"
        )
    model = build(found.config, device="meta", dtype=dtype or common_dtype(found.weights))
    pairings = pair_up(
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        found.weights,
        found.matches,
        spelling=found.spelling,
        tied=found.config.tie_embeddings,
        unused=found.unused + found.extras,
    )
    model = model.to_empty(device=device or "cpu")  # only now that everything fits is memory taken
    with torch.no_grad():
        read_all(pairings, found.weights, model.state_dict())
    model.generation = found.generation
    model.extras = {key: found.weights.read(key) for key in found.weights.shapes if matches_any(key, found.extras)}
    return model.eval()


def describe(path: Path) -> Found:
    """Recognise what lies at `path`, and read its config."""
    if not path.is_dir() or not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is no folder with a config.json; give the folder that holds config.json and the weights"
        )
    config = read_json(path / "config.json")
    weights = open_weights(path)
    return _ours(config, weights) if "clearhead" in config else _hugging_face(path, config, weights)


def common_dtype(weights: Weights) -> torch.dtype:
    """The type most of the file's tensors are stored in."""
    counts = Counter(dtype for dtype in weights.dtypes.values() if dtype in FLOATS)
    if not counts:
        raise CheckpointError("the file holds no floating-point tensors, so no model; is it the right file?")
    return counts.most_common(1)[0][0]


def _ours(saved: Mapping[str, Any], weights: Weights) -> Found:
    try:
        config = Config.from_dict(saved["model"])
        told: dict[str, Any] = saved.get("generation") or {}
        generation = Generation(**{name: tuple(v) if isinstance(v, list) else v for name, v in told.items()})
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"config.json was not written by this version of clearhead ({error}); save the model again"
        ) from None
    plain = {name: name for name in weights.shapes}
    matches = [Match(name, (name,)) for name in plain]
    extras = tuple(key for key in plain if key.startswith("extras."))
    return Found(config, weights, matches, plain, generation, extras=extras)


def _hugging_face(path: Path, theirs: Mapping[str, Any], weights: Weights) -> Found:
    kind = theirs.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"config.json's model_type is {kind!r}; a Hugging Face config names its family there")
    family = page_of(kind)
    if family is None:
        known = [name for page in PAGES.values() for name in page.HF]
        raise CheckpointError(f"model_type {kind!r} is not a family we have; {did_you_mean(kind, known)}")
    page = PAGES[family]
    spelling = {key.removeprefix(page.PREFIX): key for key in weights.shapes}
    try:
        config = Config.from_dict({"family": family, **page.BASE, **page.read(theirs, spelling)})
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json has a field of the wrong type ({error}); fetch it again") from None
    except ConfigError as error:
        raise CheckpointError(f"config.json can not be built: {error}") from None
    return Found(
        config,
        weights,
        expand(page.NAMES, config),
        spelling,
        read_generation(
            theirs, read_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
        ),
        unused=page.UNUSED,
        extras=page.EXTRAS,
    )


def read_generation(config: Mapping[str, Any], generation: Mapping[str, Any]) -> Generation:
    """How to start, stop and pad: generation_config.json where it speaks, else config.json."""

    def whole(name: str) -> int | None:
        value = generation.get(name)
        value = config.get(name) if value is None else value
        if isinstance(value, list):
            value = value[0] if value else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def several(name: str) -> tuple[int, ...]:
        value = generation.get(name)
        value = config.get(name) if value is None else value
        values = value if isinstance(value, list) else [value]
        return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))

    return Generation(
        bos=whole("bos_token_id"),
        eos=several("eos_token_id"),
        pad=whole("pad_token_id"),
        decoder_start=whole("decoder_start_token_id"),
        forced_bos=whole("forced_bos_token_id"),
        forced_eos=whole("forced_eos_token_id"),
        max_length=whole("max_length"),
        suppress=several("suppress_tokens"),
        begin_suppress=several("begin_suppress_tokens"),
    )
