"""Why each text of a beam search was kept or dropped: the trace of a `Request(trace=True)` as a document, and as a picture.

`make_trace` returns numbers, strings, lists and dicts, which can be saved as JSON. Version 1:

    format, version      "clearhead-beam-trace", 1
    beams, length_penalty, early_stopping, max_new_tokens, prompt      the request's settings; the prompt's ids
    source               {text, ids, tokens}; null for a decoder. `tokens` are pieces as a reader sees them
    attention            where the `attention` below is from: {layer, heads: "mean"}; null for a decoder
    steps                one for each token:
      beams                the beams before this step: {text, score, length}, beam 0 first
      candidates           the continuations that it considered, best first:
        id, token, text      the token, and the text with it
        parent               the beam that it continues
        score, log_prob      the sum of log-probabilities with it; its own
        fate                 "kept", "finished" or "dropped"
        why                  the same in words
        beam                 kept: the beam that it became
        normalised           finished: its final score, score / length**length_penalty
        attention            kept or finished: the cross-attention over the source when it was chosen
        wins                 whether it is part of the best text
    finished             the texts that ended, best first: {text, ids, tokens, score, sum, length, step, rank, attention}, one row
                         of attention for each token, its end included. `rank` counts from 1; null: not among the best
    stopped              why the search stopped, in words

Attention is computed afterwards, by one more forward pass over the kept texts; in a causal model its rows are the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from clearhead.data.tokenizer import Tokenizer
from clearhead.engine.request import Ticket, start_token
from clearhead.errors import InputError
from clearhead.inside.evaluation_mode import eval_mode
from clearhead.inside.heatmap import heat_map
from clearhead.inside.probe import probe
from clearhead.models import Decoder, EncoderDecoder
from clearhead.quantization.model_weights import example_weight
from clearhead.sampling.beam_search import Candidate

FORMAT, VERSION = "clearhead-beam-trace", 1
AT_ONCE = 64  # texts in one forward pass


@dataclass(eq=False)
class Node:
    """A candidate, and the candidates before it."""

    step: int
    candidate: Candidate
    before: Node | None
    attention: list[float] | None = None
    children: int = 0
    wins: bool = False
    ids: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.ids = [*(self.before.ids if self.before else []), self.candidate.token]

    def path(self) -> Iterator[Node]:
        """The nodes of this text, the last token first."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.before


def make_trace(
    ticket: Ticket, model: Decoder | EncoderDecoder, tokenizer: Tokenizer, *, text: str | None = None, layer: int = -1
) -> dict[str, Any]:
    """The search of a finished request as a document. `text` is the source as given, `layer` the decoder layer whose
    cross-attention is shown."""
    request = ticket.request
    if not ticket.trace or not ticket.is_done:
        raise InputError(
            f"there is no search to tell of: trace={request.trace}, beams={request.beams}, reason={ticket.reason}; "
            "ask with trace=True and several beams, and wait until it is over"
        )
    steps, eos = _link_steps(ticket), model.generation.eos if request.eos is None else request.eos
    ends = [eos] if isinstance(eos, int) else list(eos)
    ended = [node for step in steps for node in step if node.candidate.fate == "finished"]
    ranked = sorted(ended, key=lambda node: -_final(node, request.length_penalty))
    for node in ranked[0].path() if ranked else ():
        node.wins = True
    source: dict[str, Any] | None = None
    attention: dict[str, Any] | None = None
    if isinstance(model, EncoderDecoder) and isinstance(request.source, Sequence):
        ids = list(request.source)
        source = {"text": text, "ids": ids, "tokens": tokenizer.names(ids)}
        layer = range(model.config.n_decoder_layers)[layer]
        attention = {"layer": layer, "heads": "mean"}
        _add_attention(model, ids, list(request.prompt) or [start_token(model)], steps, layer)
    worst = _final(ranked[request.beams - 1], request.length_penalty) if len(ranked) >= request.beams else -math.inf
    return {
        "format": FORMAT,
        "version": VERSION,
        "beams": request.beams,
        "length_penalty": request.length_penalty,
        "early_stopping": request.early_stopping,
        "max_new_tokens": request.max_new_tokens,
        "prompt": list(request.prompt),
        "source": source,
        "attention": attention,
        "steps": _step_documents(steps, ticket, tokenizer, ends),
        "finished": [_finished_document(node, rank, ticket, tokenizer) for rank, node in enumerate(ranked, 1)],
        "stopped": _why_stopped(ticket, steps, worst),
    }


def _link_steps(ticket: Ticket) -> list[list[Node]]:
    """Each step's candidates, linked to the beams that they continue."""
    steps: list[list[Node]] = []
    running: dict[int, Node] = {}
    for at, candidates in enumerate(ticket.trace):
        nodes = [Node(at, candidate, running.get(candidate.parent)) for candidate in candidates]
        for node in nodes:
            if node.before is not None and node.candidate.fate != "dropped":
                node.before.children += 1
        running = {node.candidate.beam: node for node in nodes if node.candidate.beam is not None}
        steps.append(nodes)
    return steps


def _final(node: Node, length_penalty: float) -> float:
    return node.candidate.score / (node.step + 1) ** length_penalty


def _add_attention(
    model: EncoderDecoder, source: list[int], prompt: list[int], steps: list[list[Node]], layer: int
) -> None:
    """Add the cross-attention of each token that was kept or finished, by a forward pass over each longest text."""
    site, device = f"decoder.blocks.{layer}.cross.weights", example_weight(model).device
    tips = [node for step in steps for node in step if node.candidate.fate != "dropped" and not node.children]
    with torch.no_grad(), eval_mode(model):
        memory = model.encode(torch.tensor([source], device=device))
        for first in range(0, len(tips), AT_ONCE):
            some = tips[first : first + AT_ONCE]
            longest = max(len(node.ids) for node in some)
            # The last token is no input. Padding comes after it, where no attention is shown.
            rows = [[*prompt, *node.ids[:-1], *[0] * (longest - len(node.ids))] for node in some]
            with probe(model, site) as seen:
                model.decode(torch.tensor(rows, device=device), memory.expand(len(rows), -1, -1))
            weights = seen.rows(site, slice(len(prompt) - 1, None)).float().mean(1).cpu()
            for row, tip in zip(weights, some, strict=True):
                for node in tip.path():
                    node.attention = node.attention or [round(share, 6) for share in row[node.step].tolist()]


def _step_documents(
    steps: list[list[Node]], ticket: Ticket, tokenizer: Tokenizer, ends: Sequence[int]
) -> list[dict[str, Any]]:
    document: list[dict[str, Any]] = []
    beams: list[dict[str, Any]] = [{"text": "", "score": 0.0, "length": 0}]
    for nodes in steps:
        candidates = [
            {**_candidate_document(node, ticket, tokenizer), "why": _why(node, nodes, ticket, ends)} for node in nodes
        ]
        document.append({"beams": beams, "candidates": candidates})
        kept = sorted((node for node in nodes if node.candidate.beam is not None), key=lambda n: n.candidate.beam or 0)
        beams = [
            {"text": _text(tokenizer, node.ids), "score": node.candidate.score, "length": len(node.ids)}
            for node in kept
        ]
    return document


def _candidate_document(node: Node, ticket: Ticket, tokenizer: Tokenizer) -> dict[str, Any]:
    candidate, before = node.candidate, node.before.candidate.score if node.before else 0.0
    reachable = candidate.score > -math.inf
    document: dict[str, Any] = {
        "id": candidate.token,
        "token": tokenizer.name(candidate.token),
        "text": _text(tokenizer, node.ids),
        "parent": candidate.parent,
        "score": candidate.score if reachable else None,
        "log_prob": candidate.score - before if reachable else None,
        "fate": candidate.fate,
        "wins": node.wins,
    }
    if candidate.fate == "kept":
        document["beam"] = candidate.beam
    elif candidate.fate == "finished":
        document["normalised"] = _final(node, ticket.request.length_penalty)
    if node.attention is not None:
        document["attention"] = node.attention
    return document


def _why(node: Node, step: list[Node], ticket: Ticket, ends: Sequence[int]) -> str:
    candidate, beams, penalty = node.candidate, ticket.request.beams, ticket.request.length_penalty
    place = f"{_th(step.index(node) + 1)} of this step"
    is_last = node.step + 1 == ticket.request.max_new_tokens
    if candidate.score == -math.inf:
        return "forbidden, or after a beam that was not there"
    if candidate.fate == "kept":
        return f"{place}; goes on as beam {candidate.beam}"
    if candidate.fate == "finished":
        how = "ended" if candidate.token in ends else "cut by max_new_tokens"
        return f"{how}: {candidate.score:.4f} / {node.step + 1}^{penalty:g} = {_final(node, penalty):.4f}"
    if candidate.token in ends or is_last:
        return f"{place}, and an end: only the first {beams} may end a text"
    last = min(other.candidate.score for other in step if other.candidate.fate == "kept")
    return f"{place}: {last - candidate.score:.4f} behind the last of {beams} that went on"


def _th(place: int) -> str:
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"{place}{ending}"


def _finished_document(node: Node, rank: int, ticket: Ticket, tokenizer: Tokenizer) -> dict[str, Any]:
    rows = [each.attention for each in reversed([*node.path()])]
    return {
        "text": _text(tokenizer, node.ids),
        "ids": node.ids,
        "tokens": tokenizer.names(node.ids),
        "score": _final(node, ticket.request.length_penalty),
        "sum": node.candidate.score,
        "length": len(node.ids),
        "step": node.step,
        "rank": rank if rank <= ticket.request.beams else None,
        "attention": None if None in rows else rows,
    }


def _why_stopped(ticket: Ticket, steps: list[list[Node]], worst: float) -> str:
    request, beams = ticket.request, ticket.request.beams
    running = [node for node in steps[-1] if node.candidate.fate == "kept"]
    if ticket.reason == "cancelled":
        return f"cancelled after {len(steps)} tokens"
    if len(steps) == request.max_new_tokens:
        return f"max_new_tokens={request.max_new_tokens} was reached"
    if not running:
        return "no text was left to go on with"
    if request.early_stopping is True:
        return f"{beams} texts had ended, and early_stopping=True asks for no more"
    length = request.max_new_tokens if request.early_stopping == "never" and request.length_penalty > 0 else len(steps)
    best = running[0].candidate.score / length**request.length_penalty
    return f"the best that was still running, {best:.4f} at length {length}, is behind the worst of {beams} ended, {worst:.4f}"


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    try:
        return tokenizer.decode(ids)
    except InputError:  # the model has ids that the tokenizer does not have
        known = set(tokenizer.vocab.values())
        return tokenizer.decode(id for id in ids if id in known)


# The picture.


def draw_trace(trace: dict[str, Any]) -> RenderableType:
    """The steps with kept and dropped candidates, the finished texts by rank, and the cross-attention of the best."""
    parts: list[RenderableType] = [_draw_steps(trace), Text("\nTexts that ended", style="bold"), _draw_finished(trace)]
    parts.append(Text(f"over because {trace['stopped']}", style="dim"))
    winner = trace["finished"][0] if trace["finished"] else None
    if winner and winner["attention"] and trace["source"]:
        title = f"Where layer {trace['attention']['layer']} looked while it wrote the winner (mean of its heads)"
        parts += [Text(f"\n{title}", style="bold")]
        weights = torch.tensor(winner["attention"])
        parts.append(heat_map(weights, _shown(winner["tokens"]), _shown(trace["source"]["tokens"])))
    return Group(*parts)


def _draw_steps(trace: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("step", "beam", "score"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("text")
    for number, step in enumerate(trace["steps"], 1):
        alive = [each for each in step["candidates"] if each["fate"] != "dropped"]
        for place, each in enumerate(alive):
            beam = str(each["beam"]) if each["fate"] == "kept" else "end"
            mark = "* " if each["wins"] else ""
            figures = str(number) if place == 0 else "", mark + beam, f"{each['score']:.3f}"
            table.add_row(*figures, _draw_text(each, step["beams"][each["parent"]]["text"]))
        dropped = [each for each in step["candidates"] if each["fate"] == "dropped" and each["score"] is not None]
        if dropped:
            shown = [f"{each['parent']} + {each['token']!r} {each['score']:.3f}" for each in dropped[: trace["beams"]]]
            more = [f"{len(dropped) - len(shown)} more"] if len(dropped) > len(shown) else []
            table.add_row("", "", "", Text("dropped: " + ",  ".join([*shown, *more]), style="dim"))
    return table


def _draw_text(each: dict[str, Any], before: str) -> Text:
    """The text so far, with the new token in colour."""
    same = len(before) if each["text"].startswith(before) else 0
    text = Text(each["text"][:same], style="bold" if each["wins"] else "")
    added = each["text"][same:].strip() and each["text"][same:]
    text.append(added or f" {_shown([each['token']])[0]}", style="bold green" if each["wins"] else "cyan")
    if each["fate"] == "finished":
        text.append(f"   {each['normalised']:.3f}", style="yellow")
    return text


def _draw_finished(trace: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("rank", "score", "sum", "length"):
        table.add_column(title, justify="right")
    table.add_column("text")
    for each in trace["finished"]:
        style = "bold green" if each["rank"] == 1 else "dim" if each["rank"] is None else ""
        figures = f"{each['score']:.4f}", f"{each['sum']:.4f}", str(each["length"])
        table.add_row("out" if each["rank"] is None else str(each["rank"]), *figures, Text(each["text"]), style=style)
    return table


def _shown(tokens: Sequence[str]) -> list[str]:
    """Tokens with line breaks and tabs escaped, and spaces made visible."""
    return [token.replace("\n", "\\n").replace("\t", "\\t").strip() or "␣" for token in tokens]
