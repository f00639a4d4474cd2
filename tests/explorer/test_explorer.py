"""What the page is told, against what the probe, the readings and the generator say themselves."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.explorer import Explorer, forward_passes
from clearhead.explorer.explorer import ANSWERS
from clearhead.explorer.fields import Fields
from clearhead.explorer.samples import example_text, sample_sound
from clearhead.explorer.wire_format import unpack
from clearhead.inside import attention_rollout, head_scores, intervene, logit_lens, probe, sweep, zero
from clearhead.models import EncoderDecoder
from tests.explorer.models import KINDS, TEXT, make_explorer, make_run

CLOSE = 1e-5  # fp32; only the order of summation differs


@pytest.fixture(scope="module")
def explorers() -> dict[str, Explorer]:
    return {kind: make_explorer(kind) for kind in KINDS}


def ask(explorer: Explorer, name: str, **params: Any) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return unpack(explorer.answer(name, params))


def inputs_of(explorer: Explorer, run: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """What the model is called with, made again from what `read` tells."""
    told, _ = ask(explorer, "read", run=run)
    source = explorer.inputs.read(run["text"]).tensor
    if source.is_floating_point():
        inputs: tuple[torch.Tensor, ...] = (source,)
    else:
        inputs = (torch.tensor([told["source"]["ids"]]),)
        assert torch.equal(inputs[0], source)
    return inputs if told["target"] is None else (*inputs, torch.tensor([told["target"]["ids"]]))


def weights_of(explorer: Explorer, run: Mapping[str, Any], site: str) -> torch.Tensor:
    with torch.no_grad(), probe(explorer.model, f"{site}.weights") as seen:
        explorer.model(*inputs_of(explorer, run))
    return seen[f"{site}.weights"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_maps_rows_and_thumbnails_are_the_probes(explorers: dict[str, Explorer], kind: str) -> None:
    explorer = explorers[kind]
    run = make_run(explorer)
    for attention in explorer.description()["attentions"]:
        for layer, site in enumerate(attention["sites"]):
            weights = weights_of(explorer, run, site)
            H, T, S = weights.shape
            assert attention["n_heads"][layer] == H
            told, arrays = ask(explorer, "grid", run=run, attention=attention["name"], layer=layer, size=8)
            pooled = F.adaptive_max_pool2d(weights, (8, 8)).sqrt() * 255
            assert told["site"] == site
            assert np.abs(arrays["thumbs"].astype(float) - pooled.numpy()).max() <= 0.51  # rounded to a byte
            told, arrays = ask(explorer, "map", run=run, site=site, head=H - 1, box=None, most=256)
            assert (told["T"], told["S"], told["pooled"]) == (T, S, [1, 1])
            np.testing.assert_allclose(arrays["map"], weights[-1], atol=CLOSE, rtol=0)
            np.testing.assert_allclose(arrays["rowmax"], weights[-1].amax(1), atol=CLOSE, rtol=0)
            _, arrays = ask(explorer, "row", run=run, site=site, head=0, row=T - 1)
            np.testing.assert_allclose(arrays["weights"], weights[0, -1], atol=CLOSE, rtol=0)


def test_a_box_is_pooled_by_its_largest(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["decoder"]
    run = make_run(explorer, TEXT * 3)
    weights = weights_of(explorer, run, "blocks.1.attention")[2]
    T = len(weights)
    told, arrays = ask(explorer, "map", run=run, site="blocks.1.attention", head=2, box=[3, T, 0, 19], most=8)
    by = [math.ceil((T - 3) / 8), 3]
    assert told["pooled"] == by
    box = weights[3:, :19]
    for i, row in enumerate(arrays["map"]):
        for j, cell in enumerate(row):
            part = box[i * by[0] : (i + 1) * by[0], j * by[1] : (j + 1) * by[1]]
            assert cell == pytest.approx(float(part.max()), abs=CLOSE)


@pytest.mark.parametrize("kind", ["decoder", "masked", "pair"])
def test_scores_are_those_of_the_heads(explorers: dict[str, Explorer], kind: str) -> None:
    explorer = explorers[kind]
    run = make_run(explorer)
    inputs = inputs_of(explorer, run)
    expected = {(score.site, score.head): score for score in head_scores(explorer.model, *inputs)}
    for attention in explorer.description()["attentions"]:
        for layer, site in enumerate(attention["sites"]):
            for told in ask(explorer, "grid", run=run, attention=attention["name"], layer=layer)[0]["scores"]:
                score = expected[f"{site}.weights", told["head"]]
                for name in ("previous", "first", "induction", "entropy"):
                    found = getattr(score, name)
                    assert told[name] == (None if found is None else pytest.approx(found, abs=CLOSE)), (site, name)


def test_cross_attention_is_scored_by_what_it_copies(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["pair"]
    run = make_run(explorer, target="the cat sat")
    scores = ask(explorer, "grid", run=run, attention="cross", layer=1)[0]["scores"]
    assert all(0 < score["alignment"] < 1 for score in scores)


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_the_models(explorers: dict[str, Explorer], kind: str) -> None:
    explorer = explorers[kind]
    run = make_run(explorer)
    told, arrays = ask(explorer, "read", run=run)
    answer = told["answer"]
    with torch.no_grad():
        out = explorer.model(*inputs_of(explorer, run))
    if answer["kind"] == "states":
        assert answer["top"] == []
        return
    probs = (out[0] if answer["kind"] == "classes" else out[0, answer.get("at", -1)]).softmax(-1)
    best = probs.topk(min(20, len(probs)))
    assert [one["id"] for one in answer["top"]] == best.indices.tolist()
    assert [one["p"] for one in answer["top"]] == pytest.approx(best.values.tolist(), abs=CLOSE)
    if kind in ("vit", "picture"):
        size = explorer.model.config.image_size
        assert arrays["picture"].shape == (size, size, 3)
        assert len(told["source"]["tokens"]) == 17
    if kind == "whisper":
        assert arrays["spectrogram"].shape == (80, 80)
        assert len(told["source"]["tokens"]) == 40


def test_a_mask_is_answered_at_its_place(explorers: dict[str, Explorer]) -> None:
    told, _ = ask(explorers["masked"], "read", run=make_run(explorers["masked"], "the <mask> sat on the mat"))
    assert told["source"]["tokens"][told["answer"]["at"]] == "<mask>"


def test_a_translation_is_the_greedy_one(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["pair"]
    assert isinstance(explorer.model, EncoderDecoder)
    told, _ = ask(explorer, "read", run=make_run(explorer))
    written = ch.translate(explorer.model, [told["source"]["ids"]], beams=1)[0]
    assert told["target"]["ids"] == [explorer.inputs.tokenizer.bos, *written]
    assert told["source"]["ids"][-1] == explorer.inputs.tokenizer.eos


@pytest.mark.parametrize("kind", ["decoder", "classes", "vit", "pair"])
def test_changed_heads_change_the_answer(explorers: dict[str, Explorer], kind: str) -> None:
    explorer = explorers[kind]
    site = explorer.description()["attentions"][-1]["sites"][1]
    changes = [{"site": site, "head": head, "how": "zero"} for head in (0, 2)]
    run = make_run(explorer, **({"target": "the cat"} if kind == "pair" else {}))
    told, _ = ask(explorer, "read", run={**run, "changes": changes})
    plain, _ = ask(explorer, "read", run=run)
    assert told["plain"] == plain["answer"]
    with torch.no_grad(), intervene(explorer.model, zero(f"{site}.out", head=[0, 2])):
        out = explorer.model(*inputs_of(explorer, run))
    probs = (out[0] if kind in ("classes", "vit") else out[0, -1]).softmax(-1)
    assert told["answer"]["top"][0]["p"] == pytest.approx(float(probs.max()), abs=CLOSE)
    assert told["answer"] != told["plain"]


def test_means_and_patches(explorers: dict[str, Explorer]) -> None:
    explorer, site = explorers["decoder"], "blocks.1.attention"
    run, other = make_run(explorer), "a dog ran over the hill. a dog"
    all_heads = [{"site": site, "head": head, "how": "patch"} for head in range(3)]
    same, _ = ask(explorer, "read", run={**run, "second": run["text"], "changes": all_heads})
    one, two = ({each["id"]: each["p"] for each in same[name]["top"]} for name in ("answer", "plain"))
    assert one == pytest.approx(two, abs=CLOSE)  # patched from itself
    changed, _ = ask(explorer, "read", run={**run, "second": other, "changes": all_heads})
    assert changed["answer"] != changed["plain"]
    means = [{**change, "how": "mean"} for change in all_heads]
    with torch.no_grad(), probe(explorer.model, f"{site}.out") as seen:
        explorer.model(*inputs_of(explorer, run))
    middle = seen[f"{site}.out"].mean(2, keepdim=True)
    with torch.no_grad(), intervene(explorer.model, ch.inside.patch(f"{site}.out", middle)):
        expected = explorer.model(*inputs_of(explorer, run))[0, -1].softmax(-1).max()
    told, _ = ask(explorer, "read", run={**run, "changes": means})
    assert told["answer"]["top"][0]["p"] == pytest.approx(float(expected), abs=CLOSE)


def test_a_patch_goes_as_far_as_the_second_text(explorers: dict[str, Explorer]) -> None:
    explorer, site = explorers["decoder"], "blocks.1.attention"
    run, changes = make_run(explorer), [{"site": site, "head": head, "how": "patch"} for head in range(3)]
    ids = inputs_of(explorer, run)[0]
    for second in ("a", "a dog ran"):  # one token, and some
        told, _ = ask(explorer, "read", run={**run, "second": second, "changes": changes})
        other = explorer.inputs.read(second).tensor
        n = other.shape[1]
        assert (
            told["note"] == f"The second text has {n} tokens, the first {ids.shape[1]}: only the first {n} are patched."
        )
        outs: list[torch.Tensor] = []
        for each in (ids, other):
            with torch.no_grad(), probe(explorer.model, f"{site}.out") as seen:
                explorer.model(each)
            outs.append(seen[f"{site}.out"])
        mixed = torch.cat([outs[1], outs[0][:, :, n:]], 2)
        with torch.no_grad(), intervene(explorer.model, ch.inside.patch(f"{site}.out", mixed)):
            expected = explorer.model(ids)[0, -1].softmax(-1)
        top = told["answer"]["top"]
        assert [one["p"] for one in top] == pytest.approx([float(expected[one["id"]]) for one in top], abs=CLOSE)
    same, _ = ask(explorer, "read", run={**run, "second": run["text"], "changes": changes})
    assert same["note"] is None


@pytest.mark.parametrize("kind", ["decoder", "rotary", "masked", "classes", "pair", "t5", "vit"])
def test_the_lens_is_the_readings(explorers: dict[str, Explorer], kind: str) -> None:
    explorer = explorers[kind]
    run = make_run(explorer)
    said = logit_lens(explorer.model, *inputs_of(explorer, run))[:, 0]
    said = said if said.ndim == 3 else said[:, None]
    told, arrays = ask(explorer, "lens", run=run)
    assert (told["layers"], told["T"]) == said.shape[:2] == arrays["p"].shape
    best = said.softmax(-1).max(-1)
    np.testing.assert_allclose(arrays["p"], best.values, atol=CLOSE, rtol=0)
    few, part = ask(explorer, "lens", run=run, first=told["T"] - 1, n=64)
    np.testing.assert_array_equal(part["rank"], arrays["rank"][:, -1:])
    assert few["total"] == told["T"]
    cell, _ = ask(explorer, "cell", run=run, layer=1, position=told["T"] - 1, k=3)
    likeliest = said[1, -1].softmax(-1).topk(min(3, said.shape[-1])).values.tolist()
    assert [one["p"] for one in cell["top"]] == pytest.approx(likeliest, abs=CLOSE)
    assert cell["rank"] == arrays["rank"][1, -1]
    if kind in ("decoder", "rotary"):
        ids = ask(explorer, "read", run=run)[0]["source"]["ids"]
        logits = said[2, 3]
        assert arrays["rank"][2, 3] == 1 + int((logits > logits[ids[4]]).sum())


def test_flow_is_the_rollout(explorers: dict[str, Explorer]) -> None:
    for kind in ("decoder", "masked", "vit"):
        run = make_run(explorers[kind])
        expected = attention_rollout(explorers[kind].model, *inputs_of(explorers[kind], run))[0]
        np.testing.assert_allclose(ask(explorers[kind], "flow", run=run)[1]["rollout"], expected, atol=CLOSE, rtol=0)


def test_a_sweep_is_the_sweep(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["decoder"]
    run = make_run(explorer)
    ids = inputs_of(explorer, run)[0]
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    expected = sweep(explorer.model, ids, targets=targets, sites="blocks.2.attention")
    told, _ = ask(explorer, "sweep", run=run, attention="attention", layer=2)
    assert [one["d_loss"] for one in told["effects"]] == pytest.approx(
        [e.delta["loss"] for e in expected.effects], abs=1e-5
    )
    changes = [{"site": "blocks.1.attention", "head": 2, "how": how} for how in ("zero", "patch")]
    for change in changes:
        changed = {**run, "changes": [change], "second": "a dog ran over the hill"}
        told, _ = ask(explorer, "sweep", run=changed, attention="attention", layer=1)
        with torch.no_grad(), explorer.passes.changed(explorer.passes.parse(Fields({"run": changed}))):
            base = F.cross_entropy(explorer.model(ids)[0], targets[0], ignore_index=-100)
            with intervene(explorer.model, zero("blocks.1.attention.out", head=0)):
                without = F.cross_entropy(explorer.model(ids)[0], targets[0], ignore_index=-100)
        assert told["base"]["loss"] == pytest.approx(float(base), abs=CLOSE)
        assert told["effects"][0]["d_loss"] == pytest.approx(float(without - base), abs=CLOSE)
    for kind in ("masked", "classes", "pair", "whisper", "vit"):
        effects = ask(explorers[kind], "sweep", run=make_run(explorers[kind]))[0]["effects"]
        heads = sum(sum(each["n_heads"]) for each in explorers[kind].description()["attentions"])
        assert len(effects) == heads


def test_steps_are_those_of_the_generator(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["decoder"]
    assert isinstance(explorer.model, ch.Decoder)
    options: dict[str, Any] = dict(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3)
    prompt = ask(explorer, "read", run=make_run(explorer))[0]["source"]["ids"]
    expected = ch.generate(explorer.model, [prompt], max_new_tokens=5, seed=11, eos=(), **options)[0]
    ids: list[int] = []
    for _ in range(5):
        told, _ = ask(explorer, "step", model="decoder", text=TEXT, ids=ids, seed=11, **options)
        kept = [one for one in told["top"] if one["removed_by"] is None]
        assert all((one["p_final"] == 0) == (one["removed_by"] is not None) for one in told["top"])
        assert told["kept"] <= 40
        assert sum(one["p_final"] for one in kept) <= 1 + 1e-5
        ids.append(told["drawn"])
    assert ids == expected


def test_a_search_is_the_searchs(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["pair"]
    assert isinstance(explorer.model, EncoderDecoder)
    told, _ = ask(explorer, "beam", model="pair", text=TEXT, beams=3, length_penalty=1, most=6)
    ids = ask(explorer, "read", run=make_run(explorer))[0]["source"]["ids"]
    best = ch.translate(explorer.model, [ids], beams=3, n_best=3, max_new_tokens=6, return_scores=True)[0]
    assert [one["score"] for one in told["result"]] == pytest.approx([one.score for one in best], abs=1e-4)
    assert len(told["steps"][0]["alive"]) == 3
    assert all(one["why"] for step in told["steps"] for one in (*step["died"], *step["alive"]))


def test_geometry_neighbours_and_the_flat_view(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["decoder"]
    told, arrays = ask(explorer, "geometry", model="decoder")
    assert float(arrays["density"].sum()) == pytest.approx(1, abs=1e-4)
    assert float(arrays["random"].sum()) == pytest.approx(1, abs=1e-3)
    assert told["bounds"]["least_deg"] <= told["bounds"]["worst_deg"]
    table = explorer.model.tokens.weight.detach()  # type: ignore[union-attr]
    told, _ = ask(explorer, "neighbours", model="decoder", token=" cat", k=3)
    cosines = F.normalize(table, dim=1) @ F.normalize(table[told["id"]], dim=0)
    cosines[told["id"]] = -1
    assert [one["id"] for one in told["near"]] == cosines.topk(3).indices.tolist()
    told, arrays = ask(explorer, "pca", model="decoder", n=5000)
    centred = table - table.mean(0)
    assert told["explained"] == pytest.approx(
        (torch.linalg.svdvals(centred)[:2] ** 2 / (centred**2).sum()).tolist(), abs=1e-4
    )
    assert arrays["xy"].shape == (len(table), 2)


def test_positions_of_every_kind(explorers: dict[str, Explorer]) -> None:
    for kind in ("decoder", "rotary", "pair", "t5", "vit"):
        told, arrays = ask(explorers[kind], "positions", model=kind, length=11)
        own = [one["name"] for one in told["kinds"] if one["is_model"]]
        assert own == [explorers[kind].model.config.positions]
        for one in told["kinds"]:
            assert arrays[f"{one['name']}.bydistance"][0] == pytest.approx(1, abs=1e-5)
            assert arrays[f"{one['name']}.similarity"].shape == (11, 11)


def test_costs_are_the_forecasts(explorers: dict[str, Explorer]) -> None:
    config = explorers["decoder"].model.config
    told, arrays = ask(
        explorers["decoder"], "cost", model="decoder", lengths=[16, 64], batch=2, precision="bf16", mode="train"
    )
    expected = ch.cost(config, batch=2, length=64, mode="train", precision="bfloat16")
    assert arrays["flops"][:, 1].sum() == pytest.approx(expected.flops, rel=1e-6)
    assert arrays["bytes"][told["kinds"].index("peak"), 1] == pytest.approx(expected.peak_bytes, rel=1e-6)
    _, arrays = ask(explorers["decoder"], "cost", model="decoder", lengths=[told["crossover"], 2], changes={})
    attention, rest = arrays["flops"][2], np.delete(arrays["flops"], 2, 0).sum(0)
    assert attention[0] >= rest[0] * 0.99 and attention[1] < rest[1]  # noqa: PT018
    changed, _ = ask(
        explorers["rotary"], "cost", model="rotary", changes={"d_model": 64, "n_heads": 8, "n_layers": 5}, lengths=[8]
    )
    sizes = {"d_model": 64, "n_heads": 8, "n_layers": 5, "d_head": 0, "n_kv_heads": 4, "d_ff": 62}
    bigger = ch.Config.from_dict({**explorers["rotary"].model.config.to_dict(), **sizes})
    assert changed["params"] == sum(p.numel() for p in ch.build(bigger, device="meta").parameters())
    assert ask(explorers["vit"], "cost", model="vit", lengths=[17, 65])[1]["flops"].shape == (6, 2)
    assert (ask(explorers["pair"], "measure", model="pair", lengths=[4, 8])[1]["seconds"] > 0).all()


@pytest.mark.parametrize("text", ["the", "日本語 — ñ 🙂", "مرحبا بالعالم", "a\u0000b\n\t", "the cat<pad><pad><pad>"])
def test_texts_of_every_sort(explorers: dict[str, Explorer], text: str) -> None:
    for kind in ("decoder", "encoder", "masked", "pair"):
        explorer = explorers[kind]
        run = make_run(explorer, text)
        told, _ = ask(explorer, "read", run=run)
        for attention in explorer.description()["attentions"]:
            _, arrays = ask(explorer, "grid", run=run, attention=attention["name"], layer=1)
            assert arrays["thumbs"].shape == (3, 32, 32)
        assert len(told["source"]["tokens"]) == len(told["source"]["ids"])
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


def test_what_is_kept_grows_with_the_length_and_not_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = make_explorer("decoder")
    sizes: list[int] = []
    for n in (1, 2, 4):
        run = make_run(explorer, "the cat sat " * 4 * n)
        ask(explorer, "grid", run=run, attention="attention", layer=1)
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


def test_nothing_stays_attached(explorers: dict[str, Explorer]) -> None:
    for explorer in explorers.values():
        for module in explorer.model.modules():
            assert not module._forward_hooks
            assert not module._forward_pre_hooks


def test_the_example_is_of_the_models_own_data(explorers: dict[str, Explorer], tmp_path: Path) -> None:
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
    told, arrays = ask(explorer, "read", run={"model": "picture", "text": name})
    assert told["source"]["grid"] == [4, 4]
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


@pytest.mark.usefixtures("unchecked")
def test_whatever_is_asked_is_answered_or_refused(explorers: dict[str, Explorer]) -> None:
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


def test_what_is_wrong_is_said(explorers: dict[str, Explorer]) -> None:
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
