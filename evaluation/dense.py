"""Dense retrieval by exact search, as a run."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from core.encoders import Pair, Role
from core.text import document_text, normalize_text
from core.types import Document, FloatArray
from evaluation.beir import Qrels, Run
from evaluation.metrics import EXCLUDED, without_excluded
from models.encoders.cached import encode_cached
from models.encoders.factory import load_encoder
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
    that `qrels` excludes for a query are not among them and take no place. The chunks of a document
    have its id: its cosine is that of its best chunk.
    """
    ids = list(documents)
    qrels = qrels or {}
    grades = (list(judged.values()) for judged in qrels.values())
    beyond = max((found.count(EXCLUDED) for found in grades), default=0)
    # This many chunks include the best chunk of each of `depth` documents.
    chunks = max(Counter(ids).values(), default=1)
    nearest = min((depth + beyond) * chunks, len(ids))
    found = exact_search(query_vectors, document_vectors, nearest)
    run: Run = {}
    for query, scores, rows in zip(queries, *found, strict=True):
        best = run.setdefault(query, {})
        for score, row in zip(scores.tolist(), rows.tolist(), strict=True):  # descending
            best.setdefault(ids[row], score)
    run = without_excluded(qrels, run)
    return {query: dict(islice(hits.items(), depth)) for query, hits in run.items()}


def encode(
    pair: Pair,
    role: Role,
    texts: Sequence[str],
    cache: Path,
    *,
    batch_size: int = 32,
    threads: int = 0,
) -> FloatArray:
    """Encodes normalised texts with one side of a pair, with the cache of `encode_cached`.

    The encoder is on a GPU if available. Returns unit vectors, float32 [n, dimension].
    """
    spec = pair.query if role == "query" else pair.document
    load = partial(load_encoder, spec, pair.folder, threads)
    label = f"{pair.name} {role}"
    return encode_cached(load, spec, texts, cache, batch_size=batch_size, label=label)


def pair_run(
    pair: Pair,
    documents: Iterable[Document],
    queries: Mapping[str, str],
    qrels: Qrels,
    depth: int,
    cache: Path,
    **options: int,
) -> Run:
    """Returns the `dense_run` of both encoders of a pair, which are loaded one after the other.

    Queries are texts by id. For the cache and the options see `encode`.
    """
    ids, texts = [], []
    for document in documents:
        ids.append(document.parent or document.id)
        texts.append(document_text(document.title, document.text))
    vectors = encode(pair, "document", texts, cache, **options)
    asked = [normalize_text(query) for query in queries.values()]
    query_vectors = encode(pair, "query", asked, cache, **options)
    return dense_run(queries, query_vectors, ids, vectors, depth, qrels)
