"""The tables of names, read both ways: which tensor of a file is which tensor of a model.

A row is (theirs, ours), or (theirs, ours, how). `{i}` counts layers. Several of ours for one of theirs are stacked along the
first axis (GPT-2's q, k, v). The first row that names one of ours is the one written; further ones are other names that files
are seen with. `how` says in what form the file keeps it:

    transpose    the other way round (GPT-2's matrices)
    row, rows    with one axis of length 1 in front, or with two (ViT's positions and class token)
    interleaved  rotary pairs as neighbours (2i, 2i + 1), where ours are halves (i, i + d_head / 2)
    halves_in    pairs of the last axis as halves (i, i + n / 2), where ours are neighbours (the original as Marian)
    halves_out   the same along the first axis
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.checkpoint.weight_files import Weights
from clearhead.config import Config
from clearhead.errors import CheckpointError
from clearhead.families.config_translation import NameRow

FRONT = {"row": 1, "rows": 2}


@dataclass(frozen=True)
class Match:
    """One tensor of a file, and the one or several of the model that it is."""

    theirs: str
    ours: tuple[str, ...]
    how: str = ""
    d_head: int = 0

    def shape(self, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """The shape the file's tensor must have, given the model's shapes."""
        parts = [tuple(shapes[name]) for name in self.ours]
        whole = (sum(part[0] for part in parts), *parts[0][1:])
        return whole[::-1] if self.how == "transpose" else (1,) * FRONT.get(self.how, 0) + whole

    def into(self, tensor: Tensor) -> Tensor:
        """The file's tensor as the model's, or as several of the model's, one below the other."""
        if self.how == "transpose":
            return tensor.T
        if self.how in FRONT:
            return tensor[(0,) * FRONT[self.how]]
        if self.how == "interleaved":
            return tensor.unflatten(0, (-1, self.d_head // 2, 2)).transpose(1, 2).flatten(0, 2)
        if self.how in ("halves_in", "halves_out"):
            axis = tensor.ndim - 1 if self.how == "halves_in" else 0
            return tensor.unflatten(axis, (2, -1)).transpose(axis, axis + 1).flatten(axis, axis + 1)
        return tensor

    def back(self, tensors: Sequence[Tensor]) -> Tensor:
        """The model's tensors as the file's."""
        tensor = torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
        if self.how == "transpose":
            return tensor.T
        if self.how in FRONT:
            return tensor[(None,) * FRONT[self.how]]
        if self.how == "interleaved":
            return tensor.unflatten(0, (-1, 2, self.d_head // 2)).transpose(1, 2).flatten(0, 2)
        if self.how in ("halves_in", "halves_out"):
            axis = tensor.ndim - 1 if self.how == "halves_in" else 0
            return tensor.unflatten(axis, (-1, 2)).transpose(axis, axis + 1).flatten(axis, axis + 1)
        return tensor


def expand(table: Iterable[NameRow] | Callable[[Config], Iterable[NameRow]], config: Config) -> list[Match]:
    """The rows for every layer of a model; a table may be a function of the config."""
    matches: list[Match] = []
    for row in table(config) if callable(table) else table:
        theirs, ours, how = row if len(row) == 3 else (*row, "")
        names = (ours,) if isinstance(ours, str) else ours
        repeated = "{i}" in theirs + "".join(names)
        layers = config.n_decoder_layers if names[0].startswith("decoder.") else config.n_layers
        for i in range(layers if repeated else 1):
            here = tuple(name.replace("{i}", str(i)) for name in names)
            matches.append(Match(theirs.replace("{i}", str(i)), here, how, config.d_head))
    return matches


@dataclass(frozen=True)
class Pairing:
    """A tensor of the file, found and fitting; `first` is set where the model's tensor was already found under that key."""

    key: str
    match: Match
    ours: tuple[str, ...]
    first: str | None = None


def pair_up(
    shapes: Mapping[str, Sequence[int]],
    weights: Weights,
    matches: Iterable[Match],
    *,
    spelling: Mapping[str, str],
    tied: bool = False,
    unused: Iterable[str] = (),
) -> list[Pairing]:
    """Find every tensor of the model in the file, and use every tensor of the file, or fail and say which are left over.

    `spelling` gives the file's key for a table's name. `unused` are patterns of what files carry that is no weight.
    """
    known = dict(shapes)
    if tied and "head.weight" not in known:  # a tied head may be stored a second time
        known["head.weight"] = known["tokens.weight"]
    found: dict[tuple[str, ...], str] = {}
    pairings: list[Pairing] = []
    for match in matches:
        key = spelling.get(match.theirs)
        if key is None or any(name not in known for name in match.ours):
            continue
        if weights.shapes[key] != match.shape(known):
            raise CheckpointError(
                f"{key!r} has shape {weights.shapes[key]}, but by its config it must be {match.shape(known)}; "
                f"do config and weights belong together?"
            )
        ours = tuple("tokens.weight" if tied and name == "head.weight" else name for name in match.ours)
        pairings.append(Pairing(key, match, ours, found.get(ours)))
        found.setdefault(ours, key)
    filled, used = {name for ours in found for name in ours}, {pairing.key for pairing in pairings}
    missing = [name for name in shapes if name not in filled]
    left = [key for key in weights.shapes if key not in used and not matches_any(key, unused)]
    if missing or left:
        raise CheckpointError(
            f"the weights do not fit the model: {len(missing)} of its tensors are not in the file "
            f"({', '.join(missing[:5]) or 'none'}), {len(left)} of the file's are not in the model "
            f"({', '.join(left[:5]) or 'none'}); is this the right config?"
        )
    return pairings


def write_all(state: Mapping[str, Tensor], matches: Iterable[Match]) -> dict[str, Tensor]:
    """The model's tensors under the file's names, each written once."""
    written: dict[str, Tensor] = {}
    done: set[str] = set()
    for match in matches:
        if all(name in state and name not in done for name in match.ours):
            written[match.theirs] = match.back([state[name] for name in match.ours])
            done.update(match.ours)
    left = [name for name in state if name not in done]
    if left:
        raise CheckpointError(f"this layout has no name for {', '.join(left[:5])}; save with format='clearhead'")
    return written


def matches_any(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
