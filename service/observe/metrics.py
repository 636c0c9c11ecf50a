"""All metrics of the service, in the format of Prometheus."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, get_args

import prometheus_client
from prometheus_client.registry import Collector

from core.manifest import IndexManifest
from search.fusion import Channel

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

# Series with names of indexes, which not everyone may see who reads the page.
_OF_INDEXES = "care_index_queries_total"
_MOST_INDEXES = 100
_OTHERS = "(others)"  # no name of an index
UNMATCHED = "unmatched"  # the label of all paths without a route: values must be bounded
ABANDONED = "499"  # the status of a request whose client disconnected before the response

Tier = Literal["memory", "in_flight", "redis", "vectors"]
Rejection = Literal["key", "queue", "answers", "rate", "connections", "deadline", "departed"]
RedisError = Literal["timeout", "connection", "response", "value"]
CHANGES = ("added", "replaced", "deleted", "unchanged", "missing", "rejected")

# How long a rendered page is returned to all who ask for it [s]. Rendering takes 3 ms.
SHARED_SECONDS = 1.0
_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 5)
_QUERIES = (1, 2, 4, 8, 16, 32, 64)
_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class Timings:
    """Time in each stage [ms]; texts of one batch share the times to tokenize and encode."""

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
    """The metrics of one application, in a separate registry; all series exist from the start.

    Gauges say with `multiprocess_mode` how those of several workers become one. `processes` returns
    the metrics of processes; by default those of this one.
    """

    def __init__(self, processes: Collector | None = None) -> None:
        self.registry = registry = prometheus_client.CollectorRegistry()
        self.render: Callable[[], bytes] = lambda: prometheus_client.generate_latest(registry)
        self._followed: dict[prometheus_client.Gauge, list[Callable[[], float]]] = {}
        self._fallbacks: set[str] = set()
        self._page: asyncio.Task[bytes] | None = None
        self._page_until = 0.0
        registry.register(processes or prometheus_client.ProcessCollector(registry=None))
        prometheus_client.PlatformCollector(registry=registry)
        counter = partial(prometheus_client.Counter, registry=registry)
        gauge = partial(prometheus_client.Gauge, registry=registry, multiprocess_mode="sum")
        same = partial(prometheus_client.Gauge, registry=registry, multiprocess_mode="max")
        histogram = partial(prometheus_client.Histogram, registry=registry)
        seconds = partial(histogram, buckets=_SECONDS)
        self.requests = counter("care_http_requests_total", "HTTP requests.", ["route", "status"])
        self.request_seconds = seconds(
            "care_http_request_seconds", "Time from a request's arrival to its response.", ["route"]
        )
        self.in_flight = 0
        in_flight = gauge("care_http_requests_in_flight", "HTTP requests in flight.")
        self.follow(in_flight, lambda: self.in_flight)
        self.connections = gauge("care_connections", "Open connections.")
        self.unsent_bytes = gauge(
            "care_unsent_bytes", "Bytes of responses that clients have not yet taken."
        )
        self.ended_connections = counter(
            "care_connections_ended_total",
            "Connections that the service ended before their clients did, by reason.",
            ["reason"],
        )
        self.rejections = counter(
            "care_rejections_total",
            "Requests that were rejected or abandoned, by reason.",
            ["reason"],
        )
        self.stage_seconds = seconds(
            "care_stage_seconds", "Time that a query spends in a stage.", ["stage"]
        )
        self.cache_lookups = counter(
            "care_cache_lookups_total", "Queries looked up in a cache.", ["tier", "result"]
        )
        self.queue_queries = gauge(
            "care_queue_queries", "Queries queued or being encoded, without cache hits."
        )
        self.queue_tokens = gauge("care_queue_tokens", "Tokens queued or being encoded.")
        self.queue_limit = same("care_queue_tokens_limit", "Most tokens queued or being encoded.")
        self.admitted_tokens = counter(
            "care_admitted_tokens_total", "Tokens admitted to the queue."
        )
        self.overflow = counter(
            "care_overflow_queries_total",
            "Queries that CARE_OVERFLOW_PAIR took because the queue was full.",
        )
        self.unanswered = counter(
            "care_unanswered_queries_total",
            "Queries whose answerable score is below the threshold of the pair.",
        )
        self.cut_ties = counter(
            "care_cut_ties_total",
            "Searches in which more rows had the score of the last one than the 2,048 compared.",
        )
        self.channel_seconds = seconds(
            "care_channel_seconds",
            "Time that a channel of a hybrid search, or reranking, takes.",
            ["channel"],
        )
        self.channel_failures = counter(
            "care_channel_failures_total",
            "Hybrid searches that a channel failed for or was late for, and hits not reranked.",
            ["channel"],
        )
        self.batch_queries = histogram(
            "care_batch_queries", "Queries of an encoded batch.", buckets=_QUERIES
        )
        self.batch_tokens = histogram(
            "care_batch_tokens", "Tokens of an encoded batch.", buckets=_TOKENS
        )
        self.redis_breaker = same(
            "care_redis_breaker_state",
            "State of the circuit breaker of Redis: 0 closed, 1 half open, 2 open.",
        )
        self.redis_write_breaker = same(
            "care_redis_write_breaker_state",
            "State of the circuit breaker of writes to Redis: 0 closed, 1 half open, 2 open.",
        )
        self.rerank_breaker = same(
            "care_rerank_breaker_state",
            "State of the circuit breaker of CARE_RERANK_URL: 0 closed, 1 half open, 2 open.",
        )
        self.redis_errors = counter("care_redis_errors_total", "Redis calls that failed.", ["kind"])
        same(
            "care_start_timestamp_seconds",
            "Time at which the service, or the newest of its workers, started.",
        ).set_to_current_time()
        self.workers = same("care_workers", "Workers that serve.")
        self.worker_replacements = counter(
            "care_worker_replacements_total",
            "Workers that ended, or were stuck, and were replaced.",
        )
        self.ready = same("care_ready", "1 if the service is ready for requests, else 0.")
        self.reloads = counter("care_index_reloads_total", "Index reloads.", ["result"])
        self.key_reloads = counter(
            "care_api_key_reloads_total", "Changes of the file of API keys.", ["result"]
        )
        self.index_fallback = same(
            "care_index_fallback",
            "1 while the active version of an index cannot be loaded and another one is served, "
            "else 0.",
        )
        self.index_info = same(
            "care_index_info",
            "The served index version; always 1.",
            ["index", "version", "pair", "embedding_space"],
        )
        self.index_documents = same(
            "care_index_documents", "Documents in the served index version."
        )
        self.index_queries = counter(
            _OF_INDEXES,
            "Queries to each index; those to others than the first 100 together.",
            ["index"],
        )
        self.index_vectors = same(
            "care_index_vectors",
            "Vectors in the served index version, one for each document or chunk.",
        )
        self.index_created = same(
            "care_index_created_timestamp_seconds",
            "Time at which the served index version was built.",
        )
        self.writes = counter(
            "care_writes_total", "Requests that change documents, by result.", ["result"]
        )
        self.written_documents = counter(
            "care_written_documents_total",
            "Documents of such requests, by what the request did to them.",
            ["change"],
        )
        self.write_seconds = seconds(
            "care_write_seconds", "Time until the changes of a request are on disk and served."
        )
        # `labels` takes longer than to count.
        self._stages = {stage: self.stage_seconds.labels(stage) for stage in STAGES}
        self._channels = {c: self.channel_seconds.labels(c) for c in get_args(Channel)}
        self._lookups = {
            tier: tuple(self.cache_lookups.labels(tier, result) for result in ("hit", "miss"))
            for tier in get_args(Tier)
        }
        self._queried: dict[str, Any] = {}
        self._answers: dict[tuple[str, str], tuple[Any, Any]] = {}
        for series, labels in (
            (self.rejections, get_args(Rejection)),
            (self.redis_errors, get_args(RedisError)),
            (self.reloads, ("success", "failure")),
            (self.key_reloads, ("success", "failure")),
            (self.channel_failures, get_args(Channel)),
            (self.writes, ("success", "failure")),
            (self.written_documents, CHANGES),
        ):
            for label in labels:
                series.labels(label)

    def follow(self, gauge: prometheus_client.Gauge, value: Callable[[], float]) -> None:
        """Sets a gauge to what a function returns, at each `update`; to the sum of several."""
        self._followed.setdefault(gauge, []).append(value)

    def update(self) -> None:
        """Sets the gauges that follow functions; must be called on the event loop."""
        for gauge, values in self._followed.items():
            gauge.set(sum(value() for value in values))

    def register_routes(self, statuses: dict[str, list[int]]) -> None:
        """Creates the request series of each route and each status that it documents."""
        for route, codes in {**statuses, UNMATCHED: [400, 401, 404, 414, 431]}.items():
            self.request_seconds.labels(route)
            for code in codes:
                self.requests.labels(route, str(code))

    def looked_up(self, tier: Tier, hits: int, misses: int) -> None:
        """Counts the hits and misses of a lookup in one tier of the cache."""
        hit, miss = self._lookups[tier]
        if hits:
            hit.inc(hits)
        if misses:
            miss.inc(misses)

    def answered(self, route: str, status: str, seconds: float) -> None:
        """Counts a request that has ended, and observes its time [s]."""
        series = self._answers.get((route, status))
        if series is None:
            series = self.requests.labels(route, status), self.request_seconds.labels(route)
            self._answers[route, status] = series
        count, time = series
        count.inc()
        time.observe(seconds)

    def queried(self, index: str, queries: int) -> None:
        """Counts queries to an index."""
        if index not in self._queried:
            name = index if len(self._queried) < _MOST_INDEXES else _OTHERS
            self._queried[name] = self.index_queries.labels(name)
            index = name
        self._queried[index].inc(queries)

    def observe(self, timings: Timings, *, cached: bool) -> None:
        """Observes the timings of a query; a cached one was neither encoded nor searched."""
        for stage in _CACHED_STAGES if cached else STAGES:
            self._stages[stage].observe(getattr(timings, stage) / 1000)

    def observe_channels(self, seconds: Mapping[Channel, float], failed: Sequence[Channel]) -> None:
        """Observes the time [s] of each channel and of reranking, and counts failures."""
        for channel, spent in seconds.items():
            self._channels[channel].observe(spent)
        for channel in failed:
            self.channel_failures.labels(channel).inc()

    def fell_back(self, index: str, fallback: bool) -> None:
        """Notes whether another than the active version of an index is served."""
        (self._fallbacks.add if fallback else self._fallbacks.discard)(index)
        self.index_fallback.set(bool(self._fallbacks))

    def show_index(self, manifest: IndexManifest, pair: str) -> None:
        """Sets the metrics of the served index version."""
        labels = (manifest.name, manifest.version, pair, manifest.encoder.embedding_space)
        for shown in self.index_info.collect():
            for sample in shown.samples:
                self.index_info.labels(**sample.labels).set(0)
        self.index_info.clear()
        self.index_info.labels(*labels).set(1)
        self.index_documents.set(manifest.corpus.documents)
        self.index_vectors.set(manifest.count)
        self.index_created.set(manifest.created_at.timestamp())

    async def page(self, *, with_indexes: bool = True) -> bytes:
        """Returns all metrics as text: rendered in a thread, once a second for all who ask.

        `with_indexes` says whether series by index are among them.
        """
        loop = asyncio.get_running_loop()
        if self._page is None or (self._page.done() and loop.time() >= self._page_until):
            self.update()
            render = asyncio.to_thread(self.render)
            self._page = loop.create_task(render)
            self._page_until = loop.time() + SHARED_SECONDS
        # A client that disconnects does not stop the rendering for the others.
        page = await asyncio.shield(self._page)
        if with_indexes:
            return page
        lines = page.splitlines(keepends=True)
        return b"".join(line for line in lines if not line.startswith(f"{_OF_INDEXES}{{".encode()))
