"""Requests to a loaded collection of Milvus, whose rows never change, under one circuit breaker."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import numpy as np
from pymilvus import MilvusClient, MilvusException

from core.breaker import Breaker, UnavailableError
from stores.base import ScoredRows
from stores.milvus.names import ROW

_T = TypeVar("_T")

MILVUS_ERRORS = (MilvusException, grpc.RpcError)
# Only a verification needs strong consistency: later the rows are everywhere.
STRONG, EVENTUALLY = "Strong", "Eventually"

# Time until the breaker allows a probe after failures [s].
_RETRY_AFTER = 1.0
_NOT_LOADED = 101

Entity = dict[str, Any]


class Guard:
    """Circuit breaker of a connection; thread-safe.

    After three consecutive failures only one request per second is sent, and all others fail
    immediately.
    """

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


class Collection:
    """A loaded collection; thread-safe. Each request can raise `UnavailableError`.

    Args:
        timeout: Of each request [s].
        guard: That of the connection.
    """

    def __init__(self, client: MilvusClient, name: str, timeout: float, guard: Guard) -> None:
        self.name = name
        self._client = client
        self._timeout = timeout
        self._guard = guard

    def query(
        self, condition: str, fields: Sequence[str], consistency: str = EVENTUALLY, **how: Any
    ) -> list[Entity]:
        """Returns fields of the rows that meet a condition, in any order; 16,384 at most."""
        found: list[Entity] = self._call(
            self._client.query,
            filter=condition,
            output_fields=list(fields),
            consistency_level=consistency,
            **how,
        )
        return found

    def count(self, condition: str = "", consistency: str = EVENTUALLY) -> int:
        """Returns the number of rows that meet a condition, by default of all."""
        return int(self.query(condition, ["count(*)"], consistency)[0]["count(*)"])

    def nearest(
        self, field: str, query: Any, k: int, condition: str, parameters: Mapping[str, Any]
    ) -> ScoredRows:
        """Returns the k rows with the largest inner products, of those that meet a condition."""
        (hits,) = self._call(
            self._client.search,
            data=[query],
            anns_field=field,
            limit=k,
            filter=condition,
            search_params=dict(parameters),
            output_fields=[ROW],
            consistency_level=EVENTUALLY,
        )
        scores = np.array([hit["distance"] for hit in hits], np.float32)
        return scores, np.array([hit[ROW] for hit in hits], np.int64)

    def _call(self, call: Callable[..., _T], **named: Any) -> _T:
        with self._guard.request():
            try:
                return call(self.name, timeout=self._timeout, **named)
            except MilvusException as error:
                if error.code != _NOT_LOADED:
                    raise
            # After a restart of Milvus, collections must be loaded again.
            self._client.load_collection(self.name, timeout=self._timeout)
            return call(self.name, timeout=self._timeout, **named)
