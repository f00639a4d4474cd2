"""Every exercise: its answer passes, what this library does passes, and each known mistake is found by its results."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead.lessons.exercises
from clearhead.kernels.cross_entropy import IGNORED
from clearhead.kernels.cross_entropy import cross_entropy as chunked
from clearhead.layers.attention import attend, masked_softmax
from clearhead.layers.cache import Cache
from clearhead.layers.linear import make_norm
from clearhead.lessons.catalogue import CATALOGUE, find_entry, load_exercise, next_entry
from clearhead.lessons.exercise import Exercise, Function, Mistake
from clearhead.lessons.exercises import bpe, decoder
from clearhead.lessons.grading import ALLOWED, difference, grade, run
from clearhead.lessons.solutions import solution_of
from clearhead.training.optimizers import Optimizers
from clearhead.training.recipe import Train

pytestmark = pytest.mark.usefixtures("unchecked")  # as a student runs it

NAMES = [entry.name for entry in CATALOGUE]
MISTAKES = [(name, mistake) for name in NAMES for mistake in load_exercise(name).mistakes]


def test_the_catalogue_is_the_folder() -> None:
    files = {file.stem for file in Path(clearhead.lessons.exercises.__file__).parent.glob("*.py")} - {"__init__"}
    assert set(NAMES) == files
    assert len(NAMES) == len(files) >= 15
    assert [load_exercise(name).name for name in NAMES] == NAMES


def test_the_next_one() -> None:
    assert next_entry("softmax") == find_entry("attention")
    assert next_entry(NAMES[-1]) is None


@pytest.mark.parametrize("name", NAMES)
def test_the_stub_asks_for_what_the_answer_does(name: str) -> None:
    exercise = load_exercise(name)
    assert list(inspect.signature(exercise.stub).parameters) == list(inspect.signature(exercise.answer).parameters)
    with pytest.raises(NotImplementedError, match=r"\w{3}"):
        inspect.unwrap(exercise.stub)(*([None] * len(inspect.signature(exercise.stub).parameters)))
    text = exercise.stub.__doc__ or ""
    assert "law" in text.lower()
    assert len(exercise.hints) >= 3
    assert len(exercise.cases()) + len(exercise.laws) >= 2


@pytest.mark.parametrize("name", [name for name in NAMES if name != "decoder"])
def test_the_answer_passes(name: str) -> None:
    exercise = load_exercise(name)
    found = grade(exercise, exercise.answer)
    assert found.passed, found
    assert found.diagnosis is None
    assert [finding.words for finding in found.findings] == [*exercise.cases(), *exercise.laws]


@pytest.mark.slow
def test_our_decoder_passes() -> None:
    exercise = load_exercise("decoder")
    assert grade(exercise, exercise.answer).passed


@pytest.mark.parametrize(
    ("name", "mistake"), MISTAKES, ids=[f"{name}: {mistake.words[:50]}" for name, mistake in MISTAKES]
)
def test_a_known_mistake_is_found(name: str, mistake: Mistake) -> None:
    found = grade(load_exercise(name), mistake.variant)
    assert not found.passed
    assert found.error is None
    assert found.diagnosis is not None
    assert found.diagnosis.startswith(mistake.words)
    if mistake.measure is not None:
        assert (
            any(character.isdigit() for character in found.diagnosis.partition("Measured: ")[2])
            or "nan" in found.diagnosis
        )


@pytest.mark.parametrize("name", [name for name in NAMES if load_exercise(name).mistakes])
def test_there_are_three_mistakes_and_their_sentences_differ(name: str) -> None:
    words = [mistake.words for mistake in load_exercise(name).mistakes]
    assert len(words) == len(set(words)) >= 3


@pytest.mark.parametrize("name", [name for name in NAMES if load_exercise(name).mistakes])
def test_mistakes_are_far_above_what_is_allowed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times as much would still tell them from the truth, and a tenth would still let the answer through."""
    exercise = load_exercise(name)
    assert exercise.reference is not None
    cases = [(args, exercise.reference(*args)) for args in exercise.cases().values()]
    monkeypatch.setattr("clearhead.lessons.grading.ALLOWED", 10 * ALLOWED)
    for mistake in exercise.mistakes:
        assert any(difference(run(exercise, mistake.variant, args)[0], expected) for args, expected in cases)
    monkeypatch.setattr("clearhead.lessons.grading.ALLOWED", ALLOWED / 10)
    assert not any(difference(run(exercise, exercise.answer, args)[0], expected) for args, expected in cases)


# Where an answer is written out, what this library runs is graded, too.


def our_norm(kind: str) -> Function:
    def norm(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        layer = make_norm(kind, x.shape[-1], eps=rest[-1])
        layer.load_state_dict({"weight": weight} | ({"bias": rest[0]} if kind == "layer" else {}))
        return layer(x).detach()

    return norm


def our_loss(logits: Tensor, targets: Tensor, real: Tensor) -> Tensor:
    loss, _, _ = chunked(logits, torch.eye(logits.shape[-1]), targets.masked_fill(~real, IGNORED))
    return loss / real.sum()


def our_cache(q: Tensor, k: Tensor, v: Tensor, cache: dict[str, Any]) -> Tensor:
    B, H, T, E = q.shape
    kept: Cache = cache.setdefault("kept", Cache(batch=B, max_len=31, n_layers=1, n_kv_heads=H, d_head=E))
    positions, mask = kept.place(T, None)
    keys, values = kept.layers[0].extend(k, v)
    out = attend(q, keys, values, replace(mask, causal=True))
    kept.advance(positions)
    return out


def our_optimizer(weight: Tensor, gradients: list[Tensor], lr: float, betas: Any, eps: float, decay: float) -> Any:
    layer = nn.Embedding(1, len(weight), _weight=weight[None].clone())  # a matrix: only those are decayed
    optimizer, path = Optimizers(layer, Train(weight_decay=decay, betas=betas), lr=lr), []
    optimizer.all[0].param_groups[0]["eps"] = eps
    for gradient in gradients:
        layer.weight.grad = gradient[None].clone()
        optimizer.step()
        path.append(layer.weight.detach()[0].clone())
    return tuple(path)


OURS: dict[str, Callable[..., Any]] = {
    "softmax": masked_softmax,
    "layer_norm": our_norm("layer"),
    "rms_norm": our_norm("rms"),
    "cross_entropy": our_loss,
    "kv_cache": our_cache,
}


@pytest.mark.parametrize("name", OURS)
def test_what_this_library_runs_passes(name: str) -> None:
    found = grade(load_exercise(name), OURS[name])
    assert found.passed, found


def test_our_optimizer_takes_the_same_steps() -> None:
    exercise = load_exercise("adamw")
    assert exercise.reference is not None
    for args in exercise.cases().values():
        assert difference(our_optimizer(*args), exercise.reference(*args)) is None


def test_the_corpus_of_bpe_has_no_ties() -> None:
    words = {tuple(word): count for word, count in bpe.CORPUS.items()}
    for _ in range(12):
        (_, most), (_, second) = bpe.count_pairs(words).most_common(2)
        assert most > second
        words = bpe.answer(words)[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_solution_is_the_source_itself(name: str) -> None:
    exercise = load_exercise(name)
    shown = solution_of(exercise)
    assert len(shown) == len(exercise.sources) + 1
    for title, lines in shown:
        file, _, numbers = title.partition(".py, lines ")
        first, last = (int(number) for number in numbers.split(" to "))
        path = Path(clearhead.lessons.__file__).parents[2] / f"{file.rpartition(' ')[2]}.py"
        assert "\n".join(path.read_text(encoding="utf-8").splitlines()[first - 1 : last]) == lines


# A decoder has no reference to compare with: each law says itself what is wrong.


class Wrong(nn.Module):
    """A small decoder as students write them, with one thing left out or done wrong."""

    def __init__(self, sizes: dict[str, int], wrong: str) -> None:
        super().__init__()
        self.wrong, D = wrong, sizes["d_model"]
        self.tokens, self.places = nn.Embedding(sizes["vocab_size"], D), nn.Embedding(sizes["max_len"], D)
        make = lambda: nn.ModuleList([nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, D)])  # noqa: E731
        shared = make()
        layers = [shared if wrong == "shared" else make() for _ in range(sizes["n_layers"])]
        self.layers = nn.ModuleList(layers)
        self.plain = [make() for _ in range(sizes["n_layers"])] if wrong == "list" else None
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, sizes["vocab_size"], bias=False)
        if wrong == "list":
            self.layers = nn.ModuleList()
        for parameter in self.parameters():
            if parameter.ndim > 1 and wrong != "large":
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x, T = self.tokens(tokens), tokens.shape[1]
        if self.wrong not in ("positions", "unused"):
            x = x + self.places.weight[:T]
        if self.wrong == "unused":
            x = x + torch.arange(T)[:, None] / 10
        stack: Any = self.plain or self.layers
        for norm, qkv, out, up in stack:
            q, k, v = qkv(norm(x))[:, None].chunk(3, -1)
            x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=self.wrong != "mask")[:, 0])
            x = x + F.relu(up(x))
        logits = (10 * x if self.wrong == "large" else self.norm(x)) @ (
            self.tokens.weight.T if self.wrong == "large" else self.head.weight.T
        )
        if self.wrong == "dropout":
            logits = F.dropout(logits, 0.1)
        if self.wrong == "probabilities":
            logits = logits.softmax(-1)
        return logits[0] if self.wrong == "shape" else logits * math.nan if self.wrong == "nan" else logits


def built(wrong: str) -> Function:
    return lambda **sizes: Wrong(sizes, wrong)


@pytest.mark.parametrize(
    ("wrong", "law", "words"),
    [
        ("shape", decoder.has_logits, r"give \(7, 17\); expected logits \(3, 7, 17\)"),
        ("dropout", decoder.has_logits, r"the same ids give other logits each time: F.dropout needs training="),
        ("probabilities", decoder.has_logits, r"these are probabilities; return the logits"),
        ("nan", decoder.has_logits, r"logits are NaN"),
        ("mask", decoder.sees_no_future, r"the future leaks: .* by up to \d.*Is there a mask"),
        ("positions", decoder.knows_order, r"there are no positions: with tokens 0 and 1 swapped"),
        ("unused", decoder.trains_everything, r"no gradient reaches places.weight"),
        ("shared", decoder.grows_by_layers, r"one layer and two have the same [\d,]+ parameters: .*nn.ModuleList"),
        ("list", decoder.grows_by_layers, r"or stand in a plain list"),
        ("large", decoder.starts_at_chance, r"the first loss is \d\d.*log 17 = 2.83"),
    ],
)
def test_a_wrong_decoder_is_told(wrong: str, law: Callable[[Function], str | None], words: str) -> None:
    assert law(built("nothing")) is None
    found = law(built(wrong))
    assert found is not None
    assert re.search(words, found), found


class PostNorm(nn.Module):
    """One layer with norms after each step, and sinusoids that are a parameter without a gradient."""

    def __init__(self, vocab_size: int, d_model: int, max_len: int, **_: int) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocab_size, d_model), nn.Linear(d_model, vocab_size)
        self.places = nn.Parameter(0.02 * load_exercise("sinusoidal").answer(torch.arange(max_len), d_model), False)
        self.qkv = nn.Linear(d_model, 3 * d_model)
        for weight in (self.tokens.weight, self.qkv.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places[: tokens.shape[1]]
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]
        return self.head(F.layer_norm(x, x.shape[-1:]))


@pytest.mark.parametrize("law", [decoder.knows_order, decoder.trains_everything])
def test_small_weights_and_constants_are_no_fault(law: Callable[[Function], str | None]) -> None:
    assert law(PostNorm) is None


def test_what_is_no_model_is_told() -> None:
    found = grade(load_exercise("decoder"), lambda **_: None)
    assert "decoder() returned NoneType; return an nn.Module" in found.findings[-1].detail


def test_a_cache_outside_the_dict_is_told() -> None:
    shared: dict[str, Tensor] = {}
    answer = load_exercise("kv_cache").answer
    found = grade(load_exercise("kv_cache"), lambda q, k, v, cache: answer(q, k, v, shared))
    assert found.diagnosis is not None
    assert "two texts share a cache: with an empty dict, only 0." in found.diagnosis


# What is said of results of any kind.


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        (None, torch.zeros(2), "returns None; is there a `return`?"),
        ([1.0], torch.zeros(2), "returns a list, expected a tensor of shape (2,)"),
        (torch.zeros(3), torch.zeros(2), "the shape is (3,), expected (2,)"),
        (torch.zeros(2), torch.zeros(2).bool(), "torch.float32, expected torch.bool"),
        (torch.tensor([1.0, torch.nan]), torch.ones(2), "1 of 2 numbers are NaN, the first at [1]"),
        (torch.tensor([1.0, -torch.inf]), torch.ones(2), "at [1]: yours -inf, expected 1"),
        (torch.tensor([True]), torch.tensor([False]), "1 of 1 differ, the first at [0]: yours True"),
        ((1, 2), (1, 3), "result 1: yours is 2, expected 3"),
        ((1,), (1, 3), "yours is (1,), expected (1, 3)"),
        ([1e-4, 2e-4], [1e-4, 2.1e-4], "at [1]: yours 0.0002, expected 0.00021"),
    ],
)
def test_differences_in_words(found: Any, expected: Any, words: str) -> None:
    assert words in str(difference(found, expected))


def test_equal_is_no_difference() -> None:
    for value in (torch.tensor([1.0, -torch.inf]), (1, [2.0, 3.0]), {"a": 1}, 0.5):
        assert difference(value, value) is None
    assert difference(2, 2.0) is None


def test_changing_an_argument_in_place_is_told() -> None:
    def in_place(scores: Tensor) -> Tensor:
        scores -= scores.amax(-1, keepdim=True)
        return scores.softmax(-1)

    found = grade(load_exercise("softmax"), in_place)
    assert not found.passed
    assert "changes its argument scores in place" in found.findings[0].detail


def test_changing_an_argument_at_a_later_call_is_told() -> None:
    """AdamW's m and v are made by the check itself, at each step."""

    def in_place(weight: Tensor, gradient: Tensor, m: Tensor, v: Tensor, step: int, lr: float, betas: Any, *rest: Any):
        new = load_exercise("adamw").answer(weight, gradient, m, v, step, lr, betas, *rest)
        m.mul_(betas[0]).add_(gradient, alpha=1 - betas[0])
        return new[0], m, new[2]

    found = grade(load_exercise("adamw"), in_place)
    assert "changes its argument m in place" in found.findings[0].detail


@pytest.mark.parametrize("name", ["adamw", "warmup", "kv_cache", "tied_embeddings", "lstm_step", "beam_search"])
def test_a_forgotten_return_is_told(name: str) -> None:
    found = grade(load_exercise(name), lambda *_: None)
    assert found.findings[0].detail == "your function returns None; is there a `return`?"


def test_chance_is_told_and_a_state_is_not_chance() -> None:
    answer = load_exercise("attention").answer
    found = grade(load_exercise("attention"), lambda *args: F.dropout(answer(*args), 0.1))
    assert found.diagnosis is not None
    assert "the same inputs give other numbers each time: leave out dropout" in found.diagnosis
    calls = list[int]()
    found = grade(load_exercise("softmax"), lambda scores: calls.append(1) or scores * len(calls))
    assert found.diagnosis is None


def test_an_array_of_numpy_is_told() -> None:
    found = grade(load_exercise("softmax"), lambda scores: scores.softmax(-1).numpy())
    assert "returns a ndarray, expected a tensor of shape" in found.findings[0].detail
    assert found.diagnosis is None


def test_half_precision_is_told() -> None:
    found = grade(load_exercise("softmax"), lambda scores: scores.bfloat16().softmax(-1))
    assert "your numbers are torch.bfloat16, which has too few digits" in found.findings[0].detail


def test_a_difference_is_shown_with_digits_that_differ() -> None:
    assert "yours 8.41249, expected 8.4116" in str(difference(torch.tensor([8.41249]), torch.tensor([8.4116])))


def test_places_may_be_tensors() -> None:
    """As torch.unravel_index gives them."""
    exercise = load_exercise("induction_head")
    assert grade(exercise, lambda *args: tuple(map(torch.tensor, exercise.answer(*args)))).passed
    assert difference(torch.tensor(2), 3) == "yours is 2, expected 3"


def test_too_much_memory_is_told_in_words() -> None:
    found = grade(load_exercise("softmax"), lambda scores: scores.new_empty(10**16))
    assert "takes more memory than a check has" in found.findings[0].detail


def test_an_unknown_mistake_has_no_diagnosis() -> None:
    found = grade(load_exercise("softmax"), lambda scores: scores * 3)
    assert not found.passed
    assert found.diagnosis is None
    assert "the largest difference is at [" in found.findings[0].detail


def test_exercises_are_frozen() -> None:
    with pytest.raises(AttributeError):
        load_exercise("softmax").hints = ()  # type: ignore[misc]
    assert isinstance(load_exercise("softmax"), Exercise)
