"""What the routes share: the workers by name, the limits and the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clearhead.serving.guards import Limits
from clearhead.serving.http_errors import UnknownModelError
from clearhead.serving.metrics import Metrics
from clearhead.serving.model_worker import ModelWorker


@dataclass(frozen=True)
class Service:
    workers: Mapping[str, ModelWorker]
    limits: Limits
    metrics: Metrics

    def find(self, name: str, *kinds: str) -> ModelWorker:
        """The worker of this name and one of these kinds; without a name, the first of these kinds."""
        fitting = [worker for worker in self.workers.values() if worker.kind in kinds]
        if name in self.workers and self.workers[name] in fitting:
            return self.workers[name]
        if not name and fitting:
            return fitting[0]
        served = ", ".join(worker.name for worker in fitting) or "none"
        raise UnknownModelError(f"there is no model {name!r:.100} for this; served here: {served}")
