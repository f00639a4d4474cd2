"""Models with weights set by hand: what each of their heads does is known."""

from __future__ import annotations

import torch

from clearhead.families import preset
from clearhead.models import Decoder, build

VOCAB, LONGEST = 13, 20


def designed_decoder(kinds: tuple[tuple[str, ...], tuple[str, ...]]) -> Decoder:
    """Two layers of three heads, without norms, of these kinds:

    previous   attends to the token before
    duplicate  attends to all tokens equal to this one, itself included
    first      attends to the first token
    idle       attends to all tokens alike
    induction  attends to tokens after an earlier occurrence of this one; only in the second layer: it reads what the head
               "previous" of the first layer has written, each token's predecessor
    """
    V, P, E = VOCAB, LONGEST, LONGEST
    config = preset(
        "gpt2",
        **dict(n_layers=2, n_heads=3, d_head=E, d_model=2 * V + P, d_ff=3, vocab_size=V, max_len=P),
        **dict(norm="none", attention_scale=1.0, dropout=0.0, attention_dropout=0.0),
    )
    model = build(config).eval()
    assert isinstance(model, Decoder)
    # The stream is [token | position | predecessor], each one-hot. A score of 50 leaves 1e-20 for the others.
    token, position, before = slice(0, V), slice(V, V + P), slice(V + P, 2 * V + P)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.tokens.weight[:, token] = torch.eye(V)
        model.get_parameter("positions.weight")[:, position] = torch.eye(P)
        for layer, row in enumerate(kinds):
            weight = model.get_parameter(f"blocks.{layer}.attention.qkv.weight")
            for head, kind in enumerate(row):
                q, k, v = (part[head * E : (head + 1) * E] for part in weight.split(3 * E))
                if kind == "previous":
                    q[:P, position], k[:P, position] = 50 * torch.eye(P).roll(-1, 0), torch.eye(P)
                    v[:V, token] = torch.eye(V)
                    output = model.get_parameter(f"blocks.{layer}.attention.o_proj.weight")
                    output[before, head * E : head * E + V] = torch.eye(V)
                elif kind == "first":
                    q[0, position], k[0, position.start] = 50, 1
                elif kind != "idle":
                    q[:V, token], k[:V, before if kind == "induction" else token] = 50 * torch.eye(V), torch.eye(V)
    return model
