"""A draft model: the text is the one without it, whatever it drafts; how much it drafts follows what that gains."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import clearhead as ch
from clearhead.engine import draft_model
from clearhead.engine.draft_model import FIRST_RATE, ROW_BYTES, DraftCost, draft_cost, draft_length
from clearhead.engine.speculation import DRAFT_ROWS
from clearhead.errors import InputError
from clearhead.generation import Engine, Request, Strategy, stream, write_texts
from clearhead.generation.engines import make_engine
from clearhead.models import Decoder
from clearhead.quantization.integer import quantize
from tests.engine.test_async_scheduling import crowd, on_a_gpu
from tests.engine.test_engine import grammar, ids, model_of
from tests.engine.test_native_step import OTHERS, make
from tests.engine.test_speculation import DECODERS, PATTERN, STRATEGIES, assert_equal, decoder, write

SAMPLED = Strategy(temperature=0.7, top_k=20, top_p=0.9)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models would rarely draft: one that costs as much as its target never pays."""
    monkeypatch.setattr(draft_model, "draft_length", lambda rate, cost, most, n_running: max(most, 0))


def nearly(model: Decoder, seed: int = 0) -> Decoder:
    """A copy with other weights, that chooses the same token about half of the time."""
    found, generator = make_copy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in found.parameters():
            weight += 0.1 * weight.std(correction=0) * torch.randn(weight.shape, generator=generator)
    return found


def make_copy(model: Decoder) -> Decoder:
    found = ch.build(model.config).eval()
    found.load_state_dict(model.state_dict())
    assert isinstance(found, Decoder)
    return found


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("name", DECODERS)
def test_the_text_is_the_same(name: str, kind: str) -> None:
    """With a draft model that is the model itself, one that is nearly the same, and another one."""
    if name in OTHERS and kind != "fp32":
        pytest.skip("computed by torch, which adds up in another order for other numbers of rows")
    exact = decoder(name)
    model = exact if kind == "fp32" else quantize(make_copy(exact), kind)
    drafts = {"itself": model, "nearly": nearly(exact), "another": decoder("llama" if name != "llama" else "gpt2")}
    rates = dict[str, float]()
    for draft, each in drafts.items():
        drafted = accepted = 0
        for prompt in (PATTERN * 3, PATTERN[:1]):
            for strategy in (Strategy(), SAMPLED):
                fields: Any = dict(max_new_tokens=23, strategy=strategy, scored=name not in OTHERS, seed=3)
                found = write(model, prompt, draft=each, **fields)
                assert_equal(found, write(model, prompt, **fields))
                drafted, accepted = drafted + found.n_drafted, accepted + found.n_accepted
        rates[draft] = accepted / drafted
    assert rates["itself"] == 1
    assert rates["nearly"] > 0.1
    assert rates["another"] < rates["nearly"]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_draft_follows_the_strategy(strategy: str) -> None:
    """With the same weights it chooses the same tokens, under every penalty: not one draft is wrong."""
    model, fields = decoder("llama"), dict[str, Any](max_new_tokens=22, scored=True, alternatives=3)
    fields |= dict(strategy=Strategy(**STRATEGIES[strategy]), eos=(17, 60) if strategy == "min_new_tokens" else None)
    for seed in range(2):
        expected = write(model, PATTERN, seed=seed, **fields)
        found = write(model, PATTERN, draft=make_copy(model), seed=seed, **fields)
        assert_equal(found, expected)
        assert found.n_accepted == found.n_drafted > 0
        assert_equal(write(model, PATTERN, draft=nearly(model), seed=seed, **fields), expected)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("kind", [0, 1])
def test_the_draft_follows_the_grammar(kind: int) -> None:
    model, drafted = model_of("llama", torch.float32), 0
    for seed in range(3):
        fields: Any = dict(grammar=grammar(kind), strategy=Strategy(temperature=1.0), max_new_tokens=18, seed=seed)
        expected = write(model, PATTERN, **fields)
        found = write(model, PATTERN, draft=make_copy(model), **fields)
        assert_equal(found, expected)
        assert found.n_accepted == found.n_drafted
        assert_equal(write(model, PATTERN, draft=nearly(model), **fields), expected)
        drafted += found.n_drafted
    assert drafted > 0


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("near", [False, True])
def test_what_ends_a_text_may_stand_in_a_draft(near: bool) -> None:
    """Each limit, each token as eos, each pair as a stop; the blocks that enter the prefix cache hold what they say."""
    model = decoder("llama")
    draft = nearly(model) if near else make_copy(model)
    whole = write(model, PATTERN * 3, max_new_tokens=22).ids
    engine = Engine(model, max_tokens=400, max_rows=DRAFT_ROWS)
    kinds: list[dict[str, Any]] = [dict(max_new_tokens=n) for n in range(1, 23)]
    kinds += [dict(max_new_tokens=22, eos=token) for token in set(whole)]
    kinds += [dict(max_new_tokens=22, stop=[whole[at : at + 2], [60, 60]]) for at in range(21)]
    for fields in kinds:
        found = engine.submit(Request(prompt=PATTERN * 3, draft=draft, **fields))
        engine.run()
        assert_equal(found, write(model, PATTERN * 3, **fields))
        longer: Any = dict(prompt=[*PATTERN * 3, *found.written[:3]], max_new_tokens=5, scored=True)
        after = engine.submit(Request(**longer))
        engine.run()
        assert after.scores == pytest.approx(write(model, **longer).scores, abs=1e-5)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("on_gpu", [False, True])
def test_among_others(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several texts at once, at random times, some cancelled: drafts of one to three tokens, or none for some steps."""
    model, rng = decoder("llama"), random.Random("draft models")
    monkeypatch.setattr(draft_model, "draft_length", lambda rate, cost, most, n: min(most, rng.randrange(4)))
    drafts = [make_copy(model), nearly(model), decoder("gpt2"), None]
    made = Engine(model, max_tokens=180, max_rows=DRAFT_ROWS, prefill_tokens=30)
    requests = list[Request]()
    for place in range(60):
        strategy = Strategy(temperature=rng.choice([0, 0.5]), repetition_penalty=rng.choice([1.0, 1.0, 1.05]))
        prompt = rng.choice([PATTERN * 2, [7, 7, 7], ids(rng, 17), ids(rng, 1)])
        more: dict[str, Any] = dict(draft=rng.choice(drafts), max_new_tokens=rng.choice([1, 9, 18, 22]), seed=place)
        requests.append(Request(prompt=prompt, strategy=strategy, scored=True, name=f"request {place}", **more))
    done = crowd(on_a_gpu(made) if on_gpu else made, model, requests, rng, 1e-5)
    assert sum(ticket.n_accepted for ticket in done) > 20
    for ticket in done:
        alone = make_engine(model, [plain := replace(ticket.request, draft=None)])
        expected = alone.submit(plain)
        alone.run()
        assert ticket.ids == expected.ids
    assert not made.speculator.draft_models


@pytest.mark.usefixtures("eager")
def test_nothing_is_kept() -> None:
    """Neither in the engine nor on the models: a draft model that nobody else holds is freed."""
    model = decoder("gpt2")
    draft = nearly(model)
    names, held = set(vars(draft)), weakref.ref(draft)
    engine = Engine(model, max_tokens=200, max_rows=DRAFT_ROWS)
    ticket = engine.submit(Request(prompt=PATTERN, draft=draft, max_new_tokens=12))
    engine.step()
    engine.step()
    assert [one.runner.n for one in engine.speculator.draft_models.values()] == [1]
    engine.cancel(ticket)
    assert not engine.speculator.draft_models
    assert set(vars(draft)) == names
    engine.submit(Request(prompt=PATTERN, max_new_tokens=2))
    engine.run()
    del ticket, draft
    gc.collect()
    assert held() is None


@pytest.mark.usefixtures("eager")
def test_a_draft_model_in_training_drafts_without_dropout() -> None:
    model = decoder("gpt2", dropout=0.5)
    draft = make_copy(model).train()
    found = write(model, PATTERN, draft=draft, max_new_tokens=20)
    assert found.n_accepted == found.n_drafted > 0
    assert draft.training


@pytest.mark.usefixtures("eager")
def test_a_text_much_longer_than_its_prompt() -> None:
    model = decoder("llama", max_len=151)
    found = write(model, PATTERN * 3, draft=make_copy(model), max_new_tokens=133)
    assert_equal(found, write(model, PATTERN * 3, max_new_tokens=133))
    assert found.n_accepted == found.n_drafted > 100


def test_long_prompts_come_in_parts(monkeypatch: pytest.MonkeyPatch, eager: None) -> None:
    monkeypatch.setattr(draft_model, "PREFILL_TOKENS", 7)
    model = decoder("llama")
    found = write(model, PATTERN * 4, draft=make_copy(model), max_new_tokens=16)
    assert_equal(found, write(model, PATTERN * 4, max_new_tokens=16))
    assert found.n_accepted == found.n_drafted > 0


def test_the_words_of_the_library() -> None:
    model, small = decoder("gpt2", n_layers=12), decoder("gpt2", n_layers=1)
    prompts = [PATTERN * 3, [7, 7, 7]]
    for options in (dict[str, Any](), dict[str, Any](temperature=0.8, seed=5)):
        plain = ch.generate(model, prompts, max_new_tokens=17, **options)
        assert ch.generate(model, prompts, max_new_tokens=17, draft=small, **options) == plain
        assert list(stream(model, prompts[0], max_new_tokens=17, draft=small, **options)) == plain[0]
    tokenizer = ch.train_tokenizer(texts=["the cat sat on the mat"] * 9, kind="bpe", vocab_size=300)
    writer, helper = (decoder("gpt2", vocab_size=tokenizer.vocab_size, n_layers=n) for n in (12, 1))
    texts = write_texts(writer, tokenizer, ["the cat", "the mat"], max_new_tokens=9)
    assert write_texts(writer, tokenizer, ["the cat", "the mat"], max_new_tokens=9, draft=helper) == texts


@pytest.mark.usefixtures("eager")
def test_a_stop_text_may_stand_in_a_draft() -> None:
    """The tokens behind it, of the same step, belong neither to the text nor to its tokens."""
    tokenizer = ch.train_tokenizer(texts=["the cat sat on the mat"] * 9, kind="bpe", vocab_size=300)
    model, sampled = decoder("llama", vocab_size=tokenizer.vocab_size), dict[str, Any](temperature=0.4, seed=1)
    sampled |= dict(max_new_tokens=22, return_scores=True)
    (whole,) = write_texts(model, tokenizer, ["the mat"], **sampled)
    stops = {token.name for token in whole.tokens if token.name in whole.text}
    assert len(stops) > 5
    for stop in stops:
        found, expected = (
            write_texts(model, tokenizer, ["the mat"], stop=[stop], draft=draft, **sampled)[0]
            for draft in (make_copy(model), None)
        )
        assert found.text == expected.text
        assert [token.name for token in found.tokens] == [token.name for token in expected.tokens]


# How much is drafted.


def test_as_many_as_pay() -> None:
    dear, fair = DraftCost(1.2, 0.2), DraftCost(0.3, 0.1)
    assert draft_length(0.9, dear, 7, 1) == 0, "a draft model as large as the model"
    assert draft_length(0.2, fair, 7, 1) == 0, "it is rarely right"
    assert draft_length(0.5, fair, 7, 1) == 1
    assert 3 <= draft_length(0.9, fair, 7, 1) <= 5
    assert draft_length(0.9, fair, 2, 1) == 2
    assert draft_length(1.0, fair, 7, 1) == 7
    assert draft_length(1.0, fair, 0, 1) == draft_length(1.0, fair, -2, 1) == 0
    assert draft_length(0.7, fair, 7, 1) > draft_length(0.7, fair, 7, 5) == 0, "others share the step that is saved"


def test_the_length_is_the_best_one() -> None:
    """Against the sum over all outcomes."""

    def speed(n: int, rate: float, cost: DraftCost, n_running: int) -> float:
        tokens = sum((k + 1) * rate**k * ((1 - rate) if k < n else 1) for k in range(n + 1))
        return n_running * tokens / (1 + (n_running - 1) * cost.row + n_running * n * cost.token)

    rng = random.Random(0)
    for _ in range(200):
        case = rng.random(), DraftCost(rng.uniform(0.05, 1), rng.uniform(0.05, 0.4)), rng.randint(1, 4)
        found = speed(draft_length(case[0], case[1], 7, case[2]), *case)
        assert found == pytest.approx(max(speed(n, *case) for n in range(8)))


def test_it_stops_where_it_is_wrong() -> None:
    """Another model soon drafts no more."""
    model, small = (decoder(name, n_layers=n, max_len=151) for name, n in (("llama", 24), ("gpt2", 1)))
    wrong = write(model, PATTERN, max_new_tokens=140, draft=small)
    assert 0 < wrong.n_drafted < 40
    engine = Engine(model, max_tokens=200, max_rows=DRAFT_ROWS)
    engine.submit(Request(prompt=PATTERN, draft=small, max_new_tokens=34))
    while not engine.speculator.draft_models:
        engine.step()
    (one,) = engine.speculator.draft_models.values()
    assert one.rate <= FIRST_RATE


def test_the_cost_follows_the_sizes() -> None:
    model, small = decoder("llama", n_layers=24), decoder("llama", n_layers=6)
    exact, sampled = (draft_cost(small, model, Strategy(temperature=each)) for each in (0.0, 1.0))
    assert exact.row == pytest.approx(ROW_BYTES / 4, rel=0.1)
    assert exact.token - exact.row == pytest.approx(0.25, abs=0.05)
    assert exact.token < sampled.token, "drawing takes time, too"
    packed = draft_cost(small, quantize(make_copy(model), "int8"), Strategy())
    assert packed.row > 2 * exact.row
    assert packed.token > 2 * exact.token


def test_many_texts_leave_no_room_for_drafts() -> None:
    model, small = decoder("gpt2", n_layers=12), decoder("gpt2", n_layers=1)
    engine = Engine(model, max_tokens=2000, max_rows=DRAFT_ROWS)
    tickets = [engine.submit(Request(prompt=PATTERN, max_new_tokens=9, draft=small)) for _ in range(DRAFT_ROWS)]
    engine.run()
    assert sum(ticket.n_drafted for ticket in tickets) == 0


@pytest.mark.usefixtures("unchecked")
def test_refusals() -> None:
    model = decoder("gpt2")

    def refused(words: str, on: Any = model, prompt: Sequence[int] = (5,), **fields: Any) -> None:
        with pytest.raises(InputError, match=words):
            Engine(on, max_tokens=200).submit(Request(prompt=prompt, max_new_tokens=4, **fields))

    refused(
        r"draft model is a decoder, .* without beams; got .* beams=2; leave draft or beams out", draft=model, beams=2
    )
    pair: Any = make("original")
    refused(r"got shape='encoder-decoder' for shape='decoder'", draft=pair)
    refused(r"got shape='decoder' for shape='encoder-decoder'", pair, prompt=(), source=[5], draft=model)
    refused(r"got shape='str' for", draft="small")
    refused(r"lookup and a draft model both draft; .* leave one of them out", draft=model, lookup=True)
    refused(r"vocab_size=59 for vocab_size=61; take one with the same tokenizer", draft=decoder("gpt2", vocab_size=59))
    short = decoder("gpt2", max_len=9)
    refused(
        r"too long for the draft model: 6 tokens \+ max_new_tokens=4 > its max_len=9",
        draft=short,
        prompt=PATTERN,
    )
    with pytest.raises(InputError, match=r"draft needs rows for its drafts; got max_rows=1; raise it"):
        Engine(model, max_rows=1).submit(Request(prompt=[5], max_new_tokens=3, draft=model))
    refused(r"device of the model; got meta for cpu; move one", draft=decoder("gpt2").to("meta"))
