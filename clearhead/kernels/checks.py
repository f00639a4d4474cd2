"""What must hold before a kernel of our own may replace torch's operators."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack as dispatch_modes  # pyright: ignore[reportPrivateUsage]
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook  # pyright: ignore[reportPrivateUsage]
from torch.utils._python_dispatch import TorchDispatchMode

NO_FLOAT64 = ("mps",)  # devices without this type


def is_plain(*tensors: Tensor) -> bool:
    """Whether these are ordinary memory and nothing observes the operators: no compiler, autocast, fake tensors, vmap, counters."""
    return (
        tensors[0].device.type in ("cpu", "cuda")
        and not torch.compiler.is_compiling()
        and all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors)
        and not torch.is_autocast_enabled(tensors[0].device.type)
        and not dispatch_modes()
        and peek_interpreter_stack() is None  # pyright: ignore[reportUnnecessaryComparison]
    )


class torch_only(TorchDispatchMode):  # noqa: N801 - used as a function: with torch_only(): ...
    """Inside, `is_plain` is False: torch's own operators compute everything, and no kernel of ours."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def is_watched(module: nn.Module) -> bool:
    """Whether a forward hook would miss this module if it were skipped."""
    hooks = module._forward_hooks or module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
    return bool(hooks or _has_any_global_hook())


def can_read(tensor: Tensor) -> bool:
    """Whether the values can be checked at no cost: on a GPU the CPU would wait for them, and a compiler has none."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def has_forward_gradients() -> bool:
    """Whether forward-mode derivatives are being computed: only torch's own operators carry them."""
    return forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]


def product_dtype(x: Tensor) -> torch.dtype:
    """The type x has inside a product: autocast's, where autocast is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def best_device() -> str:
    """What `auto` means: a GPU that torch can use, NVIDIA's or AMD's first, then Apple's; else the CPU."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def to_float64(x: Tensor) -> Tensor:
    """x in float64, on the CPU where its own device has no float64 (Apple's GPUs)."""
    return (x.cpu() if x.device.type in NO_FLOAT64 else x).double()


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


class Capture:
    """Whether a CUDA graph is being captured. A Triton kernel takes longer to launch than torch's: it pays in a replay."""

    is_on = False

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *_: object) -> None:
        self.is_on = False


capture = Capture()
