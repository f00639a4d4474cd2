"""export: a model in another program's format. Refused before writing, verified after, and only then moved into place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from clearhead.checkpoint.durable_files import stage, sweep, sync_file, sync_folder
from clearhead.data import Tokenizer
from clearhead.errors import CheckpointError, InputError, did_you_mean
from clearhead.exports import ctranslate2_export, executorch_export, gguf_export, hugging_face, onnx_export
from clearhead.exports.verification import Verification, size_of
from clearhead.kernels import Packed
from clearhead.models import Model

STAGE = ".export-"
EXACT = ("stored", "float32", "F32")


@dataclass(frozen=True)
class Target:
    """A format: its number types (the first is the default), what it refuses, and how it is written and verified."""

    types: tuple[str, ...]
    refuse: Callable[[Model, Tokenizer | None, str, bool], None]  # the last: whether it will be verified
    write: Callable[[Model, Tokenizer | None, Path, str], None]
    verify: Callable[[Model, Tokenizer | None, Path, str], Verification]


TARGETS = {
    "hf": Target(("stored",), hugging_face.refuse, hugging_face.write, hugging_face.verify),
    "onnx": Target(onnx_export.TYPES, onnx_export.refuse, onnx_export.write, onnx_export.verify),
    "gguf": Target(gguf_export.TYPES, gguf_export.refuse, gguf_export.write, gguf_export.verify),
    "ctranslate2": Target(
        ctranslate2_export.TYPES, ctranslate2_export.refuse, ctranslate2_export.write, ctranslate2_export.verify
    ),
    "executorch": Target(
        executorch_export.TYPES, executorch_export.refuse, executorch_export.write, executorch_export.verify
    ),
}


def export(
    model: Model,
    out: str | Path,
    *,
    to: str,
    tokenizer: Tokenizer | None = None,
    type: str | None = None,
    verify: bool = True,
) -> Verification | None:
    """Write the model to `out`, a folder or for GGUF a file; returns how the format's own runtime computes it.

    What the format can not hold is an error before anything is written. An export that its runtime computes differently is an
    error, and is not left behind. `verify=False` writes it unchecked and returns None.
    """
    if to not in TARGETS:
        raise InputError(f"to={to!r} is no format to export to; {did_you_mean(to, TARGETS)}")
    target, out = TARGETS[to], Path(out)
    kind = target.types[0] if type is None else type
    if kind not in target.types:
        raise InputError(f"type={type!r} is none that {to} holds; {did_you_mean(str(type), target.types)}")
    if any(isinstance(module, Packed) for module in model.modules()):
        raise CheckpointError("a quantised model is for running and is not exported; export the model it was made from")
    check_place(out)
    target.refuse(model, tokenizer, kind, verify)
    try:
        sweep(out.parent, STAGE)
        with stage(out.parent, STAGE) as work:
            written = work / out.name
            if verify and kind not in EXACT:
                check_exact(target, model, tokenizer, written)
            target.write(model, tokenizer, written, kind)
            found = target.verify(model, tokenizer, written, kind) if verify else None
            sync_all(written)
            os.rename(written, out)
            sync_folder(out.parent)
    except OSError as error:
        raise CheckpointError(
            f"{out} could not be written ({error.strerror or error}); nothing was left behind"
        ) from None
    return None if found is None else replace(found, path=str(out), nbytes=size_of(out))


def check_exact(target: Target, model: Model, tokenizer: Tokenizer | None, written: Path) -> None:
    """Verify the same export with all bits first: the limit of few bits would let small mistakes pass. Leaves nothing."""
    kind = next(kind for kind in target.types if kind in EXACT)
    target.write(model, tokenizer, written, kind)
    target.verify(model, tokenizer, written, kind)
    if written.is_dir():
        shutil.rmtree(written)
    else:
        written.unlink()


def check_place(out: Path) -> None:
    """Refuse a place that is taken: an export never mixes with other files."""
    if out.exists() or out.is_symlink():
        raise InputError(f"{out} is there already; an export takes a new name; remove it, or choose another with --out")
    if not out.parent.is_dir():
        raise InputError(f"there is no folder {str(out.parent)!r} for {out.name!r}; make it first")


def sync_all(path: Path) -> None:
    for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        sync_file(file)
    if path.is_dir():
        sync_folder(path)
