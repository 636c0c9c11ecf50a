"""Choosing search parameters by measured recall, wherever the vectors are searched."""

from collections.abc import Callable, Mapping, Sequence

from core.shards import ShardedVectors
from core.types import FloatArray, RowArray
from stores.base import SearchChoice
from stores.exact import exact_search

RECALL_K = 10

Parameters = Mapping[str, int]
# Queries, float32 [q, dimension], and k to rows, int64 [q, k]; -1 where fewer are found.
Search = Callable[[FloatArray, int, Parameters], RowArray]

_CHUNK_ROWS = 16_384
# Equal texts have equal vectors: whichever of them a search returns is right.
_TIE = 1e-5


def choose_parameters(
    search: Search,
    by_cost: Sequence[dict[str, int]],
    vectors: ShardedVectors,
    queries: FloatArray,
    target: float,
    hint: str,
) -> SearchChoice:
    """Finds the cheapest search parameters whose mean recall@10 reaches the target, or the best.

    It is measured with held-out queries, float32 [q, dimension], against exact search. Parameters
    come `by_cost`, the cheapest first; empty ones are exact search. The hint says what to choose,
    other than Flat, if none reaches the target.
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
