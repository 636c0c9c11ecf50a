"""Candidate pools: what several retrievers find, merged."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from core.errors import CareError
from core.types import Document
from models.curation.config import Bm25Retriever, PairRetriever, Retriever, RunRetriever
from models.curation.encoding import encode_pair
from models.curation.vector_index import exact_search
from models.evaluation.beir import Run
from models.evaluation.bm25 import bm25_run
from models.evaluation.trec import read_run

# As in reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009).
_RRF = 60

Pools = dict[str, list[str]]


def candidate_pools(
    retrievers: Sequence[Retriever],
    documents: Sequence[Document],
    queries: Mapping[str, str],
    depth: int,
    cache: Path,
) -> Pools:
    """Returns for each query the ids of the documents that any retriever ranks in its top.

    Args:
        retrievers: The retrievers.
        documents: The corpus.
        queries: Text by id.
        depth: Documents of each retriever.
        cache: The folder for vectors.

    Returns:
        Ids by query id, in the order of reciprocal rank fusion.

    Raises:
        CareError: If a retriever cannot be used.
    """
    runs = [_run(retriever, documents, queries, depth, cache) for retriever in retrievers]
    return {query: _merge([run.get(query, {}) for run in runs], depth) for query in queries}


def _merge(rankings: Sequence[Mapping[str, float]], depth: int) -> list[str]:
    fused: dict[str, float] = {}
    for scores in rankings:
        # Ties by descending id, as trec_eval breaks them.
        ranked = sorted(scores, key=lambda id_: (scores[id_], id_), reverse=True)[:depth]
        for rank, id_ in enumerate(ranked, start=1):
            fused[id_] = fused.get(id_, 0.0) + 1 / (_RRF + rank)
    return sorted(fused, key=lambda id_: (fused[id_], id_), reverse=True)


def _run(
    retriever: Retriever,
    documents: Sequence[Document],
    queries: Mapping[str, str],
    depth: int,
    cache: Path,
) -> Run:
    match retriever:
        case Bm25Retriever():
            return bm25_run(documents, queries, depth)
        case RunRetriever():
            return _read_run(retriever.path, documents, queries)
        case PairRetriever():
            return _dense_run(retriever, documents, queries, depth, cache)


def _read_run(path: Path, documents: Sequence[Document], queries: Collection[str]) -> Run:
    known = {document.id for document in documents}
    # Others were washed out, or are not of the sample.
    run = {
        query: {id_: score for id_, score in scores.items() if id_ in known}
        for query, scores in read_run(path).items()
        if query in queries
    }
    if not any(run.values()):
        raise CareError(f"{path} has no document of the corpus for any of the queries")
    return run


def _dense_run(
    retriever: PairRetriever,
    documents: Sequence[Document],
    queries: Mapping[str, str],
    depth: int,
    cache: Path,
) -> Run:
    found, asked = encode_pair(
        retriever.pair,
        documents,
        list(queries.values()),
        cache,
        batch_size=retriever.batch_size,
        threads=retriever.threads,
    )
    hits = exact_search(found, asked, depth, retriever.threads)
    return {
        query: {documents[row].id: float(score) for row, score in zip(rows, scores, strict=True)}
        for query, rows, scores in zip(queries, hits.rows, hits.scores, strict=True)
    }


def sample_key(seed: int, *parts: str) -> str:
    """Returns a key that orders things at random, the same on each machine, by `seed` alone."""
    return hashlib.sha256("\0".join([str(seed), *parts]).encode()).hexdigest()
