"""Runs of documents from runs of their chunks: judgements are of documents."""

from collections.abc import Iterable

from core.types import Document
from models.evaluation.beir import Run


def chunk_depth(chunks: Iterable[Document], top_k: int) -> int:
    """Returns how many chunks a run must have to hold the best of its `top_k` documents."""
    return top_k * max(chunk.chunks for chunk in chunks)


def document_run(run: Run, chunks: Iterable[Document], top_k: int) -> Run:
    """Returns the best `top_k` documents of a run of chunks, each with its best chunk's score.

    Args:
        run: Scores by chunk id, by query id.
        chunks: All chunks; one without `parent` is a document.
        top_k: Documents for each query.

    Returns:
        Scores by document id, by query id.
    """
    parents = {chunk.id: chunk.parent or chunk.id for chunk in chunks}
    return {query: _best(scores, parents, top_k) for query, scores in run.items()}


def _best(scores: dict[str, float], parents: dict[str, str], top_k: int) -> dict[str, float]:
    best: dict[str, float] = {}
    for chunk in sorted(scores, key=lambda id_: scores[id_], reverse=True):
        if len(best) < top_k:
            best.setdefault(parents[chunk], scores[chunk])
    return best
