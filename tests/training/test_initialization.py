"""The model at the start and at the end of a run: configs from recipes, fine-tuning, LoRA that starts at zero and is merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models.tiny import assert_same, built, inputs, run, tiny
from torch import nn

import clearhead as ch
from clearhead.config import Generation
from clearhead.errors import ConfigError
from clearhead.layers.linear import FusedLinear, Linear
from clearhead.models import Model
from clearhead.training.initialization import initial_model, make_config
from clearhead.training.lora import add_lora, gather_model
from clearhead.training.optimizers import Optimizers
from clearhead.training.recipe import Recipe, Train
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
LORA = ["gpt2", "llama", "bert-classes", "t5", "qwen2", "vit"]


def with_lora(name: str, rank: int = 3, alpha: float = 5.0) -> tuple[Model, Model]:
    base, model = (tiny(name, dtype=torch.float32) for _ in range(2))
    add_lora(model, rank, alpha, seed=0)
    return base, model


@pytest.mark.parametrize("name", LORA)
def test_lora_starts_as_the_base(name: str):
    base, model = with_lora(name)
    args = inputs(base.config)
    # B A x is exactly zero; but a sum has another layout in memory than a split, and the kernels add in another order
    assert_same(run(model, *args), run(base, *args), within=1e-6)
    assert all(not p.any() for place, p in model.named_parameters() if place.endswith("lora_b"))


@pytest.mark.parametrize("name", LORA)
def test_only_the_additions_learn(name: str):
    base, model = with_lora(name)
    run(model, *inputs(base.config)).square().sum().backward()
    learning = {place for place, p in model.named_parameters() if p.requires_grad}
    linear = [
        place for place, m in base.named_modules() if "blocks." in place and isinstance(m, nn.Linear | FusedLinear)
    ]
    head = {
        place for place, _ in base.named_parameters() if place.startswith("head.") and base.config.head == "classes"
    }
    assert learning == {f"{place}.lora_{part}" for place in linear for part in "ab"} | head
    for place, p in model.named_parameters():
        assert (p.grad is not None) == (place in learning)
        if place.endswith("lora_b"):  # the other gets none while this one is zero
            assert p.grad is not None
            assert p.grad.any(), place


def test_how_many_numbers_learn():
    model = tiny("llama", dtype=torch.float32)
    count = add_lora(model, 3, 5.0, seed=0)
    assert count == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert count == 3 * sum(sum(p.shape) for n, p in tiny("llama").named_parameters() if "blocks." in n and p.ndim == 2)


@pytest.mark.parametrize("name", LORA)
def test_lora_is_merged_on_export(name: str, tmp_path: Path):
    base, model = with_lora(name)
    with torch.no_grad():
        for place, p in model.named_parameters():
            if place.endswith("lora_b"):
                p.normal_(std=0.2)
    args = inputs(base.config)
    running, exported = run(model, *args), gather_model(model)
    assert (running - run(base, *args)).abs().max() > 0.01
    assert exported.state_dict().keys() == base.state_dict().keys()
    assert not exported.training
    # float32: W x + B A x against (W + B A) x
    assert_same(run(exported, *args), running, within=1e-5)
    ch.save(exported, tmp_path)
    assert_same(run(ch.load(tmp_path), *args), running, within=1e-5)


def test_lora_is_its_equation():
    """y = W x + (alpha / r) B A x, for both kinds of layer."""
    _, model = with_lora("gpt2", rank=3, alpha=5.0)
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_a")]
    assert {type(layer) for layer in layers} == {Linear, FusedLinear}
    for layer in layers:
        nn.init.normal_(layer.lora_b)
        x = torch.randn(2, 7, layer.weight.shape[1])
        out = layer(x)
        out = out if isinstance(out, torch.Tensor) else torch.cat(out, -1)
        wanted = x @ layer.weight.T + layer.bias + 5 / 3 * (x @ layer.lora_a.T @ layer.lora_b.T)
        assert_same(out, wanted, within=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_lora_learns(optimizer: Any):
    base, model = with_lora("llama")
    optimizers = Optimizers(model, Train(optimizer=optimizer, lr=0.01, muon_lr=0.05), lr=0.01)
    tokens = inputs(base.config)[0]
    losses = []
    for _ in range(20):
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    frozen = {place: p for place, p in model.named_parameters() if "lora" not in place}
    assert all(torch.equal(p, frozen[place]) for place, p in base.named_parameters())


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "whisper", "bert-mlm"])
def test_an_export_is_a_whole_copy(name: str):
    model = tiny(name, dtype=torch.float32).train()
    exported = gather_model(model)
    assert model.training
    args = inputs(model.config)
    assert torch.equal(run(exported, *args), run(model.eval(), *args))
    for ours, theirs in zip(exported.parameters(), model.parameters(), strict=True):
        assert ours.data_ptr() != theirs.data_ptr()
    assert exported.generation == model.generation
