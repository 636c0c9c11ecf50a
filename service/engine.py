"""The path of a query: cache, admission, encode, search, fetch; and the swap of indexes."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from core.errors import QueryError
from core.text import normalize_text
from core.types import Encoder, Hit, Query
from service.cache import Cache
from service.loaded_index import LoadedIndex, load_index
from service.metrics import Metrics, Timings
from service.settings import Settings
from service.vector_search import Found, limit_threads

_T = TypeVar("_T")


class OverloadedError(Exception):
    """More queries are in work or waiting than the service admits."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The hits of one query, whether they came from the cache, and the time it took."""

    hits: list[Hit]
    cached: bool
    timings: Timings


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to the queries of one request, all from one index version."""

    index: LoadedIndex
    answers: list[Answer]


class Engine:
    """Answers queries in worker threads; the event loop never computes.

    Args:
        settings: The service's settings.
        encoder: The query encoder.
        metrics: Where stages are counted.

    Raises:
        IndexVersionError: If the active version cannot be served.
    """

    def __init__(self, settings: Settings, encoder: Encoder, metrics: Metrics) -> None:
        self._settings = settings
        self._encoder = encoder
        self._metrics = metrics
        self._cache = Cache(settings.cache_entries)
        self._in_flight = 0
        self._reloading = asyncio.Lock()
        self._workers = ThreadPoolExecutor(
            settings.threads, thread_name_prefix="search", initializer=limit_threads
        )
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load", initializer=limit_threads)
        self.index = self._load()

    async def search(self, queries: Sequence[Query], *, batch: bool = False) -> Answers:
        """Answers queries together, all from one index version.

        Args:
            queries: At least one.
            batch: Whether an error names the position of the query at fault.

        Raises:
            QueryError: If a query asks for what the index cannot answer.
            OverloadedError: If the service has enough to do.
        """
        with self._admitted(len(queries)):
            return await self._run(self._answer, self.index, queries, batch)

    async def check(self) -> None:
        """Encodes and searches one canary, past admission and cache.

        Raises:
            Exception: Whatever makes a search fail.
        """
        canary = Query(self.index.manifest.canaries[0].text, top_k=1)
        await self._run(self._search, self.index, [canary])

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
            return index

    def close(self) -> None:
        """Waits for the work in hand and ends the threads."""
        self._workers.shutdown()
        self._loader.shutdown()

    def _load(self) -> LoadedIndex:
        index = load_index(self._settings.indexes, self._settings.index, self._encoder)
        self._metrics.show_index(index.manifest)
        return index

    @contextmanager
    def _admitted(self, queries: int) -> Iterator[None]:
        if self._in_flight + queries > self._settings.max_in_flight:
            raise OverloadedError
        self._in_flight += queries
        try:
            yield
        finally:
            self._in_flight -= queries

    async def _run(self, work: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *arguments)

    def _answer(self, index: LoadedIndex, queries: Sequence[Query], batch: bool) -> Answers:
        started = time.perf_counter()
        self._check(index, queries, batch)
        keys = [self._cache.key(query, index.manifest.version) for query in queries]
        known = [self._cache.get(key) for key in keys]
        fresh = [i for i, found in enumerate(known) if found is None]
        searched = dict(zip(fresh, self._search(index, [queries[i] for i in fresh]), strict=True))
        answers = []
        for i, found in enumerate(known):
            if found is None:
                found, timings = searched[i]
                self._cache.put(keys[i], found)
            else:
                timings = Timings()
            before = time.perf_counter()
            hits = index.hits(found)
            now = time.perf_counter()
            timings = replace(timings, fetch=now - before, total=now - started)
            self._metrics.observe(timings, cached=i not in searched)
            answers.append(Answer(hits, i not in searched, timings))
        return Answers(index, answers)

    def _search(self, index: LoadedIndex, queries: Sequence[Query]) -> list[tuple[Found, Timings]]:
        if not queries:
            return []
        started = time.perf_counter()
        texts = [normalize_text(query.text) for query in queries]
        vectors = self._encoder.encode(texts).vectors
        encode = time.perf_counter() - started
        results = []
        for query, vector in zip(queries, vectors, strict=True):
            before = time.perf_counter()
            scores, rows = index.vectors.search(
                vector, query.top_k, index.filters.rows(query.filter)
            )
            if query.min_score is not None:
                good = scores >= query.min_score
                scores, rows = scores[good], rows[good]
            timings = Timings(encode=encode, search=time.perf_counter() - before)
            results.append(((scores, rows), timings))
        return results

    def _check(self, index: LoadedIndex, queries: Sequence[Query], batch: bool) -> None:
        for position, query in enumerate(queries):
            try:
                self._check_query(index, query)
            except QueryError as error:
                if not batch:
                    raise
                raise QueryError(f"queries.{position}.{error.field}", str(error)) from error

    def _check_query(self, index: LoadedIndex, query: Query) -> None:
        limits, count = self._settings, index.manifest.count
        if len(query.text) > limits.max_query_chars:
            raise QueryError(
                "query",
                f"has {len(query.text)} characters; the limit is {limits.max_query_chars}",
            )
        if not normalize_text(query.text):
            raise QueryError("query", "is empty")
        if query.top_k > limits.max_top_k:
            raise QueryError("top_k", f"is {query.top_k}; the limit is {limits.max_top_k}")
        if query.top_k > count:
            raise QueryError("top_k", f"is {query.top_k}; the index holds {count} documents")
        index.filters.check(query.filter)
