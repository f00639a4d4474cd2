"""The engine's ways on a GPU, run on the CPU: asynchronous scheduling, beam search on the device, graphs, packed prompts.

The Python code is the same, except for CUDA graphs, which `Unrecorded` replaces by the work itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.engine import engine
from clearhead.engine.cuda_graphs import CudaGraphs, round_up
from clearhead.engine.runner import DeviceTables
from clearhead.generation import Engine, Request, Ticket
from clearhead.models import Decoder
from clearhead.sampling.beam_search import Beams, BeamSearchParams, extend_on_device
from clearhead.sampling.logits_processors import LogitsProcessor
from clearhead.sampling.strategy import Strategy
from tests.engine.test_engine import (
    DTYPES,
    EXACT,
    alone,
    assert_nothing_left,
    assert_same,
    check_memory,
    ids,
    is_pair,
    model_of,
    some_request,
)
from tests.generation import test_translate

ENDINGS: list[list[int]] = [[], [16, 42], [1, 9, 15, 22, 28, 40, 48]]


class Unrecorded(CudaGraphs):
    """Does the work anew each time; when a key is new, it also runs with zeros in `switch`, as a recording does."""

    def __init__(self) -> None:
        self.keys: set[Hashable] = set()
        self.hooks = []

    def run(
        self, key: Hashable, work: Callable[[], Tensor], *, switch: Tensor, changed: Sequence[Tensor] = ()
    ) -> Tensor:
        if key not in self.keys:
            self.keys.add(key)
            before = [each.clone() for each in (switch, *changed)]
            switch.zero_()
            work()
            for each, was in zip((switch, *changed), before, strict=True):
                each.copy_(was)
        return work()


def on_a_gpu(made: Engine, *, packs: bool = False) -> Engine:
    runner, stack = made.runner, made.model if isinstance(made.model, Decoder) else made.model.decoder
    made.runs_async = runner.has_paths = True
    if stack.positions.bias is None:
        runner.graphs, runner.device_tables = Unrecorded(), DeviceTables(runner)
    runner.prompts.graphs, runner.prompts.packs = None if packs else runner.graphs, packs
    return made


def some_plain_request(rng: random.Random, model: Any, name: str, beams: int) -> Request:
    """A request of one of few kinds, so that often all rows are of one search, or greedy."""
    prompt = ids(rng, rng.choice([1, 3, 15, 16, 17, 30]))
    more: dict[str, Any] = dict(prompt=prompt, beams=beams, n_best=rng.randint(1, beams))
    if is_pair(model):
        more |= dict(source=ids(rng, rng.randint(1, 31)), prompt=prompt[: rng.choice([0, 0, 2, 20])])
    more |= dict(eos=rng.choice(ENDINGS), trace=beams > 1 and rng.random() < 0.2)
    return Request(max_new_tokens=rng.choice([1, 2, 5, 18, 33]), scored=True, name=name, **more)


def crowd(made: Engine, model: Any, requests: list[Request], rng: random.Random, within: float) -> list[Ticket]:
    """Submit all of these at random times, and cancel some."""
    tickets = list[Ticket]()
    streams = dict[int, list[Any]]()
    while len(tickets) < len(requests) or made.is_busy:
        while len(tickets) < len(requests) and rng.random() < 0.6:
            tickets.append(made.submit(requests[len(tickets)]))
        for ticket, token in made.step():
            streams.setdefault(id(ticket), []).append(token)
        check_memory(made)
        running = [ticket for ticket in tickets[-9:] if not ticket.is_done]
        if running and rng.random() < 0.1:
            made.cancel(rng.choice(running))
            check_memory(made)
    assert_nothing_left(made)
    done = [ticket for ticket in tickets if ticket.reason != "cancelled"]
    assert len(requests) / 2 < len(done) < len(requests)
    for ticket in done:
        expected = alone(model, ticket.request)
        assert_same(ticket, expected, within)
        assert streams[id(ticket)] == [*ticket.tokens, None]
        assert [[(c.token, c.parent, c.fate, c.beam) for c in step] for step in ticket.trace] == [
            [(c.token, c.parent, c.fate, c.beam) for c in step] for step in expected.trace
        ]
    return done


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "original"])
@pytest.mark.usefixtures("unchecked")
def test_each_as_if_alone(name: str) -> None:
    model, within = model_of(name), DTYPES.get(name, EXACT)[1]
    rng = random.Random(f"ahead {name}")
    made = on_a_gpu(Engine(model, max_tokens=900, max_rows=12, prefill_tokens=60))
    requests = [some_request(rng, model, f"request {place}") for place in range(40)]
    crowd(made, model, requests, rng, within)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "original"])
@pytest.mark.usefixtures("unchecked")
def test_beam_searches_as_if_alone(name: str) -> None:
    model, within = model_of(name, torch.float64), 1e-9  # long texts: in float32 some have two tokens as likely
    rng = random.Random(f"searches {name}")
    made = on_a_gpu(Engine(model, max_tokens=1500, max_rows=12, prefill_tokens=200))
    kinds = [4] * 25 + [1] * 8 + [rng.choice([1, 2, 4]) for _ in range(15)]
    requests = [some_plain_request(rng, model, f"request {place}", beams) for place, beams in enumerate(kinds)]
    done = crowd(made, model, requests, rng, within)
    graphs: Any = made.runner.graphs
    assert {kind for _, kind, *_ in graphs.keys if isinstance(kind, tuple)}  # some searches ran on the device
    assert any(hypothesis.finished for ticket in done for hypothesis in ticket.hypotheses)
    assert any(ticket.trace for ticket in done)


@pytest.mark.usefixtures("unchecked")
def test_packed_prompts() -> None:
    model = model_of("llama")
    rng = random.Random("packed")
    made = on_a_gpu(Engine(model, max_tokens=900, max_rows=12, prefill_tokens=90), packs=True)
    requests = [some_request(rng, model, f"request {place}") for place in range(30)]
    crowd(made, model, requests, rng, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["plain", "early", "never", "short"])
def test_as_transformers(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids and scores of searches on the device are those of transformers."""
    real = engine.Engine.__init__

    def init(self: Engine, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        on_a_gpu(self)

    monkeypatch.setattr(engine.Engine, "__init__", init)
    test_translate.test_as_transformers("t5", option)


@pytest.mark.parametrize("ends", [(), (3,), (5, 9, 2)])
def test_beams_on_the_device_as_in_numpy(ends: tuple[int, ...]) -> None:
    """With equal scores, missing beams, and NaN."""
    B, K, V = 5, 3, 19
    processor = LogitsProcessor(model_of("llama"), list(ends), Strategy())
    params = BeamSearchParams(K, 1.0, False, processor)
    n = params.n_candidates
    beams, device = (Beams(params, [[1]] * B, [9] * B, torch.float32, [None] * B) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    for _ in range(6):
        logits = torch.randint(-2, 3, (B * K, V), generator=generator).float()
        logits[4] = torch.nan  # of a beam that is there after the first step
        values, at = logits.log_softmax(-1).topk(n)
        values, at = values.unflatten(0, (B, K)), at.unflatten(0, (B, K))
        before = torch.from_numpy(beams.scores.copy())
        scores, tokens, parents, candidates = extend_on_device(values, at, before, ends)
        expected = beams.extend(values.numpy(), at.numpy())
        lives = torch.from_numpy(beams.scores > -torch.inf)
        assert torch.equal(scores, torch.from_numpy(beams.scores))
        for found, wanted in zip((tokens, parents), expected, strict=True):
            assert torch.equal(found[lives], torch.from_numpy(wanted)[lives])
        assert candidates.shape == (3, B, n)
        device.advance(slice(None), candidates[0].view(torch.float32).numpy(), *candidates[1:].numpy())
        assert device.scores.tolist() == beams.scores.tolist()
        assert (device.finished, device.is_open.tolist()) == (beams.finished, beams.is_open.tolist())
    assert not beams.is_open[1]
    assert beams.finished[1] == []


def test_sizes() -> None:
    for n in range(1, 300):
        size = round_up(n, 1000)
        assert n <= size <= max(n * 5 / 4, 2 * n if n < 8 else 0)
        assert round_up(size, 1000) == size
        assert round_up(n, n) == n
