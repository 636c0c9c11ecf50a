"""Search in a Milvus collection, with and without a filter, and reading of its vectors."""

from collections.abc import Iterator, Sequence

import numpy as np
from pymilvus import MilvusClient

from core.errors import IndexVersionError
from core.filter_rows import Requirement
from core.filters import Selection
from core.manifest import IndexManifest
from core.types import Check, FloatArray, RowArray, no_check
from stores.base import ScoredRows
from stores.milvus.collection import STRONG, Collection
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

# Time-out of a search for many queries [s].
_LONG_TIMEOUT = 600.0
# Candidates of a graph search per returned neighbour, as in `stores/faiss/search.py`.
_BEAM = 4
# Times the expected number of candidates that are requested if a condition is applied afterwards.
_OVERFETCH = 2
_READ_ROWS = 1024
# Most rows of which a search reads the vectors, in 64 requests: 200 MB of 768 dimensions.
_MOST_READ = 65_536


class MilvusVectors:
    """The vectors of one version, which are in a loaded collection."""

    def __init__(self, collection: Collection, manifest: IndexManifest, dimension: int) -> None:
        self._collection = collection
        self._manifest = manifest
        self.count = collection.count(consistency=STRONG)
        self.dimension = dimension

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
        matching = selection.count(check) if selection else self._manifest.count
        if matching == 0:
            return np.empty(0, np.float32), np.empty(0, np.int64)

        def find(wanted: int) -> ScoredRows:
            return self._best(query, wanted, selection, matching, check)

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
                message = f"Milvus: collection '{self._collection.name}' has no row {missing[0]}"
                raise IndexVersionError(message, code="row_missing", row=missing[0])
            vectors += [by_row[row] for row in part]
        return np.array(vectors, np.float32).reshape(len(rows), self.dimension)

    def _best(
        self,
        query: FloatArray,
        wanted: int,
        selection: Selection | None,
        matching: int,
        check: Check,
    ) -> ScoredRows:
        """Returns the `wanted` nearest of the matching rows, or those that Milvus finds."""
        labels: Sequence[Requirement] | None = selection.labels() if selection else ()
        is_readable = matching <= _MOST_READ
        if is_readable and (wanted > MAX_HITS or labels is None):
            return self._exact(query, wanted, selection, check)
        check()
        expression, complete = labels_expression(labels or ())
        fetch, passing = wanted, None
        if selection and not (complete and labels is not None):
            # Hits are chosen from these rows afterwards.
            passing = selection.rows(check)
            fetch = -(-_OVERFETCH * wanted * self._manifest.count // matching)
        k = min(fetch, MAX_HITS)
        how = search_parameters(self._manifest.search_parameters, _BEAM * k)
        scores, found = self._collection.nearest(VECTOR, query, k, expression, how)
        if passing is not None:
            passes = np.isin(found, passing, assume_unique=True)
            scores, found = scores[passes], found[passes]
        if len(found) < wanted and is_readable:
            return self._exact(query, wanted, selection, check)
        return scores[:wanted], found[:wanted]

    def _exact(
        self, query: FloatArray, k: int, selection: Selection | None, check: Check
    ) -> ScoredRows:
        rows = selection.rows(check) if selection else np.arange(self._manifest.count)
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
        found = self._collection.query(rows_expression(rows), [ROW, VECTOR])
        vectors = np.array([entity[VECTOR] for entity in found], np.float32)
        return [entity[ROW] for entity in found], vectors


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


def _parts(rows: RowArray) -> Iterator[list[int]]:
    for start in range(0, len(rows), _READ_ROWS):
        part: list[int] = rows[start : start + _READ_ROWS].tolist()
        yield part
