"""Choice of search parameters by measured recall, for all stores."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from core.shards import ShardedVectors
from core.types import FloatArray, RowArray
from stores.base import SearchChoice
from stores.exact import exact_search

RECALL_K = 10

Parameters = Mapping[str, int]
# Takes queries, float32 [q, dimension], k and parameters; returns rows, int64 [q, k], padded with
# -1 if fewer are found.
Search = Callable[[FloatArray, int, Parameters], RowArray]

# Most rows per distinct vector in a graph, on average. The links of a vector lead to its copies: of
# 14,950 × 384 a graph has recall@10 0.994 with 8 copies of each and 0.63 with 75 (efSearch 128),
# and inverted lists have 0.995 with 75, in 0.2 ms.
_MOST_COPIES = 10
# A vector with more copies than it has links in HNSW32 is linked to copies only, and a search that
# meets one finds nothing else. Of 20,000 × 64 with 20 texts 500 times each, a graph has recall@10
# 0.93 at most (efSearch 1024), with 20 texts 100 times each 0.99; lists have 0.998 (64 of 512).
_LINKS = 64
_MOST_CROWDED = 0.05  # share of the rows with more copies than links
_CHUNK_ROWS = 16_384
# Tolerance of scores: of documents with equal vectors, any counts as a correct hit.
_TIE = 1e-5


def crowded_rows(copies: NDArray[np.int64]) -> int:
    """Returns how many rows have more copies than links, given how often each vector occurs."""
    return int(copies[copies > _LINKS].sum())


def has_copies(count: int, different: int, crowded: int = 0) -> bool:
    """Returns whether `different` vectors have too many copies among `count` for a graph.

    `crowded` is the number of rows that `crowded_rows` counts.
    """
    return count > _MOST_COPIES * different or crowded > _MOST_CROWDED * count


def choose_parameters(
    search: Search,
    by_cost: Sequence[dict[str, int]],
    vectors: ShardedVectors,
    queries: FloatArray,
    target: float,
    hint: str,
) -> SearchChoice:
    """Finds the cheapest parameters whose mean recall@10 reaches the target, or else the best.

    Args:
        by_cost: Parameter combinations, the cheapest first; {} is exact search.
        queries: float32 [q, dimension], held-out queries.
        target: Target recall@10, measured against exact search.
        hint: Index types with a higher recall, for the message if the target is not reached.
    """
    k = min(RECALL_K, len(vectors))
    kth_scores = exact_search(queries, vectors.chunks(_CHUNK_ROWS), k)[0][:, -1]
    tried: dict[str, float] = {}
    best = SearchChoice({}, -1.0, tried)
    for parameters in by_cost:
        found = 0
        for query, rows, bound in zip(
            queries, search(queries, k, parameters), kth_scores, strict=True
        ):
            scores = vectors.take(rows[rows >= 0]) @ query
            found += int((scores >= bound - _TIE).sum())
        recall = found / (k * len(queries))
        if not parameters:
            return SearchChoice({}, recall, {})
        tried[",".join(f"{key}={value}" for key, value in parameters.items())] = recall
        if recall >= target:
            return SearchChoice(parameters, recall, tried)
        if recall > best.recall:
            best = SearchChoice(parameters, recall, tried, f"{hint}, or Flat")
    return best
