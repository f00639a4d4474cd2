"""Changes beyond heads, attribution, patching and the target token: the page's answers are those of the Python API."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.errors import InputError
from clearhead.explorer import Explorer
from clearhead.explorer.fields import Fields
from clearhead.inside import add, intervene, logit_attribution, patch_grid, probe, scale, sweep, zero
from clearhead.inside.interventions import Intervention
from tests.explorer.models import ask, inputs_of, make_run

SUMS = 1e-4  # fp32: some hundred parts of size up to 10
CLOSE = 1e-5  # fp32; only the order of summation differs

CHANGES: list[tuple[dict[str, Any], Intervention]] = [
    (dict(site="blocks.1.attention", head=None, how="zero"), zero("blocks.1.attention.out")),
    (dict(site="blocks.1.feedforward", head=None, how="zero"), zero("blocks.1.feedforward.hidden")),
    (dict(site="blocks.2.feedforward", head=7, how="zero"), zero("blocks.2.feedforward.hidden", unit=7)),
    (dict(site="blocks.0.attention", head=1, how="scale", by=-60), scale("blocks.0.attention.out", -60.0, head=1)),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda pair: f"{pair[0]['site']}-{pair[0]['how']}")
def test_changed_parts_are_those_of_intervene(
    explorers: dict[str, Explorer], change: tuple[dict[str, Any], Intervention]
) -> None:
    explorer = explorers["decoder"]
    given, intervention = change
    run = make_run(explorer, changes=[given])
    told, _ = ask(explorer, "read", run=run)
    inputs = inputs_of(explorer, run)
    model: Any = explorer.model
    with intervene(model, intervention), torch.no_grad():
        probs = model(*inputs)[0, -1].softmax(-1)
    assert told["answer"]["top"][0]["p"] == pytest.approx(float(probs.max()), abs=CLOSE)
    assert told["answer"]["top"] != told["plain"]["top"]
    options = dict(temperature=1, top_k=0, top_p=1, min_p=0, repetition_penalty=1, seed=0)
    step, _ = ask(explorer, "step", run=run, ids=[], **options)
    assert step["top"][0]["p_raw"] == pytest.approx(float(probs.max()), abs=CLOSE), "Generate has the change, too"


def test_a_whole_text_is_written_as_by_generate(explorers: dict[str, Explorer]) -> None:
    """With a feed-forward layer off, a neuron off and a head reversed: the tokens equal the Python API's."""
    explorer = explorers["decoder"]
    run = make_run(explorer, changes=[given for given, _ in CHANGES[1:]])
    options: dict[str, Any] = dict(temperature=0.9, top_k=40, top_p=1, min_p=0, repetition_penalty=1)
    ids: list[int] = []
    for _ in range(6):
        ids.append(ask(explorer, "step", run=run, ids=ids, seed=11, **options)[0]["drawn"])
    (prompt,) = inputs_of(explorer, run)
    sampled: dict[str, Any] = dict(max_new_tokens=6, seed=11, eos=(), **options)
    with intervene(explorer.model, *(made for _, made in CHANGES[1:])):
        changed = ch.generate(explorer.model, prompt.tolist(), **sampled)[0]
    assert ids == changed
    assert ids != ch.generate(explorer.model, prompt.tolist(), **sampled)[0]


@pytest.mark.parametrize("kind", ["decoder", "rotary", "t5", "vit", "whisper"])
def test_parts_sum_to_the_logit(explorers: dict[str, Explorer], kind: str) -> None:
    explorer = explorers[kind]
    model: Any = explorer.model
    site = next(iter(explorer.passes.attentions))
    for changes in ([], [dict(site=site, head=0, how="zero")]):
        run = make_run(explorer, changes=changes)
        told, _ = ask(explorer, "attribution", run=run)
        assert sum(part["value"] for part in told["parts"]) == pytest.approx(told["logit"], abs=SUMS)
        assert told["total"] == pytest.approx(told["logit"], abs=SUMS)
        if not changes:
            with torch.no_grad():
                logits = model(*inputs_of(explorer, run))[0]
            assert told["logit"] == pytest.approx(float(logits.reshape(-1, logits.shape[-1])[-1].max()), abs=SUMS)
        else:
            name = f"{site}.0"
            assert [part["value"] for part in told["parts"] if part["name"] == name] in ([0.0], [])


def test_the_target_token_is_the_one_named(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["decoder"]
    model: Any = explorer.model
    run = make_run(explorer)
    (tokens,) = inputs_of(explorer, run)
    cat, dog = (explorer.inputs.tokenizer.encode(word, special=False)[0] for word in (" cat", " dog"))
    names = dict(token=explorer.inputs.name(cat), against=explorer.inputs.name(dog))
    told, _ = ask(explorer, "attribution", run=run, **names)
    wanted = logit_attribution(model, tokens, tokens=torch.full_like(tokens, cat), against=torch.full_like(tokens, dog))
    assert [part["value"] for part in told["parts"]] == pytest.approx(
        [float(values[0, -1]) for values in wanted.parts.values()], abs=CLOSE
    )
    assert (told["token"], told["against"]) == (names["token"], names["against"])
    swept, _ = ask(explorer, "sweep", run=run, attention="attention", layer=1, token=names["token"])
    targets = torch.full_like(tokens, -100)
    targets[0, -1] = cat
    effects = sweep(model, tokens, targets=targets, sites="blocks.1.attention").effects
    assert [each["d_loss"] for each in swept["effects"]] == pytest.approx([e.delta["loss"] for e in effects], abs=CLOSE)
    with pytest.raises(InputError, match="not one token"):
        ask(explorer, "attribution", run=run, token="no such thing as this")


def test_patches_equal_patch_grid(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["decoder"]
    model: Any = explorer.model
    run = make_run(explorer, "the cat sat on the mat")
    told, arrays = ask(
        explorer,
        "patches",
        run=run,
        other="the dog sat on the hill",
        layer=1,
        place="attention",
        token=" the",
        against=" cat",
    )
    source, other = (
        explorer.inputs.read(text).tensor for text in ("the cat sat on the mat", "the dog sat on the hill")
    )
    token, against = (explorer.inputs.tokenizer.encode(word, special=False)[0] for word in (" the", " cat"))
    grid = patch_grid(model, source, other, token=token, against=against, place="attention")
    np.testing.assert_allclose(arrays["share"][0], grid.share[1].numpy(), atol=1e-3)  # a quotient of small differences
    assert told["other"] == pytest.approx(grid.other, abs=CLOSE)
    assert told["text"] == pytest.approx(grid.text, abs=CLOSE)
    with pytest.raises(InputError, match="as many tokens"):
        ask(explorer, "patches", run=run, other="the", layer=0)
    with pytest.raises(InputError, match="the same prediction"):
        ask(explorer, "patches", run=run, other="the cat sat on the mat", layer=0)


def residuals(explorer: Explorer, text: str, site: str) -> torch.Tensor:
    """The mean of a residual stream over the words of a text."""
    source = explorer.inputs.read(text)
    with torch.no_grad(), probe(explorer.model, site) as seen:
        explorer.model(source.tensor)
    return seen[site][0][[at for at in range(len(source.strip.ids)) if at not in source.strip.special]].mean(0)


@pytest.mark.parametrize("kind", ["decoder", "rotary", "encoder"])
def test_steering_adds_the_vector_from_one_text_to_another(explorers: dict[str, Explorer], kind: str) -> None:
    explorer, site = explorers[kind], "blocks.1.residual"
    model: Any = explorer.model
    steer = [dict(site=site, head=None, how="steer", by=-2.5)]
    run = make_run(explorer, second="a dog ran", away="the mat sat on the cat", changes=steer)
    vector = -2.5 * (residuals(explorer, run["second"], site) - residuals(explorer, run["away"], site))
    told, _ = ask(explorer, "read", run=run)
    with intervene(model, add(site, vector)), torch.no_grad():
        out = model(*inputs_of(explorer, run))[0]
    if kind == "encoder":
        plain = model(*inputs_of(explorer, run))[0]
        cosines = torch.nn.functional.cosine_similarity(out, plain, dim=-1).tolist()
        assert told["moved"]["tokens"] == pytest.approx(cosines, abs=CLOSE)
        return
    assert told["answer"]["top"][0]["p"] == pytest.approx(float(out[-1].softmax(-1).max()), abs=CLOSE)
    assert told["answer"]["top"] != told["plain"]["top"]
    ids: list[int] = []
    options: dict[str, Any] = dict(temperature=0.9, top_k=40, top_p=1, min_p=0, repetition_penalty=1, seed=3)
    for _ in range(4):
        ids.append(ask(explorer, "step", run=run, ids=ids, **options)[0]["drawn"])
    (prompt,) = inputs_of(explorer, run)
    with intervene(model, add(site, vector)):
        assert ids == ch.generate(model, prompt.tolist(), max_new_tokens=4, eos=(), **options)[0]


def test_steering_needs_both_texts_and_is_refused_where_it_would_be_left_out(explorers: dict[str, Explorer]) -> None:
    explorer = explorers["decoder"]
    steer = [dict(site="blocks.1.residual", head=None, how="steer", by=1)]
    with pytest.raises(InputError, match="write both"):
        explorer.answer("read", {"run": make_run(explorer, second="a dog", changes=steer)})
    with pytest.raises(InputError, match=r"blocks\.9\.residual"):
        explorer.answer("read", {"run": make_run(explorer, changes=[{**steer[0], "site": "blocks.9.residual"}])})
    run = make_run(explorer, second="a dog", away="the cat", changes=steer)
    for name, more in (("attribution", {}), ("sweep", {"attention": "attention", "layer": 0})):
        with pytest.raises(InputError, match="undo the steering"):
            explorer.answer(name, {"run": run, **more})


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("decoder", "blocks.1"),
        ("rotary", "blocks.2"),
        ("masked", "blocks.0"),
        ("pair", "encoder.blocks.1"),
        ("vit", "blocks.1"),
    ],
)
def test_neurons_are_those_of_probe(explorers: dict[str, Explorer], kind: str, block: str) -> None:
    explorer = explorers[kind]
    model: Any = explorer.model
    run = make_run(explorer, changes=[dict(site=next(iter(explorer.passes.attentions)), head=0, how="zero")])
    told, _ = ask(explorer, "neurons", run=run, block=block)
    changed = explorer.passes.changed(explorer.passes.parse(Fields({"run": run})))
    with changed, torch.no_grad(), probe(model, f"{block}.feedforward.hidden") as seen:
        model(*inputs_of(explorer, run))
    hidden = seen[f"{block}.feedforward.hidden"][0]
    here = hidden[told["at"]]
    assert {each["neuron"] for each in told["neurons"]} == set(here.abs().topk(12).indices.tolist())
    for each in told["neurons"]:
        values, value = hidden[:, each["neuron"]], each["value"]
        assert value == pytest.approx(float(here[each["neuron"]]), abs=CLOSE)
        best = values.max() if value > 0 else values.min()
        assert each["strongest"][0]["value"] == pytest.approx(float(best), abs=CLOSE)
        assert len(each["raises"]) == (4 if kind in ("decoder", "rotary") else 0)


@pytest.mark.parametrize("kind", ["decoder", "rotary"])
def test_a_neuron_raises_the_logits_that_attribution_gives_to_it(explorers: dict[str, Explorer], kind: str) -> None:
    """Of the last layer: without the neuron, the logits of these tokens fall most, the final norm held fixed."""
    explorer = explorers[kind]
    model: Any = explorer.model
    block = list(model.blocks)[-1]
    told, _ = ask(explorer, "neurons", run=make_run(explorer), block=f"blocks.{len(model.blocks) - 1}")
    each = told["neurons"][0]
    column = block.feedforward.down.weight[:, each["neuron"]].detach() * each["value"]
    if isinstance(model.norm, torch.nn.LayerNorm):
        column = column - column.mean()
    gains = model.project((column * model.norm.weight)[None, None])[0, 0]
    best = gains.topk(4).indices.tolist()
    assert each["raises"] == [explorer.inputs.name(id) for id in best]
