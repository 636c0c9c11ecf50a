from dataclasses import dataclass, fields
from functools import partial
from typing import Literal, get_args

import prometheus_client

from core.manifest import IndexManifest

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

UNMATCHED = "unmatched"  # stands for every path that no route has: a label must be bounded
DEPARTED = "499"  # stands for the status of a request whose client went away unanswered

Tier = Literal["memory", "in_flight", "redis"]
Rejection = Literal["queue", "rate", "connections", "deadline", "departed"]
RedisError = Literal["timeout", "connection", "value"]

_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 5)
_QUERIES = (1, 2, 4, 8, 16, 32, 64)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Timings:
    """Time in each stage [ms]; texts that are tokenized and encoded together share these two."""

    cache: float
    queue: float
    tokenize: float
    encode: float
    search: float
    fetch: float
    total: float


STAGES = tuple(stage.name for stage in fields(Timings))
_CACHED_STAGES = ("cache", "fetch", "total")


class Metrics:
    """All series of one application, in a registry of its own; each exists from the start."""

    def __init__(self) -> None:
        self.registry = registry = prometheus_client.CollectorRegistry()
        prometheus_client.ProcessCollector(registry=registry)
        prometheus_client.PlatformCollector(registry=registry)
        counter = partial(prometheus_client.Counter, registry=registry)
        gauge = partial(prometheus_client.Gauge, registry=registry)
        histogram = partial(prometheus_client.Histogram, registry=registry)
        seconds = partial(histogram, buckets=_SECONDS)
        self.requests = counter(
            "care_http_requests_total", "Requests answered.", ["route", "status"]
        )
        self.request_seconds = seconds(
            "care_http_request_seconds", "Time from a request's arrival to its response.", ["route"]
        )
        self.in_flight = gauge("care_http_requests_in_flight", "Requests being answered.")
        self.rejections = counter(
            "care_rejections_total", "Requests that were not answered, by reason.", ["reason"]
        )
        self.stage_seconds = seconds(
            "care_stage_seconds", "Time that a query spends in a stage.", ["stage"]
        )
        self.cache_lookups = counter(
            "care_cache_lookups_total", "Queries looked up in a cache.", ["tier", "result"]
        )
        self.queue_queries = gauge(
            "care_queue_queries", "Queries admitted and not yet answered, cache hits left out."
        )
        self.queue_tokens = gauge("care_queue_tokens", "Their tokens.")
        self.queue_limit = gauge("care_queue_tokens_limit", "Tokens that are admitted at once.")
        self.admitted_tokens = counter("care_admitted_tokens_total", "Tokens ever admitted.")
        self.batch_queries = histogram(
            "care_batch_queries", "Queries of an encoded batch.", buckets=_QUERIES
        )
        self.batch_tokens = histogram(
            "care_batch_tokens", "Tokens of an encoded batch.", buckets=_TOKENS
        )
        self.redis_breaker = gauge(
            "care_redis_breaker_state", "Breaker before Redis: 0 closed, 1 half open, 2 open."
        )
        self.redis_errors = counter("care_redis_errors_total", "Redis calls that failed.", ["kind"])
        self.ready = gauge("care_ready", "Whether the service takes requests.")
        self.reloads = counter("care_index_reloads_total", "Index reloads.", ["result"])
        self.index_info = gauge(
            "care_index_info",
            "The active index version; always 1.",
            ["index", "version", "pair", "embedding_space"],
        )
        self.index_documents = gauge(
            "care_index_documents", "Documents in the active index version."
        )
        self.index_vectors = gauge(
            "care_index_vectors", "Vectors of the active index version; a chunk has its own."
        )
        self.index_created = gauge(
            "care_index_created_timestamp_seconds", "When the active index version was built."
        )
        self._stages = {stage: self.stage_seconds.labels(stage) for stage in STAGES}
        for series, labels in (
            (self.rejections, get_args(Rejection)),
            (self.redis_errors, get_args(RedisError)),
            (self.reloads, ("success", "failure")),
        ):
            for label in labels:
                series.labels(label)
        for tier in get_args(Tier):
            self.looked_up(tier, 0, 0)

    def register_routes(self, statuses: dict[str, list[int]]) -> None:
        """Makes the request series of each route and each status that it documents."""
        for route, codes in {**statuses, UNMATCHED: [404]}.items():
            self.request_seconds.labels(route)
            for code in codes:
                self.requests.labels(route, str(code))

    def looked_up(self, tier: Tier, hits: int, misses: int) -> None:
        """Counts lookups in one tier of the cache."""
        self.cache_lookups.labels(tier, "hit").inc(hits)
        self.cache_lookups.labels(tier, "miss").inc(misses)

    def observe(self, timings: Timings, *, cached: bool) -> None:
        """Counts one answered query; a cached one was neither encoded nor searched."""
        for stage in _CACHED_STAGES if cached else STAGES:
            self._stages[stage].observe(getattr(timings, stage) / 1000)

    def show_index(self, manifest: IndexManifest, pair: str) -> None:
        """Names the active index version."""
        labels = (manifest.name, manifest.version, pair, manifest.encoder.embedding_space)
        self.index_info.clear()
        self.index_info.labels(*labels).set(1)
        self.index_documents.set(manifest.corpus.documents)
        self.index_vectors.set(manifest.count)
        self.index_created.set(manifest.created_at.timestamp())
