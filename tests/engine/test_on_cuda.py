"""The engine on a CUDA GPU: CUDA graphs for decode and prefill, packed prompts, beam search on the device."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from clearhead.config import Generation
from clearhead.families import preset
from clearhead.generation import Engine, Request, Strategy, Ticket
from clearhead.models import build

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("unchecked"),
]
VOCAB = 211


def make(name: str) -> Any:
    more: dict[str, Any] = {} if name == "gpt2" else dict(d_head=32)
    more |= dict(n_kv_heads=2) if name == "llama-2-7b" else {}
    sizes: dict[str, Any] = dict(n_layers=2, d_model=128, n_heads=4, d_ff=256, max_len=160, vocab_size=VOCAB)
    model: Any = build(preset(name, **sizes, **more, init_std=0.3)).eval()
    model.generation = Generation(bos=1, decoder_start=1, eos=(7, 30))
    return model


def some_request(rng: random.Random, is_pair: bool, beams: int) -> Request:
    text = [rng.randrange(5, VOCAB) for _ in range(rng.choice([1, 15, 16, 17, 40, 70]))]
    more: dict[str, Any] = dict(source=text) if is_pair else dict(prompt=text)
    if beams == 1 and rng.random() < 0.4:
        more |= dict(
            strategy=Strategy(temperature=0.8, repetition_penalty=rng.choice([1.0, 1.2])), seed=rng.randrange(99)
        )
    more |= dict(eos=rng.choice([(), None]), n_best=rng.randint(1, beams), scored=True)
    more |= dict(lookup=beams == 1 and not is_pair and rng.random() < 0.4)
    return Request(max_new_tokens=rng.choice([1, 5, 18, 40]), beams=beams, **more)


def write(engine: Engine, requests: list[Request], rng: random.Random) -> list[Ticket]:
    """Submit all of these at random times, and cancel some; all memory is freed."""
    tickets: list[Ticket] = []
    while len(tickets) < len(requests) or engine.is_busy:
        while len(tickets) < len(requests) and rng.random() < 0.7:
            tickets.append(engine.submit(requests[len(tickets)]))
        engine.step()
        if rng.random() < 0.05:
            engine.cancel(rng.choice(tickets[-9:]))
    blocks = engine.allocator
    assert (blocks.n_used, blocks.n_reserved, blocks.n_available) == (0, 0, blocks.n_blocks - 1)
    assert not blocks.ref_counts.any()
    assert not engine.beam_searcher.groups
    return tickets


@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b", "transformer-base"])
@pytest.mark.parametrize("kinds", [[1], [4], [1, 3]], ids=str)
def test_a_crowd_is_what_each_is_alone_on_a_cpu(name: str, kinds: list[int]) -> None:
    torch.manual_seed(0)
    model, rng = make(name), random.Random(f"{name} {kinds}")
    requests = [some_request(rng, name == "transformer-base", rng.choice(kinds)) for _ in range(40)]
    wanted: list[Ticket] = []
    for request in requests:
        alone = Engine(model, max_tokens=1600, max_rows=4, prefixes=False)
        wanted.append(alone.submit(request))
        alone.run()
    engine = Engine(copy.deepcopy(model).cuda(), max_tokens=4000, max_rows=24, prefill_tokens=300, prefixes=False)
    found = write(engine, requests, rng)
    pairs = [(f, w) for f, w in zip(found, wanted, strict=True) if f.reason != "cancelled"]
    same = [(f.ids, f.reason) == (w.ids, w.reason) for f, w in pairs]
    # The GPU sums in another order: where two tokens are nearly as likely, a text may go on with the other.
    assert sum(same) >= 0.9 * len(same)
    for (f, w), alike in zip(pairs, same, strict=True):
        if alike and len(f.hypotheses) == 1:
            assert f.hypotheses[0].score == pytest.approx(w.hypotheses[0].score, rel=1e-3, abs=1e-3)


def test_packed_prompts() -> None:
    """In bfloat16 many prompts are packed: the first logits of each are those of the prompt alone."""
    torch.manual_seed(0)
    model = make("llama-2-7b").cuda().bfloat16()
    rng = random.Random(3)
    prompts = [[rng.randrange(5, VOCAB) for _ in range(rng.randint(1, 90))] for _ in range(30)]
    engine = Engine(model, max_tokens=6000, max_rows=30, prefixes=False)
    engine.runner.prompts.graphs = None  # so few would be padded and replayed
    assert engine.runner.prompts.packs
    tickets = [engine.submit(Request(prompt=prompt, max_new_tokens=1, eos=(), alternatives=5)) for prompt in prompts]
    engine.run()
    for prompt, ticket in zip(prompts, tickets, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt], device="cuda"))[0, -1].float().log_softmax(-1)
        for id, score in ticket.tokens[0].alternatives:
            assert score == pytest.approx(
                float(expected[id]), abs=0.15
            )  # bfloat16: logits of up to 10 keep 2 or 3 digits
