"""From each row's last token to the logits of its next, in one call of native.cpp: what the engine asks for at each step on a CPU.

Around the blocks (prepared.py) stand the embedding with its positions, and the head; a token of a small model takes a few
milliseconds, and each of torch's operators some microseconds. What the call does not know is left to the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn

from clearhead.engine.kv_cache import Pool
from clearhead.engine.native_stack import Places, Prepared, is_plain, matrix, norm
from clearhead.kernels import huge_pages as large_pages
from clearhead.kernels import native
from clearhead.layers.embedding import TokenEmbedding, TokenHead
from clearhead.layers.linear import Packed, is_bare
from clearhead.layers.norm import LayerNorm, RMSNorm
from clearhead.layers.positions import Learned, Positions, Rotary, Sinusoidal
from clearhead.models.decoder import Decoder
from clearhead.models.encoder_decoder import EncoderDecoder
from clearhead.quantization.integer import Int8

Numbers = NDArray[np.int32]

# Weights that no cache holds move to large pages: not before a few tokens are there, and then little by little.
LARGE, FIRST_STEPS, MOVING_STEPS = 2**26, 8, 100

OWN = {"states", "project"}  # methods that this stands for; who puts another in their place wants it to be called


class Steps:
    """One caller's steps with one model."""

    def __init__(self, model: Decoder | EncoderDecoder) -> None:
        self.model = model
        self.is_alone = self.is_sure = False

    @contextmanager
    def alone(self) -> Generator[None]:
        """Within it nobody else runs between two steps: to look at each of a model's tensors takes a twentieth of one."""
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = self.is_sure = False

    def write(
        self, tokens: Int[Tensor, " n"], pool: Pool, pages: tuple[Numbers, Numbers], source: tuple[Numbers, Numbers]
    ) -> Float[Tensor, "n V"] | None:
        """Read these tokens; return logits, and put each row's likeliest next token in their place. None: not done, ask the
        model. `pages` and `source` are a table of blocks and the tokens in them, of at least as many rows; a decoder has no source.
        """
        whole = self._find(tokens, pool)
        self.is_sure = self.is_alone and whole is not None
        if whole is None or not whole.fits(pool, len(tokens)):
            return None
        return whole.write(tokens, pool, pages, source)

    def _find(self, tokens: Tensor, pool: Pool) -> Whole | None:
        whole = _MODELS.get(self.model)
        if self.is_sure:
            return whole
        if torch.is_grad_enabled() or self.model.training or not native.is_there() or not is_bare(tokens):
            return None
        if not OWN.isdisjoint(vars(self.model)):
            return None
        if pool.memory.device.type != "cpu" or pool.memory.dtype != torch.float32:
            return None
        if whole is None or not whole.is_as_it_was():
            whole = _MODELS[self.model] = Whole(self.model)
        return whole


class Whole:
    def __init__(self, model: Decoder | EncoderDecoder) -> None:
        stack = model if isinstance(model, Decoder) else model.decoder
        config, embedding, head = model.config, model.tokens, model.head
        ends: list[nn.Module] = [embedding, head, stack.positions, stack.embedding_norm]
        inner = [module for end in ends for module in end.modules()]
        self.holders = Places([model, stack, stack.blocks])
        self.ends, self.blocks = Places(inner), Prepared(stack.layers, stack.norm)
        self.head, self.bias = head, head.bias
        self.is_known = (
            self.blocks.is_known
            and type(model) in (Decoder, EncoderDecoder)
            and (type(embedding), type(head)) == (TokenEmbedding, TokenHead)
            and type(stack.positions) in (Positions, Learned, Rotary, Sinusoidal)
            and type(stack.embedding_norm) in (nn.Identity, nn.LayerNorm, LayerNorm, RMSNorm)
            and head.activation is None
            and not config.pruned_heads
            and config.kernel in ("auto", "fused")
            and all(is_plain(module) for module in inner)
        )
        if not self.is_known:
            return
        weight = cast(Tensor | Int8, embedding.weight)
        last = weight if head.weight is None else cast(Tensor | Int8, head.weight)
        self.positions, self.facts, self.d = stack.positions, _facts(stack.positions), weight.shape[1]
        self.n_held = 0  # positions in the tables
        self.tables: Sequence[Tensor] = ()
        self.vocab_size, step = last.shape[0], self.blocks.step
        self.around = native.Ends(
            embedding=matrix(cast(Tensor | Packed, weight), None),
            head=matrix(cast(Tensor | Packed, last), head.bias),
            norm=norm(stack.embedding_norm),
            factor=embedding.factor,
            scale=head.scale,
        )
        step.ends, step.window = ctypes.addressof(self.around), config.window
        self.n_steps, tensors = 0, [*self.blocks.places.tensors, *self.ends.tensors]
        total = sum(tensor.nbytes for tensor in tensors)
        self.moving = large_pages.move(tensors if total >= LARGE else [])
        self.pace = -(-total // (large_pages.PIECE * MOVING_STEPS))

    def is_as_it_was(self) -> bool:
        return (
            self.holders.are_as_they_were()
            and self.ends.are_as_they_were()
            and self.blocks.places.are_as_they_were()
            and self.head.bias is self.bias  # where there was none, there is no place to look at
            and (not self.is_known or _facts(self.positions) == self.facts)
        )

    def fits(self, pool: Pool, n_rows: int) -> bool:
        return self.is_known and self.blocks.fits(pool.memory, n_rows) and not self.ends.are_watched()

    def write(
        self, tokens: Int[Tensor, " n"], pool: Pool, pages: tuple[Numbers, Numbers], source: tuple[Numbers, Numbers]
    ) -> Float[Tensor, "n V"]:
        n, step, around = len(tokens), self.blocks.step, self.around
        logits, states = torch.empty(n, self.vocab_size), torch.empty(n, self.d)
        self.n_steps += 1
        if self.n_steps > FIRST_STEPS:
            for _ in islice(self.moving, self.pace):
                pass
        self._place(int(pages[1][:n].max()) + 1)
        around.tokens = around.likeliest = tokens.data_ptr()
        around.logits, step.x = logits.data_ptr(), states.data_ptr()
        step.pages, step.source = _blocks(*pages), _blocks(*source)
        self.blocks.take(n, pool)
        return logits

    def _place(self, n: int) -> None:
        """The tables of at least the first n positions."""
        if n <= self.n_held:
            return
        positions, step = self.positions, self.blocks.step
        self.n_held = 1 << n.bit_length()
        at = torch.arange(self.n_held)
        if isinstance(positions, Rotary):
            self.tables = [turns[0, 0].contiguous() for turns in positions.angles(at)]
            step.n_turns, (step.cos, step.sin) = self.tables[0].shape[1], (table.data_ptr() for table in self.tables)
        elif isinstance(positions, Learned):
            self.n_held = positions.weight.shape[0]
            self.around.positions = positions.weight.data_ptr()
        elif isinstance(positions, Sinusoidal):
            self.tables = [positions.table(at).contiguous()]
            self.around.positions = self.tables[0].data_ptr()


# Nothing in here holds the model itself.
_MODELS: WeakKeyDictionary[Decoder | EncoderDecoder, Whole] = WeakKeyDictionary()


def _facts(positions: Positions) -> dict[str, Any]:
    """What tables of positions depend on, beside tensors."""
    return {name: value for name, value in vars(positions).items() if name[0] != "_" and name != "training"}


def _blocks(table: Numbers, counts: Numbers) -> native.Blocks:
    (at, _), (counted, _) = table.__array_interface__["data"], counts.__array_interface__["data"]
    return native.Blocks(at, counted, table.shape[1])
