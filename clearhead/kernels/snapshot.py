"""Whether anything that some modules compute with has changed, been replaced or been hooked since a snapshot of them was taken.

A kernel that was given the addresses of weights asks this before each use. It takes a few percent of a decode step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook  # pyright: ignore[reportPrivateUsage]
from torch.utils.hooks import RemovableHandle

# Attributes that no forward reads, or that change only together with a weight's shape.
SHAPES = {"in_features", "out_features", "normalized_shape", "elementwise_affine", "num_embeddings", "embedding_dim"}
PARTS = {"parts", "biased", "kept", "shape", "widths", "is_tiled"}  # of our own modules
UNREAD = {"training", *SHAPES, *PARTS, "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"}

Entries = list[tuple[dict[str, Any], str]]


class Snapshot:
    """Of each module: its parameters, buffers, submodules and plain attributes, and where its tensors lie in memory.

    Numbers written into a tensor are no change: whoever has its address sees them. Of `containers`, whose forward is not called,
    only parameters, buffers and submodules count. The snapshot keeps tensors and submodules alive, but no container.
    """

    def __init__(self, modules: Sequence[nn.Module], containers: Sequence[nn.Module] = ()) -> None:
        entries: Entries = [
            (held, name) for module in (*modules, *containers) for held in _contents(module) for name in held
        ]
        entries += [(vars(module), name) for module in modules for name in _attributes(module)]
        # `==` compares tensors number by number, so these are compared by `is`; all else by `==`, which is faster.
        self.tensor_at = list(zip(*(entry for entry in entries if isinstance(_get(entry), Tensor)), strict=True))
        self.other_at = list(zip(*(entry for entry in entries if not isinstance(_get(entry), Tensor)), strict=True))
        self.tensors: list[Tensor] = self._get(self.tensor_at)
        self.others = self._get(self.other_at)
        self.matrices = [tensor for tensor in self.tensors if tensor.ndim == 2 and isinstance(tensor, nn.Parameter)]
        self.memory = self._memory()
        self.attributes: list[dict[str, Any]] = [vars(module) for module in modules]
        self.n_attributes = list(map(len, self.attributes))
        self.replaces_methods = any(map(_replaces_methods, modules))
        self.hooks: list[Any] = [
            hooks
            for module in modules
            for hooks in (module._forward_hooks, module._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]
        ]
        self.hook_id, self.hooked = -1, False

    def is_current(self) -> bool:
        return (
            all(map(is_, self._get(self.tensor_at), self.tensors))
            and self._get(self.other_at) == self.others
            and list(map(len, self.attributes)) == self.n_attributes  # a new one may be a method of the instance's own
            and self._memory() == self.memory
        )

    @staticmethod
    def _get(at: list[Any]) -> list[Any]:
        return list(map(dict[str, Any].get, *at))

    def _memory(self) -> tuple[list[int], list[int], list[tuple[int, ...]]]:
        matrices = self.matrices
        return (
            list(map(Tensor.data_ptr, self.tensors)),
            list(map(Tensor.numel, matrices)),
            [*map(Tensor.stride, matrices)],
        )

    def is_hooked(self) -> bool:
        """Whether a module has forward hooks. They are looked at only if a hook was registered anywhere since."""
        if self.hook_id != RemovableHandle.next_id:
            self.hooked = bool(_has_any_global_hook()) or any(map(len, self.hooks))
            self.hook_id = -1 if self.hooked else RemovableHandle.next_id
        return self.hooked


class ModelState:
    """Whether a model computes what it did when it was last asked: for results that are kept, such as keys and values.

    Here numbers written into a tensor count too, as does any hook that came or went, on whatever module. It keeps no tensor alive.
    What is written through `.data` has no version, and is not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors, self.hooks = _tensors_and_hooks(model)

    def has_changed(self) -> bool:
        """Since the last call."""
        tensors, hooks = _tensors_and_hooks(self.model)
        is_same = hooks == self.hooks and len(tensors) == len(self.tensors)
        is_same = is_same and all(
            a() is b() and seen == now for (a, *seen), (b, *now) in zip(tensors, self.tensors, strict=True)
        )
        self.tensors, self.hooks = tensors, hooks
        return not is_same


def _tensors_and_hooks(model: nn.Module) -> tuple[list[tuple[Any, int, int]], list[int]]:
    """Each tensor with its version and its place in memory; and the hooks that there are, after how many ever were."""
    tensors, hooks = list[tuple[Any, int, int]](), [RemovableHandle.next_id, int(bool(_has_any_global_hook()))]
    for module in model.modules():
        for held in (module._parameters, module._buffers):  # pyright: ignore[reportPrivateUsage]
            for tensor in held.values():
                if tensor is not None:
                    version = 0 if tensor.is_inference() else tensor._version
                    tensors.append((weakref.ref(tensor), version, tensor.data_ptr()))
        for held in (module._forward_hooks, module._forward_pre_hooks):  # pyright: ignore[reportPrivateUsage]
            hooks += held
    return tensors, hooks


def _get(entry: tuple[dict[str, Any], str]) -> Any:
    return entry[0].get(entry[1])


def _attributes(module: nn.Module) -> list[str]:
    """The names of what a forward may read. Whether a module is in training counts only if it drops numbers out."""
    names = [name for name in vars(module) if name[0] != "_" and name not in UNREAD]
    return [*names, "training"] if "dropout" in names else names


def _contents(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules  # pyright: ignore[reportPrivateUsage]


def _replaces_methods(module: nn.Module) -> bool:
    """Whether an attribute of the instance hides a method of its class, such as `forward`."""
    return any(callable(getattr(type(module), name, None)) for name in vars(module))
