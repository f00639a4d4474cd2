"""Drafted tokens: the text is the one without them, in every kind of request, and prompt lookup drafts what is worth it."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.config import Config, Generation
from clearhead.engine.prompt_lookup import FIRST_RATES, PromptLookup
from clearhead.engine.runner import ModelRunner
from clearhead.engine.speculation import DRAFT_ROWS
from clearhead.errors import InputError
from clearhead.generation import Engine, Request, Strategy, Ticket, stream, write_texts
from clearhead.generation.engines import make_engine
from clearhead.kernels import native
from clearhead.kernels.decode_step import Table
from clearhead.models import Decoder, build
from clearhead.quantization.integer import quantize
from tests.engine.test_async_scheduling import crowd, on_a_gpu
from tests.engine.test_engine import grammar, ids, model_of
from tests.engine.test_native_step import KINDS, OTHERS, SMALL, Rows, make

DECODERS = [name for name, fields in {**KINDS, **OTHERS}.items() if fields["shape"] == "decoder"]
PATTERN = [5, 9, 4, 22, 17, 3]  # repeated, so that there is something to draft
needs_native = pytest.mark.skipif(not native.is_there(), reason=str(native.why_not()))


def decoder(name: str, kind: str = "fp32", **fields: Any) -> Decoder:
    """A random model whose logits are far apart, so that its texts soon repeat themselves."""
    model = make(name)
    if fields:
        model = build(Config.from_dict({**SMALL, **{**KINDS, **OTHERS}[name], **fields}), seed=3).eval()
    assert isinstance(model, Decoder)
    model.generation = Generation(bos=1)
    return model if kind == "fp32" else quantize(model, kind)


def write(model: Decoder, prompt: Sequence[int], **fields: Any) -> Ticket:
    request = Request(prompt=prompt, **fields)
    engine = make_engine(model, [request])
    ticket = engine.submit(request)
    engine.run()
    blocks = engine.allocator
    assert (blocks.n_used, blocks.n_reserved, engine.runner.n) == (0, 0, 0)
    return ticket


def assert_equal(found: Ticket, expected: Ticket) -> None:
    """In every bit; where torch computes the steps, scores to rounding: it adds up in another order for other numbers of rows."""
    assert (found.ids, found.reason) == (expected.ids, expected.reason)
    if native.is_there():
        assert (found.scores, found.alternatives) == (expected.scores, expected.alternatives)
    else:
        assert found.scores == pytest.approx(expected.scores, abs=1e-5)
        for one, other in zip(found.alternatives, expected.alternatives, strict=True):
            assert [score for _, score in one] == pytest.approx([score for _, score in other], abs=1e-5)
    assert expected.n_drafted == 0


@pytest.mark.parametrize("kind", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("name", DECODERS)
def test_the_text_is_the_same(name: str, kind: str) -> None:
    if name in OTHERS and kind != "fp32":
        pytest.skip("computed by torch, which adds up in another order for other numbers of rows")
    model, drafted, accepted = decoder(name, kind), 0, 0
    for prompt in (PATTERN * 3, PATTERN[:1], [7, 7, 7]):
        for strategy in (Strategy(), Strategy(temperature=0.7, top_k=20, top_p=0.9)):
            # Scores are equal, too: native rows have the same bits alone and in a batch.
            fields: Any = dict(max_new_tokens=23, strategy=strategy, scored=name in KINDS, seed=3)
            found = write(model, prompt, lookup=True, **fields)
            assert_equal(found, write(model, prompt, **fields))
            drafted, accepted = drafted + found.n_drafted, accepted + found.n_accepted
    assert drafted >= accepted > 0


@needs_native
@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama", "interleaved", "mistral", "qwen"])
def test_rows_of_one_text_are_its_steps(name: str, n_threads: int) -> None:
    """Five tokens of a text in one native step, and one by one: the same bits, in logits, keys and values."""
    ours, theirs = Rows(make(name)), Rows(make(name))
    tokens, at = torch.tensor([3, 5, 7, 11, 2]), 3
    table = Table(ours.own.blocks[at : at + 1].repeat(5, 0), (ours.own.counts[at] + torch.arange(5).int()).numpy())
    source = Table(ours.source.blocks.repeat(2, 0), ours.source.counts.repeat(2))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n_threads)
        with torch.no_grad():
            found = ours.step.run(tokens.clone(), ours.pool, table, source, stores_first=True)
            expected = list[Tensor]()
            for place in range(5):
                row = Table(table.blocks[place : place + 1], table.counts[place : place + 1])
                logits = theirs.step.run(tokens[place : place + 1].clone(), theirs.pool, row, source)
                assert logits is not None
                expected.append(logits[0])
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert torch.equal(found, torch.stack(expected))
    assert torch.equal(ours.pool.memory, theirs.pool.memory)


STRATEGIES: dict[str, dict[str, Any]] = {
    "top_k": dict(temperature=1.3, top_k=7),
    "top_p": dict(temperature=1.3, top_p=0.6),
    "min_p": dict(temperature=0.5, min_p=0.05),
    "repetition_penalty": dict(repetition_penalty=1.05),
    "penalties": dict(temperature=0.4, presence_penalty=0.02, frequency_penalty=0.01),
    "no_repeat_ngram": dict(no_repeat_ngram=9),
    "logit_bias": dict(logit_bias={5: 0.5, 9: 0.5}, suppress=[4]),
    "min_new_tokens": dict(min_new_tokens=11),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_every_strategy(strategy: str) -> None:
    model = decoder("llama")
    fields: Any = dict(max_new_tokens=22, scored=True, alternatives=3, strategy=Strategy(**STRATEGIES[strategy]))
    fields |= dict(eos=(17, 60)) if strategy == "min_new_tokens" else {}
    drafted = 0
    for seed in range(4):
        found = write(model, PATTERN * 3, lookup=True, seed=seed, **fields)
        assert_equal(found, write(model, PATTERN * 3, seed=seed, **fields))
        drafted += found.n_drafted
    assert drafted > 0


def test_what_ends_a_text_may_stand_in_a_draft() -> None:
    """Each limit, each token as eos, each pair as a stop; the blocks that enter the prefix cache hold what they say."""
    model = decoder("llama")
    whole, accepted = write(model, PATTERN * 3, max_new_tokens=22).ids, 0
    engine = Engine(model, max_tokens=400, max_rows=DRAFT_ROWS)
    kinds: list[dict[str, Any]] = [dict(max_new_tokens=n) for n in range(1, 23)]
    kinds += [dict(max_new_tokens=22, eos=token) for token in set(whole)]
    kinds += [dict(max_new_tokens=22, stop=[whole[at : at + 2], [60, 60]]) for at in range(21)]
    for fields in kinds:
        found = engine.submit(Request(prompt=PATTERN * 3, lookup=True, **fields))
        engine.run()
        assert_equal(found, write(model, PATTERN * 3, **fields))
        accepted += found.n_accepted
        longer = Request(prompt=[*PATTERN * 3, *found.written[:3]], max_new_tokens=5, scored=True)
        after = engine.submit(longer)
        engine.run()
        assert after.n_cached > 0
        assert after.scores == pytest.approx(
            write(model, longer.prompt, max_new_tokens=5, scored=True).scores, abs=1e-5
        )
    assert accepted > 40


def test_a_step_that_failed_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one with drafts, whose rows were in the batch when it failed."""
    model, sizes, real, failed = decoder("llama"), list[int](), ModelRunner.decode, False
    requests = [Request(prompt=PATTERN * 3, lookup=True, max_new_tokens=12), Request(prompt=[7, 7], max_new_tokens=12)]
    expected = [write(model, request.prompt, max_new_tokens=12).ids for request in requests]

    def decode(self: ModelRunner, *args: Any) -> Tensor:
        nonlocal failed
        sizes.append(self.n)
        failed = not failed and self.n > 2
        if failed:
            raise RuntimeError("a step that fails")
        return real(self, *args)

    monkeypatch.setattr(ModelRunner, "decode", decode)
    engine = Engine(model, max_tokens=400, max_rows=DRAFT_ROWS)
    tickets = [engine.submit(request) for request in requests]
    while engine.is_busy:
        with contextlib.suppress(RuntimeError):
            engine.step()
    assert max(sizes) > 2
    assert [ticket.ids for ticket in tickets] == expected


def test_a_text_may_fill_the_model() -> None:
    model = decoder("gpt2")
    room = model.config.max_len - 18
    assert_equal(
        write(model, PATTERN * 3, max_new_tokens=room, lookup=True), write(model, PATTERN * 3, max_new_tokens=room)
    )


def test_sparse_patterns() -> None:
    fields: dict[str, Any] = dict(max_len=320, n_layers=2, sparsity="block=16, window=3, n_random=1, seed=5")
    model = decoder("llama", **fields)
    found = write(model, PATTERN * 30, max_new_tokens=60, lookup=True, scored=True)
    assert_equal(found, write(model, PATTERN * 30, max_new_tokens=60, scored=True))
    assert found.n_drafted > 0


@pytest.mark.parametrize("kind", [0, 1])
def test_grammars(kind: int) -> None:
    """What the grammar allows depends on the draft; a draft that it forbids is never accepted."""
    model = model_of("llama", torch.float32)
    drafted = 0
    for seed in range(5):
        fields: Any = dict(grammar=grammar(kind), strategy=Strategy(temperature=1.0), max_new_tokens=18, seed=seed)
        plain = write(model, PATTERN, **fields)
        prompt = [*plain.ids, *PATTERN, *plain.ids]
        found = write(model, prompt, lookup=True, **fields)
        assert_equal(found, write(model, prompt, **fields))
        drafted += found.n_drafted
    assert drafted > 0


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("on_gpu", [False, True])
def test_among_others(on_gpu: bool) -> None:
    """Several texts at once, some with a lookup, at random times; also the engine's ways on a GPU, run on the CPU."""
    model, rng = decoder("llama"), random.Random("drafts")
    made = Engine(model, max_tokens=600, max_rows=6, prefill_tokens=30)
    requests = list[Request]()
    for place in range(60):
        strategy = Strategy(temperature=rng.choice([0, 0.5]), repetition_penalty=rng.choice([1.0, 1.0, 1.05]))
        more: dict[str, Any] = dict(
            lookup=rng.random() < 0.7, strategy=strategy, max_new_tokens=rng.choice([1, 2, 9, 18])
        )
        prompt = rng.choice([PATTERN * 2, [7, 7, 7], ids(rng, 17), ids(rng, 1)])
        requests.append(Request(prompt=prompt, seed=place, scored=True, name=f"request {place}", **more))
    done = crowd(on_a_gpu(made) if on_gpu else made, model, requests, rng, 1e-5)
    assert sum(ticket.n_accepted for ticket in done) > 20


def test_many_texts_leave_no_room_for_drafts() -> None:
    model = decoder("gpt2")
    engine = Engine(model, max_tokens=2000, max_rows=DRAFT_ROWS)
    tickets = [engine.submit(Request(prompt=PATTERN * 3, max_new_tokens=9, lookup=True)) for _ in range(DRAFT_ROWS)]
    engine.run()
    assert sum(ticket.n_drafted for ticket in tickets) == 0


def test_the_words_of_the_library() -> None:
    model = decoder("gpt2")
    prompts = [PATTERN * 3, [7, 7, 7]]
    plain = ch.generate(model, prompts, max_new_tokens=17)
    assert ch.generate(model, prompts, max_new_tokens=17, lookup=True) == plain
    assert list(stream(model, prompts[0], max_new_tokens=17, lookup=True)) == plain[0]
    tokenizer = ch.train_tokenizer(texts=["the cat sat on the mat"] * 9, kind="bpe", vocab_size=300)
    writer = decoder("gpt2", vocab_size=tokenizer.vocab_size)
    texts = write_texts(writer, tokenizer, ["the cat", "the mat"], max_new_tokens=9)
    assert write_texts(writer, tokenizer, ["the cat", "the mat"], max_new_tokens=9, lookup=True) == texts


def test_refusals() -> None:
    model = decoder("gpt2")
    with pytest.raises(InputError, match=r"lookup is for decoders, without beams; got shape='decoder', beams=2; leave"):
        Engine(model).submit(Request(prompt=[5], max_new_tokens=3, beams=2, lookup=True))
    translator = make("original")
    with pytest.raises(
        InputError, match=r"lookup is for decoders, without beams; got shape='encoder-decoder', beams=1"
    ):
        Engine(translator).submit(Request(source=[5], max_new_tokens=3, lookup=True))
    with pytest.raises(
        InputError, match=rf"lookup needs rows for its drafts; got max_rows=1; raise it, best to {DRAFT_ROWS}"
    ):
        Engine(model, max_rows=1).submit(Request(prompt=[5], max_new_tokens=3, lookup=True))


# The distribution, against probabilities that are computed here.

SIZE, NEW, TEXTS = 5, 4, 1500
CHANCE = 1e-6  # that a right program fails one of these tests, if seeds were drawn anew; ours are fixed


def probabilities(model: Decoder, prompt: list[int], strategy: Strategy) -> dict[tuple[int, ...], float]:
    """Of every text of NEW tokens, in float64, from whole forward passes."""
    texts = list(product(range(SIZE), repeat=NEW))
    logits = model.double()(torch.tensor([[*prompt, *text] for text in texts]))[:, len(prompt) - 1 : -1]
    model.float()
    probs = (logits / strategy.temperature).softmax(-1)
    order = probs.sort(-1, descending=True)
    kept = order.values.cumsum(-1) - order.values < strategy.top_p
    kept[..., strategy.top_k or SIZE :] = False
    probs = probs * torch.zeros_like(kept).scatter(-1, order.indices, kept)
    probs /= probs.sum(-1, keepdim=True)
    each = probs.gather(-1, torch.tensor(texts)[..., None]).prod(1)[:, 0]
    return dict(zip(texts, each.tolist(), strict=True))


def chi_square_limit(n_cells: int) -> float:
    """What a chi-square variable exceeds with CHANCE (Wilson and Hilferty 1931)."""
    z, freedom = torch.special.ndtri(torch.tensor(1 - CHANCE, dtype=torch.float64)).item(), n_cells - 1
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "strategy", [Strategy(temperature=1.0), Strategy(temperature=0.7, top_k=3), Strategy(temperature=1.4, top_p=0.8)]
)
@pytest.mark.usefixtures("unchecked")
def test_the_distribution_is_the_models(strategy: Strategy) -> None:
    model = build(Config.from_dict({**SMALL, **KINDS["llama"], "vocab_size": SIZE, "init_std": 0.3}), seed=3).eval()
    assert isinstance(model, Decoder)
    prompt = [
        0,
        1,
        *ch.generate(model, [[0, 1]], max_new_tokens=18, eos=())[0],
    ]  # its most likely text: drafts are often right
    with torch.no_grad():
        expected = probabilities(model, prompt, strategy)
    engine, found, drafted, accepted = (
        Engine(model, max_tokens=64, max_rows=DRAFT_ROWS),
        Counter[tuple[int, ...]](),
        0,
        0,
    )
    for seed in range(TEXTS):
        request = Request(prompt=prompt, max_new_tokens=NEW, strategy=strategy, seed=seed, eos=(), lookup=True)
        ticket = engine.submit(request)
        engine.run()
        found[tuple(ticket.ids)] += 1
        drafted, accepted = drafted + ticket.n_drafted, accepted + ticket.n_accepted
    assert drafted > TEXTS
    assert drafted / 5 < accepted < drafted * 0.95
    assert all(expected[text] > 0 for text in found)
    cells = [text for text, chance in expected.items() if chance * TEXTS >= 5]
    sums = [(found[text], expected[text] * TEXTS) for text in cells]
    sums.append((TEXTS - sum(n for n, _ in sums), TEXTS - sum(n for _, n in sums)))
    assert len(cells) > 20
    assert sum((n - wanted) ** 2 / wanted for n, wanted in sums) < chi_square_limit(len(sums))


# Prompt lookup alone.


def test_what_followed_is_drafted() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert lookup.draft(7) == [], "nothing repeats"
    lookup.extend([2, 3])
    assert lookup.draft(7) == [4]  # after two tokens, one is likely enough
    lookup.extend([4, 5, 6])
    assert lookup.draft(7) == [7, 8, 9]
    assert lookup.draft(1) == [7]
    assert lookup.draft(0) == []
    assert lookup.draft(-3) == []
    lookup.extend([60])
    assert lookup.draft(7) == [], "another token came"


def test_the_longest_match_that_is_known_wins() -> None:
    lookup = PromptLookup([1, 2, 3, 10, 50, 2, 3, 20, 51, 1])
    lookup.extend([2, 3])
    assert lookup.draft(1) == [10], "after [1, 2, 3], and not what last followed [2, 3]"


def test_a_text_that_repeats_itself() -> None:
    lookup = PromptLookup([1, 2] * 30)
    assert lookup.draft(7) == [1, 2] * 3 + [1]


def test_it_learns_how_often_it_is_right() -> None:
    """Also from predictions that were not drafted: where the same pairs go on differently, it stops to draft."""
    rng = random.Random(0)
    lookup, drafted = PromptLookup([]), 0
    for _ in range(300):
        lookup.extend([1, 2])
        drafted += len(lookup.draft(7))
        lookup.extend([rng.randrange(3, 100)])
    assert 0 < drafted < 20
    before = lookup.rates[2]
    assert before < FIRST_RATES[2] / 2
    for _ in range(20):
        lookup.extend([1, 2, 50, rng.randrange(100, 200)])
    assert lookup.rates[2] > 2 * before


def test_text_without_repetition_costs_few_drafts() -> None:
    rng = random.Random(1)
    lookup, drafted = PromptLookup([]), 0
    for _ in range(4000):
        drafted += len(lookup.draft(7))
        lookup.extend([min(int(rng.paretovariate(0.7)), 5000)])  # as often as words are
    assert drafted / 3 < 0.02 * 4000, "a row takes a third of a step at most"
