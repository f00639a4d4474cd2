"""What went on inside while a text was written, told beside it.

Everything here runs in the engine's thread, a piece at a time (`Host.in_turns`): others wait for one pass at most. A text is read
once more as a whole, as it was written: the state that chose a token is that of the token before it. Heads are taken out of
passes and of steps of an engine of its own, never while anybody else's step runs.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.engine.request import n_source, start_of
from clearhead.errors import InputError
from clearhead.generation import Request, Token
from clearhead.generation.engines import make_engine
from clearhead.generation.texts import piece_name, stream_of
from clearhead.inside import Intervention, Seen, intervene, mean, probe, sites, zero
from clearhead.inside.probe import Heads, blocks_of, find_sites, heads_of
from clearhead.models import Decoder, EncoderDecoder
from clearhead.models.stack import Stack
from clearhead.serving.model_worker import Host
from clearhead.serving.protocol import Attended, Explain

MAX_TEXTS = 16
MAX_NEW = 256  # tokens written, of each text
MAX_READ = 2048  # tokens of prompt, source and text
MAX_WEIGHTS = 1_000_000  # numbers of attention in one answer
STRIP = 512  # tokens of a prompt that are scored in one turn

Work = Generator[None, None, dict[str, Any]]


@dataclass(frozen=True)
class Look:
    """An attention, some of its heads, and of the tokens written those whose rows are told (None: all)."""

    site: str  # without .weights
    heads: tuple[int, ...]
    rows: tuple[int, ...] | None


@dataclass(frozen=True)
class Plan:
    """What was asked for, site by site."""

    looks: tuple[Look, ...]
    lens: bool
    ablated: tuple[tuple[Look, str], ...]  # with how


def make_plan(host: Host, asked: Explain | None, requests: Sequence[Request]) -> Plan | None:
    """What is asked for, if it is there and not too much."""
    if asked is None:
        return None
    looks: list[Look] = []
    for one in asked.attention:
        told = Attended(site=one) if isinstance(one, str) else one
        looks += _find(host, told.site, told.head, told.rows)
    ablated = [(look, one.how) for one in asked.ablate for look in _find(host, one.site, one.head, None)]
    _check_size(requests, looks)
    return Plan(tuple(looks), asked.lens, tuple(ablated))


def _find(host: Host, pattern: str, head: Heads, rows: Sequence[int] | None) -> list[Look]:
    """The attentions of these names; `*` matches anything."""
    known = [site.removesuffix(".weights") for site in sites(host.model) if site.endswith(".weights")]
    found: list[Look] = []
    for site in find_sites(pattern.removesuffix(".weights"), known):
        name, _, step = site.rpartition(".")
        attention = getattr(blocks_of(host.model)[name], step)
        heads = heads_of(head, attention.o_proj.in_features // attention.d_head, site)
        found.append(Look(site, heads, None if rows is None else tuple(rows)))
    return found


def _check_size(requests: Sequence[Request], looks: Sequence[Look]) -> None:
    n_texts = sum(request.n_best for request in requests)
    if n_texts > MAX_TEXTS:
        raise InputError(f"{MAX_TEXTS} texts may be explained in one request; got {n_texts}; ask for fewer")
    n_weights = 0
    for request in requests:
        n_new, source = request.max_new_tokens, n_source(request.source)
        n_read = len(request.prompt) + source + n_new
        if n_new > MAX_NEW or n_read > MAX_READ:
            raise InputError(
                f"of a text that is explained, {MAX_NEW} tokens may be written and {MAX_READ} read and written; got "
                f"max_tokens={n_new}, {n_read} in all; lower max_tokens, or shorten the prompt"
            )
        for look in looks:
            n_rows = (source if look.site.startswith("encoder.") else n_new) if look.rows is None else len(look.rows)
            keys = source if look.site.startswith("encoder.") or look.site.endswith(".cross") else n_read - source
            n_weights += request.n_best * len(look.heads) * n_rows * keys
    if n_weights > MAX_WEIGHTS:
        raise InputError(
            f"attention of up to {n_weights:,} numbers is too much for one answer; {MAX_WEIGHTS:,} may be asked for; "
            f"name fewer sites, heads or rows, or lower max_tokens"
        )


class Text:
    """A prompt and what was written after it, read again as a whole."""

    def __init__(self, host: Host, request: Request, written: Sequence[int]) -> None:
        assert isinstance(host.model, Decoder | EncoderDecoder)
        assert host.tokenizer is not None
        self.model, self.tokenizer, self.request, self.written = host.model, host.tokenizer, request, list(written)
        self.device = next(self.model.parameters()).device
        self.prompt = list(request.prompt)
        self.source: list[int] = []
        self.stack: Stack
        if isinstance(self.model, EncoderDecoder):
            assert request.source is not None
            self.prompt = self.prompt or [start_of(self.model)]
            self.source = [int(id) for id in request.source]
            self.stack, self.place = self.model.decoder, "decoder."
        else:
            if not self.prompt and self.model.generation.bos is not None:
                self.prompt = [self.model.generation.bos]
            self.stack, self.place = self.model, ""
        first = len(self.prompt) - 1
        self.rows = slice(first, first + len(self.written))  # those that chose what was written

    def names(self, ids: Sequence[int]) -> list[str]:
        return [piece_name(self.tokenizer, id) for id in ids]

    @torch.no_grad()
    def read(self) -> Float[Tensor, "n D"]:
        """The states that chose what was written."""
        ids = self._tensor([*self.prompt, *self.written[:-1]])
        if isinstance(self.model, EncoderDecoder):
            states = self.model.states(ids, self.model.encode(self._tensor(self.source)))
        else:
            states = self.model.states(ids)
        return states[0, self.rows]

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.device)

    @torch.no_grad()
    def chances(self, states: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """Log-probabilities of what comes next."""
        logits = self.model.project(states[None])[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    def scores(self, states: Float[Tensor, "n D"]) -> list[float]:
        """Log-probabilities of what was written."""
        chosen = torch.tensor(self.written, device=self.device)[:, None]
        return self.chances(states).gather(1, chosen)[:, 0].tolist()


def explain(host: Host, plan: Plan, request: Request, written: Sequence[int], stops: list[str], rank: int = 0) -> Work:
    """What the plan asks of one text; of a search, the one that came `rank`th."""
    text = Text(host, request, written)
    told: dict[str, Any] = {"tokens": {"prompt": text.names(text.prompt), "written": text.names(text.written)}}
    if text.source:
        told["tokens"]["source"] = text.names(text.source)
    layers = [site for site in sites(text.model) if site == f"{text.place}embedding" or site.endswith(".residual")]
    layers = [site for site in layers if site.startswith(text.place)]
    if not text.written:
        return told
    with ExitStack() as attached:

        def see(*names: str, **kept: Any) -> Seen:
            return attached.enter_context(probe(text.model, *names, **kept))

        in_text: dict[str, Any] = dict(rows=text.rows)
        looks = [
            see(f"{look.site}.weights", head=look.heads, **({} if look.site.startswith("encoder.") else in_text))
            for look in plan.looks
        ]
        stream = see(*layers, **in_text) if plan.lens else Seen()
        means = {look.site: see(f"{look.site}.out") for look, how in plan.ablated if how == "mean"}
        states = text.read()
    if plan.looks:
        told["attention"] = [_rows(text, look, seen) for look, seen in zip(plan.looks, looks, strict=True)]
    if plan.lens:
        told["lens"] = []
        for site in layers:
            yield
            told["lens"].append({"site": site, **_lens(text, stream[site][0])})
    if plan.ablated:
        yield
        changes = [
            mean(f"{look.site}.out", means[look.site][f"{look.site}.out"], head=look.heads)
            if how == "mean"
            else zero(f"{look.site}.out", head=look.heads)
            for look, how in plan.ablated
        ]
        told["ablate"] = yield from _ablate(text, states, changes, stops, rank)
    return told


def _rows(text: Text, look: Look, seen: Seen) -> dict[str, Any]:
    weights = seen[f"{look.site}.weights"][0]
    n = weights.shape[1]
    rows = list(range(n)) if look.rows is None else [row % n for row in look.rows if -n <= row < n]
    told: list[list[list[float]]] = weights[:, rows].double().round(decimals=6).tolist()
    if not look.site.startswith("encoder.") and not look.site.endswith(".cross"):  # what comes later has no weight
        ends = [len(text.prompt) + row for row in rows]
        told = [[row[:end] for row, end in zip(head, ends, strict=True)] for head in told]
    return {"site": f"{look.site}.weights", "heads": list(look.heads), "rows": rows, "weights": told}


@torch.no_grad()
def _lens(text: Text, stream: Float[Tensor, "n D"]) -> dict[str, Any]:
    """What the head makes of a layer's stream: the likeliest next token, and the chance of the one that was written."""
    chances = text.chances(text.stack.norm(stream)).exp()
    best = chances.max(-1)
    written = chances.gather(1, torch.tensor(text.written, device=text.device)[:, None])[:, 0]
    numbers = {"probabilities": best.values.tolist(), "written": written.tolist()}
    return {"tokens": text.names(best.indices.tolist()), **numbers}


def _ablate(text: Text, states: Tensor, changes: list[Intervention], stops: list[str], rank: int) -> Work:
    """The text that the same request gets without these heads, and what the plain one is worth without them."""
    plain = text.scores(states)
    with intervene(text.model, *changes):
        other = text.scores(text.read())
    told: dict[str, Any] = {"logprob": sum(plain), "ablated_logprob": sum(other)}
    told |= {"token_logprobs": plain, "ablated_token_logprobs": other}
    yield
    engine = make_engine(text.model, [text.request])
    engine.is_gpu = False  # without asking ahead, each step calls the model, as `intervene` expects
    ticket = engine.submit(text.request)
    stream = stream_of(text.request, text.tokenizer, stops)
    said, ids = "", list[int]()
    while not ticket.is_done and stream.stop is None:
        with intervene(text.model, *changes):
            news = engine.step()
        for _, token in news:
            if token is not None and stream.stop is None:
                ids.append(token.id)
                said += stream.push(token.id)
        yield
    if text.source and ticket.hypotheses:
        ids = ticket.hypotheses[min(rank, len(ticket.hypotheses) - 1)].tokens
        said = text.tokenizer.decode(ids)
    else:
        said += stream.finish()
    reason = {"length": "length", "failed": "error"}.get(str(ticket.reason), "stop")
    return {"text": said, "tokens": text.names(ids), "finish_reason": reason, **told}


def score_prompt(host: Host, prompt: Sequence[int], alternatives: int) -> Generator[None, None, list[Token]]:
    """Each token of a prompt with its log-probability after those before it. The first has none."""
    model = host.model
    assert isinstance(model, Decoder)
    if not prompt:
        return []
    device, found = next(model.parameters()).device, [Token(prompt[0])]
    cache = model.new_cache(batch=1, max_len=len(prompt))
    for start in range(0, len(prompt) - 1, STRIP):
        if start:
            yield
        ids, after = prompt[start : start + STRIP], prompt[start + 1 : start + 1 + STRIP]
        with torch.no_grad():
            logits = model(torch.tensor([ids], device=device), cache=cache)[0, : len(after)]
            chances = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            scores = chances.gather(1, torch.tensor(after, device=device)[:, None])[:, 0].tolist()
            best = chances.topk(alternatives)
        others = [
            tuple(zip(*each, strict=True)) for each in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        found += [Token(id, score, other) for id, score, other in zip(after, scores, others, strict=True)]
    return found
