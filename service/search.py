"""One index version as the service searches it: opened and checked, queries to rows to hits."""

import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from core import documents, filters
from core.canaries import check_canaries
from core.documents import DocumentReader
from core.encoders import Encoder
from core.errors import EmbeddingSpaceError, IndexVersionError
from core.filters import FilterReader
from core.manifest import IndexManifest
from core.types import FloatArray, Hit, Query, RowArray
from core.versions import index_folder, read_manifest, verify_files
from stores.base import ScoredRows, Vectors, VectorStore
from stores.faiss.store import FaissStore

# Chunks searched for, for each document wanted, and how many times more when they were of too
# few documents: the last search costs three quarters of all.
_OVERFETCH = 4
_WIDEN = 4


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The rows found for one query, which caches keep, and their documents.

    `search` and `fetch` are the times to find the rows and to read the documents [s].
    """

    rows: ScoredRows
    hits: list[Hit]
    search: float
    fetch: float
    cached: bool


@dataclass(frozen=True, slots=True)
class LoadedIndex:
    """All that a search reads; released when the last request that uses it ends.

    `identity` is a checksum that no other index version has, whatever its name.
    """

    identity: str
    manifest: IndexManifest
    documents: DocumentReader
    filters: FilterReader
    vectors: Vectors

    def search(self, query: Query, vector: FloatArray) -> QueryResult:
        """Finds the hits of a query whose vector is float32 [dimension], of unit norm.

        Raises `UnavailableError` if the vectors cannot be searched now.
        """
        started = time.perf_counter()
        passing = self.filters.rows(query.filter)
        if query.collapse:
            nearest = partial(self.vectors.search, vector, rows=passing, filter_=query.filter)
            most = len(self.documents) if passing is None else len(passing)
            first = self.documents.first_chunks
            scores, rows = search_documents(nearest, first, query.top_k, most, query.min_score)
        else:
            scores, rows = self.vectors.search(vector, query.top_k, passing, query.filter)
        if query.min_score is not None:
            good = scores >= query.min_score
            scores, rows = scores[good], rows[good]
        return self._read((scores, rows), time.perf_counter() - started)

    def fetch(self, found: Iterable[ScoredRows]) -> list[QueryResult]:
        """Reads the documents of rows that caches kept."""
        return [self._read(rows, cached=True) for rows in found]

    def _read(self, rows: ScoredRows, search: float = 0.0, *, cached: bool = False) -> QueryResult:
        """Reads the documents of rows; equal scores are ordered by descending id."""
        started = time.perf_counter()
        pairs = [(float(score), self.documents[int(row)]) for score, row in zip(*rows, strict=True)]
        pairs.sort(key=lambda pair: (pair[0], pair[1].id), reverse=True)
        hits = [
            Hit(d.id, score, rank, d.title, d.text, d.metadata, d.parent, d.chunk, d.chunks)
            for rank, (score, d) in enumerate(pairs, start=1)
        ]
        return QueryResult(rows, hits, search, time.perf_counter() - started, cached)


def load_index(
    root: Path, name: str, encoder: Encoder, store: VectorStore | None = None
) -> LoadedIndex:
    """Opens the active version of an index and checks all of it.

    Raises:
        IndexVersionError: If there is none, anything about it is wrong, or it is of another
            embedding space than the query encoder.
    """
    store = store or FaissStore()
    folder = index_folder(root, name) / store.active_version(root, name)
    manifest = read_manifest(folder)
    theirs, ours = manifest.encoder.embedding_space, encoder.spec.embedding_space
    if theirs != ours:
        found = (
            f"index '{name}' is of the embedding space '{theirs}', the query encoder of '{ours}'"
        )
        message = f"{found}: set CARE_PAIR to the pair that the index was built with"
        spaces = {"embedding_space": theirs, "encoder_space": ours}
        raise EmbeddingSpaceError(message, index=name, **spaces)
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(verify_files, folder, manifest)
        try:
            check_canaries(encoder, manifest.canaries)
        finally:
            verified.result()
    reader = DocumentReader(folder / documents.FILE_NAME)
    if len(reader) != manifest.count:
        reason = f"holds {len(reader)} documents; the manifest counts {manifest.count}"
        counts = {"documents": len(reader), "expected": manifest.count}
        raise IndexVersionError.at(folder, reason, "wrong_document_count", **counts)
    filter_reader = FilterReader(folder / filters.FILE_NAME, manifest.filter_fields)
    vectors = store.open(folder, manifest, filter_reader)
    files = sorted((name, record.sha256) for name, record in manifest.files.items())
    identity = sha256(json.dumps([manifest.name, manifest.version, files]).encode()).hexdigest()
    return LoadedIndex(identity, manifest, reader, filter_reader, vectors)


def search_documents(
    search: Callable[[int], ScoredRows],
    first_chunks: Callable[[RowArray], RowArray],
    k: int,
    most: int,
    min_score: float | None,
) -> ScoredRows:
    """Finds the best chunk of each of the k nearest documents.

    Fewer than k come back only if the chunks that may be found, `most` in number, are of fewer
    documents, or those left are below the lowest score; chunks below it may come back. `search`
    returns so many of the nearest chunks, or all, best first, `first_chunks` of each row's
    document the row of the first chunk.
    """
    fetch = min(most, _OVERFETCH * k)
    while True:
        scores, rows = search(fetch)
        # The best chunk of each document, best first; of equals the first chunk.
        order = np.lexsort((rows, -scores))
        best = order[np.sort(np.unique(first_chunks(rows)[order], return_index=True)[1])]
        exhausted = fetch == most or len(rows) < fetch
        if len(best) >= k or exhausted or (min_score is not None and scores[-1] < min_score):
            return scores[best[:k]], rows[best[:k]]
        fetch = min(most, _WIDEN * fetch)
