"""Following one token: every number is that of `ch.probe`, and each step leads to the next."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import clearhead as ch
from clearhead.explorer import Explorer
from clearhead.explorer.wire_format import unpack
from tests.explorer.models import KINDS, inputs_of, make_explorer, make_run

CLOSE = 1e-5  # both in 32 bits, the same operators on one row or on all


def answer(explorer: Explorer, **params: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    told, arrays = unpack(explorer.answer("follow", params))
    return told, {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted.float(), atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_probe(kind: str) -> None:
    explorer = make_explorer(kind)
    model: Any = explorer.model
    run = make_run(explorer)
    inputs = inputs_of(explorer, run)
    with torch.no_grad(), ch.probe(model) as seen:
        logits = model(*inputs)
    attentions = explorer.description()["attentions"]
    for attention in attentions:
        for site, n_heads in list(zip(attention["sites"], attention["n_heads"], strict=True))[-2:]:
            T, head = seen[f"{site}.q"].shape[2], n_heads - 1
            for position in {0, T // 2, T - 1}:
                told, x = answer(explorer, run=run, site=site, head=head, position=position)
                block, _, step = site.rpartition(".")
                group = head * seen[f"{site}.k"].shape[1] // n_heads
                near(x["q"], seen[f"{site}.q"][0, head, position])
                near(x["k"], seen[f"{site}.k"][0, group])
                near(x["v"], seen[f"{site}.v"][0, group])
                near(x["scores"], seen[f"{site}.scores"][0, head, position])
                near(x["weights"], seen[f"{site}.weights"][0, head, position])
                near(x["out"], seen[f"{site}.out"][0, head, position])
                near(x["hidden"], seen[f"{block}.feedforward.hidden"][0, position])
                near(x["residual"], seen[f"{block}.residual"][0, position])
                near(x["embedding"], seen[f"{block.partition('blocks.')[0]}embedding"][0, position])
                follows(told, x, model.get_submodule(block), step, head)
                ends(told, x, logits, position, explorer)


def follows(told: dict[str, Any], x: dict[str, torch.Tensor], block: Any, step: str, head: int) -> None:
    """Each step from the one before it, by the equations."""
    with torch.no_grad():
        near(torch.where(x["allowed"] > 0, x["scores"], -torch.inf).softmax(0), x["weights"])
        near(x["weights"] @ x["v"], x["out"])
        attention = getattr(block, step)
        d = attention.d_head
        near(F.linear(x["out"], attention.o_proj.weight[:, head * d : (head + 1) * d]), x["from_head"])
        norm = getattr(block, f"{step}_norm")
        near(norm(x["stream"][None])[0] if told["norm_first"] else x["stream"], x["input"])
        added = x["stream"] + x["added"]
        near(added if told["norm_first"] else norm(added[None])[0], x["after"])
        if step == "cross" or block.cross is None:
            near(x["middle"], x["after"])
        near(block.feedforward(x["forward_input"][None, None])[0, 0], x["forward"])
        total = x["middle"] + x["forward"]
        near(total if told["norm_first"] else block.feedforward_norm(total[None])[0], x["residual"])


def ends(
    told: dict[str, Any], x: dict[str, torch.Tensor], logits: torch.Tensor, position: int, explorer: Explorer
) -> None:
    if told["end"] == "memory":
        assert told["top"] == []
        return
    if told["end"] == "states":
        near(x["final"], logits[0, position])
        return
    scores = logits[0] if told["end"] == "classes" else logits[0, position]
    assert [one["id"] for one in told["top"]] == scores.topk(min(10, len(scores))).indices.tolist()
    for one in told["top"]:
        assert one["logit"] == pytest.approx(float(scores[one["id"]]), abs=CLOSE)
        assert one["p"] == pytest.approx(float(scores.softmax(-1)[one["id"]]), abs=CLOSE)


def test_it_ends_at_the_answer_above() -> None:
    for kind in ("decoder", "pair"):
        explorer = make_explorer(kind)
        run = make_run(explorer)
        read, _ = unpack(explorer.answer("read", {"run": run}))
        last = len((read["target"] or read["source"])["ids"]) - 1
        site = explorer.description()["attentions"][-1]["sites"][0]
        told, _ = answer(explorer, run=run, site=site, head=0, position=last)
        shown = [(one["token"], pytest.approx(one["p"], abs=1e-6)) for one in told["top"]]
        assert [(one["token"], one["p"]) for one in read["answer"]["top"][:10]] == shown


def test_a_changed_head_is_followed_as_it_is_changed() -> None:
    explorer = make_explorer("rotary")
    run = make_run(explorer, changes=[{"site": "blocks.1.attention", "head": 2, "how": "zero"}])
    _, x = answer(explorer, run=run, site="blocks.1.attention", head=2, position=3)
    assert not x["out"].any()
    assert not x["from_head"].any()
    assert x["added"].any()


def test_wrong_places_are_refused() -> None:
    explorer = make_explorer("decoder")
    run = make_run(explorer)
    for wrong in (dict(head=3), dict(position=99), dict(site="blocks.9.attention")):
        with pytest.raises(ch.ClearheadError, match=r"head|position|site"):
            answer(explorer, **{**dict(run=run, site="blocks.0.attention", head=0, position=0), **wrong})
