"""A bound on the log: a line that is repeated is written a few times and then counted."""

from __future__ import annotations

import logging
import time
from collections import Counter

SECONDS = 10.0
MAX_LINES = 50  # of one kind, in so many seconds

log = logging.getLogger("clearhead.serving")


class RepeatLimit(logging.Filter):
    """Lets through `MAX_LINES` of each kind in `SECONDS`.

    A record's kind is its message before the values are filled in, or its own field `kind`, where None means no limit. A message
    that is no text, as some libraries write, is of the kind of its type.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.until = Counter[object](), 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        kind: object = getattr(record, "kind", record.msg if isinstance(record.msg, str) else type(record.msg))
        if kind is None:
            return True
        self.seen[kind] += 1
        return self.seen[kind] <= MAX_LINES

    def tell(self) -> None:
        """Write how many lines were left out, and begin to count anew, once the time is over. Called about once a second."""
        if time.monotonic() < self.until:
            return
        seen, self.seen, self.until = self.seen, Counter[object](), time.monotonic() + SECONDS
        for kind, n in seen.items():
            if n > MAX_LINES:
                log.warning("%d lines more like this: %s", n - MAX_LINES, kind, extra={"kind": None})
