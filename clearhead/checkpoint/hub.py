"""Models of the Hugging Face hub, downloaded by huggingface-hub."""

from __future__ import annotations

import re
from pathlib import Path

from clearhead.errors import CheckpointError
from clearhead.families import presets

PREFIX = "hf:"


def download(name: str) -> Path:
    """The local folder of the model "hf:owner/name", downloaded if it is not cached yet. Without hf: it was meant to be a path."""
    repository = name.removeprefix(PREFIX)
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", repository) is not None
    if name in presets():
        raise CheckpointError(
            f"{name!r} is a preset, sizes without weights; train a model, or give a folder, a file, or a hub name: 'hf:owner/model'"
        )
    if not name.startswith(PREFIX):
        ask = f"; the hub is asked for {PREFIX + name!r}" if is_name else ""
        raise CheckpointError(
            f"there is nothing at {name!r}; give a folder, a file, or a hub name such as 'hf:owner/model'{ask}"
        )
    if not is_name:
        raise CheckpointError(f"{name!r} is no name on the hub; write 'hf:owner/model'")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"{name!r} is on the hub, and to fetch it huggingface-hub is missing; pip install 'clearhead[hub]'"
        ) from None
    wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.spm", "*.jinja", "pytorch_model*.bin"]
    try:
        return Path(snapshot_download(repository, allow_patterns=wanted))
    except Exception as error:  # no network, no such model, no permission: each has its own type
        reason = str(error).strip().split("\n")[0][:200]
        raise CheckpointError(
            f"{name!r} could not be fetched from the hub ({type(error).__name__}: {reason}); check the name and the network"
        ) from None
