"""Searching a version's collection in Milvus, with and without a filter."""

import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import grpc
import numpy as np
from pymilvus import MilvusClient, MilvusException

from core.canaries import MIN_FOUND, canary_vectors
from core.errors import IndexVersionError
from core.filters import FilterReader
from core.milvus import (
    MAX_HITS,
    ROW,
    VECTOR,
    alias_name,
    labels_expression,
    read_collection,
    rows_expression,
    search_parameters,
    version_of,
)
from core.types import Filter, FloatArray, IndexManifest, RowArray
from service.breaker import Breaker, UnavailableError
from service.vector_search import Found

_T = TypeVar("_T")

_LOG = logging.getLogger("care.service")

# Until a probe finds out whether Milvus answers again [s].
_RETRY_AFTER = 1.0
# Until a collection is in the memory of Milvus, at start and at a reload [s].
_LOAD_TIMEOUT = 600.0
_NOT_LOADED = 101
# Candidates of a graph for each neighbour that it returns, as in `vector_search.py`.
_BEAM = 4
# A version's rows never change: what was verified when it was loaded is what is found later.
_STRONG, _ANY = "Strong", "Eventually"
_READ_ROWS = 1024
_MIN_CANARY_SCORE = 0.99
# A call waits for a connection until its time-out; by default the client tries again after pauses
# that grow beyond it. gRPC itself would wait for minutes before it connects anew.
_GRPC_OPTIONS = {
    "grpc.service_config": json.dumps({"methodConfig": [{"name": [{}], "waitForReady": True}]}),
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
}


class MilvusVectors:
    """Vectors in Milvus; an alias names the active version.

    Args:
        uri: Where Milvus is.
        token: What it asks for, or empty.
        timeout: The longest wait for one search [s].

    Raises:
        IndexVersionError: If it does not answer.
    """

    def __init__(self, uri: str, token: str, timeout: float) -> None:
        # Its messages quote addresses; what fails is logged here.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        try:
            self._client = MilvusClient(
                uri=uri, token=token, timeout=timeout, dedicated=True, grpc_options=_GRPC_OPTIONS
            )
        except (MilvusException, grpc.RpcError) as error:
            raise _unanswered(error) from error
        # When a connection breaks during calls the client would connect anew for each of them, one
        # after the other, with a time-out each; gRPC connects anew by itself.
        del self._client._handler._on_rpc_error
        self._timeout = timeout
        self._guard = _Guard()

    def active_version(self, root: Path, name: str) -> str:
        """Returns the version whose collection the alias leads to."""
        alias = alias_name(name)
        try:
            if not self._client.has_collection(alias, timeout=self._timeout):
                raise IndexVersionError(
                    f"Milvus has no alias '{alias}': build the index with --store milvus"
                )
            found = self._client.describe_alias(alias, timeout=self._timeout)
        except (MilvusException, grpc.RpcError) as error:
            raise _unanswered(error) from error
        return version_of(found["collection_name"])

    def open(
        self, folder: Path, manifest: IndexManifest, filters: FilterReader
    ) -> "CollectionSearch":
        """Loads the version's collection and checks that it is what the manifest says."""
        name = read_collection(folder)
        if name is None:
            raise IndexVersionError(f"the vectors of {folder} are not in Milvus: unset CARE_STORE")
        search = CollectionSearch(self._client, name, manifest, filters, self._timeout, self._guard)
        try:
            search.check()
        except (MilvusException, grpc.RpcError) as error:
            raise _unanswered(error) from error
        return search


class CollectionSearch:
    """The vectors of one version in Milvus.

    Args:
        client: The connection.
        name: The collection.
        manifest: The version's description.
        filters: Its filters.
        timeout: The longest wait for one call [s].
        guard: What calls go through.
    """

    def __init__(
        self,
        client: MilvusClient,
        name: str,
        manifest: IndexManifest,
        filters: FilterReader,
        timeout: float,
        guard: "_Guard",
    ) -> None:
        self._client = client
        self._name = name
        self._manifest = manifest
        self._filters = filters
        self._timeout = timeout
        self._guard = guard

    def check(self) -> None:
        """Loads the collection and looks for what the manifest describes.

        Raises:
            IndexVersionError: If it holds other vectors.
            MilvusException: If Milvus fails.
            RpcError: If it does not answer.
        """
        if not self._client.has_collection(self._name, timeout=self._timeout):
            raise IndexVersionError(f"Milvus has no collection '{self._name}'")
        self._client.load_collection(self._name, timeout=_LOAD_TIMEOUT)
        (found,) = self._query(consistency=_STRONG, output_fields=["count(*)"])
        count = int(found["count(*)"])
        if count != self._manifest.count:
            raise IndexVersionError(
                f"'{self._name}' in Milvus holds {count} vectors; the manifest counts "
                f"{self._manifest.count}"
            )
        canaries = canary_vectors(self._manifest.canaries)
        scores = [self._nearest(vector, 1, "", _STRONG)[0][:1] for vector in canaries]
        good = np.concatenate(scores) >= _MIN_CANARY_SCORE
        if good.sum() < MIN_FOUND * len(canaries):
            raise IndexVersionError(
                f"'{self._name}' in Milvus does not hold the vectors of the index's canaries"
            )

    def search(
        self, query: FloatArray, k: int, rows: RowArray | None = None, filter_: Filter | None = None
    ) -> Found:
        """Finds the nearest documents.

        If the graph yields too few of those that match, or more are wanted than Milvus returns,
        the vectors of all that match are read and compared here.

        Args:
            query: float32 [dimension], of unit norm.
            k: Hits wanted, at most the number of documents.
            rows: The rows that may be found, ascending, or None for all.
            filter_: The filter that these rows pass; without it they are all read.

        Returns:
            Cosine similarities, float32 [m], descending, and rows, int64 [m]; m is k, or
            the number of matching rows if that is less.

        Raises:
            UnavailableError: If Milvus fails or does not answer.
        """
        matching = self._manifest.count if rows is None else len(rows)
        wanted = min(k, matching)
        if wanted == 0:
            return np.empty(0, np.float32), np.empty(0, np.int64)
        if wanted <= MAX_HITS and (rows is None or filter_):
            expression = labels_expression(self._filters.labels(filter_ or {}))
            found = self._call(partial(self._nearest, query, wanted, expression, _ANY))
            if len(found[1]) == wanted:
                return found
        return self._exact(query, wanted, rows)

    def _nearest(self, query: FloatArray, k: int, expression: str, consistency: str) -> Found:
        (hits,) = self._client.search(
            self._name,
            data=[query],
            anns_field=VECTOR,
            limit=k,
            filter=expression,
            search_params=search_parameters(self._manifest.search_parameters, _BEAM * k),
            output_fields=[ROW],
            consistency_level=consistency,
            timeout=self._timeout,
        )
        scores = np.array([hit["distance"] for hit in hits], np.float32)
        return scores, np.array([hit[ROW] for hit in hits], np.int64)

    def _exact(self, query: FloatArray, k: int, rows: RowArray | None) -> Found:
        if rows is None:
            rows = np.arange(self._manifest.count)
        scores, best = np.empty(0, np.float32), np.empty(0, np.int64)
        for part in _parts(rows):
            expression = rows_expression(part)
            found = self._call(partial(self._query, filter=expression, output_fields=[ROW, VECTOR]))
            vectors = np.array([entity[VECTOR] for entity in found], np.float32)
            scores = np.concatenate([scores, vectors.reshape(-1, len(query)) @ query])
            best = np.concatenate([best, np.array([entity[ROW] for entity in found], np.int64)])
            order = np.argsort(-scores, kind="stable")[:k]
            scores, best = scores[order], best[order]
        return scores, best

    def _query(self, consistency: str = _ANY, **arguments: Any) -> list[dict[str, Any]]:
        entities: list[dict[str, Any]] = self._client.query(
            self._name, consistency_level=consistency, timeout=self._timeout, **arguments
        )
        return entities

    def _call(self, call: Callable[[], _T]) -> _T:
        with self._guard:
            try:
                return call()
            except MilvusException as error:
                if error.code != _NOT_LOADED:
                    raise
            # Milvus has been started anew and does not know what was loaded.
            self._client.load_collection(self._name, timeout=self._timeout)
            return call()


class _Guard:
    """Lets calls of all threads through as long as Milvus answers; entered once for each call."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._breaker = Breaker(retry_after=_RETRY_AFTER)

    def __enter__(self) -> None:
        with self._lock:
            if not self._breaker.allows():
                raise UnavailableError

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with self._lock:
            if error is None:
                self._breaker.succeeded()
            elif isinstance(error, MilvusException | grpc.RpcError):
                self._breaker.failed()
            else:
                self._breaker.abandoned()
        if isinstance(error, MilvusException | grpc.RpcError):
            _LOG.warning("Milvus failed", extra={"fields": {"code": _code(error)}})
            raise UnavailableError from error


def _parts(rows: RowArray) -> Iterator[list[int]]:
    for start in range(0, len(rows), _READ_ROWS):
        part: list[int] = rows[start : start + _READ_ROWS].tolist()
        yield part


def _code(error: MilvusException | grpc.RpcError) -> str:
    code = error.code if isinstance(error, MilvusException) else error.code()
    return str(getattr(code, "name", code))


def _unanswered(error: MilvusException | grpc.RpcError) -> IndexVersionError:
    return IndexVersionError(f"Milvus (CARE_MILVUS_URI) cannot be asked: {_code(error)}")
