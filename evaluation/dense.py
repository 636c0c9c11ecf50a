"""Dense retrieval by exact search, as a run."""

from collections.abc import Iterable

import numpy as np

from core.types import FloatArray
from evaluation.beir import Run
from stores.exact import exact_search


def dense_run(
    queries: Iterable[str],
    query_vectors: FloatArray,
    documents: Iterable[str],
    document_vectors: FloatArray,
    depth: int,
) -> Run:
    """Returns for each query the `depth` nearest documents (or all) and their cosines.

    Queries and documents are ids; the vectors, float32 [n, dimension], have unit norm.
    """
    ids = np.array(list(documents))
    found = exact_search(query_vectors, document_vectors, min(depth, len(ids)))
    return {
        query: dict(zip(ids[rows].tolist(), scores.tolist(), strict=True))
        for query, scores, rows in zip(queries, *found, strict=True)
    }
