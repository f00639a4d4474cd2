"""A stand-in for Apple's GPU: tensors that say they are on NAME, computed on the CPU, with the rules of that device.

float64 does not exist there, and one operation takes tensors of one device only. This finds such mistakes on any computer; it says
nothing about the numbers or the speed of the real device.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from clearhead.kernels import checks

NAME = "fakemps"
aten = torch.ops.aten
# These may mix devices: copies, and indices from the CPU.
MIXED = (aten.copy_, aten._to_copy, aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_)
NOT_THERE = (torch.float64, torch.complex128)


class Module(_DummyBackendModule):
    def is_available(self) -> bool:
        return False  # else torch's checkpoint writer takes it for a device with streams, which Apple's has not


class MpsTensor(torch.Tensor):
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> MpsTensor:
        if inner.dtype in NOT_THERE:
            raise TypeError(f"Cannot convert a MPS Tensor to {inner.dtype} as the MPS framework doesn't support it")
        place = dict(strides=inner.stride(), storage_offset=inner.storage_offset(), device=torch.device(NAME, 0))
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, **place)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"MpsTensor({self.inner})"


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Functions(TorchFunctionMode):
    """torch.tensor(values, device=...) and x[[1, 2]] never reach the dispatcher: such tensors are made on the CPU and moved."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and "device" in kwargs:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            x, index, *rest = args
            parts = index if isinstance(index, tuple) else (index,)
            parts = tuple(torch.tensor(part).to(x.device) if isinstance(part, list) else part for part in parts)
            args = x, parts if isinstance(index, tuple) else parts[0], *rest
        return func(*args, **kwargs)


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, MpsTensor)]
    others = [tensor for tensor in tensors if not isinstance(tensor, MpsTensor) and tensor.dim()]
    if ours and others and func.overloadpacket not in MIXED:
        raise RuntimeError(f"{func}: expected all tensors on one device; got mps and cpu")
    wanted = kwargs.get("device")
    on_mps = bool(ours) if wanted is None else torch.device(wanted).type == NAME
    if func.overloadpacket is aten.copy_:
        on_mps = isinstance(args[0], MpsTensor)
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu"), "pin_memory": False} if on_mps else kwargs
    inside = tree_map(lambda leaf: leaf.inner if isinstance(leaf, MpsTensor) else leaf, (args, kwargs))
    if func.overloadpacket is aten._to_copy and wanted is not None:
        # From one device to another is always a copy: here both are the CPU, so say so.
        inside[1].pop("pin_memory", None)
    out = func(*inside[0], **inside[1])
    same = {id(tensor.inner): tensor for tensor in ours}
    if not on_mps:
        return out

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return same[id(leaf)] if id(leaf) in same else MpsTensor(leaf)

    return tree_map(wrap, out)


@contextmanager
def fake_mps() -> Iterator[None]:
    """The device, under the name "fakemps", in the rest of this process: torch takes a new name only once."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    checks.NO_FLOAT64 = (*checks.NO_FLOAT64, NAME)
    with Dispatch(), Functions(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "run", in_modes(threading.Thread.run))
        yield


def in_modes(run: Any) -> Any:
    """Modes belong to one thread: a new one enters them by itself."""

    def inside(thread: threading.Thread) -> None:
        with Dispatch(), Functions():
            run(thread)

    return inside
