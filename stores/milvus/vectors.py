"""Search in a Milvus collection, with and without a filter, and reading of its vectors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import grpc
import numpy as np
from pymilvus import MilvusClient, MilvusException

from core.breaker import Breaker, UnavailableError
from core.errors import IndexVersionError
from core.filter_rows import Requirement
from core.filters import Selection
from core.manifest import IndexManifest
from core.types import Check, FloatArray, RowArray, no_check
from stores.base import ScoredRows
from stores.milvus.names import (
    MAX_HITS,
    ROW,
    VECTOR,
    labels_expression,
    rows_expression,
    search_parameters,
)
from stores.order import depth_for, with_ties
from stores.recall import Parameters

_P = ParamSpec("_P")
_T = TypeVar("_T")

MILVUS_ERRORS = (MilvusException, grpc.RpcError)

# Time until the breaker allows a probe after failures [s].
_RETRY_AFTER = 1.0
# Time-out of a search for many queries [s].
_LONG_TIMEOUT = 600.0
_NOT_LOADED = 101
# Candidates of a graph search per returned neighbour, as in `stores/faiss/search.py`.
_BEAM = 4
# Times the expected number of candidates that are requested if a condition is applied afterwards.
_OVERFETCH = 2
# The rows of a version never change, so only the verification needs strong consistency.
STRONG, EVENTUALLY = "Strong", "Eventually"
_READ_ROWS = 1024
# Most rows of which a search reads the vectors, in 64 requests: 200 MB of 768 dimensions.
_MOST_READ = 65_536


class MilvusVectors:
    """The loaded collection of one version.

    Requests of searches have a time-out of `timeout` seconds and share a circuit breaker, the guard
    of the connection: after three consecutive failures only one request per second is sent, and
    all others fail immediately.
    """

    def __init__(
        self,
        client: MilvusClient,
        collection: str,
        manifest: IndexManifest,
        timeout: float,
        guard: "Guard",
    ) -> None:
        self._client = client
        self._collection = collection
        self._manifest = manifest
        self._timeout = timeout
        self._guard = guard
        (found,) = self._query(STRONG, output_fields=["count(*)"])
        self.count = int(found["count(*)"])
        fields = client.describe_collection(collection, timeout=timeout)["fields"]
        self.dimension = next(int(f["params"]["dim"]) for f in fields if f["name"] == VECTOR)

    def search(
        self,
        query: FloatArray,
        k: int,
        selection: Selection | None = None,
        check: Check = no_check,
    ) -> ScoredRows:
        """Finds the nearest vectors; see `stores.base.Vectors.search`.

        Up to 50 hits are taken from one list of candidates. If the graph returns too few matching
        rows, or more are searched than the 16,384 that Milvus can return, the vectors of all
        matching rows are read and compared in this process. If more than 65,536 rows match, the
        hits are only those that the graph returns: 16,384 at most, fewer than k. Each request has a
        time-out, and `check` is called before it.

        A range can have more labels than an expression takes. Then Milvus searches without this
        condition, for more hits, of which those in the selection are returned.
        """
        rows = selection.rows(check) if selection else None
        labels = selection.labels() if selection else []
        matching = self._manifest.count if rows is None else len(rows)
        if matching == 0:
            return np.empty(0, np.float32), np.empty(0, np.int64)

        def find(wanted: int) -> ScoredRows:
            return self._best(query, wanted, rows, labels, check)

        return with_ties(find, min(k, matching), depth_for(k), matching)

    def search_together(self, queries: FloatArray, k: int) -> None:
        """Returns None: each query is a request of its own."""

    def take(self, rows: RowArray) -> FloatArray:
        """Returns the vectors of rows, int64 [n], as float32 [n, dimension].

        Raises:
            IndexVersionError: If a row is missing in the collection.
            UnavailableError: If Milvus fails or does not respond.
        """
        vectors: list[FloatArray] = []
        for part in _parts(rows):
            by_row = dict(zip(*self._read(part), strict=True))
            if missing := [row for row in part if row not in by_row]:
                message = f"Milvus: collection '{self._collection}' has no row {missing[0]}"
                raise IndexVersionError(message, code="row_missing", row=missing[0])
            vectors += [by_row[row] for row in part]
        return np.array(vectors, np.float32).reshape(len(rows), self.dimension)

    def _best(
        self,
        query: FloatArray,
        wanted: int,
        rows: RowArray | None,
        labels: Sequence[Requirement] | None,
        check: Check,
    ) -> ScoredRows:
        """Returns the `wanted` nearest of the matching rows, or those that Milvus finds."""
        matching = self._manifest.count if rows is None else len(rows)
        is_readable = matching <= _MOST_READ
        if is_readable and (wanted > MAX_HITS or labels is None):
            return self._exact(query, wanted, rows, check)
        check()
        expression, complete = labels_expression(labels or ())
        # The rows that hits are chosen from afterwards.
        passing = None if labels is not None and complete else rows
        fetch = wanted
        if passing is not None:
            fetch = -(-_OVERFETCH * wanted * self._manifest.count // matching)
        scores, found = self._call(self._nearest, query, min(fetch, MAX_HITS), expression)
        if passing is not None:
            passes = np.isin(found, passing, assume_unique=True)
            scores, found = scores[passes], found[passes]
        if len(found) < wanted and is_readable:
            return self._exact(query, wanted, rows, check)
        return scores[:wanted], found[:wanted]

    def _nearest(self, query: FloatArray, k: int, expression: str) -> ScoredRows:
        (hits,) = self._client.search(
            self._collection,
            data=[query],
            anns_field=VECTOR,
            limit=k,
            filter=expression,
            search_params=search_parameters(self._manifest.search_parameters, _BEAM * k),
            output_fields=[ROW],
            consistency_level=EVENTUALLY,
            timeout=self._timeout,
        )
        scores = np.array([hit["distance"] for hit in hits], np.float32)
        return scores, np.array([hit[ROW] for hit in hits], np.int64)

    def _exact(self, query: FloatArray, k: int, rows: RowArray | None, check: Check) -> ScoredRows:
        if rows is None:
            rows = np.arange(self._manifest.count)
        scores, best = np.empty(0, np.float32), np.empty(0, np.int64)
        for part in _parts(rows):
            check()
            found, vectors = self._read(part)
            scores = np.concatenate([scores, vectors.reshape(-1, len(query)) @ query])
            best = np.concatenate([best, np.array(found, np.int64)])
            order = np.argsort(-scores, kind="stable")[:k]
            scores, best = scores[order], best[order]
        return scores, best

    def _read(self, rows: list[int]) -> tuple[list[int], FloatArray]:
        """Returns the rows that exist in the collection, and their vectors."""
        fields = [ROW, VECTOR]
        found = self._call(self._query, filter=rows_expression(rows), output_fields=fields)
        vectors = np.array([entity[VECTOR] for entity in found], np.float32)
        return [entity[ROW] for entity in found], vectors

    def _query(self, consistency: str = EVENTUALLY, **arguments: Any) -> list[dict[str, Any]]:
        entities: list[dict[str, Any]] = self._client.query(
            self._collection, consistency_level=consistency, timeout=self._timeout, **arguments
        )
        return entities

    def _call(self, call: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
        with self._guard.request():
            try:
                return call(*arguments, **named)
            except MilvusException as error:
                if error.code != _NOT_LOADED:
                    raise
            # After a restart of Milvus, collections must be loaded again.
            self._client.load_collection(self._collection, timeout=self._timeout)
            return call(*arguments, **named)


def search_many(
    client: MilvusClient, collection: str, queries: FloatArray, k: int, parameters: Parameters
) -> RowArray:
    """Returns the nearest rows of queries, float32 [q, dimension], as int64 [q, k].

    Rows are padded with -1 if fewer than k are found.
    """
    results = client.search(
        collection,
        data=list(queries),
        anns_field=VECTOR,
        limit=k,
        search_params=search_parameters(parameters, k),
        output_fields=[ROW],
        consistency_level=STRONG,
        timeout=_LONG_TIMEOUT,
    )
    rows = np.full((len(queries), k), -1, np.int64)
    for i, hits in enumerate(results):
        rows[i, : len(hits)] = [hit[ROW] for hit in hits]
    return rows


class Guard:
    """Circuit breaker of a connection; thread-safe."""

    def __init__(self) -> None:
        self._breaker = Breaker("Milvus", retry_after=_RETRY_AFTER)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Makes one request in the block.

        Raises:
            UnavailableError: If the breaker is open, or the request fails.
        """
        try:
            with self._breaker.call(*MILVUS_ERRORS, reason=error_name):
                yield
        except MILVUS_ERRORS as error:
            raise UnavailableError from error


def error_name(error: Exception) -> str:
    """Returns the code of an error of Milvus; its message can contain an address."""
    code = error.code() if isinstance(error, grpc.RpcError) else getattr(error, "code", error)
    return str(getattr(code, "name", code))


def _parts(rows: RowArray) -> Iterator[list[int]]:
    for start in range(0, len(rows), _READ_ROWS):
        part: list[int] = rows[start : start + _READ_ROWS].tolist()
        yield part
