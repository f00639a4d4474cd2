"""Folders of sentence-transformers: modules.json lists what follows the model (pooling, a norm), each with a folder of its own.

To the family modules the list appears as a field `modules` of config.json: the type and the config of each module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from clearhead.checkpoint.weight_files import parse_json, read_json
from clearhead.errors import CheckpointError

PACKAGE = "sentence_transformers.models."


def read_modules(folder: Path) -> dict[str, Any]:
    """The field `modules`, or nothing where the folder has no modules.json."""
    file = folder / "modules.json"
    if not file.is_file():
        return {}
    listed = parse_json(file)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise CheckpointError(f"{file} is no list of modules; fetch it again")
    return {"modules": [_read_module(folder, module) for module in listed]}


def _read_module(folder: Path, module: Mapping[str, Any]) -> dict[str, Any]:
    kind, path = module.get("type"), module.get("path")
    if not isinstance(kind, str) or not isinstance(path, str) or (path and Path(path).name != path):
        raise CheckpointError(f"modules.json has a module {dict(module)!r}; each needs a type, and a path beside it")
    file = folder / path / "config.json"
    config = read_json(file) if path and file.is_file() else {}
    return {**config, "type": kind.rpartition(".")[2]}


def write_modules(modules: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of the files that hold this list, by name."""
    files: dict[str, Any] = {}
    listed: list[dict[str, Any]] = []
    for n, module in enumerate(modules):
        config = {name: value for name, value in module.items() if name != "type"}
        path = f"{n}_{module['type']}" if n else ""
        listed.append(dict(idx=n, name=str(n), path=path, type=PACKAGE + module["type"]))
        if config:
            files[f"{path}/config.json"] = config
    return {**files, "modules.json": listed} if listed else {}
