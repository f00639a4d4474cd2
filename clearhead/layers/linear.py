"""The products x W^T + b of a model, and several of them as one.

`linear` is the door they all go through. A few rows, as in generating, take as long as reading the weights does: where no gradient
is wanted, kernels of our own (native.cpp, gpu/) read them faster than torch's. Many rows on the CPU go to oneDNN (onednn.py).
Weights may also be packed (quantized.py).
"""

from __future__ import annotations

import functools
import importlib.util
import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack as dispatch_modes  # pyright: ignore[reportPrivateUsage]
from torch._C._functorch import peek_interpreter_stack
from torch.nn.modules.module import _has_any_global_hook  # pyright: ignore[reportPrivateUsage]

from clearhead.kernels import native, onednn

if TYPE_CHECKING:
    from clearhead.quantization.float8 import Product

CPU_ROWS, CUDA_ROWS = 32, 64  # up to how many our kernels win


class Packed(nn.Module):
    """A weight held in fewer bits, in the place of the parameter; it can be multiplied with and looked up in."""

    shape: torch.Size
    dtype: torch.dtype  # of results
    device: torch.device

    @abstractmethod
    def product(self, x: Float[Tensor, "*_ D"], bias: Float[Tensor, " N"] | None) -> Float[Tensor, "*_ N"]: ...

    @abstractmethod
    def rows(self, ids: Int[Tensor, "*_"]) -> Float[Tensor, "*_ D"]: ...


def linear(
    x: Float[Tensor, "*_ D"], weight: Float[Tensor, "N D"] | Packed, bias: Float[Tensor, " N"] | None = None
) -> Float[Tensor, "*_ N"]:
    """x W^T + b, by the fastest way there is for this many rows."""
    if isinstance(weight, Packed):
        return weight.product(x, bias)
    if not is_bare(x, weight) or x.dtype != weight.dtype or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    if onednn.fits(x, weight):
        return onednn.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    n_rows = x.numel() // x.shape[-1]
    if x.is_cuda:
        if 0 < n_rows <= CUDA_ROWS and recording.is_on and has_triton():
            from clearhead.kernels import gpu

            if gpu.linear_plan(n_rows, weight.shape[0], weight.shape[1], weight.dtype) is not None:
                return gpu.linear(flat(x), weight, bias).view(*x.shape[:-1], -1)
        if weight.shape[0] % 8:
            return _wide(flat(x), weight, bias).view(*x.shape[:-1], -1)
    elif 0 < n_rows <= CPU_ROWS and x.dtype == torch.float32 and x.device.type == "cpu" and native.is_there():
        return native.linear(flat(x), weight, bias).view(*x.shape[:-1], -1)
    return F.linear(x, weight, bias)


def activated(layer: nn.Module, x: Float[Tensor, "*_ D"], activation: str) -> Float[Tensor, "*_ N"] | None:
    """f(layer(x)) as one kernel, where there is one and nobody looks between the two; None elsewhere."""
    if torch.is_grad_enabled() or activation not in onednn.ACTIVATIONS or type(layer) is not Linear:
        return None
    if layer._forward_hooks or layer._forward_pre_hooks or _has_any_global_hook():  # pyright: ignore[reportPrivateUsage]
        return None
    weight: Tensor | Packed = layer.weight
    if isinstance(weight, Packed) or not (is_bare(x, weight) and weight.is_contiguous() and onednn.fits(x, weight)):
        return None
    return onednn.linear(x, weight, layer.bias, activation)


def _wide(x: Float[Tensor, "R D"], weight: Float[Tensor, "N D"], bias: Float[Tensor, " N"] | None) -> Tensor:
    """For N that no multiple of 8 is (GPT-2's 50,257 words): rows that start at such multiples are written six times as fast."""
    N, even = len(weight), len(weight) // 8 * 8
    out = x.new_empty(len(x), even + 8)
    torch.mm(x, weight[:even].T, out=out[:, :even])
    torch.mm(x, weight[even:].T, out=out[:, even:N])
    return out[:, :N] if bias is None else out[:, :N].add_(bias)


def flat(x: Float[Tensor, "*_ D"]) -> Float[Tensor, "R D"]:
    """Rows one after the other in memory."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def is_bare(*tensors: Tensor) -> bool:
    """Whether these are just memory, and nobody watches the operators: what a kernel outside torch may read."""
    return (
        tensors[0].device.type in ("cpu", "cuda")
        and not torch.compiler.is_compiling()
        and all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
        and not torch.is_autocast_enabled(tensors[0].device.type)
        and not dispatch_modes()  # counters of FLOPs, fake tensors
        and peek_interpreter_stack() is None  # vmap  # pyright: ignore[reportUnnecessaryComparison]
    )


class Recording:
    """Whether a CUDA graph is being recorded. Starting a kernel of ours takes longer than torch's: it pays where it is replayed."""

    is_on = False

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *_: object) -> None:
        self.is_on = False


recording = Recording()


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class Linear(nn.Linear):
    """torch's, through the door."""

    product8: Product | None = None  # set where training multiplies in 8 bits

    def forward(self, input: Float[Tensor, "*_ d_in"]) -> Float[Tensor, "*_ d_out"]:
        if self.product8 is not None and torch.is_grad_enabled():
            from clearhead.quantization import float8 as fp8

            return fp8.linear(input, self.weight, self.bias, self.product8, [self.out_features])[0]
        return linear(input, self.weight, self.bias)


class FusedLinear(nn.Module):
    """One product where there would be two or three: x [W_q W_k W_v], split afterwards.

    In memory there is one weight; in a state dict each part stands under its own name beside this module, so that
    `attention.qkv` is saved as `attention.q_proj.weight` and so on. `bias` names the parts that carry one.
    The module that holds it calls `save_apart` once.
    """

    product8: Product | None = None

    def __init__(self, d_in: int, parts: dict[str, int], *, bias: set[str]) -> None:
        super().__init__()
        self.parts = parts
        self.biased = [name for name in parts if name in bias]
        self.weight = nn.Parameter(torch.empty(sum(parts.values()), d_in))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))  # as nn.Linear, for those who use this alone
        d_bias = sum(parts[name] for name in self.biased)
        self.bias = nn.Parameter(torch.zeros(d_bias)) if self.biased else None

    def forward(self, x: Float[Tensor, "*_ d_in"]) -> tuple[Float[Tensor, "*_ _"], ...]:
        if self.product8 is not None and torch.is_grad_enabled():
            from clearhead.quantization import float8 as fp8

            return fp8.linear(x, self.weight, self.whole_bias(), self.product8, list(self.parts.values()))
        return linear(x, self.weight, self.whole_bias()).split(list(self.parts.values()), -1)

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
            whole = getattr(getattr(holder, name), kind)
            if not parts or isinstance(whole, Packed):
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
            # A part that is not there stays as it is; on the meta device it is nothing, and does not join.
            mixed = len({piece.device for piece in pieces}) > 1
            state[f"{prefix}{name}.{kind}"] = whole if mixed else torch.cat(pieces)

    holder.register_state_dict_post_hook(split)
    holder.register_load_state_dict_pre_hook(join)
