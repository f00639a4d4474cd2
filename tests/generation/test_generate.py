"""generate: the texts of transformers, and for each prompt the text that it gets alone."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from clearhead.config import Generation
from clearhead.engine.runner import ModelRunner
from clearhead.errors import InputError
from clearhead.generation import Engine, Hypothesis, Request, engines, generate
from clearhead.inside.evaluation_mode import eval_mode, may_train
from tests.generation.models import DECODERS, ENDS, cut, pair, texts
from tests.models.tiny import tiny

# Options of ours, and the same in theirs.
GREEDY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "min_new_tokens": (dict(min_new_tokens=5), dict(min_new_tokens=5)),
    "repetition_penalty": (dict(repetition_penalty=1.7), dict(repetition_penalty=1.7)),
    "no_repeat_ngram": (dict(no_repeat_ngram=2), dict(no_repeat_ngram_size=2)),
    "suppress": (dict(suppress=[5, 7]), dict(suppress_tokens=[5, 7])),
    "logit_bias": (dict(logit_bias={5: 1.5, 7: -3}), dict(sequence_bias=[[[5], 1.5], [[7], -3.0]])),
}


@pytest.mark.slow
@pytest.mark.parametrize("option", GREEDY)
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_as_transformers(name: str, option: str) -> None:
    ours_options, their_options = GREEDY[option]
    lengths: set[int] = set()
    for seed in range(3):
        theirs, ours = pair(name, seed)
        prompts = texts(5, seed=seed)
        for prompt, text in zip(prompts, generate(ours, prompts, max_new_tokens=13, **ours_options), strict=True):
            whole = theirs.generate(torch.tensor([prompt]), max_new_tokens=13, do_sample=False, **their_options)
            assert text == cut(whole[0, len(prompt) :])
            lengths.add(len(text))
    assert len(lengths) > 2  # some ended early, and not all alike


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(temperature=1.3, seed=3),
        dict(temperature=0.8, top_k=11, top_p=0.9, min_p=0.02, seed=-5),
        dict(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, no_repeat_ngram=2),
        dict(temperature=2.0, min_new_tokens=3, stop=[[5], [7, 9]]),
    ],
    ids=str,
)
def test_batched_is_single(options: dict[str, Any]) -> None:
    """Prompts of many lengths, in one batch, in several, and one by one; texts are longer than the window."""
    model = tiny("mistral")
    prompts, common = texts(11), dict(max_new_tokens=11, eos=ENDS, return_scores=True)
    seed = options.get("seed", 0)
    alone = [generate(model, [p], **common | options | dict(seed=seed + i))[0] for i, p in enumerate(prompts)]
    for budget in (16_384, 71):
        assert_same(generate(model, prompts, batch_tokens=budget, **common | options), alone)
    other = list(reversed(range(11)))
    moved = generate(model, [prompts[i] for i in other], **common | options | dict(seed=[seed + i for i in other]))
    assert_same(moved, [alone[i] for i in other])
    assert len({len(one.tokens) for one in alone}) > 2


def assert_same(found: list[Hypothesis], expected: list[Hypothesis]) -> None:
    assert [(one.tokens, one.finished) for one in found] == [(one.tokens, one.finished) for one in expected]
    # float64: a sum over a larger batch may be in another order
    assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-9)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "alibi"])
def test_cached_is_uncached(name: str) -> None:
    """Each token is the likeliest by a whole forward pass, and the score is the sum of their log-probabilities."""
    model = tiny(name)
    for prompt, found in zip(
        texts(5), generate(model, texts(5), max_new_tokens=11, eos=ENDS, return_scores=True), strict=True
    ):
        text, score = list(prompt), 0.0
        while len(text) - len(prompt) < 11 and text[len(prompt) :][-1:] not in [[end] for end in ENDS]:
            best = model(torch.tensor([text]))[0, -1].log_softmax(-1).max(-1)
            text, score = [*text, int(best.indices)], score + float(best.values)
        ended = text[-1] in ENDS
        assert found.tokens == text[len(prompt) : len(text) - ended]
        assert found.finished == ended
        assert found.score == pytest.approx(score, abs=1e-9)


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0, top_k=3),
        dict(temperature=1e-6),
        dict(temperature=1.0, top_k=1),
        dict(temperature=1, top_p=1e-9),
    ],
)
def test_temperature_0_is_greedy(options: dict[str, Any]) -> None:
    model, prompts = pair("gpt2")[1], texts(11)
    assert generate(model, prompts, max_new_tokens=7, seed=9, **options) == generate(model, prompts, max_new_tokens=7)


def test_seeds() -> None:
    model, prompt = pair("gpt2")[1], texts(1)[0]
    drawn = generate(model, [prompt] * 7, temperature=1.5, eos=(), max_new_tokens=11)
    assert len({tuple(text) for text in drawn}) == 7
    assert generate(model, [prompt] * 7, temperature=1.5, eos=(), max_new_tokens=11) == drawn
    again = generate(model, [prompt] * 3, temperature=1.5, eos=(), max_new_tokens=11, seed=[4, 4, 0])
    assert again == [drawn[4], drawn[4], drawn[0]]


def test_ends_and_stops() -> None:
    """The tokens that end a text are not part of it."""
    model, prompt = pair("gpt2")[1], texts(1)[0]
    whole = generate(model, [prompt], eos=(), max_new_tokens=19, temperature=1.0)[0]
    assert len(whole) == 19
    run = dict(max_new_tokens=19, temperature=1.0, return_scores=True)
    for options, at in [
        (dict(eos=whole[6]), whole.index(whole[6])),
        (dict(eos=(), stop=[whole[5:8]]), 5),
        (dict(eos=(), stop=[[52, 52], whole[2:4], whole[8:9]]), min(2, whole.index(whole[8]))),
    ]:
        found = generate(model, [prompt], **run | options)[0]
        assert (found.tokens, found.finished) == (whole[:at], True)
    assert not generate(model, [prompt], eos=(), **run)[0].finished


def test_what_is_done_leaves_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes, real = pair("gpt2")[1], list[int](), ModelRunner.decode
    monkeypatch.setattr(ModelRunner, "decode", lambda runner, *args: sizes.append(runner.n) or real(runner, *args))
    found = generate(model, texts(13), temperature=1.0, max_new_tokens=23)
    assert len({len(text) for text in found}) > 4
    assert sizes[0] > 10  # one may end with its first token
    assert sizes[-1] <= 3
    assert sum(sizes) < 13 * len(sizes) / 2


def test_an_empty_prompt_is_bos() -> None:
    model = pair("gpt2")[1]
    assert generate(model, [[], [5]], max_new_tokens=7) == generate(model, [[1], [5]], max_new_tokens=7)
    assert generate(model, []) == []


def test_the_checkpoints_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompts = pair("gpt2")[1], texts(7)
    first = {text[0] for text in generate(model, prompts, eos=(), max_new_tokens=3)}
    monkeypatch.setattr(model, "generation", replace(model.generation, begin_suppress=tuple(first)))
    assert not first & {text[0] for text in generate(model, prompts, eos=(), max_new_tokens=3)}
    monkeypatch.setattr(model, "generation", Generation(suppress=tuple(first)))
    assert not first & {token for text in generate(model, prompts, max_new_tokens=3) for token in text}


def test_modes_are_put_back() -> None:
    model = tiny("gpt2", dropout=0.5, attention_dropout=0.5)
    expected = generate(model, texts(3), max_new_tokens=7)
    model.train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    assert generate(model, texts(3), max_new_tokens=7) == expected
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ZeroDivisionError), eval_mode(model):
        1 / 0  # noqa: B018
    assert [module.training for module in model.modules()] == modes


def test_dropout_stays_off_until_the_last_caller_has_finished() -> None:
    """Of two threads that generate, the one that ends first does not switch dropout on for the other."""
    model = tiny("gpt2", dropout=0.5).train()
    model.get_submodule("blocks.1").eval()
    modes = [module.training for module in model.modules()]
    first, second = eval_mode(model), eval_mode(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(module.training for module in model.modules())
    assert may_train(model)
    second.__exit__(None, None, None)
    assert [module.training for module in model.modules()] == modes


@pytest.mark.parametrize(
    ("prompts", "options", "words"),
    [
        ([[5], []], {}, "prompt 1 is empty, and the model has no bos; got.*give at least one token"),
        ([[5], [6] * 30], {}, r"prompt 1 is too long: 30 tokens \+ max_new_tokens=11 > max_len=37; shorten"),
        ([[5, 53]], {}, r"prompt 0 holds ids from 5 to 53; the vocabulary has 0 \.\. 52; is this the model's own"),
        ([[5, -1]], {}, "prompt 0 holds ids from -1 to 5"),
        ([5, 6], {}, "prompts are a list of lists of ids; got prompt 0 = '5'; encode text with the model's tokenizer"),
        (["text"], {}, "got prompt 0 = 'text'"),
        ([[5.0]], {}, "prompts are a list of lists of ids"),
        ([[5]], dict(max_new_tokens=0), "max_new_tokens is a whole number of at least 1; got 0; raise it"),
        ([[5]], dict(batch_tokens=0), "batch_tokens is a whole number of at least 1; got 0"),
        ([[5]], dict(eos=53), r"eos holds ids from 53 to 53; the vocabulary has 0 \.\. 52"),
        ([[5]], dict(stop=[[3], []]), r"a stop is a list of at least one id; got \[\[3\], \[\]\]; leave the empty"),
        ([[5]], dict(stop=["\n"]), r"stops are a list of lists of ids; got stop 0"),
        ([[5]], dict(suppress=[54]), "logit_bias or suppress holds ids from 54 to 54"),
        ([[5]], dict(logit_bias={54: 1.0}), "logit_bias or suppress holds ids from 54 to 54"),
        ([[5]], dict(seed=[1, 2]), r"one number of up to 63 bits, or one for each of 1 prompts; got \[1, 2\]; leave"),
        ([[5]], dict(seed=2**63), "seed is one number of up to 63 bits, .* got 9223372036854775808"),
        ([[5]], dict(top_p=7), "top_p must be above 0 and at most 1; got 7; 1 is off, 0.95 is usual"),
        ([[5]], dict(topp=0.5), "there is no option 'topp' .value 0.5.; did you mean 'top_p'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_input(prompts: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        generate(tiny("gpt2", max_len=37), prompts, **dict(max_new_tokens=11) | options)


@pytest.mark.usefixtures("unchecked")
def test_other_shapes() -> None:
    other: Any = pair("marian")[1]
    with pytest.raises(
        InputError, match=r"takes a model of shape='decoder' over tokens; got.*translate for encoder-decoders"
    ):
        generate(other, [[5]])


# Runners that are kept between two calls, as on a GPU.


@pytest.fixture
def used_runners(monkeypatch: pytest.MonkeyPatch) -> list[ModelRunner]:
    """Keeps runners on a CPU too. Fills with the runner of each call."""
    runners, run = list[ModelRunner](), Engine.run
    monkeypatch.setattr(engines, "_keeps_runner", lambda _: True)
    monkeypatch.setattr(Engine, "run", lambda engine: runners.append(engine.runner) or run(engine))
    return runners


def test_the_next_call_reuses_the_runner(used_runners: list[ModelRunner]) -> None:
    """Unless it needs a larger one, or the weights have moved; a copy of the model has its own. The texts are the same."""
    model = tiny("gpt2", max_len=37)
    expected = [generate(model, prompts, max_new_tokens=5) for prompts in ([[3, 4]], [[5]] * 70)]
    used_runners.clear()
    engines._KEPT.clear()  # pyright: ignore[reportPrivateUsage]
    assert generate(model, [[3, 4]], max_new_tokens=5) == expected[0]
    assert generate(model, [[3, 4]], max_new_tokens=5) == expected[0]
    assert used_runners[0] is used_runners[1]
    assert generate(model, [[5]] * 70, max_new_tokens=5) == expected[1]
    assert generate(model, [[3, 4]], max_new_tokens=5) == expected[0]
    assert used_runners[1] is not used_runners[2] is used_runners[3]
    assert generate(copy.deepcopy(model), [[3, 4]], max_new_tokens=5) == expected[0]
    for weight in model.parameters():
        weight.data = weight.data.clone()
    assert generate(model, [[3, 4]], max_new_tokens=5) == expected[0]
    assert len(set(used_runners)) == 4


def test_two_calls_at_once_have_two_runners(used_runners: list[ModelRunner]) -> None:
    model, request = tiny("gpt2", max_len=37), Request(prompt=[3, 4], max_new_tokens=5)
    with engines.reuse_engine(model, [request]) as one, engines.reuse_engine(model, [request]) as other:
        assert one.runner is not other.runner
    generate(model, [[3, 4]], max_new_tokens=5)
    assert used_runners == [one.runner]


def test_a_kept_runner_keeps_no_model(used_runners: list[ModelRunner]) -> None:
    model = tiny("gpt2", max_len=37)
    generate(model, [[3, 4]], max_new_tokens=5)
    gone, runner = weakref.ref(model), used_runners.pop()
    runner.native_step = None  # on a GPU there is none
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt(), InputError("no")])
def test_an_interrupted_runner_is_not_used_again(
    error: BaseException, used_runners: list[ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2", max_len=37)
    generate(model, [[3, 4]], max_new_tokens=4)

    def fail(_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_step", fail)
        with pytest.raises(type(error)):
            generate(model, [[3, 4]], max_new_tokens=4)
    generate(model, [[3, 4]], max_new_tokens=4)
    assert used_runners[0] is used_runners[1] is not used_runners[2]


def test_a_mistyped_option_of_the_function_itself() -> None:
    for name in ("max_new_token", "max_tokens"):
        with pytest.raises(InputError, match=f"no option '{name}' .*did you mean 'max_new_tokens'"):
            generate(tiny("gpt2"), [[1]], **{name: 3})
