"""Weights in 8 or 4 bits, for running a model: `quantize(model, "int8")`. Less memory, and less to read for each token.

The formats, row-major, for a weight W of shape (N, D), as torch.nn.Linear holds it:

    int8    q       int8 (N, D)               W[n, d] = q[n, d] * scales[n, d // 64]
            scales  float16 (N, ceil(D / 64)) q is -127 .. 127; the last group of a row may be shorter
    int4    q       uint8 (N, D / 2)          W[n, d] = u[n, d] * scales[n, d // 32] + mins[n, d // 32], u is 0 .. 15
            scales  float16 (N, D / 32)       u[n, 2i] is the low half of byte q[n, i], u[n, 2i + 1] the high half
            mins    float16 (N, D / 32)       D is a multiple of 32

The kernels round inputs to 16 bits, which is far less than the weights lose. "w8a8" and "w4a8" are the same formats with inputs of
8 bits: each token's inputs are rounded in groups of 64 or 32, with a scale each, just before they are multiplied. On a CPU with
AVX-512 VNNI products of many rows are then twice as fast. Each is about half a percent less exact.

On a CPU with the right instructions, rows lie in tiles (kernels/packed.py). A state dict is always row-major.

int4 takes 5 bits a weight in all, int8 8.25. Embedding and head stay at 8 bits in both, and are one tensor where they are tied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead import kernels
from clearhead.errors import InputError, did_you_mean
from clearhead.kernels.packed import Packed, tile, tile_offsets, untile
from clearhead.layers.embedding import TokenEmbedding, TokenHead
from clearhead.layers.linear import FusedLinear
from clearhead.limits import QUANTIZATIONS
from clearhead.quantization.calibration import Calibration, find_norms, make_pass, round_in_turn
from clearhead.quantization.int4_rounding import FITS, GROUP, SHRINKS, gptq, search

PIECE = 2**22  # weights unpacked at a time
WIDTH = {"q": 4, "scales": 1, "mins": 1}  # of one row, at one place of a tile

Some = TypeVar("Some", bound=nn.Module)


def quantize(model: Some, kind: str, *, calibrate: Calibration | None = None) -> Some:
    """Round the weights of the blocks' products to `kind` (`QUANTIZATIONS`), and the token embedding and head to 8 bits, in place.

    The model can then be run, but not trained. A matrix whose width 4-bit groups do not fit (not a multiple of 32) takes 8 bits.
    `calibrate`, for 4 bits: texts as lists of ids, or a function that calls the model once on inputs of its own. The 4-bit weights
    are then chosen so that results on these inputs change least (calibration.py), which takes longer and loses less.
    """
    if kind not in QUANTIZATIONS:
        raise InputError(f"quantize={kind!r} is not known; {did_you_mean(kind, QUANTIZATIONS)}")
    bits, inputs = QUANTIZATIONS[kind]
    if calibrate is not None and bits != 4:
        raise InputError(
            f"calibrate=TEXTS is for quantize='int4' or 'w4a8'; got {kind!r}, whose loss is small without; leave it out"
        )
    call = None if calibrate is None else make_pass(model, calibrate)
    outer, inner = _find_weights(model)
    narrow = {name for name, width in inner.items() if bits == 4 and width % GROUP == 0}
    if call is not None and not narrow:
        raise InputError(
            f"calibrate=TEXTS is for weights of 4 bits, and this model has none: widths {sorted(set(inner.values()))} are no "
            f"multiples of {GROUP}; leave it out"
        )
    norms = {} if call is None else find_norms(model)
    held: dict[int, Quantized] = {}  # by id(parameter): a shared weight stays shared

    def replace(name: str, hessian: Tensor | None = None, factors: Tensor | None = None) -> None:
        module: Any = model.get_submodule(name)
        weight = module.weight
        if id(weight) not in held:
            rounded = weight if factors is None else (weight * factors).to(weight.dtype)
            held[id(weight)] = Int4(rounded, hessian, inputs) if name in narrow else Int8(weight, inputs)
        delattr(module, "weight")
        module.add_module("weight", held[id(weight)])

    model.requires_grad_(False).eval()
    for name in [*outer, *inner]:
        if call is None or name not in narrow:
            replace(name)
    if call is not None:
        round_in_turn(model, narrow, norms, call, replace)
    return model


def _find_weights(model: nn.Module) -> tuple[list[str], dict[str, int]]:
    """The modules whose weights are rounded: embeddings and heads, and with their widths the products of the blocks."""
    outer, inner = [], {}
    places: list[tuple[str, Any]] = list(model.named_modules())
    for name, module in places:
        is_outer = isinstance(module, TokenEmbedding | TokenHead)
        if not is_outer and not ("blocks." in name and isinstance(module, nn.Linear | FusedLinear)):
            continue
        if isinstance(module.weight, Packed):
            raise InputError(f"{name}.weight is quantised already, as {module.weight.kind}; load the model anew")
        if is_outer and module.weight is not None:  # a tied head has none
            outer.append(name)
        elif not is_outer:
            inner[name] = module.weight.shape[1]
    return outer, inner


class Quantized(Packed):
    """What both share. `like` is an empty tensor that follows the model's type and device; the scales keep their type."""

    bits: int
    group: int  # numbers that share a scale
    tensors: tuple[str, ...]
    like: Tensor
    q: Tensor
    scales: Tensor
    mins: Tensor
    is_tiled: bool

    def __init__(self, weight: Float[Tensor, "N D"], inputs: int, **held: Tensor) -> None:
        super().__init__()
        self.shape, self.inputs = weight.shape, inputs
        self.kind = next(kind for kind, bits in QUANTIZATIONS.items() if bits == (self.bits, inputs))
        self.register_buffer("like", weight.detach().new_empty(0), persistent=False)
        self.is_tiled = kernels.wants_tiles(weight)
        self.widths = {name: held[name].shape[1] for name in self.tensors}
        for name in self.tensors:
            self.register_buffer(name, tile(held[name], WIDTH[name]) if self.is_tiled else held[name])
        super().train(False)

    @property
    def dtype(self) -> torch.dtype:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.like.dtype

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.like.device

    def train(self, mode: bool = True) -> Quantized:
        if mode:
            raise InputError(
                f"quantised weights can not be trained; these are {self.kind}; train the model first, then quantise it"
            )
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Quantized:
        """Move to a device, but keep the type of scales: model.bfloat16() sets the type of results."""
        self.like = fn(self.like)
        tiled = kernels.wants_tiles(self.like)
        for name in self.tensors:
            tensor = getattr(self, name) if tiled == self.is_tiled else self.held(name)
            moved = fn(tensor)
            moved = moved if moved.dtype == tensor.dtype else tensor.to(moved.device)
            setattr(self, name, tile(moved, WIDTH[name]) if tiled and not self.is_tiled else moved)
        self.is_tiled = tiled
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Row-major, also where this machine keeps tiles."""
        destination.update({prefix + name: self.held(name) for name in self.tensors})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **named: Any) -> None:
        for name in self.tensors if self.is_tiled else ():
            rows = state_dict.get(prefix + name)
            if isinstance(rows, Tensor) and rows.shape == (self.shape[0], self.widths[name]):
                state_dict[prefix + name] = tile(rows, WIDTH[name])
        super()._load_from_state_dict(state_dict, prefix, *args, **named)

    def product(self, x: Float[Tensor, "*_ D"], bias: Float[Tensor, " N"] | None) -> Float[Tensor, "*_ N"]:
        if torch.is_grad_enabled() and x.requires_grad:
            raise InputError(
                f"no gradient goes through quantised weights; these are {self.kind}; run the model under torch.no_grad(), or "
                f"train it first and then quantise it"
            )
        out = self._by_kernel(x, bias, self.inputs)
        if out is None and self.inputs == 8:  # no kernel that rounds: perhaps one that takes what is rounded
            x = self.round_inputs(x)
            out = self._by_kernel(x, bias, 16)
        if out is not None:
            return out
        if self.q.is_cuda or torch.compiler.is_compiling():
            return F.linear(x, self.unpack().to(x.dtype), bias)
        step = max(1, PIECE // self.shape[1])  # piece by piece: the whole matrix in float32 would need much more memory
        parts = [F.linear(x, self.unpack(slice(i, i + step)).to(x.dtype)) for i in range(0, self.shape[0], step)]
        return torch.cat(parts, -1) if bias is None else torch.cat(parts, -1) + bias

    def _by_kernel(self, x: Tensor, bias: Tensor | None, inputs: int) -> Tensor | None:
        mins = self.mins if "mins" in self.tensors else None
        return kernels.packed_product(
            x, self.q, self.scales, mins, bias, self.shape[0], inputs=inputs, is_tiled=self.is_tiled
        )

    def round_inputs(self, x: Float[Tensor, "*_ D"]) -> Float[Tensor, "*_ D"]:
        """x, each group rounded to multiples of a 127th of its largest number."""
        D = x.shape[-1]
        groups = F.pad(x.float(), (0, -D % self.group)).unflatten(-1, (-1, self.group))
        largest = groups.abs().amax(-1, keepdim=True)
        inverse = 127 / largest.clamp(min=1e-36)  # below, 127 / largest is infinite
        return ((groups * inverse).round() * (largest / 127)).flatten(-2)[..., :D].to(x.dtype)

    def rows(self, ids: Int[Tensor, "*_"]) -> Float[Tensor, "*_ D"]:
        return self.unpack(ids).to(self.dtype)

    def unpack(self, rows: Tensor | slice = slice(None)) -> Float[Tensor, "*_ D"]:
        """Some rows as float32."""
        raise NotImplementedError

    def held(self, name: str, rows: Tensor | slice = slice(None)) -> Tensor:
        """Some rows of q, scales or mins, one after the other."""
        tensor = getattr(self, name)
        if not self.is_tiled:
            return tensor[rows]
        if isinstance(rows, slice):
            return untile(tensor, WIDTH[name])[rows, : self.widths[name]]
        return tensor.view(-1)[tile_offsets(rows, tensor.shape, WIDTH[name])][..., : self.widths[name]]


class Int8(Quantized):
    bits, tensors, group = 8, ("q", "scales"), 64

    def __init__(self, weight: Float[Tensor, "N D"], inputs: int = 16) -> None:
        parts = [self._round(part) for part in weight.detach().split(max(1, PIECE // weight.shape[1]))]
        q, scales = (torch.cat(part) for part in zip(*parts, strict=True))
        super().__init__(weight, inputs, q=q, scales=scales)

    def _round(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        D = weight.shape[1]
        groups = F.pad(weight.float(), (0, -D % self.group)).unflatten(1, (-1, self.group))
        scales = (groups.abs().amax(-1) / 127).half()
        step = scales.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        q = (groups / step).round().clamp(-127, 127)
        return q.flatten(1)[:, :D].to(torch.int8).contiguous(), scales

    def unpack(self, rows: Tensor | slice = slice(None)) -> Float[Tensor, "*_ D"]:
        D, (q, scales) = self.shape[1], (self.held(name, rows).float() for name in self.tensors)
        groups = F.pad(q, (0, -D % self.group)).unflatten(-1, (-1, self.group))
        return (groups * scales[..., None]).flatten(-2)[..., :D]


class Int4(Quantized):
    bits, tensors, group = 4, ("q", "scales", "mins"), GROUP

    def __init__(
        self, weight: Float[Tensor, "N D"], hessian: Float[Tensor, "D D"] | None = None, inputs: int = 16
    ) -> None:
        """`hessian`: of the inputs that the weight will get (int4_rounding.gptq)."""
        numbers = weight.detach()
        found = kernels.pack_int4(numbers, SHRINKS, FITS) if hessian is None else _packed(*gptq(numbers, hessian))
        if found is None:
            parts = [self._search(part) for part in numbers.split(max(1, PIECE // 16 // numbers.shape[1]))]
            found = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        q, scales, mins = found
        super().__init__(weight, inputs, q=q, scales=scales.half(), mins=mins.half())

    def _search(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each group the scale and minimum with the least squared error, among several starts."""
        u, scale, least, _ = search(weight.float().reshape(-1, self.group).T)
        return _packed(u.T.reshape(weight.shape), scale.view(len(weight), -1), least.view(len(weight), -1))

    def unpack(self, rows: Tensor | slice = slice(None)) -> Float[Tensor, "*_ D"]:
        q, scales, mins = (self.held(name, rows) for name in self.tensors)
        u = torch.stack([q & 15, q >> 4], -1).flatten(-2).unflatten(-1, (-1, self.group))
        return (u.float() * scales.float()[..., None] + mins.float()[..., None]).flatten(-2)


def _packed(u: Tensor, scales: Tensor, mins: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two values a byte."""
    u = u.to(torch.uint8)
    return u[:, 0::2] | u[:, 1::2] << 4, scales, mins
