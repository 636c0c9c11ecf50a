"""An index version opened for search: its checks, and the way from a query to its hits."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from pydantic_core import to_json

from core import documents, filters
from core.breaker import UnavailableError
from core.canaries import check_canaries
from core.documents import DocumentReader
from core.encoders import Encoder, EncoderSpec
from core.errors import EmbeddingSpaceError, IndexVersionError
from core.filters import FilterReader
from core.manifest import IndexManifest
from core.types import Check, FilterValue, FloatArray, Mode, Query, RowArray, no_check
from core.versions import index_folder, read_manifest, verify_files, with_version
from service.answerable import Features, Judges, answerable, measure, suitable
from service.fusion import (
    DENSE_CANDIDATES,
    LEXICAL_CANDIDATES,
    NOTHING,
    Channel,
    Found,
    fuse,
    merged,
)
from service.hits import Hits, Kept, QueryResult
from service.logs import describe
from service.version_files import VersionFiles
from stores.base import ScoredRows, Vectors, VectorStore
from stores.faiss.store import FaissStore
from stores.lexical import LexicalIndex, open_full_text

_LOG = logging.getLogger("care.service")

# To collapse chunks, this many chunks are searched for each document wanted; as long as they belong
# to too few documents, `_WIDEN` times more. The last search then takes three quarters of the time.
_OVERFETCH = 4
_WIDEN = 4
# Hits pass that are this much below `min_score`. A vector, and with it a score, varies by up to
# 1.2e-7 with the batch that a query is encoded in; a score that is sent as `min_score` must keep
# its hit in any batch.
_SAME_SCORE = 1e-6


@dataclass(frozen=True, slots=True)
class LoadedIndex:
    """The open files of an index version; released when the last request that uses them ends.

    Attributes:
        identity: Checksum of name, version and files; unique to the index version.
        reference: Name and version as JSON, for answers.
        files: The files before they were verified.
        full_text: The full text, if the version has it.
        filter_values: The first filter fields by name, each with its most frequent values; bounded
            in number and size.
        judges: What judges whether the index answers a query, by mode: those of the pair that
            were fitted on an index of about this size.
    """

    identity: str
    reference: bytes
    files: VersionFiles
    manifest: IndexManifest
    documents: DocumentReader
    filters: FilterReader
    vectors: Vectors
    full_text: LexicalIndex | None
    filter_values: Mapping[str, Sequence[FilterValue]]
    judges: Judges

    @property
    def document_bytes(self) -> int:
        """Mean size of a document or chunk in its file [bytes]."""
        return self.manifest.files[documents.FILE_NAME].bytes // max(1, self.manifest.count)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of search that the version has, the default first."""
        if self.full_text is None:
            return ("dense",)
        if self.manifest.fusion:
            return ("hybrid", "dense", "lexical")
        return ("dense", "hybrid", "lexical")

    @property
    def answerable_thresholds(self) -> dict[Mode, float]:
        """By mode, the score below which nothing in the index seems to answer a query."""
        modes = self.modes
        return {mode: judge.threshold for mode, judge in self.judges.items() if mode in modes}

    def search(
        self,
        query: Query,
        vector: FloatArray | Exception | None,
        check: Check = no_check,
        text: "Future[ScoredRows] | None" = None,
        timeout: float | None = None,
    ) -> QueryResult:
        """Returns the hits of a query.

        Args:
            query: The query, checked by `service/query.py`.
            vector: float32 [dimension], unit norm. In mode lexical it is not used; in mode hybrid
                it can be the exception that the encoder raised.
            check: Called between the steps of the search; stops it by an exception.
            text: In mode hybrid the result of `search_text`, if it runs elsewhere.
            timeout: How long to wait for it [s].

        Raises:
            UnavailableError: If the store cannot be reached, and no other channel answers.
        """
        started = time.perf_counter()
        found = self.find(query, vector, check, text, timeout)
        judged = self._answerable(query, found)
        scores, rows = found.scores, found.rows
        if query.mode != "dense" and query.collapse:
            best = np.sort(np.unique(self.documents.first_chunks(rows), return_index=True)[1])
            scores, rows = scores[best], rows[best]
        if query.min_score is not None:
            good = scores >= query.min_score - _SAME_SCORE
            scores, rows = scores[good], rows[good]
        best_rows = scores[: query.top_k], rows[: query.top_k]
        explain = found.explain if query.explain else None
        spent = time.perf_counter() - started
        return self._read(Kept(best_rows, judged), spent, explain, found.failed)

    def features(self, query: Query, found: Found) -> Features:
        """Returns the features of a query, given what it has found in mode dense or hybrid."""
        if query.mode != "hybrid" or self.full_text is None:
            return measure((found.scores, found.rows))
        dense, lexical = (found.channels[channel][0] for channel in ("dense", "lexical"))
        return measure(dense, lexical, self.full_text.idf(query.text))

    def _answerable(self, query: Query, found: Found) -> float | None:
        judge = self.judges.get(query.mode) if query.mode else None
        if judge is None or found.failed or not len(found.rows):
            return None
        return answerable(judge, self.features(query, found))

    def find(
        self,
        query: Query,
        vector: FloatArray | Exception | None,
        check: Check = no_check,
        text: "Future[ScoredRows] | None" = None,
        timeout: float | None = None,
    ) -> Found:
        """Returns the candidates of a query, before they are cut; arguments as in `search`."""
        if query.mode == "lexical":
            return Found(*self.search_text(query, check))
        if query.mode == "hybrid":
            return self._hybrid(query, vector, check, text, timeout)
        return Found(*self._nearest(query, _vector(vector), check))

    def search_text(self, query: Query, check: Check = no_check) -> ScoredRows:
        """Returns the candidates of the lexical channel: scores, descending, and rows.

        In mode hybrid these are the best by the words alone, in mode lexical by characters as well.
        """
        if self.full_text is None:
            return NOTHING
        alone = query.mode == "lexical"
        k = self._candidates(query, LEXICAL_CANDIDATES)
        return self.full_text.search(query.text, k, query.filter, check, characters=alone)

    def _candidates(self, query: Query, least: int) -> int:
        """Returns how many hits of a channel are fused or collapsed."""
        wanted = query.top_k * _OVERFETCH if query.collapse else query.top_k
        return min(self.manifest.count, max(least, wanted))

    def _nearest(self, query: Query, vector: FloatArray, check: Check) -> ScoredRows:
        passing = self.filters.rows(query.filter, self.manifest.count, check)
        if not query.collapse:
            return self.vectors.search(vector, query.top_k, passing, query.filter, check)
        nearest = partial(
            self.vectors.search, vector, rows=passing, filter_=query.filter, check=check
        )
        most = len(self.documents) if passing is None else len(passing)
        lowest = None if query.min_score is None else query.min_score - _SAME_SCORE
        first = self.documents.first_chunks
        return search_documents(nearest, first, query.top_k, most, lowest)

    def _hybrid(
        self,
        query: Query,
        vector: FloatArray | Exception | None,
        check: Check,
        text: "Future[ScoredRows] | None",
        timeout: float | None,
    ) -> Found:
        """Fuses both channels; if one fails, the other one answers."""
        failed: list[Channel] = []
        lexical = NOTHING
        try:
            lexical = text.result(timeout) if text else self.search_text(query, check)
        except (TimeoutError, ValueError) as error:
            _LOG.warning("full-text search failed", extra={"fields": describe(error)})
            failed.append("lexical")
        try:
            dense = self._dense_candidates(query, _vector(vector), lexical[1], check)
        except Exception as error:
            is_expected = error is vector or isinstance(error, UnavailableError)
            if failed or not is_expected:
                raise
            return Found(*lexical, failed=("dense",), channels={"lexical": (lexical, 1.0)})
        return replace(fuse(dense, lexical, self.manifest.fusion), failed=tuple(failed))

    def _dense_candidates(
        self, query: Query, vector: FloatArray, others: RowArray, check: Check
    ) -> ScoredRows:
        """Returns the nearest rows together with other rows, all with their similarities."""
        passing = self.filters.rows(query.filter, self.manifest.count, check)
        k = self._candidates(query, DENSE_CANDIDATES)
        nearest = self.vectors.search(vector, k, passing, query.filter, check)
        missing = np.setdiff1d(others, nearest[1], assume_unique=True)
        if not len(missing):
            return nearest
        return merged(nearest, self.vectors.search(vector, len(missing), missing, None, check))

    def fetch(self, found: Iterable[Kept]) -> list[QueryResult]:
        """Reads the documents of cached rows."""
        return [self._read(kept, cached=True) for kept in found]

    def _read(
        self,
        kept: Kept,
        search: float = 0.0,
        explain: Callable[[int], dict[str, Any]] | None = None,
        failed: tuple[Channel, ...] = (),
        *,
        cached: bool = False,
    ) -> QueryResult:
        started = time.perf_counter()
        hits = Hits(self.documents, kept.rows, explain)
        fetch = time.perf_counter() - started
        return QueryResult(kept, hits, search, fetch, cached, failed=failed)


def _vector(vector: FloatArray | Exception | None) -> FloatArray:
    if vector is None:
        raise ValueError("a dense search needs the vector of the query")
    if isinstance(vector, Exception):
        raise vector
    return vector


def load_index(
    root: Path,
    name: str,
    encoder: Encoder,
    store: VectorStore | None = None,
    others: Sequence[Encoder] = (),
    judges: Judges = MappingProxyType({}),
) -> LoadedIndex:
    """Opens the active version of an index and checks its files, counts and canaries.

    The canaries are checked with each encoder. `judges` are those of the pair.

    If another version becomes active and the first one is pruned meanwhile, the new one is opened.

    Raises:
        IndexVersionError: If the index has no active version, or a check fails.
        EmbeddingSpaceError: If index and query encoder do not share one embedding space.
    """
    store = store or FaissStore()
    return with_version(
        lambda: store.active_version(root, name),
        lambda version: open_version(
            index_folder(root, name) / version, encoder, store, others, judges
        ),
    )


def open_version(
    folder: Path,
    encoder: Encoder,
    store: VectorStore,
    others: Sequence[Encoder] = (),
    judges: Judges = MappingProxyType({}),
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
    full_text = open_full_text(folder, manifest, filter_reader)
    sums = sorted((name, record.sha256) for name, record in manifest.all_files.items())
    identity = sha256(json.dumps([manifest.name, manifest.version, sums]).encode()).hexdigest()
    listed = filter_reader.frequent_values()
    reference = to_json({"name": manifest.name, "version": manifest.version})
    opened = reader, filter_reader, vectors, full_text
    return LoadedIndex(
        identity, reference, files, manifest, *opened, listed, suitable(judges, manifest.count)
    )


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
