"""A model that has only shapes gets its numbers.

On the CPU a parameter is the file's own pages, where the file holds it as the model does: nothing is copied, and nothing read
before it is used. The others are copied, several at a time.
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


def assign_weights(model: Model, pairings: Sequence[Pairing], weights: Weights, device: torch.device) -> None:
    """`pairings` name each of the model's tensors once; what is stored twice must be the same twice."""
    on_cpu = device.type == "cpu"
    # Windows does not let go of a file that is mapped: nobody could save to its folder.
    kept = _keep(model, pairings, weights) if on_cpu and os.name == "posix" else set[str]()
    take_memory(model, device)
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
        if len(names) == 1 and not match.how:
            weights.read_into(pairing.key, targets[names[0]])
        else:
            _copy(match.into(weights.read(pairing.key)), [targets[name] for name in names])
        if isinstance(weights, MappedWeights):
            weights.let_go(pairing.key)

    left = [pairing for pairing in pairings if not kept.issuperset(pairing.ours) or pairing.first is not None]
    with ThreadPoolExecutor(_n_threads() if on_cpu else 1) as pool:
        for _ in pool.map(read, left):
            pass


def _keep(model: Model, pairings: Sequence[Pairing], weights: Weights) -> set[str]:
    """Parameters that stay in the file; the names that they have in a state dict."""
    keys = {
        pairing.ours[0]: pairing
        for pairing in pairings
        if pairing.first is None and len(pairing.ours) == 1 and pairing.match.how in ("", *FRONT)
    }
    found: list[tuple[nn.Module, str, list[str]]] = []
    for place, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            names = _names(module, place, name)
            if all(each in keys and weights.dtypes[keys[each].key] == parameter.dtype for each in names):
                found.append((module, name, names))
    with ThreadPoolExecutor(_n_threads()) as pool:
        tensors = pool.map(weights.find, [[keys[each].key for each in names] for _, _, names in found])
        kept = set[str]()
        for (module, name, names), tensor in zip(found, tensors, strict=True):
            if tensor is not None:
                old: nn.Parameter = getattr(module, name)
                setattr(module, name, nn.Parameter(tensor.view(old.shape), requires_grad=old.requires_grad))
                kept.update(names)
    return kept


def _n_threads() -> int:
    """A few: memory is the limit, and torch may bring threads of its own to each."""
    return min(4, torch.get_num_threads())


def _names(module: nn.Module, place: str, name: str) -> list[str]:
    """A parameter's names in a state dict: several, if it is one in memory for several."""
    if not isinstance(module, FusedLinear):
        return [f"{place}.{name}" if place else name]
    holder = place.rpartition(".")[0]
    return [f"{holder}.{part}.{name}" for part in (module.biased if name == "bias" else module.parts)]


def _copy(whole: Tensor, targets: list[Tensor]) -> None:
    """Into tensors that hold it one below the other; in one go where they lie so in memory: torch then turns it faster."""
    ends = [target.data_ptr() + target.nbytes for target in targets]
    if all(target.is_contiguous() for target in targets) and ends[:-1] == [t.data_ptr() for t in targets[1:]]:
        targets[0].as_strided(whole.shape, targets[0].stride()).copy_(whole)
        return
    for target, piece in zip(targets, whole.split([len(target) for target in targets]), strict=True):
        target.copy_(piece)
