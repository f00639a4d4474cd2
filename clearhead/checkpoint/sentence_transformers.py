"""sentence-transformers' folders: modules.json lists what follows the model (pooling, a norm), each with a folder of its own.

Pages read and write the list as the field `modules` of config.json, each module's type beside its config.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clearhead.checkpoint.weight_files import parse_json, read_json
from clearhead.errors import CheckpointError

PACKAGE = "sentence_transformers.models."


def read_modules(folder: Path) -> dict[str, Any]:
    """`modules` as a field, or nothing where the folder is a model alone."""
    file = folder / "modules.json"
    if not file.is_file():
        return {}
    listed = parse_json(file)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise CheckpointError(f"{file} is no list of modules; fetch it again")
    return {"modules": [_read_module(folder, module) for module in listed]}


def _read_module(folder: Path, module: Mapping[str, Any]) -> dict[str, Any]:
    kind, place = module.get("type"), module.get("path")
    if not isinstance(kind, str) or not isinstance(place, str) or (place and Path(place).name != place):
        raise CheckpointError(f"modules.json has a module {dict(module)!r}; each needs a type, and a path beside it")
    file = folder / place / "config.json"
    own = read_json(file) if place and file.is_file() else {}
    return {**own, "type": kind.rpartition(".")[2]}


def write_modules(modules: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The files that hold this list."""
    files: dict[str, Any] = {}
    listed: list[dict[str, Any]] = []
    for n, module in enumerate(modules):
        own = {name: value for name, value in module.items() if name != "type"}
        place = f"{n}_{module['type']}" if n else ""
        listed.append(dict(idx=n, name=str(n), path=place, type=PACKAGE + module["type"]))
        if own:
            files[f"{place}/config.json"] = own
    return {**files, "modules.json": listed} if listed else {}
