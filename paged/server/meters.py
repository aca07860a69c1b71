"""Figures for Prometheus; each name ends with its unit."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from paged.call import Call
from paged.engine import Engine

FIRST = (.005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 60)
TOKEN = (.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2)
WHOLE = (.05, .1, .2, .5, 1, 2, 5, 10, 20, 60, 120, 300)


class EngineNow(Collector):
    """What the engine has at the moment in which it is asked."""

    def __init__(self, engine: Engine, meters: Meters):
        self.engine, self.meters = engine, meters

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One family a figure. Lengths of lists: no step has to wait for them."""
        engine = self.engine
        prompt, cached = self.meters.num_prompt_tokens, self.meters.num_cached_tokens
        for name, what, value in (
            ("requests_running", "sequences that hold blocks", len(engine.scheduler.running)),
            ("requests_waiting", "sequences that wait for blocks", len(engine.scheduler.waiting)),
            ("blocks_free", "blocks of the pool that nobody holds", engine.block_pool.num_free()),
            ("blocks", "blocks of the pool", engine.config.num_blocks),
            ("prefix_hit_ratio", "share of prompt tokens found in the cache, of all ended requests",
             cached / prompt if prompt else 0.0),
        ):
            yield GaugeMetricFamily(f"paged_{name}", what, value)


class Meters:
    """Counts what ends."""

    def __init__(self, engine: Engine):
        self.registry = registry = CollectorRegistry()

        def counter(name: str, what: str, *labels: str) -> Counter:
            return Counter(f"paged_{name}", what, labels, registry=registry)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"paged_{name}_seconds", what, buckets=buckets, registry=registry)

        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.requests = counter("requests", "completions that ended, by how", "reason")
        self.refused = counter("requests_refused", "requests that were not run", "status")
        self.prompt_tokens = counter("prompt_tokens", "of requests that were begun")
        self.cached_tokens = counter("cached_prompt_tokens", "of them, found in the prefix cache")
        self.output_tokens = counter("output_tokens", "generated")
        self.queue = histogram("queue_time", "from arrival to the first blocks", FIRST)
        self.first = histogram("time_to_first_token", "from arrival", FIRST)
        self.token = histogram("time_per_output_token", "mean of a request, after its first", TOKEN)
        self.whole = histogram("request", "from arrival to the end", WHOLE)
        registry.register(EngineNow(engine, self))

    def ended(self, call: Call) -> None:
        """A call is over: enter its requests, also those that its caller has left."""
        for output in call.outputs:
            metrics = output.metrics
            if metrics.first_scheduled_time is not None:
                self.num_prompt_tokens += len(output.prompt_token_ids)
                self.num_cached_tokens += output.num_cached_tokens
                self.prompt_tokens.inc(len(output.prompt_token_ids))
                self.cached_tokens.inc(output.num_cached_tokens)
            self.output_tokens.inc(metrics.num_output_tokens)
            for completion in output.outputs:
                self.requests.labels(completion.finish_reason or "abort").inc()
            for meter, seconds in ((self.queue, metrics.queue_time), (self.first,
                                                                      metrics.time_to_first_token),
                                   (self.token, metrics.time_per_output_token)):
                if seconds is not None:
                    meter.observe(seconds)
            end = metrics.finish_time or time.perf_counter()
            self.whole.observe(end - metrics.arrival_time)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)
