"""The model at the start of a run: configs from recipes, and fine-tuning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import assert_same, built, tiny

import clearhead as ch
from clearhead.config import Generation
from clearhead.errors import ConfigError
from clearhead.training.initialization import initial_model, make_config
from clearhead.training.recipe import Recipe
from clearhead.training.tasks.task import Facts
from training.tiny_tasks import MODEL, make, recipe_of, words, write

FACTS = Facts(dict(shape="decoder", vocab_size=53, max_len=31), Generation(eos=(2,)), {}, [])
CLASSES = Facts(
    dict(shape="encoder", head="classes", labels=("a", "b", "c"), n_classes=3, vocab_size=53, max_len=31),
    Generation(pad=0),
    {},
    [],
)


def recipe(task: Any = "language", *, seed: Any = 0, **model: Any) -> Recipe:
    return Recipe.from_tables({"task": task, "model": model, "train": {"seed": seed}})


def test_weights_are_drawn_from_the_seed():
    first, again, other = (initial_model(recipe(**MODEL, seed=seed), FACTS) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.tokens.weight, other.tokens.weight)  # type: ignore[union-attr]
    assert first.generation == FACTS.generation
    assert first.config.vocab_size == 53


def test_a_preset_takes_the_data_s_facts():
    config = make_config(recipe(preset="gpt2", n_layers=1, d_model=24, n_heads=3), FACTS.fields)
    assert (config.family, config.n_layers, config.vocab_size, config.max_len) == ("gpt2", 1, 53, 31)


def test_a_recipe_may_ask_for_more_than_the_data_needs():
    config = initial_model(recipe(**MODEL, max_len=37, vocab_size=64), FACTS).config
    assert (config.max_len, config.vocab_size) == (37, 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(shape="encoder"), r"model\.shape='encoder', but this task needs 'decoder'; leave it out"),
        (dict(max_len=29), r"data needs max_len=31, but the model has 29; lower data\.length"),
        (dict(vocab_size=51), r"data needs vocab_size=53, but the model has 51"),
        (dict(d_model=23, d_head=0), r"d_model=23 .*n_heads"),
        (dict(preset="gpt-2"), r"gpt2"),
    ],
)
def test_a_model_that_can_not_read_its_data_is_refused(changes: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        initial_model(recipe(**{**MODEL, **changes}), FACTS)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of an encoder trained by masking."""
    return saved_encoder(tmp_path_factory.mktemp("encoder"))


def saved_encoder(folder: Path, **changes: Any) -> Path:
    config = ch.Config.from_dict(
        {
            **MODEL,
            "shape": "encoder",
            "head": "tokens",
            "vocab_size": 53,
            "max_len": 31,
            "tie_embeddings": True,
            **changes,
        }
    )
    ch.save(built(config, dtype=torch.float32), folder)
    return folder


@pytest.mark.parametrize("changes", [{}, dict(tie_embeddings=False), dict(head_transform=True, head_bias="learned")])
def test_a_masked_encoder_becomes_a_classifier(tmp_path: Path, changes: dict[str, Any]):
    folder = saved_encoder(tmp_path, **changes)
    loaded = ch.load(folder)
    model = initial_model(recipe("classify", **{"from": str(folder), "dropout": 0.2, "pool": "mean"}), CLASSES)
    assert (model.config.head, model.config.n_classes, model.config.dropout, model.config.pool) == (
        "classes",
        3,
        0.2,
        "mean",
    )
    assert model.config.labels == ("a", "b", "c")
    before, after = loaded.state_dict(), model.state_dict()
    assert {name for name in after if name not in before or not torch.equal(after[name], before[name])} == {
        "head.weight",
        "head.bias",
    }
    tokens = torch.randint(0, 53, (3, 11))
    assert_same(model.eval().states(tokens), loaded.states(tokens), within=1e-6)  # type: ignore[operator]
    again = initial_model(recipe("classify", **{"from": str(folder)}), CLASSES)
    assert torch.equal(again.state_dict()["head.weight"], after["head.weight"])  # from the seed
    ch.save(model, tmp_path / "classifier")
    assert ch.load(tmp_path / "classifier").config.labels == ("a", "b", "c")


def test_a_language_model_goes_on_as_it_was(tmp_path: Path):
    model = tiny("gpt2", dtype=torch.float32)
    ch.save(model, tmp_path)
    went = initial_model(recipe(**{"from": str(tmp_path)}), FACTS)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), went.parameters(), strict=True))
    assert went.config == model.config


@pytest.mark.parametrize(
    ("task", "given", "facts", "words"),
    [
        (
            "classify",
            dict(d_model=24),
            CLASSES,
            r"model\.d_model=24, but the checkpoint has 22; leave it out, or.*dropout",
        ),
        (
            "classify",
            dict(positions="learned"),
            CLASSES,
            r"model\.positions='learned', but the checkpoint has 'rotary'",
        ),
        ("language", {}, FACTS, r"data needs shape='decoder', but the checkpoint has 'encoder'"),
        (
            "classify",
            {},
            Facts(CLASSES.fields | dict(vocab_size=59), Generation(), {}, []),
            r"tokenizer has 59 tokens, the checkpoint's vocabulary 53; use the checkpoint's tokenizer",
        ),
        (
            "classify",
            {},
            Facts(CLASSES.fields | dict(max_len=37), Generation(), {}, []),
            r"needs max_len=37, but the model has 31; lower data\.length, or raise model\.max_len",
        ),
    ],
)
def test_what_does_not_fit_is_refused(encoder: Path, task: str, given: dict[str, Any], facts: Facts, words: str):
    with pytest.raises(ConfigError, match=words):
        initial_model(recipe(task, **{"from": str(encoder), **given}), facts)


def test_a_longer_rotary_model_may_be_asked_for(encoder: Path):
    facts = Facts(CLASSES.fields | dict(max_len=37), Generation(), {}, [])
    assert initial_model(recipe("classify", **{"from": str(encoder), "max_len": 37}), facts).config.max_len == 37


def test_learned_positions_can_not_grow(tmp_path: Path):
    folder = saved_encoder(tmp_path, positions="learned")
    with pytest.raises(ConfigError, match=r"has no positions\.weight of this shape"):
        initial_model(recipe("classify", **{"from": str(folder), "max_len": 37}), CLASSES)


def test_a_smaller_tokenizer_is_fine(encoder: Path):
    facts = Facts(CLASSES.fields | dict(vocab_size=47), Generation(), {}, [])
    assert initial_model(recipe("classify", **{"from": str(encoder)}), facts).config.vocab_size == 53


def test_masking_and_then_classifying(tmp_path: Path):
    """The second task uses the tokenizer and the weights of the first."""
    data = dict(files=[write(tmp_path / "a.txt", words(307))], length=31)
    first = make(recipe_of("mask", model=MODEL | dict(tie_embeddings=True), data=data), tmp_path / "mask")
    ch.save(initial_model(first.recipe, first.facts), tmp_path / "model")
    first.words.save(tmp_path / "model")
    table = "text,label\n" + "".join(f"{words(3, seed=i)},{'yn'[i % 2]}\n" for i in range(20))
    data = dict(files=[write(tmp_path / "t.csv", table)], length=31)
    second = make(recipe_of("classify", model={"from": str(tmp_path / "model")}, data=data), tmp_path / "classify")
    assert second.words.core.to_str() == first.words.core.to_str()
    model = initial_model(second.recipe, second.facts)
    losses = second.losses(model, second.batch(second.rows(0), 0))
    assert losses.goal.requires_grad


# LoRA. Families that between them have plain and fused linear layers, with and without biases, gated and cross-attending.
