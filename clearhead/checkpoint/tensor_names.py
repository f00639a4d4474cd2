"""Tables of tensor names, used for loading and for saving: which tensor of a file is which tensor of a model.

A row is (theirs, ours), or (theirs, ours, layout). `{i}` is the layer's number. Where one of theirs holds several of ours, they
are stacked along the first axis (GPT-2's q, k, v). Saving uses the first row that names a tensor of ours; later rows are other
names of it that files are known to have. `layout` says how the file stores the tensor:

    transpose    transposed (GPT-2's matrices)
    row, rows    with one, or with two, axes of length 1 in front (ViT's positions and class token)
    interleaved  rotary pairs as neighbours (2i, 2i + 1); ours are halves (i, i + d_head / 2)
    halves_in    pairs of the last axis as halves (i, i + n / 2); ours are neighbours (the original Transformer, saved as Marian)
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
    """The name of a tensor in a file, and of the one or several tensors of the model that it holds."""

    theirs: str
    ours: tuple[str, ...]
    layout: str = ""
    d_head: int = 0

    def shape(self, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """The shape that the file's tensor must have, given the shapes of the model's tensors."""
        parts = [tuple(shapes[name]) for name in self.ours]
        whole = (sum(part[0] for part in parts), *parts[0][1:])
        return whole[::-1] if self.layout == "transpose" else (1,) * FRONT.get(self.layout, 0) + whole

    def from_file(self, tensor: Tensor) -> Tensor:
        """The file's tensor in the model's layout; several tensors of the model are stacked along the first axis."""
        if self.layout == "transpose":
            return tensor.T
        if self.layout in FRONT:
            return tensor[(0,) * FRONT[self.layout]]
        if self.layout == "interleaved":
            return tensor.unflatten(0, (-1, self.d_head // 2, 2)).transpose(1, 2).flatten(0, 2)
        if self.layout in ("halves_in", "halves_out"):
            axis = tensor.ndim - 1 if self.layout == "halves_in" else 0
            return tensor.unflatten(axis, (2, -1)).transpose(axis, axis + 1).flatten(axis, axis + 1)
        return tensor

    def to_file(self, tensors: Sequence[Tensor]) -> Tensor:
        """The model's tensors as one, in the file's layout."""
        tensor = torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
        if self.layout == "transpose":
            return tensor.T
        if self.layout in FRONT:
            return tensor[(None,) * FRONT[self.layout]]
        if self.layout == "interleaved":
            return tensor.unflatten(0, (-1, 2, self.d_head // 2)).transpose(1, 2).flatten(0, 2)
        if self.layout in ("halves_in", "halves_out"):
            axis = tensor.ndim - 1 if self.layout == "halves_in" else 0
            return tensor.unflatten(axis, (-1, 2)).transpose(axis, axis + 1).flatten(axis, axis + 1)
        return tensor


def expand(table: Iterable[NameRow] | Callable[[Config], Iterable[NameRow]], config: Config) -> list[Match]:
    """The rows of a table, once for each layer of the model. The table may be a function of the config."""
    matches: list[Match] = []
    for row in table(config) if callable(table) else table:
        theirs, ours, layout = row if len(row) == 3 else (*row, "")
        names = (ours,) if isinstance(ours, str) else ours
        repeated = "{i}" in theirs + "".join(names)
        layers = config.n_decoder_layers if names[0].startswith("decoder.") else config.n_layers
        for i in range(layers if repeated else 1):
            here = tuple(name.replace("{i}", str(i)) for name in names)
            matches.append(Match(theirs.replace("{i}", str(i)), here, layout, config.d_head))
    return matches


@dataclass(frozen=True)
class Pairing:
    """A tensor of the file that is in the model too, with the right shape.

    `first` is set where the same tensor of the model was already found under another key.
    """

    key: str
    match: Match
    ours: tuple[str, ...]
    first: str | None = None


def pair_up(
    shapes: Mapping[str, Sequence[int]],
    weights: Weights,
    matches: Iterable[Match],
    *,
    keys: Mapping[str, str],
    tied: bool = False,
    unused: Iterable[str] = (),
) -> list[Pairing]:
    """Pair every tensor of the model with one of the file, or fail and say which tensors of either have no partner.

    `keys` maps a name in the table to the key in the file. Keys that match a pattern in `unused` need no partner.
    """
    known = dict(shapes)
    if tied and "head.weight" not in known:  # a tied head may be stored a second time
        known["head.weight"] = known["tokens.weight"]
    found: dict[tuple[str, ...], str] = {}
    pairings: list[Pairing] = []
    for match in matches:
        key = keys.get(match.theirs)
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
    """The model's tensors under the file's names and in its layout, each once."""
    written: dict[str, Tensor] = {}
    done: set[str] = set()
    for match in matches:
        if all(name in state and name not in done for name in match.ours):
            written[match.theirs] = match.to_file([state[name] for name in match.ours])
            done.update(match.ours)
    left = [name for name in state if name not in done]
    if left:
        raise CheckpointError(f"this layout has no name for {', '.join(left[:5])}; save with format='clearhead'")
    return written


def matches_any(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)
