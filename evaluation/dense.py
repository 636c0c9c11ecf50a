"""Dense retrieval by exact search, as a run."""

from collections.abc import Iterable
from itertools import islice

import numpy as np

from core.types import FloatArray
from evaluation.beir import Qrels, Run
from evaluation.metrics import EXCLUDED, without_excluded
from stores.exact import exact_search


def dense_run(
    queries: Iterable[str],
    query_vectors: FloatArray,
    documents: Iterable[str],
    document_vectors: FloatArray,
    depth: int,
    qrels: Qrels | None = None,
) -> Run:
    """Returns for each query the `depth` nearest documents (or all) and their cosines.

    Queries and documents are ids; the vectors, float32 [n, dimension], have unit norm. Documents
    that `qrels` excludes for a query are not among them and take no place.
    """
    ids = np.array(list(documents))
    qrels = qrels or {}
    grades = (list(judged.values()) for judged in qrels.values())
    beyond = max((found.count(EXCLUDED) for found in grades), default=0)
    found = exact_search(query_vectors, document_vectors, min(depth + beyond, len(ids)))
    run = {
        query: dict(zip(ids[rows].tolist(), scores.tolist(), strict=True))
        for query, scores, rows in zip(queries, *found, strict=True)
    }
    run = without_excluded(qrels, run)
    return {query: dict(islice(hits.items(), depth)) for query, hits in run.items()}
