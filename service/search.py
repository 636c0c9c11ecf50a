"""An index version opened for search: its checks, and the way from a query to its hits."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple, overload

import numpy as np
from pydantic_core import to_json

from core import documents, filters
from core.canaries import check_canaries
from core.documents import DocumentReader, JsonDocument
from core.encoders import Encoder, EncoderSpec
from core.errors import EmbeddingSpaceError, IndexVersionError
from core.filters import FilterReader
from core.manifest import IndexManifest
from core.types import Check, FilterValue, FloatArray, Hit, Query, RowArray, no_check
from core.versions import index_folder, read_manifest, verify_files, with_version
from service.version_files import VersionFiles
from stores.base import ScoredRows, Vectors, VectorStore
from stores.faiss.store import FaissStore

# To collapse chunks, this many chunks are searched for each document wanted; as long as they belong
# to too few documents, `_WIDEN` times more. The last search then takes three quarters of the time.
_OVERFETCH = 4
_WIDEN = 4
# The documents of a result with more hits are read when they are accessed. In memory all at once,
# those of a large batch would hold up the process for each garbage collection.
_FEW_HITS = 64
# Hits of one piece of JSON.
_HITS = 16
# Hits pass that are this much below `min_score`. A vector, and with it a score, varies by up to
# 1.2e-7 with the batch that a query is encoded in; a score that is sent as `min_score` must keep
# its hit in any batch.
_SAME_SCORE = 1e-6


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of one query.

    Attributes:
        rows: Scores and rows, which caches store.
        hits: The hits of the rows.
        search: Time to find the rows [s].
        fetch: Time to read the documents, or the ids of many [s].
        cached: Whether the rows come from a cache.
        overflow: Whether the query was encoded by the encoder for a full queue.
    """

    rows: ScoredRows
    hits: "Hits"
    search: float
    fetch: float
    cached: bool
    overflow: bool = False


class Found(NamedTuple):
    """Scores and rows of a query, and the time to find those of its batch [s]."""

    rows: ScoredRows
    seconds: float


class Hits(Sequence[Hit]):
    """The hits of a query, best first; equal scores are ordered by descending id.

    The documents of a few hits are read at once, those of many when they are accessed.

    Args:
        documents: The documents of the index.
        rows: Scores and rows.
    """

    def __init__(self, documents: DocumentReader, rows: ScoredRows) -> None:
        self._documents = documents
        scores: list[float] = rows[0].tolist()
        self._found = list(zip(scores, rows[1].tolist(), strict=True))
        if any(better <= worse for better, worse in pairwise(scores)):
            self._found.sort(key=lambda hit: (hit[0], documents.id(hit[1])), reverse=True)
        self._read: list[JsonDocument] | None = None
        if len(self._found) <= _FEW_HITS:
            self._read = [documents.json(row) for _, row in self._found]

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, at: int) -> Hit: ...
    @overload
    def __getitem__(self, at: slice) -> list[Hit]: ...
    def __getitem__(self, at: int | slice) -> Hit | list[Hit]:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        score, row = self._found[at]
        d = self._documents[row]
        chunk = d.parent, d.chunk, d.chunks
        return Hit(d.id, score, at % len(self) + 1, d.title, d.text, d.metadata, *chunk)

    @property
    def text_bytes(self) -> int | None:
        """Size of the texts as JSON [bytes], or None if they are still to be read."""
        return None if self._read is None else sum(len(d.text) for d in self._read)

    def json(self, include: Sequence[str]) -> Iterator[bytes]:
        """Yields the hits as JSON, separated by commas, several at a time.

        Args:
            include: The optional fields, `text` and `metadata`.
        """
        form = b'{"id":%b,"score":%b,"rank":%d,"title":%b'
        form += b"".join(b',"%b":%%b' % name.encode() for name in include) + b"%b}"
        others = attrgetter("title", *include, "chunk")
        for first in range(0, len(self), _HITS):
            hits = []
            for at in range(first, min(first + _HITS, len(self))):
                score, row = self._found[at]
                d = self._read[at] if self._read else self._documents.json(row)
                hits.append(form % (d.id, to_json(score), at + 1, *others(d)))
            yield (b"," if first else b"") + b",".join(hits)


@dataclass(frozen=True, slots=True)
class LoadedIndex:
    """The open files of an index version; released when the last request that uses them ends.

    Attributes:
        identity: Checksum of name, version and files; unique to the index version.
        reference: Name and version as JSON, for answers.
        files: The files before they were verified.
        filter_values: The first filter fields by name, each with its most frequent values; bounded
            in number and size.
    """

    identity: str
    reference: bytes
    files: VersionFiles
    manifest: IndexManifest
    documents: DocumentReader
    filters: FilterReader
    vectors: Vectors
    filter_values: Mapping[str, Sequence[FilterValue]]

    @property
    def document_bytes(self) -> int:
        """Mean size of a document or chunk in its file [bytes]."""
        return self.manifest.files[documents.FILE_NAME].bytes // max(1, self.manifest.count)

    def nearest(self, query: Query) -> tuple[Vectors, int] | None:
        """Returns where to find a query's rows by `search_together`, and how many; None if not."""
        return None if query.filter or query.collapse else (self.vectors, query.top_k)

    def search(
        self,
        query: Query,
        vector: FloatArray,
        check: Check = no_check,
        found: Found | None = None,
    ) -> QueryResult:
        """Returns the hits of a query.

        Args:
            query: The query, checked by `service/query.py`.
            vector: float32 [dimension], unit norm.
            check: Called between the steps of the search; stops it by an exception.
            found: What a search as by `nearest` has found for the query, if there was one.

        Raises:
            UnavailableError: If the store cannot be reached.
        """
        started = time.perf_counter()
        lowest = None if query.min_score is None else query.min_score - _SAME_SCORE
        passing = self.filters.rows(query.filter, self.manifest.count, check)
        if found:
            (scores, rows), started = found.rows, started - found.seconds
        elif query.collapse:
            nearest = partial(
                self.vectors.search, vector, rows=passing, filter_=query.filter, check=check
            )
            most = len(self.documents) if passing is None else len(passing)
            first = self.documents.first_chunks
            scores, rows = search_documents(nearest, first, query.top_k, most, lowest)
        else:
            scores, rows = self.vectors.search(vector, query.top_k, passing, query.filter, check)
        if lowest is not None:
            good = scores >= lowest
            scores, rows = scores[good], rows[good]
        return self._read((scores, rows), time.perf_counter() - started)

    def fetch(self, found: Iterable[ScoredRows]) -> list[QueryResult]:
        """Reads the documents of cached rows."""
        return [self._read(rows, cached=True) for rows in found]

    def _read(self, rows: ScoredRows, search: float = 0.0, *, cached: bool = False) -> QueryResult:
        started = time.perf_counter()
        hits = Hits(self.documents, rows)
        return QueryResult(rows, hits, search, time.perf_counter() - started, cached)


def load_index(
    root: Path,
    name: str,
    encoder: Encoder,
    store: VectorStore | None = None,
    others: Sequence[Encoder] = (),
) -> LoadedIndex:
    """Opens the active version of an index and checks its files, counts and canaries.

    The canaries are checked with each encoder.

    If another version becomes active and the first one is pruned meanwhile, the new one is opened.

    Raises:
        IndexVersionError: If the index has no active version, or a check fails.
        EmbeddingSpaceError: If index and query encoder do not share one embedding space.
    """
    store = store or FaissStore()
    return with_version(
        lambda: store.active_version(root, name),
        lambda version: open_version(index_folder(root, name) / version, encoder, store, others),
    )


def open_version(
    folder: Path, encoder: Encoder, store: VectorStore, others: Sequence[Encoder] = ()
) -> LoadedIndex:
    """Opens the version in a folder and checks its files, counts and canaries as `load_index`.

    Raises:
        IndexVersionError: If a check fails.
        EmbeddingSpaceError: If index and query encoder do not share one embedding space.
    """
    files = VersionFiles.of(folder)
    manifest = read_manifest(folder)
    for each in (encoder, *others):
        check_space(manifest, each.spec)
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(verify_files, folder, manifest)
        try:
            for each in (encoder, *others):
                check_canaries(each, manifest.canaries)
        finally:
            verified.result()
    reader = DocumentReader(folder / documents.FILE_NAME)
    if len(reader) != manifest.count:
        reason = f"contains {len(reader)} documents; the manifest counts {manifest.count}"
        counts = {"documents": len(reader), "expected": manifest.count}
        raise IndexVersionError.at(folder, reason, "wrong_document_count", **counts)
    filter_reader = FilterReader(folder / filters.FILE_NAME, manifest.filter_fields)
    vectors = store.open(folder, manifest, filter_reader)
    sums = sorted((name, record.sha256) for name, record in manifest.files.items())
    identity = sha256(json.dumps([manifest.name, manifest.version, sums]).encode()).hexdigest()
    listed = filter_reader.frequent_values()
    reference = to_json({"name": manifest.name, "version": manifest.version})
    return LoadedIndex(identity, reference, files, manifest, reader, filter_reader, vectors, listed)


def check_space(
    manifest: IndexManifest, query_encoder: EncoderSpec, setting: str = "CARE_PAIR"
) -> None:
    """Raises `EmbeddingSpaceError` if index and query encoder name different embedding spaces.

    The message names the setting that chooses the query encoder.
    """
    of_index, of_encoder = manifest.encoder.embedding_space, query_encoder.embedding_space
    if of_index != of_encoder:
        raise EmbeddingSpaceError(
            f"index '{manifest.name}' has the embedding space '{of_index}' and the query encoder "
            f"has '{of_encoder}': set {setting} to a pair of the space that the index was built in",
            index=manifest.name,
            embedding_space=of_index,
            encoder_space=of_encoder,
        )


def search_documents(
    search: Callable[[int], ScoredRows],
    first_chunks: Callable[[RowArray], RowArray],
    k: int,
    most: int,
    min_score: float | None,
) -> ScoredRows:
    """Finds the best chunk of each of the k nearest documents.

    Args:
        search: Returns this many of the nearest chunks, or all, best first.
        first_chunks: Returns, for each row, the row of the first chunk of its document.
        k: Number of documents.
        most: Number of chunks that match the filter.
        min_score: Lowest score; the search widens no further below it.

    Returns:
        Scores and rows, best first. Fewer than k if the chunks belong to fewer documents, or if
        the remaining chunks are below `min_score`; some that are returned may be below it too.
    """
    fetch = min(most, _OVERFETCH * k)
    while True:
        scores, rows = search(fetch)
        # The best chunk of each document, best first; the first one among equal scores.
        order = np.lexsort((rows, -scores))
        best = order[np.sort(np.unique(first_chunks(rows)[order], return_index=True)[1])]
        exhausted = fetch == most or len(rows) < fetch
        if len(best) >= k or exhausted or (min_score is not None and scores[-1] < min_score):
            return scores[best[:k]], rows[best[:k]]
        fetch = min(most, _WIDEN * fetch)
