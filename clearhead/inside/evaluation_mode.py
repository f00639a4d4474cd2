"""`eval_mode`: a model without dropout for a while, for several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import nn


@dataclass
class Use:
    """How many are inside `eval_mode` of one model, and the modules that were in training mode before the first."""

    n: int = 0
    training: list[nn.Module] = field(default_factory=list[nn.Module])


_USES: dict[nn.Module, Use] = {}  # of the models that somebody uses now
_LOCK = threading.Lock()


@contextmanager
def eval_mode(model: nn.Module) -> Generator[None]:
    """Without dropout inside. Each module's mode is restored when the last of all threads leaves.

    A thread that trains the model meanwhile has no dropout either: let it train a copy.
    """
    with _LOCK:
        use = _USES.setdefault(model, Use())
        use.n += 1
        training = [module for module in model.modules() if module.training]
        use.training += training
        for module in training:
            module.training = False
    try:
        yield
    finally:
        with _LOCK:
            use.n -= 1
            if not use.n:
                del _USES[model]
                for module in use.training:
                    module.training = True


def may_train(model: nn.Module) -> bool:
    """Whether the model is in training mode, or will be again when another thread leaves `eval_mode`."""
    return model.training or model in _USES
