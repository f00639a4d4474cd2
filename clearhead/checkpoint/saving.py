"""`save`: a model to a folder, in our layout or in Hugging Face's; it loads back bit for bit.

All files are first written to a hidden folder inside the target, which is on the same file system even where the target is a mount
point. One rename of that folder to `.saved` makes the save valid: from then on `load` reads the model there. Then the files replace
the old ones, config.json last, and only then are files of the old model that have no successor removed. So a kill or a failure at
any moment leaves the old model or the new one. Tensors, headers and our config.json have checksums, which loading compares.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn

from clearhead.checkpoint.checksums import seal
from clearhead.checkpoint.durable_files import stage, sweep, sync_file, sync_folder
from clearhead.checkpoint.hugging_face import write_hugging_face
from clearhead.checkpoint.weight_files import SAVED, write_safetensors
from clearhead.errors import CheckpointError, did_you_mean
from clearhead.kernels import Packed
from clearhead.models import Model, build
from clearhead.quantization import float8
from clearhead.version import __version__

SHARD_BYTES = 4 * 2**30
STAGE = ".save-"  # folders in which a save is under way
VALUES = ("activation", "eps", "factor", "norm_first", "scale")  # plain attributes of modules that the config decides
SIDE_FILES = ("modules.json", "generation_config.json")  # of the old model: the new one may have none
TOKENIZER_FILES = ("tokenizer.json", "chat_template.jinja", "special_tokens_map.json")  # of an old tokenizer, likewise


@runtime_checkable
class SavesItself(Protocol):
    """A tokenizer, as far as `save` needs to know: its room is beside this one."""

    def save(self, directory: Path, /) -> None: ...


def save(
    model: Model,
    path: str | Path,
    *,
    format: Literal["clearhead", "hf"] = "clearhead",
    tokenizer: SavesItself | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write the model to the folder `path`: config.json and model.safetensors (several files, above `shard_bytes`).

    `format="clearhead"` keeps our names and all fields; `format="hf"` is a layout that Hugging Face transformers loads: the model's
    own family's, or that of any other that can express it. `tokenizer` is written beside it; without it, a tokenizer that is in the
    folder stays.
    """
    if format not in ("clearhead", "hf"):
        raise CheckpointError(f"format={format!r} is not known; {did_you_mean(str(format), ['clearhead', 'hf'])}")
    if any(isinstance(module, Packed) for module in model.modules()):
        raise CheckpointError("a quantised model is for running and is not saved; save the model it was made from")
    _refuse_changes(model)
    files, state = _ours(model) if format == "clearhead" else write_hugging_face(model)
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"{path} is a file; give a folder to save into")
    is_new = not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
        sweep(path, STAGE)
        if (path / SAVED).is_dir():  # a save that was cut short after it had become valid
            _install(path)
        with stage(path, STAGE) as work:
            headers = _write_weights(work, state, shard_bytes)
            if format == "clearhead":
                files["config.json"] = seal({**files["config.json"], "headers": headers})
            for name, value in files.items():
                (work / name).parent.mkdir(exist_ok=True)
                (work / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
            if tokenizer is not None:
                tokenizer.save(work)
            for file in _files(work):
                sync_file(file)
            for folder in {file.parent for file in _files(work)}:
                sync_folder(folder)
            os.rename(work, path / SAVED)
    except OSError as error:
        if is_new:
            with suppress(OSError):
                path.rmdir()
        raise CheckpointError(
            f"{path} could not be written ({error.strerror or error}); what was there before is untouched"
        ) from None
    try:
        _install(path)
    except OSError as error:
        raise CheckpointError(
            f"the new model is whole in {path / SAVED}, where clearhead loads it, but its files could not replace the old ones "
            f"({error.strerror or error}); mend the folder and save again"
        ) from None
    return path


def _refuse_changes(model: Model) -> None:
    """Refuse a model that is no longer what its config says: a file holds config and tensors; `load` would make another."""
    plain = build(model.config, device="meta")
    ours, wanted = dict(model.named_modules()), dict(plain.named_modules())
    changed = [name for name in {**wanted, **ours} if _is_changed(ours.get(name), wanted.get(name))]
    shapes, wanted_shapes = ({name: t.shape for name, t in m.state_dict().items()} for m in (model, plain))
    names = {**wanted_shapes, **shapes}
    changed = changed or [name for name in names if shapes.get(name) != wanted_shapes.get(name)]
    if changed:
        found = ours.get(changed[0])
        kind = "" if found is None else f" (now {type(found).__name__})"
        raise CheckpointError(
            f"this model is not what its config says: {', '.join(repr(name) for name in changed[:3])}{kind} was changed in Python, "
            f"and config and weights alone would load as another model; put it back, or keep its state_dict() with torch.save"
        )


def _is_changed(ours: nn.Module | None, wanted: nn.Module | None) -> bool:
    if ours is None or wanted is None:
        return True
    kind = type(ours)
    is_float8 = kind.__module__ == float8.__name__ and isinstance(
        ours, type(wanted)
    )  # computes the same, in fewer bits
    return (
        not (kind is type(wanted) or is_float8)
        or "forward" in vars(ours)
        or any(vars(ours).get(name) != vars(wanted).get(name) for name in VALUES)
    )


def _ours(model: Model) -> tuple[dict[str, Any], dict[str, Tensor]]:
    config = {"clearhead": __version__, "model": model.config.to_dict(), "generation": asdict(model.generation)}
    extras = {key if key.startswith("extras.") else f"extras.{key}": tensor for key, tensor in model.extras.items()}
    return {"config.json": config}, {**model.state_dict(), **extras}


def _write_weights(folder: Path, state: Mapping[str, Tensor], shard_bytes: int) -> dict[str, int]:
    """Write one file, or several; returns the checksum of each one's header."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        nbytes = tensor.numel() * tensor.element_size()
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    weight_map, headers = dict[str, str](), dict[str, int]()
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        # One shard at a time on the CPU, whatever device the model is on.
        headers[file] = write_safetensors(
            folder / file, {name: state[name].detach().cpu().contiguous() for name in names}
        )
        weight_map.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return headers


def _install(path: Path) -> None:
    """Move the valid save in `.saved` to its place, config.json last; then remove what is left of the old model.

    Files are linked, not moved: `.saved` stays whole, and `load` reads it, until everything is in its place.
    """
    saved = path / SAVED
    sync_folder(path)
    names = [file.relative_to(saved) for file in _files(saved)]
    for name in sorted(names, key=lambda name: (name == Path("config.json"), name)):
        (path / name).parent.mkdir(exist_ok=True)
        link = saved / f".{secrets.token_hex(8)}"
        try:
            os.link(saved / name, link)
        except OSError:  # a file system without links
            shutil.copyfile(saved / name, link)
            sync_file(link)
        os.replace(link, path / name)
    patterns = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*", *SIDE_FILES)
    patterns += TOKENIZER_FILES if Path("tokenizer_config.json") in names else ()
    for old in [file for pattern in patterns for file in path.glob(pattern)]:
        if old.relative_to(path) not in names:
            os.unlink(old)
    for folder in {(path / name).parent for name in names}:
        sync_folder(folder)
    done = path / f"{STAGE}{secrets.token_hex(8)}"
    os.rename(saved, done)  # first: a kill while it is deleted must not leave half of it valid
    sync_folder(path)
    shutil.rmtree(done, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and not file.name.startswith(".")]
