"""Queries to answers: caches before, documents behind the pipeline; and the swap of indexes."""

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from core.encoders import QueryEncoder
from core.errors import CareError, QueryError
from core.text import normalize_text
from core.types import FloatArray, Query
from service.cache import MemoryCache, QueryKeys
from service.logs import describe
from service.metrics import Metrics, Timings
from service.pipeline import Flight, Pipeline, spawn
from service.problems import RequestError
from service.search import LoadedIndex, QueryResult, load_index
from service.settings import Settings
from stores.base import VectorStore
from stores.faiss.search import limit_threads

if TYPE_CHECKING:
    from service.redis_tier import RedisCache

_LOG = logging.getLogger("care.service")

# How long a real search may take before the service counts as not ready, and for how long
# one that succeeded stands for the next [s].
_CHECK_TIMEOUT = 5.0
_CHECK_EVERY = 1.0
# Between two attempts to load a version that cannot be loaded [s].
_LONGEST_PAUSE = 600.0
# Writes to Redis under way; more are left out: a cache may forget.
_MAX_WRITES = 64


class Engine:
    """Answers queries; the event loop looks up, admits and waits, threads compute.

    Making it raises `IndexVersionError` if the active version cannot be served.
    """

    def __init__(
        self,
        settings: Settings,
        store: VectorStore,
        pair: str,
        encoder: QueryEncoder,
        metrics: Metrics,
        keys: QueryKeys,
        redis: "RedisCache | None",
    ) -> None:
        self._settings = settings
        self._store = store
        self._pair = pair
        self._encoder = encoder
        self._metrics = metrics
        self._keys = keys
        self._memory = MemoryCache(settings.cache_entries)
        self._redis = redis
        self._writes: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()
        self._checking = asyncio.Lock()
        self._checked = float("-inf")
        self._draining = False
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load", initializer=limit_threads)
        self.index = self._load()
        self._pipeline = Pipeline(encoder, settings, metrics, self._keep)
        self._show(self.index)

    async def search(
        self, queries: Sequence[Query], deadline: float, *, batch: bool
    ) -> tuple[LoadedIndex, list[tuple[QueryResult, Timings]]]:
        """Answers one query or more from one index version: results and times in their order.

        The deadline is on the clock of the event loop [s]. Errors of a batch name the position of
        the query at fault.

        Raises:
            QueryError: If a query asks for what the index cannot answer.
            RequestError: If the service has enough to do, or the deadline passes first.
        """
        started = time.perf_counter()
        index = self.index
        queries = [
            self._checked_query(index, query, f"queries.{i}." if batch else "")
            for i, query in enumerate(queries)
        ]
        keys = [self._keys.key(query, index.identity) for query in queries]
        known = {i: rows for i, key in enumerate(keys) if (rows := self._memory.get(key))}
        self._metrics.looked_up("memory", len(known), len(keys) - len(known))
        missing = [i for i in range(len(keys)) if i not in known]
        asked = [_flight(index, queries[i], keys[i]) for i in missing]
        lookup = time.perf_counter() - started
        shared = partial(self._look_up, self._redis, index) if self._redis else None
        others = [self._pipeline.run(index.fetch, known.values())] if known else []
        found = await self._pipeline.complete(asked, deadline, shared, others)
        flights = dict(zip(missing, found, strict=True))
        results: dict[int, QueryResult] = {i: f.result.result() for i, f in flights.items()}
        for fetched in others:
            results |= zip(known, fetched.result(), strict=True)
        answers = []
        for i, result in sorted(results.items()):
            timings = _timings(result, flights.get(i), started, lookup)
            self._metrics.observe(timings, cached=result.cached)
            answers.append((result, timings))
        return index, answers

    async def embed(self, texts: Sequence[str], deadline: float) -> tuple[FloatArray, int]:
        """Encodes texts that are under the text rules: float32 [n, dimension], and all tokens.

        Raises `RequestError` as `search` does.
        """
        asked = [Flight(text=text, finish=lambda vector: vector) for text in texts]
        flights = await self._pipeline.complete(asked, deadline)
        vectors = np.stack([flight.result.result() for flight in flights])
        return vectors, sum(len(flight.tokenized) for flight in flights)

    async def check(self) -> None:
        """Encodes and searches one canary, before all that wait and past the cache.

        Raises `RequestError` if that fails, or the service is about to end.
        """
        async with self._checking:
            if self._draining:
                raise RequestError("shutting_down", "the service is shutting down")
            now = asyncio.get_running_loop().time()
            if now - self._checked < _CHECK_EVERY:
                return
            canary = Query(normalize_text(self.index.manifest.canaries[0].text), top_k=1)
            try:
                asked = [_flight(self.index, canary)]
                await self._pipeline.complete(asked, now + _CHECK_TIMEOUT, urgent=True)
            except Exception as error:
                self._metrics.ready.set(0)
                message = "a search of the service itself failed"
                raise RequestError("self_test_failed", message) from error
            self._metrics.ready.set(1)
            self._checked = now

    async def reload(self) -> LoadedIndex:
        """Loads the active version beside the old one and swaps it in when it is good.

        Raises `IndexVersionError` if it is not; the old index keeps serving.
        """
        async with self._reloading:
            loop = asyncio.get_running_loop()
            try:
                index = await loop.run_in_executor(self._loader, self._load)
            except Exception:
                self._metrics.reloads.labels("failure").inc()
                raise
            self._metrics.reloads.labels("success").inc()
            self.index = index
            self._memory = MemoryCache(self._settings.cache_entries)
            self._show(index)
            return index

    async def watch(self, every: float) -> None:
        """Looks every so many seconds whether another version has become active, and loads it.

        What fails is logged and tried again after pauses that grow; 0 stands for never.
        """
        loop = asyncio.get_running_loop()
        look = partial(self._store.active_version, self._settings.indexes, self._settings.index)
        pause = every
        while every:
            await asyncio.sleep(pause)
            try:
                active = await loop.run_in_executor(self._loader, look)
                if active != self.index.manifest.version:
                    await self.reload()
                pause = every
            except Exception as error:
                pause = min(2 * pause, max(every, _LONGEST_PAUSE))
                code = error.code if isinstance(error, CareError) else "internal_error"
                _LOG.error("reload failed", extra={"fields": {"code": code, **describe(error)}})

    def drain(self) -> None:
        """Counts as not ready from now on; requests are still answered."""
        self._draining = True
        self._metrics.ready.set(0)

    async def close(self) -> None:
        """Waits for the work in hand and ends the threads."""
        for task in self._writes:
            task.cancel()
        await self._pipeline.close()
        self.stop()

    def stop(self) -> None:
        """Ends the threads, from a thread without the event loop."""
        self._pipeline.stop()
        self._loader.shutdown()

    def _load(self) -> LoadedIndex:
        return load_index(self._settings.indexes, self._settings.index, self._encoder, self._store)

    def _show(self, index: LoadedIndex) -> None:
        self._metrics.show_index(index.manifest, self._pair)
        self._metrics.ready.set(not self._draining)

    async def _look_up(
        self, redis: "RedisCache", index: LoadedIndex, keys: Sequence[bytes]
    ) -> list[QueryResult | None]:
        found = await redis.get_many(keys, index.manifest.count)
        known = {i: rows for i, rows in enumerate(found) if rows}
        self._metrics.looked_up("redis", len(known), len(found) - len(known))
        fetched = await self._pipeline.run(index.fetch, known.values()) if known else []
        results = dict(zip(known, fetched, strict=True))
        return [results.get(i) for i in range(len(keys))]

    def _keep(self, key: bytes, result: QueryResult) -> None:
        self._memory.put(key, result.rows)
        if self._redis and not result.cached and len(self._writes) < _MAX_WRITES:
            spawn(self._redis.put(key, result.rows), self._writes)

    def _checked_query(self, index: LoadedIndex, query: Query, place: str) -> Query:
        """Returns the query as it is searched: under the text rules, within the index's size."""
        limit = self._settings.max_top_k
        try:
            text = check_text(query.text, self._settings.max_query_chars)
            if query.top_k > limit:
                message = f"is {query.top_k}; the limit is {limit}"
                raise QueryError("top_k", message, code="top_k_too_large", limit=limit)
            index.filters.check(query.filter)
        except QueryError as error:
            raise QueryError(place + error.field, str(error), code=error.code) from error
        # Queries that are searched alike are one for the caches: no more is found than there is,
        # and where nothing is cut every document is one chunk.
        top_k = min(query.top_k, index.manifest.count)
        collapse = query.collapse and index.documents.chunked
        return replace(query, text=text, top_k=top_k, collapse=collapse)


def _flight(index: LoadedIndex, query: Query, key: bytes = b"") -> Flight:
    return Flight(text=query.text, finish=partial(index.search, query), key=key)


def check_text(text: str, limit: int, field: str = "query") -> str:
    """Returns a text under the text rules; `QueryError` if empty or of over `limit` characters."""
    if len(text) > limit:
        message = f"has {len(text)} characters; the limit is {limit}"
        raise QueryError(field, message, code="text_too_long", limit=limit)
    normal = normalize_text(text)
    if not normal:
        raise QueryError(field, "is empty", code="empty_text")
    return normal


def _timings(result: QueryResult, flight: Flight | None, started: float, lookup: float) -> Timings:
    """Returns the time that a query took until now; `flight` is the work on it, if any."""
    encoding = (0.0, 0.0, 0.0)
    if flight:
        lookup = max(lookup, flight.queued - started)
        if not result.cached:
            encoding = (flight.queue, flight.tokenize, flight.encode)
    seconds = (lookup, *encoding, result.search, result.fetch, time.perf_counter() - started)
    return Timings(*(round(s * 1000, 3) for s in seconds))
