"""Whether anything that some modules compute with has changed, been replaced or been hooked since a snapshot of them was taken.

A kernel that was given the addresses of weights asks this before each use. It takes a few percent of a decode step.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook  # pyright: ignore[reportPrivateUsage]
from torch.utils.hooks import RemovableHandle

SHAPES = {"in_features", "out_features"}  # of nn.Linear: no forward reads them


class Snapshot:
    """Of each module: its parameters, buffers, submodules and plain attributes, and where its tensors lie in memory.

    Numbers written into a tensor are no change: whoever has its address sees them. Of `containers`, whose forward is not called,
    only parameters, buffers and submodules count. The snapshot keeps tensors and submodules alive, but no container.
    """

    def __init__(self, modules: Sequence[nn.Module], containers: Sequence[nn.Module] = ()) -> None:
        entries = [(held, name) for module in (*modules, *containers) for held in _contents(module) for name in held]
        self.attributes: list[dict[str, Any]] = [vars(module) for module in modules]
        entries += [(held, name) for held in self.attributes for name in held if name[0] != "_" and name not in SHAPES]
        self.dicts, self.names = [held for held, _ in entries], [name for _, name in entries]
        self.values = [held[name] for held, name in entries]
        self.n_attributes = list(map(len, self.attributes))
        self.tensors = list({id(value): value for value in self.values if isinstance(value, Tensor)}.values())
        self.matrices = [tensor for tensor in self.tensors if tensor.ndim == 2]
        self.memory = self._memory()
        self.replaces_methods = any(map(_replaces_methods, modules))
        self.hooks: list[Any] = [
            hooks
            for module in modules
            for hooks in (module._forward_hooks, module._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
        ]
        self.hook_id, self.hooked = -1, False

    def is_current(self) -> bool:
        return (
            all(map(is_, map(dict[str, Any].get, self.dicts, self.names), self.values))
            and list(map(len, self.attributes)) == self.n_attributes  # a new one may be a method of the instance's own
            and self._memory() == self.memory
        )

    def _memory(self) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
        tensors = self.tensors
        return (
            list(map(Tensor.data_ptr, tensors)),
            list(map(Tensor.numel, tensors)),
            [*map(Tensor.stride, self.matrices)],
        )

    def is_hooked(self) -> bool:
        """Whether a module has forward hooks. They are looked at only if a hook was registered anywhere since."""
        if self.hook_id != RemovableHandle.next_id:
            self.hooked = bool(_has_any_global_hook()) or any(map(len, self.hooks))
            self.hook_id = -1 if self.hooked else RemovableHandle.next_id
        return self.hooked


def _contents(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules  # pyright: ignore[reportPrivateUsage]


def _replaces_methods(module: nn.Module) -> bool:
    """Whether an attribute of the instance hides a method of its class, such as `forward`."""
    return any(callable(getattr(type(module), name, None)) for name in vars(module))
