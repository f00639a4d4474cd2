"""Explanations: attention, logit lens and ablation of a generated text, returned with it.

Everything here runs in the engine's thread in slices (`ModelWorker.run_sliced`), so that others wait for one forward pass at most.
The prompt and the text are run once more as a whole; the state at a token is the one that chose the next. Ablations run in passes
and in an engine of their own, never while the engine makes a step for others.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead import kernels
from clearhead.engine.request import Memory, source_length, start_token
from clearhead.errors import InputError
from clearhead.generation import Request, Token
from clearhead.generation.engines import make_engine
from clearhead.generation.texts import stream_of
from clearhead.inside import Intervention, Seen, intervene, mean, probe, sites, zero
from clearhead.inside.probe import Heads, heads_of
from clearhead.inside.sites import blocks_of, find_sites
from clearhead.models import Decoder, EncoderDecoder
from clearhead.models.stack import Stack
from clearhead.quantization.model_weights import example_weight
from clearhead.serving.model_worker import ModelWorker
from clearhead.serving.protocol import AttentionChoice, Explain

MAX_TEXTS = 16
MAX_NEW = 256  # tokens generated, of each text
MAX_READ = 2048  # tokens of prompt, source and text
MAX_WEIGHTS = 1_000_000  # numbers of attention in one answer
STRIP = 512  # tokens of a prompt that are scored in one slice

Work = Generator[None, None, dict[str, Any]]


@dataclass(frozen=True)
class AttentionQuery:
    """An attention, some of its heads, and the generated tokens whose rows are returned (None: all)."""

    site: str  # without .weights
    heads: tuple[int, ...]
    rows: tuple[int, ...] | None


@dataclass(frozen=True)
class Plan:
    """What an explanation contains, site by site."""

    queries: tuple[AttentionQuery, ...]
    lens: bool
    ablated: tuple[tuple[AttentionQuery, str], ...]  # with "zero" or "mean"


def make_plan(worker: ModelWorker, asked: Explain | None, requests: Sequence[Request]) -> Plan | None:
    """The plan for an `explain` field, checked: its sites exist and the answer is not too large."""
    if asked is None:
        return None
    queries: list[AttentionQuery] = []
    for one in asked.attention:
        choice = AttentionChoice(site=one) if isinstance(one, str) else one
        queries += _find(worker, choice.site, choice.head, choice.rows)
    ablated = [(query, one.how) for one in asked.ablate for query in _find(worker, one.site, one.head, None)]
    _check_size(requests, queries)
    return Plan(tuple(queries), asked.lens, tuple(ablated))


def _find(worker: ModelWorker, pattern: str, head: Heads, rows: Sequence[int] | None) -> list[AttentionQuery]:
    """The attentions whose names match; `*` matches anything."""
    known = [site.removesuffix(".weights") for site in sites(worker.model) if site.endswith(".weights")]
    found: list[AttentionQuery] = []
    for site in find_sites(pattern.removesuffix(".weights"), known):
        name, _, step = site.rpartition(".")
        attention = getattr(blocks_of(worker.model)[name], step)
        heads = heads_of(head, attention.o_proj.in_features // attention.d_head, site)
        found.append(AttentionQuery(site, heads, None if rows is None else tuple(rows)))
    return found


def _check_size(requests: Sequence[Request], queries: Sequence[AttentionQuery]) -> None:
    n_texts = sum(request.n_best for request in requests)
    if n_texts > MAX_TEXTS:
        raise InputError(f"{MAX_TEXTS} texts may be explained in one request; got {n_texts}; ask for fewer")
    n_weights = 0
    for request in requests:
        n_new, source = request.max_new_tokens, source_length(request.source)
        n_read = len(request.prompt) + source + n_new
        if n_new > MAX_NEW or n_read > MAX_READ:
            raise InputError(
                f"of a text that is explained, {MAX_NEW} tokens may be written and {MAX_READ} read and written; got "
                f"max_tokens={n_new}, {n_read} in all; lower max_tokens, or shorten the prompt"
            )
        for query in queries:
            n_rows = (source if query.site.startswith("encoder.") else n_new) if query.rows is None else len(query.rows)
            keys = source if query.site.startswith("encoder.") or query.site.endswith(".cross") else n_read - source
            n_weights += request.n_best * len(query.heads) * n_rows * keys
    if n_weights > MAX_WEIGHTS:
        raise InputError(
            f"attention of up to {n_weights:,} numbers is too much for one answer; {MAX_WEIGHTS:,} may be asked for; "
            f"name fewer sites, heads or rows, or lower max_tokens"
        )


class GeneratedText:
    """A prompt and the text generated after it, to be run again as a whole."""

    def __init__(self, worker: ModelWorker, request: Request, written: Sequence[int]) -> None:
        assert isinstance(worker.model, Decoder | EncoderDecoder)
        assert worker.tokenizer is not None
        self.model, self.tokenizer, self.request, self.written = worker.model, worker.tokenizer, request, list(written)
        self.device = example_weight(self.model).device
        self.prompt = list(request.prompt)
        self.source: list[int] = []
        self.stack: Stack
        if isinstance(self.model, EncoderDecoder):
            assert request.source is not None
            assert not isinstance(request.source, Memory)
            self.prompt = self.prompt or [start_token(self.model)]
            self.source = [int(id) for id in request.source]
            self.stack, self.prefix = self.model.decoder, "decoder."
        else:
            if not self.prompt and self.model.generation.bos is not None:
                self.prompt = [self.model.generation.bos]
            self.stack, self.prefix = self.model, ""
        first = len(self.prompt) - 1
        self.rows = slice(first, first + len(self.written))  # the states that chose the generated tokens

    def names(self, ids: Sequence[int]) -> list[str]:
        return self.tokenizer.names(ids)

    @torch.no_grad()
    def run(self) -> Float[Tensor, "n D"]:
        """The states that chose the generated tokens."""
        ids = self._tensor([*self.prompt, *self.written[:-1]])
        if isinstance(self.model, EncoderDecoder):
            states = self.model.states(ids, self.model.encode(self._tensor(self.source)))
        else:
            states = self.model.states(ids)
        return states[0, self.rows]

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.device)

    @torch.no_grad()
    def log_probs(self, states: Float[Tensor, "n D"]) -> Float[Tensor, "n V"]:
        """Log-probabilities of the next token."""
        logits = self.model.project(states[None])[0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)

    def scores(self, states: Float[Tensor, "n D"]) -> list[float]:
        """Log-probabilities of the generated tokens."""
        chosen = torch.tensor(self.written, device=self.device)[:, None]
        return self.log_probs(states).gather(1, chosen)[:, 0].tolist()


def explain(
    worker: ModelWorker, plan: Plan, request: Request, written: Sequence[int], stops: list[str], rank: int = 0
) -> Work:
    """The explanation of one text; of a beam search, the text with this rank."""
    text = GeneratedText(worker, request, written)
    answer: dict[str, Any] = {"tokens": {"prompt": text.names(text.prompt), "written": text.names(text.written)}}
    if text.source:
        answer["tokens"]["source"] = text.names(text.source)
    if not text.written:
        return answer
    layers = [f"{text.prefix}embedding", *(f"{text.prefix}blocks.{n}.residual" for n in range(len(text.stack.blocks)))]
    with ExitStack() as attached:

        def record(*names: str, **kept: Any) -> Seen:
            return attached.enter_context(probe(text.model, *names, **kept))

        generated: dict[str, Any] = dict(rows=text.rows)
        attention = [
            record(f"{each.site}.weights", head=each.heads, **({} if each.site.startswith("encoder.") else generated))
            for each in plan.queries
        ]
        stream = record(*layers, **generated) if plan.lens else Seen()
        outputs = {each.site: record(f"{each.site}.out") for each, how in plan.ablated if how == "mean"}
        states = text.run()
    if plan.queries:
        answer["attention"] = [_rows(text, each, seen) for each, seen in zip(plan.queries, attention, strict=True)]
    if plan.lens:
        answer["lens"] = []
        for site in layers:
            yield
            answer["lens"].append({"site": site, **_lens(text, stream[site][0])})
    if plan.ablated:
        yield
        changes = [
            mean(f"{each.site}.out", outputs[each.site][f"{each.site}.out"], head=each.heads)
            if how == "mean"
            else zero(f"{each.site}.out", head=each.heads)
            for each, how in plan.ablated
        ]
        answer["ablate"] = yield from _ablate(text, states, changes, stops, rank)
    return answer


def _rows(text: GeneratedText, query: AttentionQuery, seen: Seen) -> dict[str, Any]:
    """The weights of a query's heads and rows; rows of a causal attention end at their own token."""
    weights = seen[f"{query.site}.weights"][0]
    n = weights.shape[1]
    rows = list(range(n)) if query.rows is None else [row % n for row in query.rows if -n <= row < n]
    listed: list[list[list[float]]] = kernels.to_float64(weights[:, rows]).round(decimals=6).tolist()
    if not query.site.startswith("encoder.") and not query.site.endswith(".cross"):
        ends = [len(text.prompt) + row for row in rows]
        listed = [[row[:end] for row, end in zip(head, ends, strict=True)] for head in listed]
    return {"site": f"{query.site}.weights", "heads": list(query.heads), "rows": rows, "weights": listed}


@torch.no_grad()
def _lens(text: GeneratedText, stream: Float[Tensor, "n D"]) -> dict[str, Any]:
    """The head applied to a layer's stream: the likeliest next token, and the probability of the generated one."""
    probs = text.log_probs(text.stack.norm(stream)).exp()
    best = probs.max(-1)
    written = probs.gather(1, torch.tensor(text.written, device=text.device)[:, None])[:, 0]
    numbers = {"probabilities": best.values.tolist(), "written": written.tolist()}
    return {"tokens": text.names(best.indices.tolist()), **numbers}


def _ablate(text: GeneratedText, states: Tensor, changes: list[Intervention], stops: list[str], rank: int) -> Work:
    """The text that the same request gets without these heads, and the log-probability of the original text without them."""
    plain = text.scores(states)
    with intervene(text.model, *changes):
        ablated = text.scores(text.run())
    scores: dict[str, Any] = {"logprob": sum(plain), "ablated_logprob": sum(ablated)}
    scores |= {"token_logprobs": plain, "ablated_token_logprobs": ablated}
    yield
    engine = make_engine(text.model, [text.request])
    engine.runs_async = False  # no steps ahead: each step calls the model, as `intervene` expects
    ticket = engine.submit(text.request)
    stream = stream_of(text.request, text.tokenizer, stops)
    new_text, ids = "", list[int]()
    while not ticket.is_done and stream.stop is None:
        with intervene(text.model, *changes):
            new_tokens = engine.step()
        for _, token in new_tokens:
            if token is not None and stream.stop is None:
                ids.append(token.id)
                new_text += stream.push(token.id)
        yield
    if text.source and ticket.hypotheses:
        ids = ticket.hypotheses[min(rank, len(ticket.hypotheses) - 1)].tokens
        new_text = text.tokenizer.decode(ids)
    else:
        new_text += stream.finish()
    reason = {"length": "length", "failed": "error"}.get(str(ticket.reason), "stop")
    return {"text": new_text, "tokens": text.names(ids), "finish_reason": reason, **scores}


def score_prompt(worker: ModelWorker, prompt: Sequence[int], alternatives: int) -> Generator[None, None, list[Token]]:
    """Each token of a prompt with its log-probability given the tokens before it. The first has none."""
    model = worker.model
    assert isinstance(model, Decoder)
    if not prompt:
        return []
    device, found = example_weight(model).device, [Token(prompt[0])]
    cache = model.new_cache(batch=1, max_len=len(prompt))
    for start in range(0, len(prompt) - 1, STRIP):
        if start:
            yield
        ids, after = prompt[start : start + STRIP], prompt[start + 1 : start + 1 + STRIP]
        with torch.no_grad():
            logits = model(torch.tensor([ids], device=device), cache=cache)[0, : len(after)]
            log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            scores = log_probs.gather(1, torch.tensor(after, device=device)[:, None])[:, 0].tolist()
            best = log_probs.topk(alternatives)
        others = [
            tuple(zip(*each, strict=True)) for each in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        found += [Token(id, score, other) for id, score, other in zip(after, scores, others, strict=True)]
    return found
