"""An index version opened for search: its checks, and the way from a query to its hits."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import to_json

from core import documents, filters
from core.breaker import UnavailableError
from core.canaries import check_canaries
from core.documents import DocumentReader
from core.encoders import Encoder, EncoderSpec, Pair
from core.errors import EmbeddingSpaceError, IndexVersionError
from core.filters import FilterReader
from core.manifest import IndexManifest
from core.text import document_text
from core.types import Check, FilterValue, FloatArray, Mode, Query, RowArray, no_check
from core.versions import index_folder, opening, read_manifest, verify_files, with_version
from service.answerable import Features, Judges, answerable, measure, suitable
from service.evidence import term_weights
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
from service.limits import HitLimits, first_depth, is_limited, search_limited
from service.logs import describe
from service.rerank import LateReranker, not_reranked
from service.version_files import VersionFiles
from stores.base import ScoredRows, Vectors, VectorStore
from stores.faiss.store import FaissStore
from stores.lexical import LexicalIndex, open_full_text
from stores.order import are_cut, ordered, rounded
from stores.token_vectors import TokenVectors, open_token_vectors

_LOG = logging.getLogger("care.service")

# Hits pass that are this much below `min_score`. A vector, and with it a score, varies by up to
# 1.2e-7 with the batch that a query is encoded in, and so by one in the sixth decimal; a score that
# is sent as `min_score` must keep its hit in any batch.
_SAME_SCORE = 1.1e-6


# Scored rows, and the time to find them [s].
Timed = tuple[ScoredRows, float]


@dataclass(frozen=True, slots=True)
class Candidates:
    """What the search for a query has found, before `min_score` and `top_k` are applied.

    Attributes:
        found: The rows, best first: of a query with `rerank` as many as are ranked again.
        answerable: The score that says whether the index answers the query, if there is one.
        seconds: Time to find them [s].
    """

    found: Found
    answerable: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadedIndex:
    """The open files of an index version; released when the last request that uses them ends.

    Attributes:
        identity: Checksum of the manifest, which names version and files and their checksums.
        reference: Name and version as JSON, for answers.
        files: The files before they were verified.
        full_text: The full text, if the version has it.
        filter_values: The first filter fields by name, each with its most frequent values; bounded
            in number and size.
        judges: What judges whether the index answers a query, by mode: those of the pair that
            were fitted on an index of about this size.
        late: What reranks by late interaction, if version and pair have token vectors of one space.
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
    late: LateReranker | None

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

    def nearest(self, query: Query) -> tuple[Vectors, int] | None:
        """Returns where to find a query's rows by `search_together`, and how many; None if not."""
        if query.filter or is_limited(query) or query.mode == "lexical":
            return None
        least = DENSE_CANDIDATES if query.mode == "hybrid" else 1
        return self.vectors, self._candidates(_sought(query).top_k, least)

    def search(
        self,
        query: Query,
        vector: FloatArray | Exception | None,
        check: Check = no_check,
        text: "Future[Timed] | None" = None,
        near: Timed | None = None,
        timeout: float | None = None,
        tokens: FloatArray | None = None,
    ) -> QueryResult:
        """Returns the hits of a query; with `rerank` they are ranked again by late interaction.

        Args:
            query: The query, checked by `service/query.py`.
            vector: float32 [dimension], unit norm. In mode lexical it is not used; in mode hybrid
                it can be the exception that the encoder raised.
            check: Called between the steps of the search; stops it by an exception.
            text: In mode hybrid the result of `search_text`, if it runs elsewhere.
            near: What a search as by `nearest` has found, if there was one.
            timeout: How long to wait for `text` [s].
            tokens: The token vectors of the query, float32 [tokens, dimension] of unit norm.
                Without them the hits are marked as not reranked.

        Raises:
            UnavailableError: If the store cannot be reached, and no other channel answers.
        """
        candidates = self.candidates(query, vector, check, text, near, timeout)
        if query.rerank:
            started = time.perf_counter()
            if self.late and tokens is not None:
                found = self.late.rerank(candidates.found, tokens)
                spent = time.perf_counter() - started
                found = replace(found, seconds={**found.seconds, "rerank": spent})
                candidates = replace(candidates, found=found, seconds=candidates.seconds + spent)
            else:
                candidates = replace(candidates, found=not_reranked(candidates.found))
        return self.result(query, candidates, check)

    def candidates(
        self,
        query: Query,
        vector: FloatArray | Exception | None,
        check: Check = no_check,
        text: "Future[Timed] | None" = None,
        near: Timed | None = None,
        timeout: float | None = None,
    ) -> Candidates:
        """Returns what is found for a query; arguments and errors as in `search`."""
        started = time.perf_counter()
        searches: list[Found] = []
        query = _sought(query)
        lowest = _lowest_accepted(query)

        def find(query: Query, depth: int) -> Found:
            nonlocal vector, text, timeout
            found = self.find(query, depth, vector, check, text, near, timeout)
            searches.append(found)
            # A wider search does not wait for a channel that has failed.
            text, timeout = (Future() if "lexical" in found.failed else None), 0
            vector = UnavailableError() if "dense" in found.failed else vector
            return found

        count = self.manifest.count
        if is_limited(query):
            limits = HitLimits(query, self.documents, self.filters)
            # Ranks of a narrower search are others, and explanations are those of the last search.
            narrow = not (query.explain or self.manifest.fusion.get("rank_constant"))
            order = self._ordered
            found = search_limited(find, query, limits, count, lowest, order, narrow=narrow)
        else:
            found = find(query, first_depth(query, count))
        best = slice(query.top_k)
        found = replace(found, scores=found.scores[best], rows=found.rows[best])
        seconds = time.perf_counter() - started + (near[1] if near else 0.0)
        # Later searches may leave out what the first one has found.
        return Candidates(found, self._answerable(query, searches[0]), seconds)

    def result(self, query: Query, candidates: Candidates, check: Check = no_check) -> QueryResult:
        """Returns the hits of a query among candidates that have their final scores."""
        found, lowest = candidates.found, _lowest_accepted(query)
        scores, rows = self._ordered((found.scores, found.rows), query.top_k)
        scores = rounded(scores).astype(np.float32)
        if lowest is not None:
            good = scores >= lowest
            scores, rows = scores[good], rows[good]
        kept = Kept((scores, rows), candidates.answerable)
        explain = None
        if query.explain:
            channels = {c: (self._ordered(own), w) for c, (own, w) in found.channels.items()}
            explain = replace(found, channels=channels).explain
        result = self._read(query, kept, candidates.seconds, explain, check)
        return replace(result, failed=found.failed, channel_seconds=found.seconds, cut=found.cut)

    def texts(self, rows: RowArray) -> list[str]:
        """Returns the text of each row, with its title, as encoders read it."""
        read = map(self.documents.__getitem__, rows.tolist())
        return [document_text(document.title, document.text) for document in read]

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

    def search_text(self, query: Query, check: Check = no_check, depth: int | None = None) -> Timed:
        """Returns the candidates of the lexical channel, and the time to find them [s].

        In mode hybrid these are the best by the words alone, in mode lexical by characters as well.
        """
        started = time.perf_counter()
        if self.full_text is None:
            return NOTHING, 0.0
        alone = query.mode == "lexical"
        depth = depth or first_depth(_sought(query), self.manifest.count)
        k = self._candidates(depth, LEXICAL_CANDIDATES)
        found = self.full_text.search(query.text, k, query.filter, check, characters=alone)
        return found, time.perf_counter() - started

    def find(
        self,
        query: Query,
        depth: int,
        vector: FloatArray | Exception | None,
        check: Check = no_check,
        text: "Future[Timed] | None" = None,
        near: Timed | None = None,
        timeout: float | None = None,
    ) -> Found:
        """Returns at least the `depth` best rows, or all; other arguments as in `search`."""
        if query.mode == "hybrid":
            found = self._hybrid(query, depth, vector, check, text, near, timeout)
        else:
            if query.mode == "lexical":
                k = self._candidates(depth, LEXICAL_CANDIDATES)
                rows = self.search_text(query, check, depth)[0]
            else:
                k = depth
                rows = self._near(query, k, vector, near, check)
            cut = are_cut(rows, k, self.manifest.count)
            found = Found(*rows, bound=_lowest(rows), cut=cut)
        most = None if is_limited(query) else depth
        scores, own = self._ordered((found.scores, found.rows), most)
        return replace(found, scores=scores, rows=own)

    def _ordered(self, found: ScoredRows, most: int | None = None) -> ScoredRows:
        return ordered(found, self.documents.id, most)

    def _near(
        self,
        query: Query,
        k: int,
        vector: FloatArray | Exception | None,
        near: Timed | None,
        check: Check,
    ) -> ScoredRows:
        """Returns the k nearest rows, or what a search as by `nearest` has found."""
        vector = _vector(vector)
        if near:
            return near[0]
        passing = self.filters.rows(query.filter, self.manifest.count, check)
        return self.vectors.search(vector, k, passing, query.filter, check)

    def _candidates(self, depth: int, least: int) -> int:
        """Returns how many hits of a channel are fused."""
        return min(self.manifest.count, max(least, depth))

    def _hybrid(
        self,
        query: Query,
        depth: int,
        vector: FloatArray | Exception | None,
        check: Check,
        text: "Future[Timed] | None",
        near: Timed | None,
        timeout: float | None,
    ) -> Found:
        """Fuses both channels; if one fails, the other one answers."""
        lexical = NOTHING
        seconds: dict[Channel, float] = {}
        try:
            lexical, spent = text.result(timeout) if text else self.search_text(query, check, depth)
            seconds["lexical"] = spent
        except TimeoutError:
            pass
        except ValueError as error:
            _LOG.error("full-text search failed", extra={"fields": describe(error)})
        started = time.perf_counter()
        count, by_rank = self.manifest.count, bool(self.manifest.fusion.get("rank_constant"))
        try:
            k = self._candidates(depth, DENSE_CANDIDATES)
            nearest = self._near(query, k, vector, near, check)
            dense = self._compared(nearest, lexical, _vector(vector), check)
        except Exception as error:
            is_expected = error is vector or isinstance(error, UnavailableError)
            if not seconds or not is_expected:
                raise
            cut = False
            found = Found(*lexical, channels={"lexical": (lexical, 1.0)}, bound=_lowest(lexical))
        else:
            seconds["dense"] = time.perf_counter() - started + (near[1] if near else 0.0)
            cut = are_cut(nearest, k, count)
            if by_rank or query.explain:
                dense, lexical = self._ordered(dense), self._ordered(lexical)
            found = fuse(dense, lexical, self.manifest.fusion)
            if is_limited(query) and not by_rank:
                weight = found.channels["lexical"][1]
                bound = _lowest(nearest) + weight * max(0.0, _lowest(lexical))
                found = replace(found, bound=bound)
        cut |= are_cut(lexical, self._candidates(depth, LEXICAL_CANDIDATES), count)
        both: tuple[Channel, ...] = ("dense", "lexical")
        failed = tuple(channel for channel in both if channel not in seconds)
        return replace(found, failed=failed, seconds=seconds, cut=cut)

    def _compared(
        self, nearest: ScoredRows, lexical: ScoredRows, vector: FloatArray, check: Check
    ) -> ScoredRows:
        """Returns the nearest rows together with lexical ones, all with their similarities."""
        missing = np.setdiff1d(lexical[1], nearest[1], assume_unique=True)
        if not len(missing):
            return nearest
        return merged(nearest, self.vectors.search(vector, len(missing), missing, None, check))

    def fetch(self, found: Iterable[tuple[Query, Kept]]) -> list[QueryResult]:
        """Reads the documents of queries whose rows are cached."""
        return [self._read(query, kept, cached=True) for query, kept in found]

    def _read(
        self,
        query: Query,
        kept: Kept,
        search: float = 0.0,
        explain: Callable[[int], dict[str, Any]] | None = None,
        check: Check = no_check,
        *,
        cached: bool = False,
    ) -> QueryResult:
        started = time.perf_counter()
        weights = term_weights(query.text, self.full_text) if query.evidence else None
        hits = Hits(self.documents, kept.rows, explain, weights, check)
        fetch = time.perf_counter() - started
        return QueryResult(kept, hits, search, fetch, cached)


def _sought(query: Query) -> Query:
    """Returns the query that finds the candidates: with `rerank` more of them, of any score."""
    return replace(query, top_k=query.rerank, min_score=None) if query.rerank else query


def _lowest_accepted(query: Query) -> float | None:
    return None if query.min_score is None else query.min_score - _SAME_SCORE


def _lowest(found: ScoredRows) -> float:
    return float(found[0][-1]) if len(found[0]) else -math.inf


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
    pair: Pair | None = None,
) -> LoadedIndex:
    """Opens the active version of an index and checks its files, counts and canaries.

    The canaries are checked with each encoder. `pair` has the calibration of the answerable score
    and the weight of late interaction.

    If another version becomes active and the first one is pruned meanwhile, the new one is opened.

    Raises:
        IndexVersionError: If the index has no active version, or a check fails.
        EmbeddingSpaceError: If index and query encoder do not share one embedding space.
    """
    store = store or FaissStore()
    return with_version(
        lambda: store.active_version(root, name),
        lambda version: open_version(
            index_folder(root, name) / version, encoder, store, others, pair
        ),
    )


def open_version(
    folder: Path,
    encoder: Encoder,
    store: VectorStore,
    others: Sequence[Encoder] = (),
    pair: Pair | None = None,
) -> LoadedIndex:
    """Opens the version in a folder and checks its files, counts and canaries as `load_index`.

    Raises:
        IndexVersionError: If a check fails.
        EmbeddingSpaceError: If index and query encoder do not share one embedding space.
    """
    files = VersionFiles.of(folder)
    with opening(folder):
        manifest = read_manifest(folder)
    for each in (encoder, *others):
        check_space(manifest, each.spec)
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(verify_files, folder, manifest)
        try:
            for each in (encoder, *others):
                check_canaries(each, manifest.canaries)
        finally:
            with opening(folder):
                verified.result()
    with opening(folder):
        reader = DocumentReader(folder / documents.FILE_NAME)
        if len(reader) != manifest.count:
            reason = f"contains {len(reader)} documents; the manifest counts {manifest.count}"
            counts = {"documents": len(reader), "expected": manifest.count}
            raise IndexVersionError.at(folder, reason, "wrong_document_count", **counts)
        filter_reader = FilterReader(folder / filters.FILE_NAME, manifest.filter_fields)
        listed = filter_reader.frequent_values()
        full_text = open_full_text(folder, manifest, filter_reader)
        late = _late_reranker(open_token_vectors(folder, manifest), pair)
        # Last, because a GPU may have to give up the vectors of the version that is served.
        vectors = store.open(folder, manifest, filter_reader)
    reference = to_json({"name": manifest.name, "version": manifest.version})
    opened = reader, filter_reader, vectors, full_text
    judges = suitable(pair.answerable, manifest.count) if pair else {}
    return LoadedIndex(manifest.identity, reference, files, manifest, *opened, listed, judges, late)


def _late_reranker(tokens: TokenVectors | None, pair: Pair | None) -> LateReranker | None:
    how = pair.late_interaction if pair else None
    if tokens is None or how is None or how.space != tokens.spec.space:
        return None
    return LateReranker(tokens, how.weight)


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
