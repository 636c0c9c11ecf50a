"""Choosing search parameters by measured recall, wherever the vectors are searched."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import IndexVersionError
from core.shards import ShardedVectors
from core.types import FloatArray, RowArray

RECALL_K = 10

Parameters = Mapping[str, int]
# Queries, float32 [q, dimension], and k to rows, int64 [q, k]; -1 where fewer are found.
Search = Callable[[FloatArray, int, Parameters], RowArray]

_CHUNK_ROWS = 4096
# Equal texts have equal vectors: whichever of them a search returns is right.
_TIE = 1e-5


@dataclass(frozen=True, slots=True)
class SearchChoice:
    """Search parameters, and recall@10 of each combination that was tried."""

    parameters: dict[str, int]
    recall: float
    tried: dict[str, float]


def choose_parameters(
    search: Search,
    by_cost: Sequence[dict[str, int]],
    vectors: ShardedVectors,
    queries: FloatArray,
    target: float,
    remedy: str,
) -> SearchChoice:
    """Finds the cheapest search parameters whose recall@10 reaches the target.

    Args:
        search: Searches the index over `vectors`.
        by_cost: The combinations of parameters, cheapest first; an empty one is exact search.
        vectors: All document vectors, for the exact search that recall is measured against.
        queries: float32 [q, dimension], held-out query vectors.
        target: The mean recall@10 wanted.
        remedy: What to choose if no combination reaches it.

    Raises:
        IndexVersionError: If none does.
    """
    exact = _exact_kth_score(vectors, queries, RECALL_K)
    tried: dict[str, float] = {}
    for parameters in by_cost:
        recall = _recall(search, vectors, queries, exact, parameters)
        if not parameters:
            return SearchChoice({}, recall, {})
        name = ",".join(f"{key}={value}" for key, value in parameters.items())
        tried[name] = recall
        if recall >= target:
            return SearchChoice(parameters, recall, tried)
    best = max(tried, key=lambda name: tried[name])
    raise IndexVersionError(
        f"recall@{RECALL_K} is {tried[best]:.4f} with {best}, below the target {target}: "
        f"choose {remedy}, or Flat"
    )


def _exact_kth_score(vectors: ShardedVectors, queries: FloatArray, k: int) -> FloatArray:
    best = np.full((len(queries), k), -np.inf, dtype=np.float32)
    for _, chunk in vectors.chunks(_CHUNK_ROWS):
        scores = np.concatenate([best, queries @ chunk.T], axis=1)
        best = -np.partition(-scores, k - 1, axis=1)[:, :k]
    kth: FloatArray = best.min(axis=1)
    return kth


def _recall(
    search: Search,
    vectors: ShardedVectors,
    queries: FloatArray,
    kth_score: FloatArray,
    parameters: Parameters,
) -> float:
    k = min(RECALL_K, len(vectors))
    rows = search(queries, k, parameters)
    hits = 0
    for query, found, bound in zip(queries, rows, kth_score, strict=True):
        scores = vectors.take(found[found >= 0]) @ query
        hits += int((scores >= bound - _TIE).sum())
    return hits / (k * len(queries))
