"""Proteins: residues as tokens, and what a masked language model expects at a residue that it can not see.

The effect of a variant is the sum, over its substitutions, of log p(mutant) - log p(wild), where p is the model's probability at
these positions while all of them are masked (masked marginals; Meier et al. 2021). Rows of one protein are equally long, so that
batches have no padding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.data.fasta import AMINO_ACIDS, Protein
from clearhead.data.tokenizer import Tokenizer
from clearhead.errors import InputError
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.models import Encoder
from clearhead.quantization.model_weights import example_weight

AT_ONCE = 2**12  # tokens computed together
Follow = Callable[[list[list[int]], str, int], Iterable[list[int]]]  # iterates over a list and shows the progress


@dataclass(frozen=True)
class Substitution:
    """One residue for another, at a position counted from 1: A23V."""

    wild: str
    position: int
    mutant: str

    def __str__(self) -> str:
        return f"{self.wild}{self.position}{self.mutant}"


Variant = tuple[Substitution, ...]


class Residues:
    """A tokenizer's residues, and the tokens that it puts around a protein."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ids = {token: id for token, id in tokenizer.vocab.items() if len(token) == 1 and "A" <= token <= "Z"}
        around = tokenizer.encode("")
        if not set(AMINO_ACIDS) <= self.ids.keys() or len(around) != 2:
            raise InputError(
                f"this tokenizer is not one of proteins: its vocabulary of {tokenizer.vocab_size} lacks single residues, or it "
                f"puts {len(around)} tokens around a text and not 2; take a model of proteins, such as an ESM-2"
            )
        self.start, self.end = around
        self.mask = tokenizer.mask

    def encode(self, protein: Protein, max_len: int) -> list[int]:
        """Start, residues, end."""
        if len(protein.residues) + 2 > max_len:
            raise InputError(
                f"the protein {protein.name!r:.60} has {len(protein.residues)} residues, and the model takes {max_len - 2}; "
                f"cut it into domains"
            )
        return [self.start, *(self.ids[letter] for letter in protein.residues), self.end]


def all_substitutions(protein: Protein) -> list[Variant]:
    """Every position with each of the 19 other amino acids, by position."""
    return [
        (Substitution(wild, position, mutant),)
        for position, wild in enumerate(protein.residues, 1)
        for mutant in AMINO_ACIDS
        if mutant != wild
    ]


def parse_variant(text: str, protein: Protein) -> Variant:
    """A23V, or several joined by colons: A23V:K40R. The first letter must be the protein's residue there."""
    found: list[Substitution] = []
    for part in text.upper().split(":"):
        match = re.fullmatch(r"([A-Z])([1-9][0-9]{0,8})([A-Z])", part.strip())
        if match is None or match[3] not in AMINO_ACIDS:
            raise InputError(
                f"{part!r:.40} is no substitution; got {text!r:.60}; write residue, position, new residue, such as A23V"
            )
        one = Substitution(match[1], int(match[2]), match[3])
        if one.position > len(protein.residues):
            raise InputError(
                f"{part} lies behind the {len(protein.residues)} residues of {protein.name!r:.60}; correct it"
            )
        there = protein.residues[one.position - 1]
        if there != one.wild:
            raise InputError(
                f"{part} says {one.wild} at {one.position}, but {protein.name!r:.60} has {there} there; positions are counted "
                f"from 1"
            )
        if one.position in [other.position for other in found]:
            raise InputError(f"{text!r:.60} changes position {one.position} twice; name each position once")
        found.append(one)
    return tuple(found)


def variant_effects(
    model: Encoder,
    tokenizer: Tokenizer,
    protein: Protein,
    variants: Sequence[Variant],
    follow: Follow = lambda parts, what, n: parts,
) -> list[float]:
    """The effect of each variant, in nats: below 0 the model finds it less likely than the protein as it is."""
    ids = Residues(tokenizer).ids
    places = [tuple(one.position for one in variant) for variant in variants]
    seen = _masked_log_probs(model, tokenizer, protein, list(dict.fromkeys(places)), follow)
    return [
        sum(float(row[ids[one.mutant]] - row[ids[one.wild]]) for one, row in zip(variant, seen[place], strict=True))
        for variant, place in zip(variants, places, strict=True)
    ]


def residue_scores(
    model: Encoder, tokenizer: Tokenizer, protein: Protein, follow: Follow = lambda parts, what, n: parts
) -> Float[Tensor, "L a"]:
    """At each position, masked alone, the log-probability of each of AMINO_ACIDS, among all tokens of the vocabulary."""
    ids = Residues(tokenizer).ids
    seen = _masked_log_probs(model, tokenizer, protein, [(at,) for at in range(1, len(protein.residues) + 1)], follow)
    return torch.cat(list(seen.values()))[:, [ids[letter] for letter in AMINO_ACIDS]]


@torch.no_grad()
def _masked_log_probs(
    model: Encoder, tokenizer: Tokenizer, protein: Protein, places: list[tuple[int, ...]], follow: Follow
) -> dict[tuple[int, ...], Float[Tensor, "_ V"]]:
    """For each set of positions, masked together, the log-probabilities of all tokens at them."""
    residues = Residues(tokenizer)
    if model.config.head != "tokens" or residues.mask is None:
        raise InputError(
            f"masked residues are scored by a masked language model; got head={model.config.head!r}, mask token "
            f"{residues.mask}; take a checkpoint with its language-model head, such as EsmForMaskedLM"
        )
    row = torch.tensor(residues.encode(protein, model.config.max_len))
    device, step = example_weight(model).device, max(1, AT_ONCE // len(row))
    parts = [list(range(first, min(first + step, len(places)))) for first in range(0, len(places), step)]
    found: dict[tuple[int, ...], Tensor] = {}
    with eval_mode(model):
        for part in follow(parts, "masking", len(parts)):
            tokens = row.repeat(len(part), 1)
            which = [(i, at) for i, each in enumerate(part) for at in places[each]]
            rows, columns = torch.tensor(which).T  # position 1 is column 1: column 0 is the start token
            tokens[rows, columns] = residues.mask
            states = model.states(tokens.to(device))[rows.to(device), columns.to(device)]
            scores = model.project(states[None])[0].float().log_softmax(-1).cpu()
            found |= zip(
                [places[each] for each in part], scores.split([len(places[each]) for each in part]), strict=True
            )
    return found
