"""`load`: a model from a folder or file of any known format.

Every tensor of the file must be used and every parameter of the model assigned. Otherwise loading fails and names the others.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clearhead.checkpoint import gguf, llama2c, openai_whisper
from clearhead.checkpoint.assignment import assign_weights
from clearhead.checkpoint.checkpoint import Checkpoint, check_layers
from clearhead.checkpoint.checksums import check_seal
from clearhead.checkpoint.gguf_file import MAGIC
from clearhead.checkpoint.hub import download
from clearhead.checkpoint.image_size import resize_pictures
from clearhead.checkpoint.run_checkpoint import newest_step, open_step, unfinished
from clearhead.checkpoint.sentence_transformers import read_modules
from clearhead.checkpoint.tensor_names import Match, expand, matches_any, pair_up
from clearhead.checkpoint.weight_files import SAVED, SafeTensors, Weights, open_weights, read_json
from clearhead.config import Config, Generation
from clearhead.errors import CheckpointError, ConfigError, InputError, did_you_mean
from clearhead.families import FAMILIES, family_of
from clearhead.families.config_translation import Keys
from clearhead.kernels import require_memory
from clearhead.limits import QUANTIZATIONS
from clearhead.models import Model, build
from clearhead.quantization import integer as quantized
from clearhead.quantization.calibration import Calibration

TORCH_FILES = (
    b"PK\x03\x04",
    b"\x80\x02\x8a\n",
)  # the first bytes of torch.save's files: a zip; before torch 1.6 a pickle
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@torch.inference_mode(mode=False)  # it holds in one thread only, and models loaded in it can not be trained
def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    image_size: int | None = None,
    quantize: str | None = None,
    calibrate: Calibration | None = None,
) -> Model:
    """The model at `path`, in eval mode.

    `path` is a folder of ours, a Hugging Face folder, a name on its hub ("hf:owner/name"), a .gguf file, llama2.c's .bin
    or OpenAI's Whisper .pt.
    It may also be the folder of a run that goes on or was stopped: a warning names the step of its newest whole checkpoint.
    Weights are loaded directly to `device` and `dtype`. Defaults: the CPU, and the type they are stored in (float32 for quantised
    ones). On the CPU, weights that the file stores as the model needs them stay memory-mapped and are read when they are used: the
    file may be replaced, as `save` does, but nobody may write into it.
    `image_size` is for Vision Transformers: position embeddings are interpolated to images of that size. `quantize`, "int8" or
    "int4", holds the weights in 8 or 4 bits, for inference only; "w8a8" and "w4a8" also round the inputs of products to 8 bits.
    `calibrate`, for weights of 4 bits: some texts as lists of ids, for which they are rounded with the least loss.
    """
    if quantize is not None and quantize not in QUANTIZATIONS:
        raise InputError(f"quantize={quantize!r} is not known; {did_you_mean(quantize, QUANTIZATIONS)}")
    if calibrate is not None and quantize is None:
        raise InputError("calibrate=TEXTS is for quantize='int4' or 'w4a8'; got None; pass both, or none")
    try:
        target = torch.device(device or "cpu")
    except RuntimeError:
        raise InputError(
            f"device={device!r} is no device of torch's; pass one such as 'cpu', 'cuda' or 'mps'"
        ) from None
    checkpoint = open_checkpoint(Path(path) if Path(path).exists() else download(str(path)))
    if checkpoint.note:
        warnings.warn(checkpoint.note, stacklevel=3)
    try:
        model = build(checkpoint.config, device="meta", dtype=dtype or common_dtype(checkpoint.weights))
    except (RuntimeError, OverflowError, TypeError) as error:  # more bytes than torch can count
        reason = str(error).split("\n")[0][:200]
        raise CheckpointError(f"{path} asks for a model of impossible sizes ({reason}); fetch it again") from None
    pairings = pair_up(
        {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
        checkpoint.weights,
        checkpoint.matches,
        keys=checkpoint.keys,
        tied=checkpoint.config.tie_embeddings,
        unused=checkpoint.unused + checkpoint.extras,
    )
    # Memory is taken only now, after all names and shapes have been checked.
    assign_weights(model, pairings, checkpoint.weights, target)
    model.generation = checkpoint.generation
    left = checkpoint.weights.shapes.keys() - {pairing.key for pairing in pairings}
    model.extras = {key: checkpoint.weights.read(key) for key in sorted(left) if matches_any(key, checkpoint.extras)}
    model = (model if image_size is None else resize_pictures(model, image_size)).eval()
    if quantize is None:
        return model
    (bits, _), numbers = QUANTIZATIONS[quantize], sum(parameter.numel() for parameter in model.parameters())
    smaller = "quantize='int4' takes half" if bits == 8 else "load a smaller model"
    require_memory(numbers * bits // 8, device or "cpu", f"{path} in {bits} bits", lambda free: smaller)
    return quantized.quantize(model, quantize, calibrate=calibrate)


def open_checkpoint(path: Path) -> Checkpoint:
    """Recognise the format of the checkpoint at `path`, and read its config and its list of tensors."""
    if path.is_file():
        return _one_file(path)
    if (path / SAVED / "config.json").is_file():
        try:
            return open_checkpoint(path / SAVED)
        except CheckpointError:
            if (path / SAVED).exists():
                raise  # else a running save has just put its files in their places
    if (path / "state.json").is_file() and path.parent.name == "checkpoints":
        return _checkpoint_of_run(path)
    if (step := newest_step(path)) is not None:
        return replace(_checkpoint_of_run(step), note=unfinished(path))
    if not (path / "config.json").is_file():
        inside = path.iterdir() if path.is_dir() else ()
        files = sorted(file.name for file in inside if file.suffix in (".gguf", ".bin", ".pt"))
        hint = f"or the file itself, such as {files[0]!r}" if files else "or a .gguf, .bin or .pt file"
        raise CheckpointError(
            f"{path} is no folder with a config.json; give the folder that holds config.json and the weights, {hint}"
        )
    config = read_json(path / "config.json")
    weights = open_weights(path)
    return _ours(config, weights) if "clearhead" in config else _hugging_face(path, config, weights)


def _checkpoint_of_run(step: Path) -> Checkpoint:
    config, generation, weights = open_step(step)
    keys = {name: name for name in weights.shapes}
    return Checkpoint(config, weights, [Match(name, (name,)) for name in keys], keys, generation)


def _one_file(path: Path) -> Checkpoint:
    """A model in a single file. The format is known by the first bytes, where it has characteristic ones, else by the name."""
    try:
        with path.open("rb") as stream:
            start = stream.read(4)
    except OSError as error:
        raise CheckpointError(f"{path} can not be read ({error.strerror or error}); is the path right?") from None
    if start == MAGIC or path.suffix == ".gguf":
        return gguf.open_checkpoint(path)
    if start in TORCH_FILES or path.suffix == ".pt":
        return openai_whisper.open_checkpoint(path)
    if path.suffix == ".bin":
        return llama2c.open_checkpoint(path)
    if path.suffix in (".safetensors", ".json"):
        raise CheckpointError(
            f"{path} is one file of a model; give the folder that holds it and config.json: {path.parent}"
        )
    raise CheckpointError(
        f"{path} is no file of weights that is known (it starts with {start!r}); known are .gguf (llama.cpp), .bin (llama2.c), "
        f".pt (OpenAI's Whisper), and folders with a config.json"
    )


def common_dtype(weights: Weights) -> torch.dtype:
    """The type that most of the file's tensors have."""
    counts = Counter(dtype for dtype in weights.dtypes.values() if dtype in FLOATS)
    if not counts:
        raise CheckpointError("the file holds no floating-point tensors, so no model; is it the right file?")
    return counts.most_common(1)[0][0]


def _check_saved(saved: Mapping[str, Any], weights: Weights) -> None:
    """Compare the checksums of config.json and of the weights' headers. Files of a save that was changed by hand may have none."""
    try:
        check_seal(saved, {"clearhead", "model", "generation", "headers"})
    except ValueError as error:
        raise CheckpointError(f"config.json is damaged: {error}; fetch or save the model again") from None
    headers = weights.headers if isinstance(weights, SafeTensors) else {}
    for name, wanted in (saved.get("headers") or {}).items():
        if headers.get(name) != wanted:
            raise CheckpointError(
                f"{name} is not the file that config.json was saved with: its header does not match its checksum; fetch or save "
                f"both again"
            )


def _ours(saved: Mapping[str, Any], weights: Weights) -> Checkpoint:
    _check_saved(saved, weights)
    try:
        config = Config.from_dict(saved["model"])
        saved_generation: Mapping[str, Any] = saved.get("generation") or {}
        fields: dict[str, Any] = {k: _as_tuple(v) for k, v in saved_generation.items()}
        generation = Generation(**fields)
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"config.json was not written by this version of clearhead ({error}); save the model again"
        ) from None
    check_layers(config, weights)
    keys = {name: name for name in weights.shapes}
    matches = [Match(name, (name,)) for name in keys]
    extras = tuple(key for key in keys if key.startswith("extras."))
    return Checkpoint(config, weights, matches, keys, generation, extras=extras)


def _as_tuple(value: Any) -> Any:
    """JSON's lists as tuples, also those inside."""
    return tuple(_as_tuple(each) for each in value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def _hugging_face(path: Path, theirs: Mapping[str, Any], weights: Weights) -> Checkpoint:
    kind = theirs.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"config.json's model_type is {kind!r}; a Hugging Face config names its family there")
    family = family_of(kind)
    if family is None:
        known = [name for module in FAMILIES.values() for name in module.HF]
        # No nearest name: a file's model_type is no slip of the hand, and BART is no BERT.
        raise CheckpointError(f"model_type {kind!r} is not a family we have; supported: {', '.join(sorted(known))}")
    module = FAMILIES[family]
    theirs = {**theirs, **read_modules(path)}
    keys = Keys({key.removeprefix(module.PREFIX): key for key in weights.shapes}, weights.read)
    try:
        config = Config.from_dict({"family": family, **module.BASE, **module.read(theirs, keys)})
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json has a field of the wrong type ({error}); fetch it again") from None
    except ConfigError as error:
        raise CheckpointError(f"config.json can not be built: {error}") from None
    check_layers(config, weights)
    beside = path / "generation_config.json"
    written = read_json(beside) if beside.is_file() else {}
    if config.shape != "encoder":
        warn_of_unapplied({**theirs, **written})
    return Checkpoint(
        config,
        weights,
        expand(module.NAMES, config),
        keys,
        read_generation(theirs, written),
        unused=module.UNUSED,
        extras=module.EXTRAS,
    )


# Fields that change which texts a checkpoint writes, the values that change nothing, and our option for the same.
UNAPPLIED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), "beams"),
    "repetition_penalty": ((1.0,), "repetition_penalty"),
    "no_repeat_ngram_size": ((0,), "no_repeat_ngram"),
    "encoder_no_repeat_ngram_size": ((0,), ""),
    "exponential_decay_length_penalty": ((), ""),
    "renormalize_logits": ((False,), ""),
    "min_length": ((0,), ""),
    "min_new_tokens": ((0,), "min_new_tokens"),
    "bad_words_ids": ((), ""),
    "sequence_bias": ((), ""),
    "guidance_scale": ((1, 1.0), ""),
}


def warn_of_unapplied(fields: Mapping[str, Any]) -> None:
    """Say which wishes of the checkpoint about its texts are not applied by themselves, and which option applies each."""
    words: Any = fields.get("bad_words_ids")
    several = [word for word in words if isinstance(word, list) and len(word) > 1] if isinstance(words, list) else []
    wishes = {**fields, "bad_words_ids": several or None}  # words of one token are applied
    for name, (neutral, option) in UNAPPLIED.items():
        value = wishes.get(name)
        if value is not None and value not in neutral:
            advice = f"pass {option}={value!r} for it" if option else "there is no option for it"
            warnings.warn(
                f"the checkpoint asks for {name}={value!r:.60} when it writes texts, which is not applied by itself; {advice}",
                UserWarning,
                stacklevel=6,  # the line that calls `load`
            )


def read_generation(config: Mapping[str, Any], generation: Mapping[str, Any]) -> Generation:
    """How to start, stop and pad: the fields of generation_config.json, and of config.json where it lacks one."""

    def get(name: str) -> Any:
        value = generation.get(name)
        return config.get(name) if value is None else value

    def whole(name: str) -> int | None:
        value = get(name)
        if isinstance(value, list):
            value = value[0] if value else None
        return value if _is_id(value) else None

    def several(name: str) -> tuple[int, ...]:
        value = get(name)
        values = value if isinstance(value, list) else [value]
        return tuple(v for v in values if _is_id(v))

    return Generation(
        bos=whole("bos_token_id"),
        eos=several("eos_token_id"),
        pad=whole("pad_token_id"),
        decoder_start=whole("decoder_start_token_id"),
        forced_bos=whole("forced_bos_token_id"),
        forced_start=_read_forced(get("forced_decoder_ids")),
        forced_eos=whole("forced_eos_token_id"),
        max_length=whole("max_length"),
        suppress=(*several("suppress_tokens"), *_read_bad_words(get("bad_words_ids"))),
        begin_suppress=several("begin_suppress_tokens"),
        alignment_heads=_read_heads(get("alignment_heads")),
    )


def _is_id(value: Any) -> bool:
    """Whether this is a token. Some files write -1 where they mean none."""
    return type(value) is int and value >= 0


def _read_forced(pairs: Any) -> tuple[int | None, ...]:
    """Whisper's [[1, language], [2, task], ...]: positions are counted from 1; null means that the model chooses."""
    places: dict[Any, Any] = {}
    for pair in pairs if isinstance(pairs, list) else ():
        if isinstance(pair, list) and len(pair) == 2 and all(item is None or type(item) is int for item in pair):
            places[pair[0]] = pair[1]
    first = 1
    while first in places:
        first += 1
    return tuple(places[place] for place in range(1, first))


def _read_heads(pairs: Any) -> tuple[tuple[int, int], ...]:
    """Whisper's [[layer, head], ...]."""
    listed: list[Any] = pairs if isinstance(pairs, list) else []
    return tuple((pair[0], pair[1]) for pair in listed if isinstance(pair, list) and [*map(type, pair)] == [int, int])  # pyright: ignore[reportUnknownArgumentType]


def _read_bad_words(words: Any) -> tuple[int, ...]:
    """Marian's list of forbidden words, as far as they are one token, such as [[pad]]."""
    listed: list[Any] = words if isinstance(words, list) else []
    return tuple(word[0] for word in listed if isinstance(word, list) and len(word) == 1 and _is_id(word[0]))
