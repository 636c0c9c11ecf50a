"""The engine: searches through caches and pipeline, and encodes texts."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from core.encoders import Pair, QueryEncoder
from core.errors import QueryError
from core.text import normalize_text
from core.types import Conjunction, FloatArray, Query
from search.answerable import is_unanswered
from search.hits import CacheEntry, QueryResult
from search.query import QueryLimits, checked_query
from search.rerank import RerankerName
from search.snapshot import Snapshot
from search.task import SearchTask, read_cached
from service.errors import RequestError
from service.limits import ANYONE, Client, Limits, Usages
from service.observe.metrics import Metrics, Timings
from service.pipeline.cache import MemoryCache, QueryKeys
from service.pipeline.pipeline import DEADLINE_EXCEEDED, QUEUE_FULL, Flight, Pipeline, spawn
from service.settings import Settings, plain

if TYPE_CHECKING:
    from service.pipeline.redis_tier import RedisCache
    from service.pipeline.rerank_server import RerankServer

_T = TypeVar("_T")
_LOG = logging.getLogger("care.service")

# Time-out of the search of a readiness check, and how long its success is reused [s].
_CHECK_TIMEOUT = 5.0
_CHECK_EVERY = 1.0
# Lists of texts in several parts that are encoded at once; each takes a quarter of the queue.
_LONG_LISTS = 2
# Queries that are checked before the event loop handles other requests.
_STEP = 4
# Writes to Redis in flight; more are dropped, as a cache may lose entries.
_MAX_WRITES = 64
# Lists of fields without documents, each of a grant and a version, that are remembered as logged.
_MAX_LACKING = 100


@dataclass(frozen=True, slots=True)
class CheckedQueries:
    """The queries of a request, checked for an index version."""

    index: Snapshot
    queries: Sequence[Query]  # as they are searched
    keys: Sequence[bytes]  # key of each query in the caches
    started: float  # when the check began, on the clock of `time.perf_counter` [s]
    client: Client = ANYONE  # who asks, and which index


class Engine:
    """Searches and encodes for the indexes of one embedding space.

    The event loop looks up, admits and waits; threads compute. The encoder `overflow` takes what
    the queue has no room for. The engine closes `redis` and `reranker`. `make_cache` makes an empty
    memory cache; `secret` is that of the keys of caches, if the settings have none: by default a
    new one.
    """

    def __init__(
        self,
        settings: Settings,
        pair: Pair,
        encoder: QueryEncoder,
        overflow: QueryEncoder | None,
        metrics: Metrics,
        redis: "RedisCache | None" = None,
        reranker: "RerankServer | None" = None,
        usages: Usages | None = None,
        make_cache: Callable[[int, int], MemoryCache] = MemoryCache,
        secret: str = "",
    ) -> None:
        self.usages = usages = usages or Usages()
        self.settings = settings
        self.limits = Limits.of(settings)
        self.metrics = metrics
        self.pair = pair
        self.encoder = encoder
        self._reranker = reranker
        self._query_limits = QueryLimits(
            settings.max_query_chars,
            settings.max_top_k,
            settings.max_rerank,
            settings.rerank_hits,
            server=reranker is not None,
        )
        secret = plain(settings.cache_secret) or secret or secrets.token_hex(32)
        server = (
            plain(settings.rerank_url),
            settings.rerank_model,
            str(settings.rerank_truncate_tokens or ""),
        )
        self._keys = QueryKeys(secret, encoder.spec, pair, server)
        self._memory = make_cache(self.limits.cache_entries, self.limits.cache_bytes)
        self._redis = redis
        self._writes: set[asyncio.Task[None]] = set()
        self._checking = asyncio.Lock()
        self._checked = float("-inf")
        self._draining = False
        self._long_lists = asyncio.Semaphore(_LONG_LISTS)
        self._lacking: set[tuple[str, tuple[str, ...]]] = set()
        self._pipeline = Pipeline(
            encoder, overflow, settings, self.limits, metrics, self._keep, reranker, usages
        )

    def reranker(self, index: Snapshot) -> RerankerName | None:
        """Returns what ranks the hits of an index again, if anything."""
        if self._reranker:
            return "server"
        return "late_interaction" if index.late else None

    async def checked(
        self,
        index: Snapshot,
        queries: Sequence[Query],
        within: Conjunction,
        *,
        batch: bool,
        client: str = "",
    ) -> CheckedQueries:
        """Checks the queries of a request for an index version.

        `within` bounds their documents. QueryError if one is not valid for the index; with `batch`
        it names the position of the query. Queues serve indexes, and each `client` of an index, in
        turn.
        """
        started = time.perf_counter()
        self._report_lacking(index, within, client)
        valid: list[Query] = []
        keys: list[bytes] = []
        for i, query in enumerate(queries):
            valid.append(
                self._checked_query(index, query, within, f"queries.{i}." if batch else "")
            )
            # Caches keep rows and scores only, without explanations.
            explained = valid[i].explain
            keys.append(b"" if explained else self._keys.key(valid[i], index.identity))
            if i % _STEP == _STEP - 1:
                await asyncio.sleep(0)
        asking = Client(client, index.manifest.name)
        return CheckedQueries(index, valid, keys, started, asking)

    def recall(
        self, checked: CheckedQueries, include: Sequence[str]
    ) -> tuple[bytes, CacheEntry, Timings] | None:
        """Returns what is known of the only query.

        These are its hits as JSON, which `remember` has stored, its cache entry, and timings.
        """
        hits = self._memory.get_json(checked.keys[0], include)
        entry = self._memory.get(checked.keys[0])
        if hits is None or entry is None:
            return None
        self.metrics.looked_up("memory", 1, 0)
        spent = round((time.perf_counter() - checked.started) * 1000, 3)
        timings = Timings(spent, 0.0, 0.0, 0.0, 0.0, 0.0, spent)
        self.metrics.observe(timings, cached=True)
        self._judged(checked.index, checked.queries[0], entry.answerable)
        return hits, entry, timings

    def remember(self, checked: CheckedQueries, include: Sequence[str], hits: bytes) -> None:
        """Stores the hits of the only query as JSON, beside its rows in the memory cache."""
        self._memory.put_json(checked.keys[0], include, hits)

    def check_room(self, checked: CheckedQueries) -> None:
        """Raises RequestError if the queue has no room for the only query, and no cache knows it.

        `search` would too, after more work: under overload most requests are refused, and share the
        event loop with those that are served.
        """
        (query,), (key,) = checked.queries, checked.keys
        if self._redis or self._pipeline.has_room(query.text, key, checked.client):
            return
        if self._memory.get(key) is None:
            self.metrics.looked_up("memory", 0, bool(key))
            self.metrics.looked_up("in_flight", 0, bool(key))
            raise RequestError("overloaded", QUEUE_FULL)

    async def search(
        self, checked: CheckedQueries, deadline: float
    ) -> list[tuple[QueryResult, Timings]]:
        """Returns result and timings of each query of a request, in order.

        RequestError if the queue is full, or the deadline, a time of the event loop [s], passes.
        """
        index, keys, started = checked.index, checked.keys, checked.started
        known = {i: entry for i, key in enumerate(keys) if (entry := self._memory.get(key))}
        self.metrics.looked_up("memory", len(known), sum(map(bool, keys)) - len(known))
        missing = [i for i in range(len(keys)) if i not in known]
        requested = [
            self._flight(index, checked.queries[i], keys[i], checked.client) for i in missing
        ]
        lookup = time.perf_counter() - started
        by_key = dict(zip(keys, checked.queries, strict=True))
        shared = partial(self._look_up, self._redis, index, by_key) if self._redis else None
        cached = [(checked.queries[i], rows) for i, rows in known.items()]
        others = [self._pipeline.run(read_cached, index, cached)] if cached else []
        found = await self._pipeline.complete(requested, deadline, shared, others)
        flights = dict(zip(missing, found, strict=True))
        results: dict[int, QueryResult] = {i: f.result.result() for i, f in flights.items()}
        for fetched in others:
            results |= zip(known, fetched.result(), strict=True)
        timed = []
        for i, result in sorted(results.items()):
            if i in flights and flights[i].overflow:
                # The judge belongs to the vectors of the other encoder.
                entry = result.entry._replace(answerable=None)
                result = replace(result, entry=entry, overflow=True)
            self._judged(index, checked.queries[i], result.entry.answerable)
            self.metrics.observe_channels(result.channel_seconds, result.failed)
            if result.cut:
                self.metrics.cut_ties.inc()
            timings = _timings(result, flights.get(i), started, lookup)
            self.metrics.observe(timings, cached=result.cached)
            timed.append((result, timings))
        return timed

    async def embed(
        self, texts: Sequence[str], deadline: float, client: Client = ANYONE
    ) -> tuple[FloatArray, int]:
        """Encodes normalized texts: float32 [n, dimension], and the total number of tokens.

        A list that does not fit into one part is encoded part by part. The queue holds one part of
        it at a time, so that other requests are admitted and encoded between parts. Of several such
        lists, `_LONG_LISTS` are encoded at once and the others wait.
        """
        parts = self._pipeline.split(texts, self.settings.max_batch)
        if len(parts) == 1:
            return await self._embed_part(texts, deadline, client)
        try:
            async with asyncio.timeout_at(deadline), self._long_lists:
                results: list[tuple[FloatArray, int]] = []
                for part in parts:
                    if results:
                        await self._pipeline.wait_for_room(part)
                    results.append(await self._embed_part(part, deadline, client))
        except TimeoutError as error:
            raise RequestError("deadline_exceeded", DEADLINE_EXCEEDED) from error
        return np.concatenate([v for v, _ in results]), sum(tokens for _, tokens in results)

    async def _embed_part(
        self, texts: Sequence[str], deadline: float, client: Client
    ) -> tuple[FloatArray, int]:
        requested = [Flight(text=text, client=client) for text in texts]
        flights = await self._pipeline.complete(requested, deadline)
        vectors = np.stack([flight.result.result() for flight in flights])
        return vectors, sum(len(flight.tokenized) for flight in flights)

    async def check(self, index: Snapshot) -> None:
        """Encodes and searches one canary, ahead of the queue; RequestError if that fails."""
        async with self._checking:
            if self._draining:
                raise RequestError("shutting_down", "the service is shutting down")
            now = asyncio.get_running_loop().time()
            if now - self._checked < _CHECK_EVERY:
                return
            text = normalize_text(index.manifest.canaries[0].text)
            try:
                flights = [self._flight(index, Query(text, top_k=1, mode="dense"))]
                await self._pipeline.complete(flights, now + _CHECK_TIMEOUT, urgent=True)
            except Exception as error:
                self.metrics.ready.set(0)
                message = "the test search of the readiness check failed"
                raise RequestError("self_test_failed", message) from error
            self.metrics.ready.set(1)
            self._checked = now

    def run(self, work: Callable[..., _T], *arguments: Any) -> "asyncio.Future[_T]":
        """Runs a function in a search thread."""
        return self._pipeline.run(work, *arguments)

    def show_readiness(self) -> None:
        """Shows in the metrics that the engine is ready for requests, unless it drains."""
        self.metrics.ready.set(not self._draining)

    @property
    def is_draining(self) -> bool:
        """Whether the service is shutting down."""
        return self._draining

    def drain(self) -> None:
        """Makes readiness checks fail from now on; requests are still served."""
        self._draining = True
        self.metrics.ready.set(0)

    async def close(self) -> None:
        """Waits for requests in flight and stops the threads."""
        for task in self._writes:
            task.cancel()
        await self._pipeline.close()
        self.stop()
        for client in (self._redis, self._reranker):
            if client:
                await client.close()

    def stop(self) -> None:
        """Stops the threads; for callers outside the event loop."""
        self._pipeline.stop()

    async def _look_up(
        self,
        redis: "RedisCache",
        index: Snapshot,
        queries: Mapping[bytes, Query],
        keys: Sequence[bytes],
    ) -> list[QueryResult | None]:
        # A search that explains has no key, as caches do not keep what it returns.
        keyed = [i for i, key in enumerate(keys) if key]
        found = await redis.get_many([keys[i] for i in keyed], index.segment.count)
        known = {i: entry for i, entry in zip(keyed, found, strict=True) if entry}
        self.metrics.looked_up("redis", len(known), len(found) - len(known))
        cached = [(queries[keys[i]], rows) for i, rows in known.items()]
        fetched = await self._pipeline.run(read_cached, index, cached) if cached else []
        results = dict(zip(known, fetched, strict=True))
        return [results.get(i) for i in range(len(keys))]

    def _keep(self, key: bytes, result: QueryResult) -> None:
        if result.failed:
            return
        self._memory.put(key, result.entry)
        if self._redis and not result.cached and len(self._writes) < _MAX_WRITES:
            spawn(self._redis.put(key, result.entry), self._writes)

    def _judged(self, index: Snapshot, query: Query, score: float | None) -> None:
        if is_unanswered(index.judges, query.mode, score):
            self.metrics.unanswered.inc()

    def _flight(
        self, index: Snapshot, query: Query, key: bytes = b"", client: Client = ANYONE
    ) -> Flight:
        task = SearchTask(
            snapshot=index,
            query=query,
            by_server=bool(query.rerank and self._reranker),
            lexical_timeout=self.settings.channel_timeout_ms / 1000,
        )
        with_tokens = task.needs_tokens
        return Flight(text=query.text, client=client, task=task, key=key, with_tokens=with_tokens)

    def _report_lacking(self, index: Snapshot, within: Conjunction, client: str) -> None:
        """Logs once which fields of a grant no document has, so that it opens nothing."""
        fields = tuple(index.segment.filters.lacking(within))
        if not fields or (index.identity, fields) in self._lacking:
            return
        if len(self._lacking) >= _MAX_LACKING:
            self._lacking.clear()
        self._lacking.add((index.identity, fields))
        of_index = {"index": index.manifest.name, "client": client, "filter_fields": fields}
        message = "a grant has a filter of fields that no document has: it matches nothing"
        _LOG.warning(message, extra={"fields": of_index})

    def _checked_query(
        self, index: Snapshot, query: Query, within: Conjunction, place: str
    ) -> Query:
        try:
            return checked_query(index, query, self._query_limits, within)
        except QueryError as error:
            raise error.of(place) from error


def _timings(result: QueryResult, flight: Flight | None, started: float, lookup: float) -> Timings:
    """Returns the time that a query took in each stage; `flight` is its flight, if not cached."""
    encoding = (0.0, 0.0, 0.0)
    if flight:
        lookup = max(lookup, flight.queued - started)
        if not result.cached:
            encoding = (flight.queue, flight.tokenize, flight.encode)
    seconds = (lookup, *encoding, result.search, result.fetch, time.perf_counter() - started)
    return Timings(*(round(s * 1000, 3) for s in seconds))
