from dataclasses import dataclass, fields

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from core.types import IndexManifest

disable_created_metrics()  # type: ignore[no-untyped-call]

UNMATCHED = "unmatched"  # stands for every path that no route has: a label must be bounded

_SECONDS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1, 2, 5)


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that one query spent in each stage; encoding is shared by a batch."""

    encode: float = 0.0
    search: float = 0.0
    fetch: float = 0.0
    total: float = 0.0


class Metrics:
    """All series of one application, in a registry of its own; each exists from the start."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        self.requests = Counter(
            "care_http_requests_total",
            "Requests answered.",
            ("route", "status"),
            registry=registry,
        )
        self.request_seconds = Histogram(
            "care_http_request_seconds",
            "Time from a request's arrival to its response.",
            ("route",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge(
            "care_http_requests_in_flight", "Requests being answered.", registry=registry
        )
        self.stage_seconds = Histogram(
            "care_stage_seconds",
            "Time that a query spends in a stage.",
            ("stage",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.cache_lookups = Counter(
            "care_cache_lookups_total",
            "Queries looked up in the cache.",
            ("result",),
            registry=registry,
        )
        self.reloads = Counter(
            "care_index_reloads_total", "Index reloads.", ("result",), registry=registry
        )
        self.index_info = Gauge(
            "care_index_info",
            "The active index version; always 1.",
            ("index", "version", "embedding_space"),
            registry=registry,
        )
        self.index_documents = Gauge(
            "care_index_documents", "Documents in the active index version.", registry=registry
        )
        for stage in fields(Timings):
            self.stage_seconds.labels(stage.name)
        for result in ("hit", "miss"):
            self.cache_lookups.labels(result)
        for result in ("success", "failure"):
            self.reloads.labels(result)

    def register_routes(self, statuses: dict[str, list[int]]) -> None:
        """Makes the request series of each route and each status that it documents."""
        for route, codes in {**statuses, UNMATCHED: [404]}.items():
            self.request_seconds.labels(route)
            for code in codes:
                self.requests.labels(route, str(code))

    def observe(self, timings: Timings, *, cached: bool) -> None:
        """Counts one answered query; a cached one was neither encoded nor searched."""
        self.cache_lookups.labels("hit" if cached else "miss").inc()
        stages = ("fetch", "total") if cached else ("encode", "search", "fetch", "total")
        for stage in stages:
            self.stage_seconds.labels(stage).observe(getattr(timings, stage))

    def show_index(self, manifest: IndexManifest) -> None:
        """Names the active index version."""
        self.index_info.clear()
        self.index_info.labels(
            manifest.name, manifest.version, manifest.encoder.embedding_space
        ).set(1)
        self.index_documents.set(manifest.count)
