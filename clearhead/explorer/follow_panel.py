"""The panel that follows one token, `follow`: every number on the way from its embedding to what the model says after it.

The numbers are the sites of `probe` in one block, for one head and one position; what lies between two sites (a norm, W_O, the sum
of both) is the block's own module applied to them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.explorer.fields import Fields
from clearhead.explorer.forward_passes import ForwardPass, ForwardPasses
from clearhead.explorer.output_panel import name_of
from clearhead.explorer.wire_format import pack
from clearhead.inside.ablation_sweep import n_heads_of
from clearhead.inside.probe import Seen, probe
from clearhead.inside.sites import blocks_of
from clearhead.layers.block import Block
from clearhead.layers.embedding import TokenEmbedding
from clearhead.models import Encoder, EncoderDecoder, Model
from clearhead.models.stack import Stack

TOP = 10  # tokens at the end

Vector = Float[Tensor, " _"]


def follow(passes: ForwardPasses, fields: Fields) -> bytes:
    """One position through one attention and the feed-forward after it, and then to the end of its stack."""
    run, site = passes.parse(fields), fields.choice("site", list(passes.attentions))
    head = fields.integer("head", 0, n_heads_of(passes.attentions[site]) - 1)
    forward = passes.run(run)
    prefix = site.partition("blocks.")[0]
    strip = forward.source.strip if prefix != "decoder." else forward.strip
    position = fields.integer("position", 0, len(strip.ids) - 1)
    name = site.rpartition(".")[0]
    block = blocks_of(passes.model)[name]
    stack = stack_of(passes.model, prefix)
    sites = [f"{name}.{step}.{part}" for step in ("attention", "cross") for part in ("q", "k", "v", "scores", "out")]
    wanted = [each for each in sites if block.cross is not None or ".cross." not in each]
    streams = f"{prefix}embedding", f"{prefix}blocks.*.residual", f"{name}.feedforward.hidden"
    with passes.changed(run), probe(passes.model, *wanted, f"{site}.weights", *streams) as seen:
        states = passes.states(forward.source, forward.target_ids)
    if prefix == "encoder.":
        states = stack.norm(seen[f"encoder.blocks.{len(stack.blocks) - 1}.residual"])
    entered, final = seen[f"{prefix}embedding"][0, position], states[0, position]
    arrays = {"embedding": entered, **_token(passes, forward, stack, prefix, position)}
    arrays |= _attention(seen, site, block, head, position) | _around(seen, site, block, stack, head, position)
    layers = len(stack.blocks)
    arrays |= {"last": seen[f"{prefix}blocks.{layers - 1}.residual"][0, position], "final": final}
    end = _end(passes, forward, prefix, position, final, states)
    keys = forward.source.strip if site.endswith(".cross") or prefix != "decoder." else forward.strip
    attention = passes.attentions[site]
    told: dict[str, Any] = {
        "site": site,
        "layer": int(name.rpartition(".")[2]),
        "layers": layers,
        "head": head,
        "position": position,
        "token": strip.tokens[position],
        "keys": keys.tokens,
        "scale": attention.heads.scale or attention.d_head**-0.5,
        "norm_first": block.norm_first,
        "turned": passes.model.config.positions == "rotary" and not site.endswith(".cross"),
        **end,
    }
    return pack(told, **{each: _plain(x) for each, x in arrays.items()})


def stack_of(model: Model, prefix: str) -> Stack:
    if isinstance(model, EncoderDecoder):
        return model.decoder if prefix == "decoder." else model.encoder
    return model


def _token(passes: ForwardPasses, forward: ForwardPass, stack: Stack, prefix: str, position: int) -> dict[str, Vector]:
    """The row of the embedding, and what was added to it; nothing for pictures and sounds, which have no rows."""
    model, ids = passes.model, forward.target_ids if prefix == "decoder." else forward.source.strip.ids
    table = (
        model.source if prefix == "encoder." and isinstance(model, EncoderDecoder) and model.source else model.tokens
    )
    if not isinstance(table, TokenEmbedding) or model.config.dropped_token >= 0:  # ESM-2 scales rows by the whole text
        return {}
    row = table(torch.tensor([[ids[position]]], device=passes.inputs.device))
    x = row
    if isinstance(model, Encoder) and model.segments is not None:
        x = x + model.segments.weight[0]
    real = None if prefix == "decoder." else forward.source.real
    at = position if real is None else int(real[0, :position].sum())  # padding is not counted
    placed = stack.positions.enter(x, torch.tensor([at], device=x.device))
    return {"row": row[0, 0], **({} if torch.equal(placed, row) else {"place": (placed - row)[0, 0]})}


def _attention(seen: Seen, site: str, block: Block, head: int, position: int) -> dict[str, Tensor]:
    """Inside the head: query, keys, values, scores, weights, and their mix."""
    attention = seen.attention[site]
    group = head * attention.k.shape[1] // attention.q.shape[1]
    weights = seen.rows(f"{site}.weights", position, head=head)[0, 0, 0]
    T, S = attention.q.shape[2], attention.k.shape[2]
    allowed = attention.mask.allowed(T, S, slice(position, position + 1), slice(None), weights.device)
    return {
        "q": seen[f"{site}.q"][0, head, position],
        "queries": seen[f"{site}.q"][0, head],
        "k": seen[f"{site}.k"][0, group],
        "v": seen[f"{site}.v"][0, group],
        "scores": seen.rows(f"{site}.scores", position, head=head)[0, 0, 0],
        "allowed": torch.ones_like(weights) if allowed is None else allowed[0, 0, 0].to(weights),
        "weights": weights,
        "out": seen[f"{site}.out"][0, head, position],
    }


def _around(seen: Seen, site: str, block: Block, stack: Stack, head: int, position: int) -> dict[str, Vector]:
    """Around the head: the residual stream, its norms, W_O and the feed-forward."""
    name, _, step = site.rpartition(".")
    layer = int(name.rpartition(".")[2])
    before = name.removesuffix(f"blocks.{layer}")
    stream = seen[f"{before}embedding" if layer == 0 else f"{before}blocks.{layer - 1}.residual"][0, position]
    found: dict[str, Vector] = {}
    for kind, attention, norm in (
        ("attention", block.attention, block.attention_norm),
        ("cross", block.cross, block.cross_norm),
    ):
        if attention is None or norm is None:
            continue
        outs = seen[f"{name}.{kind}.out"][0, :, position]
        added = attention.o_proj(outs.flatten()[None])[0]
        after = stream + added if block.norm_first else norm((stream + added)[None])[0]
        if kind == step:
            alone, none = torch.zeros_like(outs), torch.zeros_like(outs)
            alone[head] = outs[head]
            mine, bias = attention.o_proj(torch.stack([alone.flatten(), none.flatten()]))
            found |= {
                "stream": stream,
                "input": norm(stream[None])[0] if block.norm_first else stream,
                "from_head": mine - bias,
                "added": added,
                "after": after,
            }
        stream = after
    hidden, norm = seen[f"{name}.feedforward.hidden"][0, position], block.feedforward_norm
    return {
        **found,
        "middle": stream,
        "forward_input": norm(stream[None])[0] if block.norm_first else stream,
        "hidden": hidden,
        "forward": block.feedforward.down(hidden[None])[0],
        "residual": seen[f"{name}.residual"][0, position],
    }


def _end(
    passes: ForwardPasses, forward: ForwardPass, prefix: str, position: int, final: Vector, states: Tensor
) -> dict[str, Any]:
    """What becomes of the final state: scores of tokens or classes, or nothing more."""
    model, config = passes.model, passes.model.config
    if prefix == "encoder.":
        return {"end": "memory", "top": []}
    if config.head == "none":
        return {"end": "states", "top": []}
    if passes.has_classes:
        assert isinstance(model, Encoder)
        assert model.head is not None
        logits = model.head(model.pooled(states, forward.source.real))[0].float()
        return {"end": "classes", "top": _top(passes, logits, logits if config.problem == "regression" else None)}
    logits = model.project(final[None, None])[0, 0].float()
    return {"end": "token" if isinstance(model, Encoder) else "next", "top": _top(passes, logits)}


def _top(passes: ForwardPasses, logits: Vector, chances: Vector | None = None) -> list[dict[str, Any]]:
    if chances is None:
        many = passes.has_classes and passes.model.config.problem == "multi_label"
        chances = logits.sigmoid() if many else logits.softmax(-1)
    best = logits.topk(min(TOP, len(logits))).indices.tolist()
    kind = "label" if passes.has_classes else "token"
    return [{kind: name_of(passes, id), "id": id, "logit": float(logits[id]), "p": float(chances[id])} for id in best]


def _plain(x: Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()
