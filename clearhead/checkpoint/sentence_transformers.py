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


# The values that are supported in the files beside modules.json. A field that is not listed, or has another value, is refused.
ANY = None  # every value
SIDE_FILES: dict[str, dict[str, tuple[Any, ...] | None]] = {
    "config_sentence_transformers.json": {
        "__version__": ANY,
        "model_type": ("SentenceTransformer",),
        "prompts": ANY,  # used only by name; by default none is
        "default_prompt_name": (),
        "similarity_fn_name": ANY,  # how vectors are compared, not how they are made
        "truncate_dim": (),
    },
    "sentence_bert_config.json": {
        "max_seq_length": ANY,  # `max_text_length`
        "do_lower_case": (False,),
        "transformer_task": ("feature-extraction",),
        "modality_config": ({"text": {"method": "forward", "method_output_name": "last_hidden_state"}},),
        "module_output_name": ("token_embeddings",),
    },
}


def read_modules(folder: Path) -> dict[str, Any]:
    """The field `modules`, or nothing where the folder has no modules.json."""
    file = folder / "modules.json"
    if not file.is_file():
        return {}
    listed = parse_json(file)
    for name in SIDE_FILES:
        check_side_file(folder, name)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise CheckpointError(f"{file} is no list of modules; fetch it again")
    return {"modules": [_read_module(folder, module) for module in listed]}


def max_text_length(folder: Path, max_len: int) -> int:
    """The longest text to embed, in tokens: the length in training, if sentence_bert_config.json has it, else the model's."""
    file = folder / "sentence_bert_config.json"
    limit = read_json(file).get("max_seq_length") if file.is_file() else None
    return min(limit, max_len) if isinstance(limit, int) and limit > 0 else max_len


def check_side_file(folder: Path, name: str) -> None:
    """Raise an error if the file changes the embeddings in a way that is not supported."""
    known, beside = SIDE_FILES[name], folder / "tokenizer_config.json"
    for field, value in (read_json(folder / name) if (folder / name).is_file() else {}).items():
        supported = known.get(field, ())
        if value is None or supported is None or value in supported:
            continue
        # Lower case changes nothing where the tokenizer makes it too.
        if field == "do_lower_case" and beside.is_file() and read_json(beside).get("do_lower_case") is True:
            continue
        raise CheckpointError(
            f"{name}'s {field}={value!r:.80} changes the embeddings and is not supported; "
            f"supported: {', '.join(map(repr, supported)) or 'null'}; delete the field, and do its work on the texts or vectors"
        )


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
