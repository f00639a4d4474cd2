"""Several texts in one row, without padding: the mask, each token's position, and attention text by text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from clearhead import kernels
from clearhead.errors import InputError
from clearhead.layers.masks import Mask, Spans, documents
from clearhead.layers.positions import Bias


def packed(lengths: Sequence[int], device: torch.device | str = "cpu") -> tuple[Mask, Int[Tensor, " T"]]:
    """Texts of these lengths, one after the other."""
    if not lengths or min(lengths) < 1:
        raise InputError(f"each text has one token at least; got lengths {list(lengths)[:8]}; leave empty ones out")
    starts = F.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    return packed_at(starts.to(device, non_blocking=True), sum(lengths), max(lengths))


def packed_at(starts: Int[Tensor, " n"], T: int, longest: int) -> tuple[Mask, Int[Tensor, " T"]]:
    """The same from where each text starts in the row of T tokens; the last of `starts` is T. Texts may be empty."""
    index = torch.arange(T, device=starts.device, dtype=starts.dtype)
    ids = torch.searchsorted(starts, index, right=True) - 1
    mask = replace(documents(ids[None]), spans=Spans(starts, longest))
    return mask, index.long() - starts[ids]


def across(queries: Mask, keys: Mask) -> Mask:
    """Cross-attention between two packed rows: each text of the one sees the text of the same number in the other."""
    if queries.spans is None or keys.spans is None or len(queries.spans.starts) != len(keys.spans.starts):
        raise InputError(
            "cross-attention of packed rows needs two masks from packed(), of as many texts; got others; pack both sides"
        )
    spans = replace(queries.spans, keys=keys.spans)
    return Mask(documents=keys.documents, asking=queries.documents, spans=spans)


def pays(mask: Mask, bias: Bias | None, like: Tensor, kernel: str, dropout: float) -> bool:
    """Whether texts packed into one row are attended to one by one, without the pairs between different texts."""
    plain = bias is None and not (mask.window or len(mask.patterns) or mask.keys is not None)
    return plain and kernel in ("auto", "fused") and not dropout and kernels.takes_packed(like)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
    """Each text over its own keys."""
    spans = mask.spans
    assert spans is not None
    keys = spans.keys or spans
    starts, longest = (spans.starts, keys.starts), (spans.longest, keys.longest)
    return kernels.packed_attention(q, k, v, starts, longest, scale, causal=mask.causal)
