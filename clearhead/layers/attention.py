"""Multi-head attention: self and cross, with as many key/value heads as query heads, or fewer."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn

from clearhead.engine.kv_cache import AnyLayerCache
from clearhead.layers.attend import attend
from clearhead.layers.linear import FusedLinear, Linear, save_apart
from clearhead.layers.masks import Mask
from clearhead.layers.norm import RMSNorm
from clearhead.layers.positions import Angles, Bias, rotate


class Attend(nn.Module):
    """`attend` as a module: the one place where q, k, v and the mask meet, so that a hook here sees all of attention."""

    def __init__(self, *, scale: float | None = None, dropout: float = 0.0, kernel: str = "auto") -> None:
        super().__init__()
        self.scale, self.dropout, self.kernel = scale, dropout, kernel

    def forward(
        self,
        q: Float[Tensor, "B H T E"],
        k: Float[Tensor, "n K s E"],
        v: Float[Tensor, "n K s E"],
        mask: Mask | None = None,
        bias: Bias | None = None,
    ) -> Float[Tensor, "B H T E"]:
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, mask, bias=bias, scale=self.scale, dropout=dropout, kernel=self.kernel)


class MultiHeadAttention(nn.Module):
    """concat(head_1 .. head_H) W_o with head_i = attend(x W_q, y W_k, y W_v) (section 3.2.2).

    y is x itself, or with `cross=True` the encoder's output. `bias` names which of q k v o carry one.
    Self-attention projects q, k and v in one product, cross-attention k and v; saved, all have names of their own.
    Where heads were pruned, `kept` says which these are, since a bias is each head's own.
    """

    def __init__(
        self,
        *,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        bias: str = "qkvo",
        cross: bool = False,
        qk_norm: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        kernel: str = "auto",
        kept: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.kept, self.n_kv_heads = kept, n_kv_heads or n_heads
        self.d_head = d_head or d_model // n_heads
        d_q, d_kv = n_heads * self.d_head, (n_kv_heads or n_heads) * self.d_head
        biased = {f"{letter}_proj" for letter in bias}
        self.cross = cross
        if cross:
            self.q_proj = Linear(d_model, d_q, bias="q" in bias)
            self.kv = FusedLinear(d_model, {"k_proj": d_kv, "v_proj": d_kv}, bias=biased)
            save_apart(self, "kv")
        else:
            self.qkv = FusedLinear(d_model, {"q_proj": d_q, "k_proj": d_kv, "v_proj": d_kv}, bias=biased)
            save_apart(self, "qkv")
        self.q_norm = RMSNorm(self.d_head, eps=1e-6) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.d_head, eps=1e-6) if qk_norm else nn.Identity()
        self.heads = Attend(scale=scale, dropout=dropout, kernel=kernel)
        self.o_proj = Linear(d_q, d_model, bias="o" in bias)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        mask: Mask | None = None,
        *,
        memory: Float[Tensor, "B S D"] | None = None,
        angles: Angles | None = None,
        bias: Bias | None = None,
        cache: AnyLayerCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """x attends to itself, or to `memory`. With a cache, x is what comes after the tokens it holds."""
        if self.cross:
            q = self.q_norm(self._split(self.q_proj(x)))
            k, v = self._read(memory, cache)
        else:
            q, k, v = (self._split(part) for part in self.qkv(x))
            q, k = self.q_norm(q), self.k_norm(k)
            if angles is not None:
                q, k = rotate(q, angles), rotate(k, angles)
            if cache is not None:
                k, v = cache.extend(k, v)
        if bias is not None and self.kept:
            bias = bias[:, list(self.kept)] if isinstance(bias, Tensor) else bias.only(self.kept)
        return self.o_proj(self.heads(q, k, v, mask, bias).transpose(1, 2).flatten(2))

    def _split(self, x: Float[Tensor, "B T _"]) -> Float[Tensor, "B h T E"]:
        return x.unflatten(-1, (-1, self.d_head)).transpose(1, 2)

    def _read(self, memory: Float[Tensor, "B S D"] | None, cache: AnyLayerCache | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's output: computed once, then kept by the cache."""
        if cache is not None and cache.cross is not None:
            k, v = cache.cross  # a pool has room for heads that may have been pruned
            return k[:, : self.n_kv_heads], v[:, : self.n_kv_heads]
        assert memory is not None, "cross-attention needs the encoder's output, or a cache that has read it"
        k, v = (self._split(part) for part in self.kv(memory))
        k = self.k_norm(k)
        if cache is not None:
            cache.cross = k, v
        return k, v
