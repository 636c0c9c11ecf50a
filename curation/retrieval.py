"""Candidate pools: the merged hits of several retrievers."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from core.encoders import Role
from core.errors import CareError
from core.text import normalize_text
from core.types import Document, FloatArray
from curation.config import (
    Bm25Retriever,
    PairRetriever,
    Retriever,
    RunRetriever,
    ServiceRetriever,
)
from curation.service import search_run
from evaluation.beir import Run, document_texts
from evaluation.bm25 import bm25_run
from evaluation.dense import dense_run
from evaluation.metrics import ranked
from evaluation.trec import read_run
from models.encoders.cached import encode_cached
from models.encoders.factory import load_encoder
from models.pairs import load_pair

# As in reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009).
_RRF = 60

Pools = dict[str, list[str]]


def candidate_pools(
    retrievers: Sequence[Retriever],
    documents: Sequence[Document],
    queries: Mapping[str, str],
    depth: int,
    cache: Path,
    pool: Literal["fused", "union"] = "fused",
) -> Pools:
    """Returns for each query ids of documents in the top `depth` of any retriever.

    Ids are sorted by reciprocal rank fusion; a fused pool has the first `depth`, a union all.
    Vectors are cached in the folder `cache`.
    """
    size = depth if pool == "fused" else None
    runs = [_run(retriever, documents, queries, depth, cache) for retriever in retrievers]
    pools = {}
    for query in queries:
        fused: dict[str, float] = {}
        for run in runs:
            for rank, (id_, _) in enumerate(ranked(run.get(query, {}))[:depth], start=1):
                fused[id_] = fused.get(id_, 0.0) + 1 / (_RRF + rank)
        pools[query] = [id_ for id_, _ in ranked(fused)[:size]]
    return pools


def encode(
    pair: str,
    role: Role,
    texts: Sequence[str],
    cache: Path,
    *,
    batch_size: int = 32,
    threads: int = 1,
) -> FloatArray:
    """Encodes normalised texts with one side of a pair, with the cache of `encode_cached`.

    Returns unit vectors, float32 [n, dimension].
    """
    loaded = load_pair(pair)
    spec = loaded.query if role == "query" else loaded.document
    load = partial(load_encoder, spec, loaded.folder, threads)
    label = f"{pair} {role}"
    return encode_cached(load, spec, texts, cache, batch_size=batch_size, label=label)


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
        case RunRetriever(path=path):
            return _of_corpus(read_run(path), documents, queries, path)
        case ServiceRetriever(url=url):
            return _of_corpus(search_run(url, queries, depth), documents, queries, url)
        case PairRetriever(pair=pair, batch_size=batch_size, threads=threads):
            side = partial(encode, pair, cache=cache, batch_size=batch_size, threads=threads)
            vectors = side("document", list(document_texts(documents).values()))
            asked = side("query", [normalize_text(query) for query in queries.values()])
            ids = [document.id for document in documents]
            return dense_run(queries, asked, ids, vectors, depth)


def _of_corpus(
    run: Run, documents: Sequence[Document], queries: Mapping[str, str], source: Path | str
) -> Run:
    """Returns a run without other documents and queries: cleaning or the sample may omit some."""
    known = {document.id for document in documents}
    kept = {
        query: {id_: score for id_, score in scores.items() if id_ in known}
        for query, scores in run.items()
        if query in queries
    }
    if not any(kept.values()):
        reason = "contains no document of the corpus for any query: is it a run on other data?"
        raise CareError.at(source, reason, "run_of_other_data")
    return kept
