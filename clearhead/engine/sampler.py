"""Tokens for rows that do not search. Rows that are chosen for in the same way are one group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.engine.batches import Parcel, send, widen
from clearhead.engine.runner import Runner
from clearhead.engine.sequence import Member
from clearhead.errors import InputError
from clearhead.sampling.beam_search import lay_out
from clearhead.sampling.strategy import Shaper


@dataclass
class Group:
    """Rows that are chosen for in the same way, and what is known of them as long as nobody comes or goes."""

    shaper: Shaper
    members: list[Member]
    rows: Int[Tensor, " n"]
    among: Int[Tensor, " n"] | None  # of the logits, its rows; None: all, in order
    seeds: Int[Tensor, " n"]
    n_prompt: Int[Tensor, " n"]
    limits: Int[Tensor, " n"]
    scored: bool
    alternatives: int
    is_plain: bool  # of each only its token is asked for, and its ends and limit alone end a text


def make_groups(
    members: Sequence[Member], firsts: Sequence[int], places: Sequence[int], device: torch.device
) -> list[Group]:
    """Those that do not search, by the way their tokens are chosen; of each its row, and its place among the logits."""
    by: dict[tuple[int, bool, int], list[tuple[Member, int, int]]] = {}
    for member, first, place in zip(members, firsts, places, strict=True):
        if member.width == 1:
            request = member.ticket.request
            way = id(member.shaper), request.scored, request.alternatives
            by.setdefault(way, []).append((member, first, place))
    groups: list[Group] = []
    for (_, scored, alternatives), those in by.items():
        each = [member for member, _, _ in those]
        facts = [(m.ticket.request.seed, len(m.prompt), m.limit, first, place) for m, first, place in those]
        seeds, n_prompt, limits, rows, among = send(np.array(facts, np.int64), device).unbind(1)
        among = among if len(those) < len(members) else None
        is_plain = not (scored or alternatives or any(m.constraints or m.ticket.request.stop for m in each))
        told = (scored, alternatives, is_plain)
        groups.append(Group(each[0].shaper, each, rows, among, seeds, n_prompt, limits, *told))
    return groups


def choose(group: Group, logits: Float[Tensor, "n V"], runner: Runner) -> Parcel:
    """Each row's next token, on its way, and what was asked of it beside: log-probability, the likeliest ones' too, and their
    ids. -1: there was none to choose."""
    shaper, members = group.shaper, group.members
    bound = any(member.constraints for member in members)
    greedy = shaper.is_plain and shaper.strategy.temperature == 0 and not bound
    looked_at = not (greedy and runner.is_greedy) or group.scored or bool(group.alternatives)
    logits = logits[group.among] if looked_at and group.among is not None else logits
    dead = None
    if greedy and runner.is_greedy:
        tokens = runner.tokens[: len(members)] if group.among is None else runner.tokens[group.rows]
    elif greedy:
        tokens = runner.tokens[group.rows] = logits.argmax(-1)
    else:
        steps = send(np.array([member.n_asked for member in members]), runner.device)
        history = None
        if shaper.looks_back:
            history = lay_out([[*m.prompt, *m.ticket.written] for m in members], runner.device)
        shaped = shaper(widen(logits), history, group.n_prompt, steps, group.limits)
        if bound:
            shaped = shaped.masked_fill(~allowed(members, shaper.vocab_size, runner.device), -math.inf)
        tokens = runner.tokens[group.rows] = shaper.strategy.choose(shaped, group.seeds, steps)
        dead = ~(shaped > -math.inf).any(-1)  # nothing is left to choose from
    told: list[Tensor] = [tokens if dead is None else tokens.masked_fill(dead, -1)]
    if group.scored or group.alternatives:
        log_probs = widen(logits).log_softmax(-1)
        told.append(log_probs.gather(1, tokens[:, None])[:, 0])
        told += log_probs.topk(group.alternatives) if group.alternatives else ()
    return Parcel(*told)


def allowed(members: Sequence[Member], vocab_size: int, device: torch.device) -> Bool[Tensor, "n V"]:
    """What their grammars allow next; where there is none, everything."""
    rows: list[Tensor] = []
    for member in members:
        everything = torch.ones(vocab_size, dtype=torch.bool)
        for held in member.constraints or [None] * member.width:
            try:
                rows.append(held.allowed() if held is not None else everything)
            except InputError:  # the vocabulary lacks what must come next: this text fails, the others go on
                rows.append(~everything)
    return torch.stack(rows).to(device)
