"""Exact nearest-neighbour search."""

from collections.abc import Iterable

import faiss
import numpy as np

from core.types import FloatArray, RowArray

_CHUNK_ROWS = 16_384


def exact_search(
    queries: FloatArray, vectors: FloatArray | Iterable[tuple[int, FloatArray]], k: int
) -> tuple[FloatArray, RowArray]:
    """Finds the k vectors with the largest inner product (for unit vectors, the cosine).

    Args:
        queries: float32 [q, dimension].
        vectors: float32 [n, dimension], or chunks of it, each with its first row.

    Returns:
        Scores, float32 [q, k], descending, and rows, int64 [q, k]; padded with -inf and -1 if
        there are fewer than k vectors.
    """
    if isinstance(vectors, np.ndarray):
        vectors = _chunks(vectors)
    heap = faiss.ResultHeap(len(queries), k, keep_max=True)
    queries = np.ascontiguousarray(queries, dtype=np.float32)
    for first, chunk in vectors:
        depth = min(k, len(chunk))
        scores, rows = faiss.knn(queries, chunk, depth, metric=faiss.METRIC_INNER_PRODUCT)
        heap.add_result(scores, rows + first)
    heap.finalize()
    return np.where(heap.I < 0, np.float32(-np.inf), heap.D), heap.I


def _chunks(vectors: FloatArray) -> Iterable[tuple[int, FloatArray]]:
    for start in range(0, len(vectors), _CHUNK_ROWS):
        yield start, np.ascontiguousarray(vectors[start : start + _CHUNK_ROWS], dtype=np.float32)
