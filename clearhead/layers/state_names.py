"""One weight in memory, several names on disk: how a FusedLinear is saved and loaded as its parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clearhead.layers.linear import FusedLinear


def save_apart(holder: nn.Module, name: str) -> None:
    """Make `holder`'s state dict show the FusedLinear `name` as its parts, and take the parts back on loading."""
    fused: FusedLinear = getattr(holder, name)
    tables = {"weight": fused.parts, "bias": {part: fused.parts[part] for part in fused.biased}}

    def split(_: nn.Module, state: dict[str, Any], prefix: str, __: dict[str, Any]) -> None:
        for kind, parts in tables.items():
            if (whole := state.pop(f"{prefix}{name}.{kind}", None)) is not None:
                for part, piece in zip(parts, whole.split(list(parts.values())), strict=True):
                    state[f"{prefix}{part}.{kind}"] = piece

    def join(
        holder: nn.Module,
        state: dict[str, Any],
        prefix: str,
        _: dict[str, Any],
        __: bool,
        missing: list[str],
        ___: list[str],
        errors: list[str],
    ) -> None:
        for kind, parts in tables.items():
            whole = getattr(getattr(holder, name), kind)
            if not parts or not isinstance(whole, Tensor):  # a packed weight has no parts
                continue
            pieces: list[Tensor] = []
            for part, now in zip(parts, whole.split(list(parts.values())), strict=True):
                key = f"{prefix}{part}.{kind}"
                piece = state.pop(key, None)
                if piece is None:
                    missing.append(key)
                elif piece.shape != now.shape:
                    errors.append(
                        f"size mismatch for {key}: {tuple(piece.shape)} in the checkpoint, {tuple(now.shape)} here"
                    )
                pieces.append(now if piece is None or piece.shape != now.shape else piece)
            # A missing part keeps its value; on the meta device it has none, and nothing can be joined.
            mixed = len({piece.device for piece in pieces}) > 1
            state[f"{prefix}{name}.{kind}"] = whole if mixed else torch.cat(pieces)

    holder.register_state_dict_post_hook(split)
    holder.register_load_state_dict_pre_hook(join)
