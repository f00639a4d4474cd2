"""The flow panel: `flow`, the attention rollout of a stack."""

from __future__ import annotations

import math

from torch import Tensor

from clearhead.explorer.fields import Fields
from clearhead.explorer.forward_passes import ForwardPasses, Steps
from clearhead.explorer.wire_format import pack
from clearhead.inside.heatmap import max_pool
from clearhead.inside.rollout import mean_of_heads, roll

MAX_CELLS = 256  # on a side

WORDS = "How much of each input may have reached each final state, if attention were all there is. It is not an explanation."


def flow(passes: ForwardPasses, fields: Fields) -> Steps[bytes]:
    """The rollout over all layers of a stack, in at most MAX_CELLS x MAX_CELLS cells. Yields before each layer."""
    run = passes.parse(fields)
    names = [name for name in passes.groups() if name != "cross"]
    name = fields.choice("attention", names, names[0])
    forward = yield from passes.steps(run)
    rollout: Tensor | None = None
    for site in passes.group(name):
        yield
        rollout = roll(rollout, mean_of_heads(forward.seen, f"{site}.weights").float())
    assert rollout is not None
    T = rollout.shape[1]
    by = math.ceil(T / MAX_CELLS)
    cells = max_pool(rollout[0].cpu(), by, by)
    return pack({"T": T, "pooled": [by, by], "words": WORDS}, rollout=cells.numpy())
