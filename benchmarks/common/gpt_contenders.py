"""One small GPT, built by clearhead and by other libraries: the same layers, sizes, loss and, before timing, weights.

Pre-norm, learned positions, exact GELU, tied embeddings, attention by torch's scaled_dot_product_attention, dropout on the
embeddings, on attention weights and on each step's output. x-transformers knows no biases in attention and norms, and
transformers' GPT-2 cannot leave them out, so clearhead is built both ways and each library meets its own kind.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.config import Config
from clearhead.models import build


@dataclass(frozen=True)
class Size:
    n_layers: int = 6
    n_heads: int = 6
    d_model: int = 384
    max_len: int = 256
    vocab_size: int = 65


@dataclass(frozen=True)
class Contender:
    name: str
    library: str
    biases: bool
    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]  # of tokens and targets

    @property
    def n_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def contenders(size: Size, *, dropout: float, nanogpt: str | None = None) -> list[Contender]:
    """Everyone who can be built here, all with the weights of clearhead's model."""
    ours = {biases: clearhead(size, dropout=dropout, biases=biases) for biases in (False, True)}
    everyone = [*ours.values(), x_transformers(size, dropout=dropout), transformers(size, dropout=dropout)]
    if nanogpt is not None:
        everyone += [nano_gpt(size, Path(nanogpt), dropout=dropout, biases=biases) for biases in (False, True)]
    for peer in everyone:
        if peer.library != "clearhead":
            copy_weights(ours[peer.biases].model, peer)
    return everyone


def clearhead(size: Size, *, dropout: float, biases: bool) -> Contender:
    model = build(config(size, dropout=dropout, biases=biases))
    return Contender(_name("clearhead", biases), "clearhead", biases, model, _loss_of(model))


def config(size: Size, *, dropout: float = 0.0, biases: bool = True) -> Config:
    return Config(
        shape="decoder",
        n_layers=size.n_layers,
        n_heads=size.n_heads,
        d_model=size.d_model,
        max_len=size.max_len,
        vocab_size=size.vocab_size,
        positions="learned",
        norm="layer",
        norm_first=True,
        feedforward="gelu",
        bias=biases,
        dropout=dropout,
        attention_dropout=dropout,
        tie_embeddings=True,
        init_residual="scaled",
    )


def transformers(size: Size, *, dropout: float) -> Contender:
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2Config(
        n_layer=size.n_layers,
        n_head=size.n_heads,
        n_embd=size.d_model,
        n_positions=size.max_len,
        vocab_size=size.vocab_size,
        activation_function="gelu",
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(theirs)
    return Contender(
        _name("transformers", True), "transformers", True, model, _loss_of(lambda tokens: model(tokens).logits)
    )


def x_transformers(size: Size, *, dropout: float) -> Contender:
    from x_transformers import Decoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=size.vocab_size,
        max_seq_len=size.max_len,
        emb_dropout=dropout,
        tie_embedding=True,
        tie_embedding_scale=1.0,
        attn_layers=Decoder(
            dim=size.d_model,
            depth=size.n_layers,
            heads=size.n_heads,
            attn_dim_head=size.d_model // size.n_heads,
            attn_flash=True,  # its name for scaled_dot_product_attention
            attn_dropout=dropout,
            attn_sublayer_dropout=dropout,
            ff_sublayer_dropout=dropout,
            ff_no_bias=True,
        ),
    )
    return Contender(_name("x-transformers", False), "x-transformers", False, model, _loss_of(model))


def nano_gpt(size: Size, page: Path, *, dropout: float, biases: bool) -> Contender:
    """nanoGPT's GPT, from the user's own copy of its model.py."""
    if "nanogpt_model" not in sys.modules:  # where torch.compile looks for the names its code uses
        spec = importlib.util.spec_from_file_location("nanogpt_model", page)
        if spec is None or spec.loader is None or not page.is_file():
            raise SystemExit(f"--nanogpt takes the path of nanoGPT's model.py; got {page}")
        sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["nanogpt_model"])
    theirs = sys.modules["nanogpt_model"]
    config = theirs.GPTConfig(
        n_layer=size.n_layers,
        n_head=size.n_heads,
        n_embd=size.d_model,
        block_size=size.max_len,
        vocab_size=size.vocab_size,
        dropout=dropout,
        bias=biases,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
        model = theirs.GPT(config)
    return Contender(
        _name("nanoGPT", biases), "nanoGPT", biases, model, lambda tokens, targets: model(tokens, targets)[1]
    )


@torch.no_grad()
def copy_weights(ours: nn.Module, peer: Contender) -> None:
    """Give the peer our weights, every one of them, so that both compute the same function."""
    theirs = dict(peer.model.named_parameters())
    for name, value in _translate(ours.state_dict(), peer.library):
        parameter = theirs.pop(name)
        assert parameter.shape == value.shape, (name, parameter.shape, value.shape)
        parameter.copy_(value)
    assert not theirs, f"{peer.name} has parameters that were given no value: {sorted(theirs)}"


def _translate(state: dict[str, Tensor], library: str) -> Iterator[tuple[str, Tensor]]:
    """Our names and values in another library's names and layout."""
    for name, value in state.items():
        i, part = name.split(".", 2)[1:] if name.startswith("blocks.") else (0, name)
        if library == "x-transformers":
            if name == "positions.weight":  # shrunk on use there
                value = value * math.sqrt(value.shape[-1])
            elif part.endswith("norm.weight"):  # used there as 1 + weight
                value = value - 1
            step = 2 * int(i) + part.startswith("feedforward")
            yield _X_TRANSFORMERS[part].format(step=step), value
        elif part.startswith("attention.q_proj"):
            kind = part.rpartition(".")[2]
            three = [state[name.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
            yield _gpt2(i, f"attn.c_attn.{kind}", torch.cat(three), library)
        elif not part.startswith(("attention.k_proj", "attention.v_proj")):
            head, _, kind = part.rpartition(".")
            yield _gpt2(i, f"{_GPT2[head]}.{kind}", value, library)


def _gpt2(i: object, name: str, value: Tensor, library: str) -> tuple[str, Tensor]:
    is_matrix = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    inner = name.startswith(("ln_1", "attn", "ln_2", "mlp"))
    # transformers keeps GPT-2's matrices as (in, out), as OpenAI's code did.
    return (
        f"transformer.{f'h.{i}.' if inner else ''}{name}",
        value.T if is_matrix and library == "transformers" else value,
    )


def _loss_of(logits: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda tokens, targets: F.cross_entropy(logits(tokens).flatten(0, 1), targets.flatten())


def _name(library: str, biases: bool) -> str:
    return f"{library} (biases)" if biases else library


_GPT2 = {
    "tokens": "wte",
    "positions": "wpe",
    "norm": "ln_f",
    "attention_norm": "ln_1",
    "attention.o_proj": "attn.c_proj",
    "feedforward_norm": "ln_2",
    "feedforward.up": "mlp.c_fc",
    "feedforward.down": "mlp.c_proj",
}
_X_TRANSFORMERS = {
    "tokens.weight": "token_emb.emb.weight",
    "positions.weight": "pos_emb.emb.weight",
    "norm.weight": "attn_layers.final_norm.gamma",
    "attention_norm.weight": "attn_layers.layers.{step}.0.0.gamma",
    "attention.q_proj.weight": "attn_layers.layers.{step}.1.to_q.weight",
    "attention.k_proj.weight": "attn_layers.layers.{step}.1.to_k.weight",
    "attention.v_proj.weight": "attn_layers.layers.{step}.1.to_v.weight",
    "attention.o_proj.weight": "attn_layers.layers.{step}.1.to_out.weight",
    "feedforward_norm.weight": "attn_layers.layers.{step}.0.0.gamma",
    "feedforward.up.weight": "attn_layers.layers.{step}.1.ff.0.0.weight",
    "feedforward.down.weight": "attn_layers.layers.{step}.1.ff.2.weight",
}
