"""Metrics for Prometheus. Nothing here holds a text, a key or a name chosen by a client."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from clearhead.serving.worker import Worker

log = logging.getLogger("clearhead.serving")

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The counters of one server."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.requests = Counter("clearhead_requests", "Requests answered", ["route", "status"], registry=registry)
        self.prompt_tokens = Counter("clearhead_prompt_tokens", "Tokens of prompts", ["model"], registry=registry)
        self.new_tokens = Counter("clearhead_new_tokens", "Tokens written", ["model"], registry=registry)
        wait = "Seconds that a request waited until it was let in"
        self.wait = Histogram("clearhead_wait_seconds", wait, ["model"], buckets=SECONDS, registry=registry)
        for name, worker in workers.items():
            worker.on_wait = self.wait.labels(name).observe
        first = "Seconds from a request to its first token"
        self.first_token = Histogram(
            "clearhead_first_token_seconds", first, ["model"], buckets=SECONDS, registry=registry
        )
        between = "Seconds between two tokens of a text"
        self.between_tokens = Histogram(
            "clearhead_between_tokens_seconds", between, ["model"], buckets=SECONDS, registry=registry
        )
        whole = "Seconds from a request to the end of its answer"
        self.whole = Histogram("clearhead_request_seconds", whole, ["route"], buckets=SECONDS, registry=registry)
        self.connections = Gauge("clearhead_connections", "Open connections", registry=registry)
        self.registry.register(Engines(workers))
        self.gather_others: Callable[[], Awaitable[list[list[Metric]]]] | None = None  # of the server's other processes

    async def expose(self) -> bytes:
        """All processes' metrics, summed up, as Prometheus reads them."""
        if self.gather_others is None:
            return generate_latest(self.registry)
        return generate_latest(Summed([list(self.registry.collect()), *await self.gather_others()]))


class Summed(Collector):
    """The metrics of several processes as one."""

    def __init__(self, processes: list[list[Metric]]) -> None:
        self.processes = processes

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[Any, ...], float]] = {}
        for family in itertools.chain.from_iterable(self.processes):
            families.setdefault(family.name, family)
            own = values.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, *sorted(sample.labels.items())
                if sample.name.endswith("_created"):
                    own[key] = min(own.get(key, sample.value), sample.value)
                else:
                    own[key] = own.get(key, 0.0) + sample.value
        for name, family in families.items():
            summed = Metric(name, family.documentation, family.type)
            for (sample, *labels), value in values[name].items():
                summed.add_sample(sample, dict(labels), value)
            yield summed


class Engines(Collector):
    """How busy each engine is, read when Prometheus asks."""

    def __init__(self, workers: Mapping[str, Worker]) -> None:
        self.workers = workers

    def collect(self) -> Iterator[GaugeMetricFamily]:
        waiting = GaugeMetricFamily("clearhead_waiting", "Requests not let in yet", labels=["model"])
        running = GaugeMetricFamily("clearhead_running", "Requests being written", labels=["model"])
        steps = GaugeMetricFamily("clearhead_steps", "Steps that the engine has taken", labels=["model"])
        held = GaugeMetricFamily("clearhead_kv_share", "Share of the blocks of memory that are held", labels=["model"])
        for name, worker in self.workers.items():
            if (engine := worker.engine) is not None:
                waiting.add_metric([name], engine.n_waiting)
                running.add_metric([name], engine.n_running)
                steps.add_metric([name], engine.n_steps)
                held.add_metric([name], engine.cache_usage)
        yield from (waiting, running, steps, held)


class Count:
    """Middleware that counts and times each request and logs one line, without texts, keys or addresses."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, is_whole = time.perf_counter(), 0, False

        async def watched(message: Message) -> None:
            nonlocal status, is_whole
            status = message.get("status", status)
            is_whole = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            seconds = time.perf_counter() - began
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.whole.labels(route).observe(seconds)
            facts = (_known(scope["method"]), route, status, seconds, "yes" if is_whole else "no")
            # Refusals cost a client nothing: their lines are limited.
            kind = f"route={route} status={status}" if status >= 400 else None
            log.info("method=%s route=%s status=%d seconds=%.3f whole=%s", *facts, extra={"kind": kind})


def _known(method: str) -> str:
    return method if method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE") else "other"
