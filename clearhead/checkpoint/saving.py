"""`save`: a model to a folder, in our layout or in Hugging Face's; it loads back bit for bit.

All files are first written to a temporary folder and moved when they are complete, so that a process that is killed leaves
the old checkpoint or the new one. Each tensor has a checksum, which loading compares.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from clearhead.checkpoint.sentence_transformers import write_modules
from clearhead.checkpoint.tensor_names import expand, write_all
from clearhead.checkpoint.weight_files import write_safetensors
from clearhead.config import Config, Generation
from clearhead.errors import CheckpointError, did_you_mean
from clearhead.families import FAMILIES
from clearhead.kernels import Packed
from clearhead.models import Model
from clearhead.version import __version__

SHARD_BYTES = 4 * 2**30


def save(
    model: Model, path: str | Path, *, format: Literal["clearhead", "hf"] = "clearhead", shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write the model to the folder `path`: config.json and model.safetensors (several files, above `shard_bytes`).

    `format="clearhead"` keeps our names and all fields; `format="hf"` is the layout that Hugging Face transformers loads.
    """
    if format not in ("clearhead", "hf"):
        raise CheckpointError(f"format={format!r} is not known; {did_you_mean(str(format), ['clearhead', 'hf'])}")
    if any(isinstance(module, Packed) for module in model.modules()):
        raise CheckpointError("a quantised model is for running and is not saved; save the model it was made from")
    files, state = _ours(model) if format == "clearhead" else _hugging_face(model)
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; give a folder to save into")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            _write_weights(temporary, state, shard_bytes)
            for name, value in files.items():
                (temporary / name).parent.mkdir(exist_ok=True)
                (temporary / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
            for file in _files(temporary):
                _sync(file)
            _move(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"{path} could not be written ({error.strerror or error}); what was there before is untouched"
        ) from None
    return path


def _ours(model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {"clearhead": __version__, "model": model.config.to_dict(), "generation": asdict(model.generation)}
    extras = {key if key.startswith("extras.") else f"extras.{key}": tensor for key, tensor in model.extras.items()}
    return {"config.json": config}, {**model.state_dict(), **extras}


def _hugging_face(model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = model.config
    if config.family not in FAMILIES:
        raise CheckpointError(f"family={config.family!r} has no Hugging Face layout; save with format='clearhead'")
    if config.pruned_heads:
        raise CheckpointError(
            f"transformers has no layers of unequal heads, and this model has lost {len(config.pruned_heads)}, such as "
            f"{config.pruned_heads[0]!r}; save with format='clearhead'"
        )
    module = FAMILIES[config.family]
    theirs = {**module.write(config), **_write_generation(model.generation)}
    state = write_all(model.state_dict(), expand(module.NAMES, config))
    prefix = module.PREFIX if config.head != "none" else ""
    added: Callable[[Config], dict[str, Tensor]] = getattr(module, "added", lambda _: {})
    kept = {key.removeprefix("extras.").removeprefix(module.PREFIX): tensor for key, tensor in model.extras.items()}
    whole = {**state, **added(config), **kept}
    named = {key if key.startswith(module.HEADS) else prefix + key: tensor for key, tensor in whole.items()}
    files = write_modules(theirs.pop("modules", []))
    files["config.json"] = {**theirs, "dtype": str(next(model.parameters()).dtype).removeprefix("torch.")}
    if config.shape != "encoder":
        files["generation_config.json"] = _write_generation(model.generation)
    return files, named


def _write_generation(generation: Generation) -> dict[str, Any]:
    eos = generation.eos[0] if len(generation.eos) == 1 else list(generation.eos) or None
    values = {
        "bos_token_id": generation.bos,
        "eos_token_id": eos,
        "pad_token_id": generation.pad,
        "decoder_start_token_id": generation.decoder_start,
        "forced_bos_token_id": generation.forced_bos,
        "forced_decoder_ids": [[place, token] for place, token in enumerate(generation.forced_start, 1)] or None,
        "forced_eos_token_id": generation.forced_eos,
        "max_length": generation.max_length,
        "suppress_tokens": list(generation.suppress) or None,
        "begin_suppress_tokens": list(generation.begin_suppress) or None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _write_weights(folder: Path, state: Mapping[str, Tensor], shard_bytes: int) -> None:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # One shard at a time on the CPU, whatever device the model is on.
        write_safetensors(folder / file, {name: state[name].detach().cpu().contiguous() for name in names})
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _move(temporary: Path, path: Path) -> None:
    """Move the finished files to `path`.

    A new folder is one rename. In an old folder config.json is deleted first and written last, so that old and new files are
    never loaded together.
    """
    if not path.exists():
        temporary.chmod(0o755)
        temporary.rename(path)
        return
    (path / "config.json").unlink(missing_ok=True)
    (path / "modules.json").unlink(missing_ok=True)
    for old in [
        *path.glob("model*.safetensors"),
        *path.glob("model*.safetensors.index.json"),
        *path.glob("pytorch_model*"),
    ]:
        old.unlink()
    for file in sorted(_files(temporary), key=lambda file: file == temporary / "config.json"):
        target = path / file.relative_to(temporary)
        target.parent.mkdir(exist_ok=True)
        os.replace(file, target)


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
