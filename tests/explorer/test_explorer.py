"""The explorer on texts, pictures and sounds of every sort, with padding, and on wrong requests."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clearhead as ch
from clearhead.errors import InputError
from clearhead.explorer import Explorer, forward_passes
from clearhead.explorer.explorer import ANSWERS
from clearhead.explorer.samples import example_text, sample_sound
from clearhead.explorer.wire_format import unpack
from clearhead.inside.sites import blocks_of
from tests.explorer.models import ask, make_explorer, make_run

CLOSE = 1e-5  # fp32; only the order of summation differs


@pytest.mark.slow
@pytest.mark.parametrize("text", ["the", "日本語 — ñ 🙂", "مرحبا بالعالم", "a\u0000b\n\t", "the cat<pad><pad><pad>"])
def test_texts_of_every_sort(explorers: dict[str, Explorer], text: str) -> None:
    for kind in ("decoder", "encoder", "masked", "pair"):
        explorer = explorers[kind]
        run = make_run(explorer, text)
        reply, _ = ask(explorer, "read", run=run)
        for attention in explorer.description()["attentions"]:
            _, arrays = ask(explorer, "grid", run=run, attention=attention["name"], layer=1)
            assert arrays["thumbs"].shape == (3, 32, 32)
        assert len(reply["source"]["tokens"]) == len(reply["source"]["ids"])
        if kind != "encoder":
            ask(explorer, "sweep", run=run, layer=0)
            ask(explorer, "lens", run=run)


def test_padding_changes_nothing(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["masked"]
    plain, padded = (make_run(explorer, text) for text in ("the <mask> sat", "the <mask> sat<pad><pad>"))
    one, two = (ask(explorer, "read", run=run)[0]["answer"]["top"] for run in (plain, padded))
    assert [each["p"] for each in one] == pytest.approx([each["p"] for each in two], abs=CLOSE)
    scores = [ask(explorer, "grid", run=run, attention="attention", layer=2)[0]["scores"] for run in (plain, padded)]
    assert [s["entropy"] for s in scores[0]] == pytest.approx([s["entropy"] for s in scores[1]], abs=CLOSE)


def test_the_cache_grows_linearly_with_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = make_explorer("decoder")
    sizes: list[int] = []
    for n in (1, 2, 4):
        run = make_run(explorer, "the cat sat " * 4 * n)
        ask(explorer, "lens", run=run)
        made = next(reversed(explorer.passes.cached.values()))
        T = len(made.strip.ids)
        assert made.n_bytes == 4 * T * 24 * (3 * 2 + 4 + 1)  # q and k of three layers, four streams, and the states
        sizes.append(made.n_bytes)
    assert len(explorer.passes.cached) == 3
    monkeypatch.setattr(forward_passes, "CACHE_BYTES", sizes[-1] + 1)
    ask(explorer, "read", run=make_run(explorer, "the"))
    ask(explorer, "read", run=make_run(explorer, "the mat"))
    assert sum(each.n_bytes for each in explorer.passes.cached.values()) <= sizes[-1] + 1
    assert len(explorer.passes.cached) >= 1


@pytest.mark.parametrize("kind", ["decoder", "classes", "pair"])
def test_first_layers_are_answered_before_the_last_are_computed(kind: str) -> None:
    """A map and thumbnails of a layer need the blocks up to it; the pass goes on from there, to the same end as in one go."""
    explorer, whole = make_explorer(kind), make_explorer(kind)
    run = make_run(explorer, "the cat sat on the mat", target="the cat" if kind == "pair" else None)
    group = {"pair": "encoder"}.get(kind, "attention")
    site = explorer.passes.groups()[group][0]
    calls = count_calls(explorer)
    asked = dict(run=run, site=site, head=1)
    first = ask(explorer, "map", **asked)
    assert sum(calls.values()) == 1, "one block of all"
    ask(explorer, "grid", run=run, attention=group, layer=0)
    assert sum(calls.values()) == 1
    told, _ = ask(explorer, "read", run=run, within=0)
    assert told["layers"] == {"done": 2, "of": len(calls)}
    assert told["source"]["tokens"]
    assert "answer" not in told
    answer, _ = ask(explorer, "read", run=run)
    assert set(calls.values()) == {1}, "no block runs twice"
    assert answer == ask(whole, "read", run=run)[0]
    assert (first[1]["map"] == ask(whole, "map", **asked)[1]["map"]).all()


def test_a_pass_that_is_left_gives_way() -> None:
    """Texts typed one after the other: only the last few unfinished passes are kept, and a failed one is forgotten."""
    explorer = make_explorer("decoder")
    for text in ("the", "the cat", "the cat sat", "the cat sat on"):
        ask(explorer, "read", run=make_run(explorer, text), within=0)
    assert [run.text for run in explorer.passes.begun] == ["the cat sat", "the cat sat on"]
    with pytest.raises(InputError, match="tokens"):
        ask(explorer, "read", run=make_run(explorer, "the cat " * 999))
    assert len(explorer.passes.begun) == 2


def count_calls(explorer: Explorer) -> dict[str, int]:
    """How often each block is called from now on."""
    calls = dict.fromkeys(blocks_of(explorer.model), 0)

    def count(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            calls[name] += 1

        return hook

    for name, block in blocks_of(explorer.model).items():
        block.register_forward_hook(count(name))
    return calls


def test_no_hook_stays(explorers: dict[str, Explorer]) -> None:
    for explorer in explorers.values():
        for module in explorer.model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks


def test_the_example_comes_from_the_training_run(explorers: dict[str, Explorer], tmp_path: Path) -> None:
    model, tokenizer = explorers["pair"].model, explorers["pair"].inputs.tokenizer
    assert example_text(model, tokenizer, tmp_path) == "le 3 mars 1987"
    rows = [
        {"kind": "valid", "step": 10, "loss": 1.0, "samples": [{"input": "mardi", "output": "", "wanted": ""}]},
        {"kind": "train", "step": 15, "loss": 1.0},
        {
            "kind": "valid",
            "step": 20,
            "loss": 1.0,
            "samples": [{"input": "", "output": ""}, {"input": "<s>7 mars 1989</s>"}],
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"cut of')
    assert example_text(model, tokenizer, tmp_path) == "7 mars 1989"
    assert "<mask>" in example_text(explorers["masked"].model, explorers["masked"].inputs.tokenizer)
    words = ch.train_tokenizer(texts=["zig zag zog"] * 9, kind="wordpiece", vocab_size=60, special=["[UNK]"])
    example = example_text(explorers["decoder"].model, words)
    assert example
    assert words.unk not in words.encode(example, special=False)
    assert example_text(explorers["vit"].model, None) == "sample:0"


def test_a_sample_sound_fills_seconds() -> None:
    sound = sample_sound(3)
    loud = sound.unfold(0, 1600, 1600).abs().amax(1) > 0.05  # tenths of a second
    assert len(loud) == 60
    assert loud.float().mean() > 0.9
    assert sound.abs().max() <= 1


def test_uploaded_pictures_are_read(explorers: dict[str, Explorer]) -> None:
    from io import BytesIO

    from PIL import Image

    explorer, file = explorers["picture"], BytesIO()
    Image.new("RGB", (50, 40), (255, 0, 0)).save(file, "png")
    name = unpack(explorer.take("picture", file.getvalue()))[0]["text"]
    reply, arrays = ask(explorer, "read", run={"model": "picture", "text": name})
    assert reply["source"]["grid"] == [4, 4]
    assert (arrays["picture"] == np.array([255, 0, 0], dtype=np.uint8)).all()
    for wrong in (b"", b"no picture", file.getvalue()[:60]):
        with pytest.raises(ch.ClearheadError):
            explorer.take("picture", wrong)
    with pytest.raises(ch.InputError, match="no pictures"):
        explorers["decoder"].take("picture", file.getvalue())


WRONG: list[Any] = [
    None,
    -1,
    10**9,
    1.5,
    math.nan,
    "x",
    "",
    [],
    {},
    True,
    [1, 2],
    {"a": 1},
    "\ud800",
    10**400,
    [None] * 9,
]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
def test_any_request_is_answered_or_refused(explorers: dict[str, Explorer]) -> None:
    draw = random.Random(0)
    good: dict[str, Any] = {"attention": "attention", "layer": 0, "size": 8, "site": "blocks.0.attention", "head": 1}
    good |= {
        "box": None,
        "most": 64,
        "row": 0,
        "position": 0,
        "k": 3,
        "length": 8,
        "token": "cat",
        "n": 9,
        "lengths": [8],
    }
    good |= {
        "changes": {},
        "batch": 1,
        "precision": "fp32",
        "mode": "forward",
        "text": "the",
        "ids": [1],
        "temperature": 1,
    }
    good |= {
        "top_k": 2,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "seed": 1,
        "beams": 2,
        "length_penalty": 1,
    }
    n_refused = 0
    for _ in range(400):
        explorer = explorers[draw.choice(["decoder", "masked", "vit", "pair"])]
        params = {
            "model": explorer.name,
            "run": make_run(explorer, "the cat"),
            **good,
            "most": 4 if draw.random() < 0.5 else 64,
        }
        field = draw.choice([*params, "run.text", "run.target", "run.second", "run.changes", "run.change"])
        value = draw.choice(WRONG)
        if field == "run.change":
            change = {"site": "blocks.0.attention", "head": 0, "how": "zero"}
            change[draw.choice(list(change))] = value
            params["run"]["changes"] = [change]
        elif field.startswith("run."):
            params["run"][field[4:]] = value
        else:
            params[field] = value
        try:
            unpack(explorer.answer(draw.choice([*ANSWERS, "models", "nope"]), params))
        except ch.ClearheadError:
            n_refused += 1
    assert n_refused > 85


def test_errors_say_what_is_wrong(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["decoder"]
    run = make_run(explorer)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("map", {"run": run, "site": "blocks.9.attention", "head": 0}, "did you mean 'blocks"),
        ("map", {"run": run, "site": "blocks.0.attention", "head": 3}, "head is a whole number from 0 to 2; got 3"),
        ("grid", {"run": run, "attention": "cross", "layer": 0}, "there is no attention 'cross'"),
        ("grid", {"run": {**run, "text": "the cat " * 200}, "layer": 0}, "97 are the most"),
        ("grid", {"run": "x"}, "'run' is a JSON object"),
        (
            "read",
            {"run": {**run, "changes": [{"site": "blocks.0.attention", "head": 0, "how": "patch"}]}},
            "second text",
        ),
        ("neighbours", {"model": "decoder", "token": "supercalifragilistic"}, "is not one token"),
        ("reed", {"run": run}, "did you mean 'read'"),
    ]
    for name, params, words in cases:
        with pytest.raises(ch.InputError, match=words):
            explorer.answer(name, params)
    with pytest.raises(ch.InputError, match="no embedding of tokens"):
        explorers["vit"].answer("geometry", {"model": "vit"})
    with pytest.raises(ch.InputError, match="sample:0"):
        explorers["vit"].answer("read", {"run": {"model": "vit", "text": "upload:../../x"}})
    assert json.dumps(explorer.description())
