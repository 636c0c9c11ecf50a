"""Queries to answers: caches before, documents behind the pipeline; and the swap of indexes."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from core.errors import QueryError
from core.text import normalize_text
from core.types import FloatArray, Hit, Query, QueryEncoder
from service.cache import MemoryCache, QueryKeys
from service.collapse import search_documents
from service.loaded_index import LoadedIndex, load_index
from service.metrics import Metrics, Timings
from service.pipeline import Flight, Pipeline
from service.settings import Settings
from service.stores import open_store
from service.vector_search import Found, limit_threads

if TYPE_CHECKING:
    from service.redis_tier import RedisCache

# How long a real search may take before the service counts as not ready, and for how long
# one that succeeded stands for the next [s].
_CHECK_TIMEOUT = 5.0
_CHECK_EVERY = 1.0
# Writes to Redis under way; more are left out: a cache may forget.
_MAX_WRITES = 64


class NotReadyError(Exception):
    """The service takes no requests; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The hits of one query, whether they came from a cache, and the time it took."""

    hits: list[Hit]
    cached: bool
    timings: Timings


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to the queries of one request, all from one index version."""

    index: LoadedIndex
    answers: list[Answer]


@dataclass(frozen=True, slots=True)
class _Searched:
    """The result of a flight: rows for the caches, documents for the answer, seconds."""

    found: Found
    hits: list[Hit]
    search: float = 0.0
    fetch: float = 0.0
    cached: bool = False


class Engine:
    """Answers queries; the event loop looks up, admits and waits, threads compute.

    Args:
        settings: The service's settings.
        encoder: The query encoder.
        metrics: Where stages are counted.
        keys: The keys of queries in both caches.
        redis: The second cache, shared by processes.

    Raises:
        IndexVersionError: If the active version cannot be served.
        ProviderError: If what it is searched with is not installed.
    """

    def __init__(
        self,
        settings: Settings,
        encoder: QueryEncoder,
        metrics: Metrics,
        keys: QueryKeys,
        redis: "RedisCache | None" = None,
    ) -> None:
        self._settings = settings
        self._encoder = encoder
        self._metrics = metrics
        self._keys = keys
        self._memory = MemoryCache(settings.cache_entries)
        self._redis = redis
        self._lookups: set[asyncio.Task[None]] = set()
        self._writes: set[asyncio.Task[None]] = set()
        self._reloading = asyncio.Lock()
        self._checking = asyncio.Lock()
        self._checked = float("-inf")
        self._draining = False
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load", initializer=limit_threads)
        self._store = open_store(settings)
        self.index = self._load()
        self._pipeline = Pipeline(encoder, settings, metrics)
        self._show(self.index)

    async def search(
        self, queries: Sequence[Query], deadline: float, *, batch: bool = False
    ) -> Answers:
        """Answers queries together, all from one index version.

        Args:
            queries: At least one.
            deadline: On the clock of the event loop [s].
            batch: Whether an error names the position of the query at fault.

        Raises:
            QueryError: If a query asks for what the index cannot answer.
            OverloadedError: If the service has enough to do.
            DeadlineError: If the deadline passes first.
        """
        started = time.perf_counter()
        index = self.index
        queries = self._checked_queries(index, queries, batch)
        keys = [self._keys.key(query, index.identity) for query in queries]
        known = {i: found for i, key in enumerate(keys) if (found := self._memory.get(key))}
        self._metrics.looked_up("memory", len(known), len(keys) - len(known))
        lookup = time.perf_counter() - started
        flights: dict[int, Flight] = {}
        try:
            self._board(index, queries, keys, known, flights)
            waited: set[asyncio.Future[Any]] = {flight.result for flight in flights.values()}
            if known:
                fetched = self._pipeline.run(_fetch, index, list(known.values()))
                waited.add(fetched)
            await self._pipeline.wait(waited, deadline)
        finally:
            for flight in flights.values():
                self._pipeline.leave(flight)
        results = dict(zip(known, fetched.result(), strict=True)) if known else {}
        answers = []
        for i in range(len(queries)):
            ridden = flights.get(i)
            searched: _Searched = ridden.result.result() if ridden else results[i]
            timings = _timings(searched, ridden, started, lookup)
            self._metrics.observe(timings, cached=searched.cached)
            answers.append(Answer(searched.hits, searched.cached, timings))
        return Answers(index, answers)

    async def embed(self, texts: Sequence[str], deadline: float) -> list[tuple[FloatArray, int]]:
        """Encodes texts as queries.

        Returns:
            For each text its vector, float32 [dimension], and its tokens.

        Raises:
            OverloadedError: If the service has enough to do.
            DeadlineError: If the deadline passes first.
        """
        flights = [Flight(text=normalize_text(text), finish=_identity) for text in texts]
        self._pipeline.submit(flights)
        await self._ride(flights, deadline)
        return [(flight.result.result(), len(flight.tokenized)) for flight in flights]

    async def check(self) -> None:
        """Encodes and searches one canary, before all that wait and past the cache.

        Raises:
            NotReadyError: If that fails, or the service is about to end.
        """
        async with self._checking:
            if self._draining:
                raise NotReadyError("the service is ending")
            now = asyncio.get_running_loop().time()
            if now - self._checked < _CHECK_EVERY:
                return
            index = self.index
            canary = Query(normalize_text(index.manifest.canaries[0].text), top_k=1)
            flight = Flight(text=canary.text, finish=partial(_search, index, canary))
            try:
                self._pipeline.submit([flight], urgent=True)
                await self._ride([flight], now + _CHECK_TIMEOUT)
            except Exception as error:
                self._metrics.ready.set(0)
                raise NotReadyError("a search of the service itself failed") from error
            self._metrics.ready.set(1)
            self._checked = now

    async def reload(self) -> LoadedIndex:
        """Loads what CURRENT names beside the old index and swaps it in when it is good.

        Raises:
            IndexVersionError: If it is not; the old index keeps serving.
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
            self._memory.clear()
            self._show(index)
            return index

    def drain(self) -> None:
        """Counts as not ready from now on; requests are still answered."""
        self._draining = True
        self._metrics.ready.set(0)

    async def close(self) -> None:
        """Waits for the work in hand and ends the threads."""
        for task in self._lookups | self._writes:
            task.cancel()
        await asyncio.to_thread(self._pipeline.close)
        self._loader.shutdown()

    def _load(self) -> LoadedIndex:
        settings = self._settings
        return load_index(settings.indexes, settings.index, self._encoder, self._store)

    def _show(self, index: LoadedIndex) -> None:
        self._metrics.show_index(index.manifest, self._settings.pair)
        self._metrics.ready.set(not self._draining)

    def _board(
        self,
        index: LoadedIndex,
        queries: Sequence[Query],
        keys: Sequence[bytes],
        known: dict[int, Found],
        flights: dict[int, Flight],
    ) -> None:
        """Joins or starts the work on each query that is not known, and notes it in `flights`."""
        new: dict[bytes, Flight] = {}
        for i, (query, key) in enumerate(zip(queries, keys, strict=True)):
            if i in known:
                continue
            flight = self._pipeline.find(key) or new.get(key)
            if flight is None:
                finish = partial(_search, index, query)
                flight = new[key] = Flight(text=query.text, finish=finish, key=key)
                flight.result.add_done_callback(partial(self._keep, key))
            flight.waiters += 1
            flights[i] = flight
        self._metrics.looked_up("in_flight", len(flights) - len(new), len(new))
        if self._redis and new:
            self._pipeline.open(new.values())
            _spawn(self._look_up(self._redis, index, list(new.values())), self._lookups)
        elif new:
            self._pipeline.submit(list(new.values()))
            self._pipeline.open(new.values())

    async def _look_up(
        self, redis: "RedisCache", index: LoadedIndex, flights: Sequence[Flight]
    ) -> None:
        """Ends the flights that Redis knows and submits the others."""
        try:
            found = await redis.get_many([flight.key for flight in flights], index.manifest.count)
            for flight in flights:
                flight.queued = time.perf_counter()
            known = [(f, rows) for f, rows in zip(flights, found, strict=True) if rows]
            self._metrics.looked_up("redis", len(known), len(flights) - len(known))
            if known:
                fetched = await self._pipeline.run(_fetch, index, [rows for _, rows in known])
                for (flight, _), searched in zip(known, fetched, strict=True):
                    self._pipeline.resolve(flight, searched)
            missing = [f for f in flights if not f.result.done()]
            if missing:
                self._pipeline.submit(missing)
        except Exception as error:
            for flight in flights:
                self._pipeline.resolve(flight, error)

    def _keep(self, key: bytes, result: "asyncio.Future[_Searched]") -> None:
        """Puts what a flight found into the caches."""
        if result.cancelled() or result.exception():
            return
        searched = result.result()
        self._memory.put(key, searched.found)
        if self._redis and not searched.cached and len(self._writes) < _MAX_WRITES:
            _spawn(self._redis.put_many([(key, searched.found)]), self._writes)

    async def _ride(self, flights: Sequence[Flight], deadline: float) -> None:
        for flight in flights:
            flight.waiters += 1
        try:
            await self._pipeline.wait({flight.result for flight in flights}, deadline)
        finally:
            for flight in flights:
                self._pipeline.leave(flight)

    def _checked_queries(
        self, index: LoadedIndex, queries: Sequence[Query], batch: bool
    ) -> list[Query]:
        checked = []
        for position, query in enumerate(queries):
            try:
                checked.append(self._checked_query(index, query))
            except QueryError as error:
                if not batch:
                    raise
                raise QueryError(f"queries.{position}.{error.field}", str(error)) from error
        return checked

    def _checked_query(self, index: LoadedIndex, query: Query) -> Query:
        """Returns the query with its text under the text rules."""
        limits, count = self._settings, index.manifest.count
        text = check_text(query.text, limits.max_query_chars)
        if query.top_k > limits.max_top_k:
            raise QueryError("top_k", f"is {query.top_k}; the limit is {limits.max_top_k}")
        if query.top_k > count:
            raise QueryError("top_k", f"is {query.top_k}; the index holds {count} documents")
        index.filters.check(query.filter)
        # Where nothing is cut, both searches are one, for the caches too.
        collapse = query.collapse and index.documents.chunked
        return replace(query, text=text, collapse=collapse)


def _spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


def check_text(text: str, limit: int, field: str = "query") -> str:
    """Returns a text under the text rules.

    Raises:
        QueryError: If it is empty or longer than `limit` characters.
    """
    if len(text) > limit:
        raise QueryError(field, f"has {len(text)} characters; the limit is {limit}")
    normal = normalize_text(text)
    if not normal:
        raise QueryError(field, "is empty")
    return normal


def _timings(searched: _Searched, flight: Flight | None, started: float, lookup: float) -> Timings:
    timings = Timings(
        cache=max(lookup, flight.queued - started) if flight else lookup,
        search=searched.search,
        fetch=searched.fetch,
        total=time.perf_counter() - started,
    )
    if flight and not searched.cached:
        timings.queue, timings.tokenize = flight.queue, flight.tokenize
        timings.encode = flight.encode
    return timings


def _identity(vector: FloatArray) -> FloatArray:
    return vector


def _search(index: LoadedIndex, query: Query, vector: FloatArray) -> _Searched:
    started = time.perf_counter()
    passing = index.filters.rows(query.filter)
    if query.collapse:
        scores, rows = search_documents(
            lambda fetch: index.vectors.search(vector, fetch, passing, query.filter),
            index.documents.first_chunks,
            query.top_k,
            len(index.documents) if passing is None else len(passing),
            query.min_score,
        )
    else:
        scores, rows = index.vectors.search(vector, query.top_k, passing, query.filter)
    if query.min_score is not None:
        good = scores >= query.min_score
        scores, rows = scores[good], rows[good]
    searched = time.perf_counter()
    hits = index.hits((scores, rows))
    return _Searched(
        (scores, rows), hits, search=searched - started, fetch=time.perf_counter() - searched
    )


def _fetch(index: LoadedIndex, found: Sequence[Found]) -> list[_Searched]:
    results = []
    for rows in found:
        started = time.perf_counter()
        hits = index.hits(rows)
        results.append(_Searched(rows, hits, fetch=time.perf_counter() - started, cached=True))
    return results
