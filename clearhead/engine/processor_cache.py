"""Strategies prepared for one model (`LogitsProcessor`). Equal requests share one, and are then sampled together."""

from __future__ import annotations

import threading
from collections import OrderedDict
from operator import is_

from clearhead.engine.request import Request
from clearhead.models import Decoder, EncoderDecoder
from clearhead.sampling.logits_processors import LogitsProcessor

MAX_BYTES = 32 * 2**20  # of all that are kept; each may hold some numbers for each token of the vocabulary
MAX_SHARED = 1000  # biases: to compare more of them takes longer than sharing saves


class ProcessorCache:
    """Processors by what they are made of; the last ones are kept. Several threads may ask."""

    def __init__(self, model: Decoder | EncoderDecoder) -> None:
        self.model, self.lock = model, threading.Lock()
        self.kept: OrderedDict[str, LogitsProcessor] = OrderedDict()
        self.n_bytes = 0
        self.last: LogitsProcessor | None = None

    def get(self, request: Request) -> LogitsProcessor:
        """The request's own processor if it brings one; else one that is kept, or a new one."""
        strategy, own, last = request.strategy, request.processor, self.last
        settings = strategy, self.model.generation, request.eos
        if own is not None and all(map(is_, own.settings, settings)):
            return own
        biases = len(strategy.logit_bias) + len(strategy.suppress)
        if biases > MAX_SHARED:
            return LogitsProcessor(self.model, request.eos, strategy)
        # Many requests of one caller have the very same settings. Those that can be changed in place are compared by value.
        is_fixed = not biases and isinstance(request.eos, tuple | None)
        if is_fixed and last is not None and all(map(is_, last.settings, settings)):
            return last
        key = f"{strategy} {request.eos} {self.model.generation}"
        with self.lock:
            found = self.kept.pop(key, None)
            if found is None:
                found = LogitsProcessor(self.model, request.eos, strategy)
                self.n_bytes += found.nbytes
            self.kept[key] = found  # the newest
            while self.n_bytes > MAX_BYTES and len(self.kept) > 1:
                self.n_bytes -= self.kept.popitem(last=False)[1].nbytes
        self.last = found if is_fixed else None
        return found
