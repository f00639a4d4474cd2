"""Models of the Hugging Face hub, downloaded by huggingface-hub."""

from __future__ import annotations

import re
from pathlib import Path

from clearhead.errors import CheckpointError


def download(name: str) -> Path:
    """The local folder of the model "owner/name", downloaded if it is not cached yet."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise CheckpointError(
            f"there is nothing at {name!r}; give a folder, a file, or a hub name such as 'owner/model'"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"there is no folder {name!r}, and to fetch it from the hub huggingface-hub is missing; pip install 'clearhead[hub]'"
        ) from None
    wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.spm", "*.jinja", "pytorch_model*.bin"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # no network, no such model, no permission: each has its own type
        reason = str(error).strip().split("\n")[0][:200]
        raise CheckpointError(
            f"there is no folder {name!r}, and it could not be fetched from the hub ({type(error).__name__}: {reason}); "
            f"check the path, the name and the network"
        ) from None
