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
    """Returns for each query the `depth` nearest documents with their cosines.

    Args:
        queries: Ids of the queries.
        query_vectors: float32 [queries, dimension], unit norm.
        documents: Ids of the documents.
        document_vectors: float32 [documents, dimension], unit norm.
        depth: Documents for each query; all if there are fewer.
    """
    ids = np.array(list(documents))
    found = exact_search(query_vectors, document_vectors, min(depth, len(ids)))
    return {
        query: dict(zip(ids[rows].tolist(), scores.tolist(), strict=True))
        for query, scores, rows in zip(queries, *found, strict=True)
    }
