"""Recipes: written and read back, errors that name the field, and every shipped recipe builds a model."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import clearhead as ch
from clearhead.config import Config
from clearhead.errors import ConfigError, InputError
from clearhead.families import preset
from clearhead.training.initialization import make_config
from clearhead.training.recipe import SHIPPED, TASKS, Data, Recipe, Train, find_recipe

SHIPPED_NAMES = sorted(path.stem for path in SHIPPED.glob("*.toml"))

# Any text that a file can hold: quotes, control characters, other scripts; a lone surrogate can not be written as UTF-8.
texts = st.text(st.characters(exclude_categories=("Cs",)))
numbers = st.floats(0, 1e30, allow_nan=False).filter(lambda x: x > 0)


@pytest.mark.slow
@given(st.lists(texts), texts, numbers, st.floats(0, 1, exclude_max=True), st.booleans(), st.integers(0, 2**63 - 1))
@example(
    ['"', "'''", '"""', "\\", "\x00\x1b\x7f\x85\u2028", "a\r\nb", "naïve 日本 🙂", "#", "="],
    "\\u0041",
    1e-05,
    0.0,
    True,
    7,
)
@example([], "", 5e-324, 0.0, False, 0)
def test_toml_comes_back(files: list[str], tokenizer: str, lr: float, share: float, flag: bool, seed: int):
    recipe = Recipe(
        task="mask",
        model={"preset": tokenizer, "norm_eps": lr, "bias": flag, "labels": files, "d_model": seed},
        data=Data(files=tuple(files), tokenizer=tokenizer, valid_share=share, lowercase=flag),
        train=Train(lr=lr, betas=(share, 0.9), seed=seed, compile=flag),
    )
    assert Recipe.read(recipe.to_toml()) == recipe
    assert Recipe.from_tables(recipe.tables()) == recipe


def test_toml_holds_every_field():
    text = Recipe(task="language").to_toml()
    for kind in (Data, Train):
        for field in fields(kind):
            assert f"\n{field.name} = " in text


def test_a_path_that_is_no_unicode_is_refused():
    """Linux allows such names, and TOML, which is UTF-8, can not hold them."""
    recipe = Recipe(task="language").with_files(files=["caf\udce9.txt"])
    with pytest.raises(ConfigError, match=r"caf.*is no Unicode.*rename"):
        recipe.to_toml()


@pytest.mark.parametrize("name", SHIPPED_NAMES)
def test_shipped_recipes_build(name: str):
    recipe = find_recipe(name)
    assert Recipe.read(recipe.to_toml()) == recipe
    needs: dict[str, Any] = {"max_len": recipe.data.length, "vocab_size": recipe.data.vocab_size}
    match recipe.task:
        case "language":
            needs |= dict(shape="decoder")
        case "translate":
            needs |= dict(shape="encoder-decoder", max_source_len=recipe.data.length)
        case "mask":
            needs |= dict(shape="encoder", head="tokens")
        case "classify":
            pictures = recipe.model.get("inputs") == "patches"
            needs = dict(inputs="patches") if pictures else needs
            needs |= dict(shape="encoder", head="classes", n_classes=10)
    model = ch.build(make_config(recipe, needs), device="meta")
    assert 1e4 < sum(p.numel() for p in model.parameters()) < 1e8


def test_each_task_has_a_recipe():
    assert set(TASKS) <= set(SHIPPED_NAMES)
    assert {find_recipe(name).task for name in SHIPPED_NAMES} == set(TASKS)


def test_a_recipe_from_a_file(tmp_path: Path):
    file = tmp_path / "own.toml"
    file.write_text(Recipe(task="mask").to_toml(), encoding="utf-8")
    assert find_recipe(str(file)) == Recipe(task="mask")
    with pytest.raises(ConfigError, match=r"no recipe 'langauge', and no .toml file.*'language'"):
        find_recipe("langauge")
    with pytest.raises(InputError, match=r"nowhere\.toml.*No such file"):
        find_recipe(str(tmp_path / "nowhere.toml"))
    file.write_bytes(b"task = '\xff'")
    with pytest.raises(InputError, match=r"can not be read.*utf-8"):
        find_recipe(str(file))
    file.write_text("task = \n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"own\.toml is no TOML.*line 1"):
        find_recipe(str(file))


LANGUAGE = Recipe(task="language")


@pytest.mark.parametrize(
    ("setting", "part", "name", "value"),
    [
        ("train.steps=500", "train", "steps", 500),
        ("train.steps = 1_000", "train", "steps", 1000),
        ("train.lr=3e-4", "train", "lr", 3e-4),
        ("train.lr=1", "train", "lr", 1.0),
        ("train.schedule=cosine", "train", "schedule", "cosine"),
        ('train.schedule="cosine"', "train", "schedule", "cosine"),
        ("train.compile=true", "train", "compile", True),
        ("train.betas=[0.8, 0.9]", "train", "betas", (0.8, 0.9)),
        ("data.files=a.txt", "data", "files", ("a.txt",)),
        ("data.files=['a.txt', 'b=c.txt']", "data", "files", ("a.txt", "b=c.txt")),
        ("data.cache=", "data", "cache", ""),
        ("data.tokenizer=a=b", "data", "tokenizer", "a=b"),
    ],
)
def test_set(setting: str, part: str, name: str, value: Any):
    changed = LANGUAGE.with_set([setting])
    found = getattr(getattr(changed, part), name)
    assert found == value
    assert type(found) is type(value)
    assert replace(changed, **{part: getattr(LANGUAGE, part)}) == LANGUAGE


def test_set_of_the_model():
    assert LANGUAGE.with_set(["model.n_layers=3", "model.n_layers=5"]).model == {"n_layers": 5}
    assert LANGUAGE.with_set(["model.preset=gpt2"]).model == {"preset": "gpt2"}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.step=5", r"no field train\.step;.*'train\.steps'"),
        ("data.batch_tokens=5", r"no field data\.batch_tokens;.*'train\.batch_tokens'"),
        ("train.d_model=5", r"no field train\.d_model;.*'model\.d_model'"),
        ("model.n_layer=5", r"no field model\.n_layer;.*'model\.n_layers'"),
        ("steps=5", r"'steps=5' is not understood.*part\.field=value"),
        ("train.steps", r"'train\.steps' is not understood.*train\.steps=500"),
        ("trian.steps=5", r"'trian\.steps=5' is not understood"),
        ("train.steps=many", r"train\.steps='many' is a str; give a value of type int"),
        ("train.steps=1.5", r"train\.steps=1\.5 is a float; give a value of type int"),
        ("train.steps=true", r"train\.steps=True is a bool"),
        ("train.compile=1", r"train\.compile=1 is not known; .*true"),
        ("train.compile='true'", r"train\.compile='true' is not known; write true without quotes"),
        ("train.checkpointing=1", r"train\.checkpointing=1 is a int; give a value of type bool"),
        ("train.lr=true", r"train\.lr=True is a bool"),
        ("train.lr='x'", r"train\.lr='x' is a str; give a value of type float"),
        ("train.schedule=cosin", r"train\.schedule='cosin' is not known;.*'cosine'"),
        ("train.schedule=[1]", r"train\.schedule=\[1\] is not known"),
        ("data.files=3", r"data\.files=3 is no list of str"),
        ("data.files=['a', 3]", r"data\.files=.* is no list of str"),
        ("train.betas=0.9", r"train\.betas=0\.9 is no list of float"),
        ("train.betas=[0.9]", r"train\.betas=\[0\.9\] has 1 values; give 2"),
        ("train.betas=[0.9, 0.9, 0.9]", r"has 3 values; give 2"),
        ("train.betas=[0.9, 1.0]", r"train\.betas\[1\]=1\.0 is no share"),
        ("train.steps=0", r"train\.steps=0 is too small; nearest valid: 1"),
        ("train.seed=-1", r"train\.seed=-1 is too small; nearest valid: 0"),
        ("data.length=1", r"data\.length=1 is too small; nearest valid: 2"),
        ("data.valid_share=1", r"data\.valid_share=1\.0 is no share.*from 0 up to, but not, 1"),
        ("train.label_smoothing=-0.1", r"train\.label_smoothing=-0\.1 is no share"),
        ("train.label_smoothing=nan", r"train\.label_smoothing=nan is no share"),
        ("train.lr=-1", r"train\.lr=-1\.0 is below 0.*0\.001 is usual"),
        ("train.lr=nan", r"train\.lr=nan is below 0 or no number"),
        ("train.clip=inf", r"train\.clip=inf is below 0 or no number"),
        (
            "train.muon_iteration=polar",
            r"train\.muon_iteration='polar' is Muon's, and has no effect .*'adamw'.*optimizer=muon",
        ),
        ("train.muon_beta2=0.9", r"train\.muon_beta2=0\.9 is Muon's, and has no effect"),
        ("train.muon_beta2=1.0", r"train\.muon_beta2=1\.0 is no share"),
        ("train.stream=half", r"train\.stream='half' is not known"),
        ("train.lr=0", r"train\.lr=0 is for schedule='noam'; got schedule='cosine'"),
        ("train.best=bleu", r"train\.best='bleu'.*translate.*got task='language'.*loss or accuracy"),
    ],
)
def test_wrong_settings(setting: str, words: str):
    with pytest.raises(ConfigError, match=words):
        LANGUAGE.with_set([setting])


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        (
            "translate",
            ["train.batch_doublings=1"],
            r"batch_doublings=1 has no effect.*task='translate'.*language or mask",
        ),
        ("classify", ["train.length_doublings=2"], r"length_doublings=2 has no effect.*task='classify'.*leave it out"),
        ("language", ["train.batch_doublings=-1"], r"batch_doublings=-1 is too small; nearest valid: 0"),
        (
            "language",
            ["train.growth=0.4"],
            r"growth=0\.4 has no effect while nothing grows; set train\.batch_doublings",
        ),
        (
            "mask",
            ["train.batch_doublings=1", "train.growth=0"],
            r"growth=0\.0 is not above 0 and below 1.*0\.5 is usual",
        ),
        ("mask", ["train.batch_doublings=1", "train.growth=1"], r"growth=1\.0 is not above 0 and below 1"),
        (
            "language",
            ["train.length_doublings=3", "data.length=28"],
            r"data\.length=28 .*length_doublings=3 .*valid: 2",
        ),
        ("language", ["train.length_doublings=3", "data.length=27"], r"data\.length=27 .*nearest valid: 0"),
        ("language", ["train.length_doublings=5", "data.length=32"], r"2 tokens or more; nearest valid: 4"),
        ("mask", ["train.length_doublings=1000000000"], r"data\.length=256 .*nearest valid: 7"),
        (
            "language",
            ["train.batch_doublings=5"],
            r"batch_tokens=4096 .*batch_doublings=5 .*length=256 .*nearest valid: 4",
        ),
        ("mask", ["train.batch_doublings=1000000000"], r"less than one window.*nearest valid: 4"),
    ],
)
def test_what_can_not_grow(task: Any, settings: list[str], words: str):
    with pytest.raises(ConfigError, match=words):
        Recipe(task=task).with_set(settings)


@pytest.mark.parametrize("settings", [["train.batch_doublings=4"], ["train.length_doublings=7", "train.growth=0.3"]])
def test_what_can_grow(settings: list[str]):
    assert LANGUAGE.with_set(settings) != LANGUAGE


def test_the_paper_s_rate_needs_no_number():
    assert LANGUAGE.with_set(["train.schedule=noam", "train.lr=0"]).train.lr == 0


def test_the_best_by_bleu_needs_scored_rows():
    assert Recipe(task="translate").with_set(["train.best=bleu"]).train.best == "bleu"
    with pytest.raises(ConfigError, match=r"train\.best='chrf'.*score_rows=0"):
        Recipe(task="translate").with_set(["train.best=chrf", "train.score_rows=0"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"does not say its task.*language, translate, mask, classify"),
        ("task = 'langauge'", r"no task 'langauge';.*'language'"),
        ("task = 3", r"no task 3"),
        ("task = 'mask'\nsteps = 5", r"no part 'steps'"),
        ("task = 'mask'\n[trian]\n", r"no part 'trian';.*'train'"),
        ("task = 'mask'\ntrain = 3", r"\[train\] is a table of fields; got 3"),
        ("task = 'mask'\nmodel = 3", r"\[model\] is a table of fields; got 3"),
        ("task = 'mask'\nmodel = ['a']", r"\[model\] is a table of fields"),
        ("task = 'mask'\n[train]\nstep = 5", r"no field train\.step;.*'steps'"),
        ("task = 'mask'\n[model]\nhidden_size = 5", r"no field model\.hidden_size"),
        ("task = 'mask'\n[model]\npreset = 'a'\nfrom = 'b'", r"preset='a' and model\.from='b'.*leave one out"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_recipes(text: str, words: str):
    with pytest.raises(ConfigError, match=words):
        Recipe.read(text)


def test_files_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    recipe = LANGUAGE.with_files(files=["a.txt", "/b/c.txt", "hf:owner/name"], valid=[])
    assert recipe.data.files == (str(tmp_path / "a.txt"), "/b/c.txt", "hf:owner/name")
    assert replace(recipe, data=replace(recipe.data, files=())) == LANGUAGE
    assert LANGUAGE.with_files(files="a.txt").data.files == (str(tmp_path / "a.txt"),)
    # none given: those of the recipe stay
    assert recipe.with_files(files=[]).data.files == recipe.data.files


def test_every_number_of_the_defaults_is_finite():
    for kind in (Data(), Train()):
        for field in fields(kind):
            value = getattr(kind, field.name)
            assert not isinstance(value, float) or math.isfinite(value)


def config_of(task: str, *settings: str) -> Config:
    return make_config(find_recipe(task).with_set(settings), {})


def test_a_preset_replaces_the_recipes_model() -> None:
    assert config_of("language", "model.preset=gpt2") == preset("gpt2")
    assert config_of("mask", "model.preset=bert-base") == preset("bert-base")
    assert config_of("language", "model.preset=llama-3-8b") == preset("llama-3-8b")
    # Fields set beside it win, before or after it.
    for settings in (("model.n_layers=2", "model.preset=gpt2"), ("model.preset=gpt2", "model.n_layers=2")):
        assert config_of("language", *settings) == preset("gpt2", n_layers=2)


@pytest.mark.parametrize(
    ("task", "name", "fitting"),
    [
        ("translate", "gpt2", "t5-small"),
        ("language", "t5-small", "gpt2"),
        ("mask", "vit-b-16", "bert-base"),
        ("classify", "gpt2", "vit-b-16"),
        ("translate", "whisper-tiny", "transformer-base"),
    ],
)
def test_a_preset_of_another_shape_is_refused(task: str, name: str, fitting: str) -> None:
    with pytest.raises(ConfigError, match=f"no model for the task '{task}'.*got shape=.*choose one of: .*{fitting}"):
        find_recipe(task).with_set([f"model.preset={name}"])


def test_n_layers_of_a_translator_is_of_both_stacks() -> None:
    def depths(*settings: str) -> str:
        facts = dict(vocab_size=7, max_len=5, max_source_len=5)
        return make_config(find_recipe("translate").with_set(settings), facts).depth

    assert depths("model.n_layers=2") == "2+2"
    assert depths("model.n_layers=2", "model.n_decoder_layers=3") == "2+3"
    assert depths("model.n_decoder_layers=3") == "4+3"
    assert depths("model.preset=t5-small", "model.n_layers=2") == "2+2"
    # Two stacks that were given different depths keep their difference.
    uneven = find_recipe("translate").with_set(["model.n_decoder_layers=1"]).with_set(["model.n_layers=7"])
    assert (uneven.model["n_layers"], uneven.model["n_decoder_layers"]) == (7, 1)
