"""Finding documents by their best chunks: search for more, until enough documents are found."""

from collections.abc import Callable

import numpy as np

from core.types import FloatArray, RowArray
from service.vector_search import Found

# Chunks searched for, for each document wanted, and how many times more when they were of too
# few documents: the last search costs three quarters of all.
_OVERFETCH = 4
_WIDEN = 4


def search_documents(
    search: Callable[[int], Found],
    first_chunks: Callable[[RowArray], RowArray],
    k: int,
    most: int,
    min_score: float | None,
) -> Found:
    """Finds the best chunk of each of the k nearest documents.

    Fewer than k come back only if the chunks that may be found are of fewer documents, or
    those left are below the lowest score.

    Args:
        search: Returns that many of the nearest chunks, or all, best first.
        first_chunks: Returns of each row's document the row of the first chunk.
        k: Documents wanted.
        most: The number of chunks that may be found.
        min_score: The lowest score wanted, or None; chunks below it may come back.

    Returns:
        Cosine similarities, float32 [m], descending, and rows, int64 [m].
    """
    fetch = min(most, _OVERFETCH * k)
    while True:
        scores, rows = search(fetch)
        best = _best(scores, first_chunks(rows), rows)
        exhausted = fetch == most or len(rows) < fetch
        if len(best) >= k or exhausted or (min_score is not None and scores[-1] < min_score):
            return scores[best[:k]], rows[best[:k]]
        fetch = min(most, _WIDEN * fetch)


def _best(scores: FloatArray, parents: RowArray, rows: RowArray) -> RowArray:
    """Returns the places of each parent's best chunk, best first; of equals the first chunk."""
    order = np.lexsort((rows, -scores))
    _, first = np.unique(parents[order], return_index=True)
    best: RowArray = order[np.sort(first)]
    return best
