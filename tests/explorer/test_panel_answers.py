"""The page's answers, against `probe`, the analyses of inside/ and the generator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.explorer import Explorer, cost_panel
from clearhead.explorer.fields import Fields
from clearhead.inside import attention_rollout, head_scores, intervene, logit_lens, probe, sweep, zero
from clearhead.models import EncoderDecoder
from tests.explorer.models import KINDS, TEXT, ask, inputs_of, make_run, weights_of

CLOSE = 1e-5  # fp32; only the order of summation differs


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_maps_rows_and_thumbnails_equal_the_probe(explorers: dict[str, Explorer], kind: str) -> None:
    explorer = explorers[kind]
    run = make_run(explorer)
    for attention in explorer.description()["attentions"]:
        for layer, site in enumerate(attention["sites"]):
            weights = weights_of(explorer, run, site)
            H, T, S = weights.shape
            assert attention["n_heads"][layer] == H
            reply, arrays = ask(explorer, "grid", run=run, attention=attention["name"], layer=layer, size=8)
            pooled = F.adaptive_max_pool2d(weights, (8, 8)).sqrt() * 255
            assert reply["site"] == site
            assert np.abs(arrays["thumbs"].astype(float) - pooled.numpy()).max() <= 0.51  # rounded to a byte
            reply, arrays = ask(explorer, "map", run=run, site=site, head=H - 1, box=None, most=256)
            assert (reply["T"], reply["S"], reply["pooled"]) == (T, S, [1, 1])
            np.testing.assert_allclose(arrays["map"], weights[-1], atol=CLOSE, rtol=0)
            np.testing.assert_allclose(arrays["rowmax"], weights[-1].amax(1), atol=CLOSE, rtol=0)
            _, arrays = ask(explorer, "row", run=run, site=site, head=0, row=T - 1)
            np.testing.assert_allclose(arrays["weights"], weights[0, -1], atol=CLOSE, rtol=0)


def test_a_box_is_max_pooled(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["decoder"]
    run = make_run(explorer, TEXT * 3)
    weights = weights_of(explorer, run, "blocks.1.attention")[2]
    T = len(weights)
    reply, arrays = ask(explorer, "map", run=run, site="blocks.1.attention", head=2, box=[3, T, 0, 19], most=8)
    by = [math.ceil((T - 3) / 8), 3]
    assert reply["pooled"] == by
    box = weights[3:, :19]
    for i, row in enumerate(arrays["map"]):
        for j, cell in enumerate(row):
            part = box[i * by[0] : (i + 1) * by[0], j * by[1] : (j + 1) * by[1]]
            assert cell == pytest.approx(float(part.max()), abs=CLOSE)


@pytest.mark.parametrize("kind", ["decoder", "masked", "pair"])
def test_scores_equal_head_scores(explorers: dict[str, Explorer], kind: str) -> None:
    explorer = explorers[kind]
    run = make_run(explorer)
    inputs = inputs_of(explorer, run)
    expected = {(score.site, score.head): score for score in head_scores(explorer.model, *inputs)}
    for attention in explorer.description()["attentions"]:
        for layer, site in enumerate(attention["sites"]):
            for reply in ask(explorer, "grid", run=run, attention=attention["name"], layer=layer)[0]["scores"]:
                score = expected[f"{site}.weights", reply["head"]]
                for name in ("previous", "first", "induction", "entropy"):
                    found = getattr(score, name)
                    assert reply[name] == (None if found is None else pytest.approx(found, abs=CLOSE)), (site, name)


def test_cross_attention_is_scored_by_what_it_copies(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["pair"]
    run = make_run(explorer, target="the cat sat")
    scores = ask(explorer, "grid", run=run, attention="cross", layer=1)[0]["scores"]
    assert all(0 < score["alignment"] < 1 for score in scores)


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_is_the_models(explorers: dict[str, Explorer], kind: str) -> None:
    explorer = explorers[kind]
    run = make_run(explorer)
    reply, arrays = ask(explorer, "read", run=run)
    answer = reply["answer"]
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
        assert len(reply["source"]["tokens"]) == 17
    if kind == "whisper":
        assert arrays["spectrogram"].shape == (80, 80)
        assert len(reply["source"]["tokens"]) == 40


def test_the_output_is_at_the_mask(explorers: dict[str, Explorer]) -> None:
    reply, _ = ask(explorers["masked"], "read", run=make_run(explorers["masked"], "the <mask> sat on the mat"))
    assert reply["source"]["tokens"][reply["answer"]["at"]] == "<mask>"


def test_a_translation_is_the_greedy_one(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["pair"]
    assert isinstance(explorer.model, EncoderDecoder)
    reply, _ = ask(explorer, "read", run=make_run(explorer))
    written = ch.translate(explorer.model, [reply["source"]["ids"]], beams=1)[0]
    assert reply["target"]["ids"] == [explorer.inputs.tokenizer.bos, *written]
    assert reply["source"]["ids"][-1] == explorer.inputs.tokenizer.eos


@pytest.mark.parametrize("kind", ["decoder", "classes", "vit", "pair"])
def test_changed_heads_change_the_answer(explorers: dict[str, Explorer], kind: str) -> None:
    explorer = explorers[kind]
    site = explorer.description()["attentions"][-1]["sites"][1]
    changes = [{"site": site, "head": head, "how": "zero"} for head in (0, 2)]
    run = make_run(explorer, **({"target": "the cat"} if kind == "pair" else {}))
    reply, _ = ask(explorer, "read", run={**run, "changes": changes})
    plain, _ = ask(explorer, "read", run=run)
    assert reply["plain"] == plain["answer"]
    with torch.no_grad(), intervene(explorer.model, zero(f"{site}.out", head=[0, 2])):
        out = explorer.model(*inputs_of(explorer, run))
    probs = (out[0] if kind in ("classes", "vit") else out[0, -1]).softmax(-1)
    assert reply["answer"]["top"][0]["p"] == pytest.approx(float(probs.max()), abs=CLOSE)
    assert reply["answer"] != reply["plain"]


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
    reply, _ = ask(explorer, "read", run={**run, "changes": means})
    assert reply["answer"]["top"][0]["p"] == pytest.approx(float(expected), abs=CLOSE)


def test_a_patch_goes_as_far_as_the_second_text(explorers: dict[str, Explorer]) -> None:
    explorer, site = explorers["decoder"], "blocks.1.attention"
    run, changes = make_run(explorer), [{"site": site, "head": head, "how": "patch"} for head in range(3)]
    ids = inputs_of(explorer, run)[0]
    for second in ("a", "a dog ran"):  # one token, and some
        reply, _ = ask(explorer, "read", run={**run, "second": second, "changes": changes})
        other = explorer.inputs.read(second).tensor
        n = other.shape[1]
        assert (
            reply["note"]
            == f"The second text has {n} tokens, the first {ids.shape[1]}: only the first {n} are patched."
        )
        outs: list[torch.Tensor] = []
        for each in (ids, other):
            with torch.no_grad(), probe(explorer.model, f"{site}.out") as seen:
                explorer.model(each)
            outs.append(seen[f"{site}.out"])
        mixed = torch.cat([outs[1], outs[0][:, :, n:]], 2)
        with torch.no_grad(), intervene(explorer.model, ch.inside.patch(f"{site}.out", mixed)):
            expected = explorer.model(ids)[0, -1].softmax(-1)
        top = reply["answer"]["top"]
        assert [one["p"] for one in top] == pytest.approx([float(expected[one["id"]]) for one in top], abs=CLOSE)
    same, _ = ask(explorer, "read", run={**run, "second": run["text"], "changes": changes})
    assert same["note"] is None


@pytest.mark.parametrize("kind", ["decoder", "rotary", "masked", "classes", "pair", "t5", "vit"])
def test_the_lens_equals_logit_lens(explorers: dict[str, Explorer], kind: str) -> None:
    explorer = explorers[kind]
    run = make_run(explorer)
    said = logit_lens(explorer.model, *inputs_of(explorer, run))[:, 0]
    said = said if said.ndim == 3 else said[:, None]
    reply, arrays = ask(explorer, "lens", run=run)
    assert (reply["layers"], reply["T"]) == said.shape[:2] == arrays["p"].shape
    best = said.softmax(-1).max(-1)
    np.testing.assert_allclose(arrays["p"], best.values, atol=CLOSE, rtol=0)
    few, part = ask(explorer, "lens", run=run, first=reply["T"] - 1, n=64)
    np.testing.assert_array_equal(part["rank"], arrays["rank"][:, -1:])
    assert few["total"] == reply["T"]
    cell, _ = ask(explorer, "cell", run=run, layer=1, position=reply["T"] - 1, k=3)
    likeliest = said[1, -1].softmax(-1).topk(min(3, said.shape[-1])).values.tolist()
    assert [one["p"] for one in cell["top"]] == pytest.approx(likeliest, abs=CLOSE)
    assert cell["rank"] == arrays["rank"][1, -1]
    if kind in ("decoder", "rotary"):
        ids = ask(explorer, "read", run=run)[0]["source"]["ids"]
        logits = said[2, 3]
        assert arrays["rank"][2, 3] == 1 + int((logits > logits[ids[4]]).sum())


def test_flow_equals_the_rollout(explorers: dict[str, Explorer]) -> None:
    for kind in ("decoder", "masked", "vit"):
        run = make_run(explorers[kind])
        expected = attention_rollout(explorers[kind].model, *inputs_of(explorers[kind], run))[0]
        np.testing.assert_allclose(ask(explorers[kind], "flow", run=run)[1]["rollout"], expected, atol=CLOSE, rtol=0)


def test_a_sweep_equals_sweep(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["decoder"]
    run = make_run(explorer)
    ids = inputs_of(explorer, run)[0]
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    expected = sweep(explorer.model, ids, targets=targets, sites="blocks.2.attention")
    reply, _ = ask(explorer, "sweep", run=run, attention="attention", layer=2)
    assert [one["d_loss"] for one in reply["effects"]] == pytest.approx(
        [e.delta["loss"] for e in expected.effects], abs=1e-5
    )
    changes = [{"site": "blocks.1.attention", "head": 2, "how": how} for how in ("zero", "patch")]
    for change in changes:
        changed = {**run, "changes": [change], "second": "a dog ran over the hill"}
        reply, _ = ask(explorer, "sweep", run=changed, attention="attention", layer=1)
        with torch.no_grad(), explorer.passes.changed(explorer.passes.parse(Fields({"run": changed}))):
            base = F.cross_entropy(explorer.model(ids)[0], targets[0], ignore_index=-100)
            with intervene(explorer.model, zero("blocks.1.attention.out", head=0)):
                without = F.cross_entropy(explorer.model(ids)[0], targets[0], ignore_index=-100)
        assert reply["base"]["loss"] == pytest.approx(float(base), abs=CLOSE)
        assert reply["effects"][0]["d_loss"] == pytest.approx(float(without - base), abs=CLOSE)
    for kind in ("masked", "classes", "pair", "whisper", "vit"):
        effects = ask(explorers[kind], "sweep", run=make_run(explorers[kind]))[0]["effects"]
        heads = sum(sum(each["n_heads"]) for each in explorers[kind].description()["attentions"])
        assert len(effects) == heads


def test_steps_equal_generate(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["decoder"]
    assert isinstance(explorer.model, ch.Decoder)
    options: dict[str, Any] = dict(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3)
    prompt = ask(explorer, "read", run=make_run(explorer))[0]["source"]["ids"]
    expected = ch.generate(explorer.model, [prompt], max_new_tokens=5, seed=11, eos=(), **options)[0]
    ids: list[int] = []
    for _ in range(5):
        reply, _ = ask(explorer, "step", run=make_run(explorer), ids=ids, seed=11, **options)
        kept = [one for one in reply["top"] if one["removed_by"] is None]
        assert all((one["p_final"] == 0) == (one["removed_by"] is not None) for one in reply["top"])
        assert reply["kept"] <= 40
        assert sum(one["p_final"] for one in kept) <= 1 + 1e-5
        ids.append(reply["drawn"])
    assert ids == expected


def test_a_beam_search_equals_translate(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["pair"]
    assert isinstance(explorer.model, EncoderDecoder)
    reply, _ = ask(explorer, "beam", run=make_run(explorer), beams=3, length_penalty=1, most=6)
    ids = ask(explorer, "read", run=make_run(explorer))[0]["source"]["ids"]
    best = ch.translate(explorer.model, [ids], beams=3, n_best=3, max_new_tokens=6, return_scores=True)[0]
    assert [one["score"] for one in reply["result"]] == pytest.approx([one.score for one in best], abs=1e-4)
    assert len(reply["steps"][0]["alive"]) == 3
    assert all(one["why"] for step in reply["steps"] for one in (*step["died"], *step["alive"]))


@pytest.mark.parametrize("how", ["zero", "mean", "patch"])
def test_generation_follows_the_changes(explorers: dict[str, Explorer], how: str) -> None:
    """The page's steps and beams are those of `generate` and `translate` inside the same interventions."""
    for kind, site in (("decoder", "blocks.1.attention"), ("pair", "decoder.blocks.0.cross")):
        explorer = explorers[kind]
        changes = [{"site": site, "head": head, "how": how} for head in range(3)]
        second = "a dog ran over the hill. a" if how == "patch" else None
        run = make_run(explorer, changes=changes, second=second)
        prompt = ask(explorer, "read", run=make_run(explorer))[0]["source"]["ids"]
        passes: Any = explorer.passes
        with torch.no_grad(), passes.changed(passes.parse(Fields({"run": run}))):
            if kind == "decoder":
                expected = ch.generate(explorer.model, [prompt], max_new_tokens=4, temperature=0, eos=())[0]
            else:
                expected = ch.translate(explorer.model, [prompt], beams=3, max_new_tokens=6, return_scores=True)[0]
        if kind == "pair":
            reply, _ = ask(explorer, "beam", run=run, beams=3, length_penalty=1, most=6)
            best: Any = expected
            assert reply["result"][0]["score"] == pytest.approx(best[0].score, abs=1e-4)
            plain, _ = ask(explorer, "beam", run=make_run(explorer), beams=3, length_penalty=1, most=6)
            assert reply["result"][0]["score"] != pytest.approx(plain["result"][0]["score"], abs=1e-6)
            continue
        ids: list[int] = []
        for _ in range(4):
            ids.append(ask(explorer, "step", run=run, ids=ids, temperature=0)[0]["drawn"])
        assert ids == expected


def test_states_that_turned(explorers: dict[str, Explorer]) -> None:
    """A model without a head predicts nothing; a change is told by the cosines of its states."""
    explorer = explorers["encoder"]
    assert ask(explorer, "read", run=make_run(explorer))[0]["moved"] is None
    changes = [{"site": "blocks.1.attention", "head": 0, "how": "zero"}]
    reply, _ = ask(explorer, "read", run=make_run(explorer, changes=changes))
    assert "text" not in reply["answer"]
    ids = torch.tensor([reply["source"]["ids"]])
    with torch.no_grad():
        before = explorer.model(ids)[0]
        with intervene(explorer.model, zero("blocks.1.attention.out", head=0)):
            after = explorer.model(ids)[0]
    assert reply["moved"]["tokens"] == pytest.approx(F.cosine_similarity(before, after).tolist(), abs=CLOSE)
    assert reply["moved"]["mean"] == pytest.approx(
        float(F.cosine_similarity(before.mean(0), after.mean(0), dim=0)), abs=CLOSE
    )
    assert min(reply["moved"]["tokens"]) < 1 - 1e-6


def test_geometry_neighbours_and_pca(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["decoder"]
    reply, arrays = ask(explorer, "geometry", model="decoder")
    assert float(arrays["density"].sum()) == pytest.approx(1, abs=1e-4)
    assert float(arrays["random"].sum()) == pytest.approx(1, abs=1e-3)
    assert reply["bounds"]["least_deg"] <= reply["bounds"]["worst_deg"]
    table = explorer.model.tokens.weight.detach()  # type: ignore[union-attr]
    reply, _ = ask(explorer, "neighbours", model="decoder", token=" cat", k=3)
    cosines = F.normalize(table, dim=1) @ F.normalize(table[reply["id"]], dim=0)
    cosines[reply["id"]] = -1
    assert [one["id"] for one in reply["near"]] == cosines.topk(3).indices.tolist()
    reply, arrays = ask(explorer, "pca", model="decoder", n=5000)
    centred = table - table.mean(0)
    assert reply["explained"] == pytest.approx(
        (torch.linalg.svdvals(centred)[:2] ** 2 / (centred**2).sum()).tolist(), abs=1e-4
    )
    assert arrays["xy"].shape == (len(table), 2)


def test_positions_of_every_kind(explorers: dict[str, Explorer]) -> None:
    for kind in ("decoder", "rotary", "pair", "t5", "vit"):
        reply, arrays = ask(explorers[kind], "positions", model=kind, length=11)
        own = [one["name"] for one in reply["kinds"] if one["is_model"]]
        assert own == [explorers[kind].model.config.positions]
        for one in reply["kinds"]:
            assert arrays[f"{one['name']}.bydistance"][0] == pytest.approx(1, abs=1e-5)
            assert arrays[f"{one['name']}.similarity"].shape == (11, 11)


def test_costs_equal_the_forecast(explorers: dict[str, Explorer]) -> None:
    config = explorers["decoder"].model.config
    reply, arrays = ask(
        explorers["decoder"], "cost", model="decoder", lengths=[16, 64], batch=2, precision="bf16", mode="train"
    )
    expected = ch.cost(config, batch=2, length=64, mode="train", precision="bfloat16")
    assert arrays["flops"][:, 1].sum() == pytest.approx(expected.flops, rel=1e-6)
    assert arrays["bytes"][reply["kinds"].index("peak"), 1] == pytest.approx(expected.peak_bytes, rel=1e-6)
    _, arrays = ask(explorers["decoder"], "cost", model="decoder", lengths=[reply["crossover"], 2], changes={})
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


def test_a_measurement_ends_before_it_takes_too_long(
    explorers: dict[str, Explorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_panel, "_time", lambda *_: cost_panel.MEASURE_SECONDS)
    reply, arrays = ask(explorers["decoder"], "measure", model="decoder", lengths=[16, 4, 8])
    assert (reply["lengths"], len(arrays["seconds"])) == ([4], 1)
    monkeypatch.setattr(cost_panel, "MEASURE_SECONDS", 0.0)
    with pytest.raises(ch.InputError, match=r"a call of 4 tokens takes more than 0 seconds here.*shorter"):
        ask(explorers["decoder"], "measure", model="decoder", lengths=[4, 8])


@pytest.mark.parametrize("kind", KINDS)
def test_an_explorer_apart_has_the_same_weights_and_is_not_seen(explorers: dict[str, Explorer], kind: str) -> None:
    explorer = explorers[kind]
    other = explorer.apart()
    assert all(a is b for a, b in zip(explorer.model.parameters(), other.model.parameters(), strict=True))
    run = make_run(explorer)
    with probe(explorer.model, "*embedding") as seen:
        other.answer("read", {"run": run})
    for site in seen:
        with pytest.raises(ch.InputError, match="was not reached"):
            seen[site]
    assert ask(explorer, "read", run=run)[0] == ask(other, "read", run=run)[0]
