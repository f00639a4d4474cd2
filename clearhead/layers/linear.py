"""Several projections of one input as one matrix product, saved under their own names."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class FusedLinear(nn.Module):
    """One product where there would be two or three: x [W_q W_k W_v], split afterwards.

    In memory there is one weight; in a state dict each part stands under its own name beside this module, so that
    `attention.qkv` is saved as `attention.q_proj.weight` and so on. `bias` names the parts that carry one.
    The module that holds it calls `save_apart` once.
    """

    def __init__(self, d_in: int, parts: dict[str, int], *, bias: set[str]) -> None:
        super().__init__()
        self.parts = parts
        self.biased = [name for name in parts if name in bias]
        self.weight = nn.Parameter(torch.empty(sum(parts.values()), d_in))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear, for those who use this alone
        d_bias = sum(parts[name] for name in self.biased)
        self.bias = nn.Parameter(torch.zeros(d_bias)) if self.biased else None

    def forward(self, x: Float[Tensor, "*_ d_in"]) -> tuple[Float[Tensor, "*_ _"], ...]:
        return F.linear(x, self.weight, self.whole_bias()).split(list(self.parts.values()), -1)

    def whole_bias(self) -> Float[Tensor, " d_out"] | None:
        """The bias of every part, zeros where a part has none (Whisper's keys)."""
        bias = self.bias
        if bias is None or len(self.biased) == len(self.parts):
            return bias
        given = dict(zip(self.biased, bias.split([self.parts[name] for name in self.biased]), strict=True))
        return torch.cat([given.get(name, bias.new_zeros(size)) for name, size in self.parts.items()])


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
            if not parts:
                continue
            whole = getattr(getattr(holder, name), kind)
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
            # A part that is not there stays as it is; on the meta device it is nothing, and does not join.
            mixed = len({piece.device for piece in pieces}) > 1
            state[f"{prefix}{name}.{kind}"] = whole if mixed else torch.cat(pieces)

    holder.register_state_dict_post_hook(split)
    holder.register_load_state_dict_pre_hook(join)
