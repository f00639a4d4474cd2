"""Assign the tensors of a checkpoint to a model that was built on the meta device.

On the CPU a parameter that the file stores as the model needs it becomes the mapped file itself: nothing is copied, and nothing
is read before it is used. The other parameters are copied, several at a time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from clearhead.checkpoint.tensor_names import FRONT, Pairing
from clearhead.checkpoint.weight_files import MappedWeights, Weights
from clearhead.errors import CheckpointError
from clearhead.layers.linear import FusedLinear
from clearhead.models import Model, take_memory
from clearhead.quantization.model_weights import example_weight


def assign_weights(model: Model, pairings: Sequence[Pairing], weights: Weights, device: torch.device) -> None:
    """Give each tensor of the model its numbers. `pairings` name them all; tensors that are stored twice must be equal."""
    on_cpu = device.type == "cpu"
    # On Windows a mapped file can not be replaced, so nobody could save to its folder.
    mapped = _assign_mapped(model, pairings, weights) if on_cpu and os.name == "posix" else set[str]()
    take_memory(model, device, _advise(model, weights, on_cpu=on_cpu))
    targets = model.state_dict()

    def read(pairing: Pairing) -> None:
        match, names = pairing.match, pairing.ours
        if pairing.first is not None:
            if not torch.equal(weights.read(pairing.key), weights.read(pairing.first)):
                raise CheckpointError(
                    f"{pairing.key!r} and {pairing.first!r} are one tensor in this model, but differ; is "
                    f"tie_word_embeddings right?"
                )
            return
        if len(names) == 1 and not match.layout:
            weights.read_into(pairing.key, targets[names[0]])
        else:
            _copy(match.from_file(weights.read(pairing.key)), [targets[name] for name in names])
        _check_numbers(pairing.key, weights, [targets[name] for name in names])
        if isinstance(weights, MappedWeights):
            weights.release(pairing.key)

    left = [pairing for pairing in pairings if not mapped.issuperset(pairing.ours) or pairing.first is not None]
    with ThreadPoolExecutor(_n_threads() if on_cpu else 1) as pool:
        for _ in pool.map(read, left):
            pass


def _check_numbers(key: str, weights: Weights, read: Sequence[Tensor]) -> None:
    """Refuse whole numbers, and numbers that have become infinite in float16 (`clearhead check` names those that the file has)."""
    dtype = weights.dtypes[key]
    if not dtype.is_floating_point:
        raise CheckpointError(
            f"{key!r} holds whole numbers ({dtype}): quantised weights, without scales; load the model they were made from"
        )
    if read[0].dtype != torch.float16 or dtype == torch.float16 or all(bool(x.isfinite().all()) for x in read):
        return
    stored = weights.read(key)
    if bool(stored.isfinite().all()):
        raise CheckpointError(
            f"{key!r} has numbers up to {float(stored.abs().max()):.3g}, and float16 ends at 65,504; load with "
            f"dtype=torch.bfloat16 or torch.float32"
        )


def _advise(model: Model, weights: Weights, *, on_cpu: bool) -> str:
    """How to load a model that needs more memory than there is."""
    stored = sorted({str(dtype).removeprefix("torch.") for dtype in weights.dtypes.values()})
    wanted = str(example_weight(model).dtype).removeprefix("torch.")
    if on_cpu and isinstance(weights, MappedWeights) and wanted not in stored:
        return f"without dtype={wanted}, weights stay in the file as {' and '.join(stored)} and take little memory"
    return "load a smaller model, or one stored in fewer bits"


def _assign_mapped(model: Model, pairings: Sequence[Pairing], weights: Weights) -> set[str]:
    """Let parameters be views of the mapped files where that is possible. Returns their names in the state dict."""
    keys = {
        pairing.ours[0]: pairing
        for pairing in pairings
        if pairing.first is None and len(pairing.ours) == 1 and pairing.match.layout in ("", *FRONT)
    }
    candidates: list[tuple[nn.Module, str, list[str]]] = []
    for place, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            names = _names(module, place, name)
            if all(each in keys and weights.dtypes[keys[each].key] == parameter.dtype for each in names):
                candidates.append((module, name, names))
    with ThreadPoolExecutor(_n_threads()) as pool:
        tensors = pool.map(weights.read_stacked, [[keys[each].key for each in names] for _, _, names in candidates])
        mapped = set[str]()
        for (module, name, names), tensor in zip(candidates, tensors, strict=True):
            if tensor is not None:
                old: nn.Parameter = getattr(module, name)
                setattr(module, name, nn.Parameter(tensor.view(old.shape), requires_grad=old.requires_grad))
                mapped.update(names)
    return mapped


def _n_threads() -> int:
    """Few: memory bandwidth is the limit, and torch may start threads of its own in each."""
    return min(4, torch.get_num_threads())


def _names(module: nn.Module, place: str, name: str) -> list[str]:
    """A parameter's names in the state dict; a fused layer's parameter has several."""
    if not isinstance(module, FusedLinear):
        return [f"{place}.{name}" if place else name]
    holder = place.rpartition(".")[0]
    return [f"{holder}.{part}.{name}" for part in (module.biased if name == "bias" else module.parts)]


def _copy(whole: Tensor, targets: list[Tensor]) -> None:
    """Copy `whole` into tensors that are its parts along the first axis.

    Where the parts are neighbours in memory this is one copy, which is faster for a transposed `whole`.
    """
    ends = [target.data_ptr() + target.nbytes for target in targets]
    if all(target.is_contiguous() for target in targets) and ends[:-1] == [t.data_ptr() for t in targets[1:]]:
        targets[0].as_strided(whole.shape, targets[0].stride()).copy_(whole)
        return
    for target, part in zip(targets, whole.split([len(target) for target in targets]), strict=True):
        target.copy_(part)
