"""A query on its way through a snapshot: channels, fusion, limits, reranking, hits."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from core.breaker import UnavailableError
from core.encoders import Encoder, TokenVectorEncoder
from core.errors import describe
from core.filters import Selection
from core.types import Check, FloatArray, Query, no_check
from search.answerable import Features, answerable, measure
from search.evidence import asked
from search.fusion import (
    DENSE_CANDIDATES,
    LEXICAL_CANDIDATES,
    NOTHING,
    Channel,
    ChannelResult,
    RankedList,
    fuse,
    joined,
    lexical_weight,
    without,
)
from search.hits import CacheEntry, Hits, QueryResult
from search.limits import HitLimits, first_depth, is_limited, search_limited
from search.rerank import not_reranked, reranked_by_server
from search.snapshot import Snapshot
from stores.base import ScoredRows, Vectors
from stores.lexical import LexicalIndex
from stores.order import are_cut, rounded

_LOG = logging.getLogger("care.search")

# Hits pass that are this much below `min_score`. A vector, and with it a score, varies by up to
# 1.2e-7 with the batch that a query is encoded in, and so by one in the sixth decimal; a score that
# is sent as `min_score` must keep its hit in any batch.
_SAME_SCORE = 1.1e-6
_NO_ROWS = RankedList(*NOTHING)


class AbandonedError(Exception):
    """No request waits for a result any more."""


@dataclass(eq=False, slots=True, kw_only=True)
class SearchTask:
    """One search: `search` runs its steps, which are `channels`, `rerank` and `read`.

    The vector is computed before, by `encode` or in a batch with those of other queries. The steps
    run one after another, in any thread; `search_lexical` may run beside the encoder.

    Attributes:
        snapshot: What is searched.
        query: The query, checked by `search/query.py`.
        by_server: Whether a server ranks the hits again: then `channels`, `rerank_by` or
            `leave_ranking`, and `read` are called one by one.
        lexical_timeout: How long to wait for `lexical` [s]; None waits until it is done.
        abandoned: Whether no one waits for the result any more; ends the next step.
        vector: float32 [dimension] of unit norm; None if there is none, as in mode lexical. In mode
            hybrid it can be the exception that the encoder raised.
        tokens: Token vectors of the query, float32 [tokens, dimension] of unit norm. Without them
            hits are marked as not reranked.
        lexical: The future of `search_lexical`, if it runs elsewhere.
        nearest: What `search_together` has found, if it has searched.
        failed: The channels that have failed or were late.
        ranked: The rows so far, best first: with `rerank` as many as are ranked again.
        answerable: The score that says whether the index answers the query, if there is one.
        seconds: Time to find and rank the rows [s].
    """

    snapshot: Snapshot
    query: Query
    by_server: bool = False
    lexical_timeout: float | None = None
    abandoned: bool = False
    vector: FloatArray | Exception | None = None
    tokens: FloatArray | None = None
    lexical: "Future[ChannelResult] | None" = None
    nearest: ChannelResult | None = None
    failed: frozenset[Channel] = frozenset()
    ranked: RankedList = _NO_ROWS
    answerable: float | None = None
    seconds: float = 0.0

    @property
    def needs_tokens(self) -> bool:
        """Whether late interaction needs the token vectors of the query."""
        return bool(self.query.rerank) and not self.by_server

    @property
    def needs_vector(self) -> bool:
        """Whether the query has to be encoded."""
        return self.query.mode != "lexical" or self.needs_tokens

    @property
    def dense_search(self) -> tuple[Vectors, int] | None:
        """Where `search_together` searches, and for how many rows; None if it cannot."""
        query = self.query
        if query.conditions or query.mode == "lexical" or is_limited(query):
            return None
        least = DENSE_CANDIDATES if query.mode == "hybrid" else 1
        return self.snapshot.segment.vectors, self._depth(query.rerank or query.top_k, least)

    def check(self) -> None:
        """Raises `AbandonedError` once no one waits for the result."""
        if self.abandoned:
            raise AbandonedError

    def search(self) -> QueryResult:
        """Returns the hits of the query; with `rerank` they are ranked again by late interaction.

        Raises:
            UnavailableError: If the store cannot be reached, and no other channel answers.
            AbandonedError: If the task is abandoned meanwhile.
        """
        self.channels()
        if self.query.rerank:
            self.rerank()
        return self.read()

    def search_lexical(self) -> ChannelResult:
        """Returns the candidates of the lexical channel.

        In mode hybrid these are the best by the words alone, in mode lexical by characters as well.
        """
        query = self._candidates_wanted()
        return self._search_lexical(query, first_depth(query, self.snapshot.most_hits))

    def channels(self) -> None:
        """Searches each channel, fuses what they find and keeps the limits of the query."""
        started = time.perf_counter()
        query, manifest = self._candidates_wanted(), self.snapshot.manifest
        searches: list[RankedList] = []

        def find(query: Query, depth: int) -> RankedList:
            found = self._find(query, depth)
            searches.append(found)
            # A wider search finds its own rows, and does not ask a channel again that has failed.
            self.lexical, self.failed = None, frozenset(found.failed)
            return found

        if is_limited(query):
            limits = HitLimits(query, self.snapshot.segment.documents)
            # Ranks of a narrower search are others, and explanations are those of the last search.
            narrow = not (query.explain or manifest.fusion.get("rank_constant"))
            lowest, order = _lowest_accepted(query), self.snapshot.ordered
            self.ranked = search_limited(
                find, query, limits, self.snapshot.most_hits, lowest, order, narrow=narrow
            )
        else:
            self.ranked = find(query, first_depth(query, self.snapshot.most_hits))
        # Later searches may leave out what the first one has found.
        self.answerable = self._judged(searches[0])
        batched = self.nearest.seconds if self.nearest else 0.0
        self.seconds = time.perf_counter() - started + batched

    def rerank(self) -> None:
        """Ranks the rows again by late interaction; without token vectors they stay as they are."""
        late, started = self.snapshot.late, time.perf_counter()
        if late is None or self.tokens is None:
            self.ranked = not_reranked(self.ranked)
        else:
            ranked = late.rerank(self.ranked, self.tokens)
            self._set_ranking(ranked, time.perf_counter() - started)

    def rerank_by(self, scores: FloatArray, seconds: float) -> None:
        """Ranks the rows again by the scores of a server, float32 [n], which took `seconds`."""
        self._set_ranking(reranked_by_server(self.ranked, scores), seconds)

    def leave_ranking(self, seconds: float) -> None:
        """Leaves the rows as they are, as the server has failed after `seconds`."""
        self.ranked = not_reranked(self.ranked)
        self.seconds += seconds

    def read(self) -> QueryResult:
        """Reads the documents of the rows, whose scores are final."""
        query, ranked = self.query, self.ranked
        scores, rows = ranked.scores, ranked.rows
        if query.rerank:
            scores, rows = self.snapshot.ordered((scores, rows), query.top_k)
        scores = rounded(scores).astype(np.float32)
        lowest = _lowest_accepted(query)
        if lowest is not None:
            good = scores >= lowest
            scores, rows = scores[good], rows[good]
        explain = None
        if query.explain:
            order = self.snapshot.ordered
            channels = {c: (order(own), weight) for c, (own, weight) in ranked.channels.items()}
            explain = replace(ranked, channels=channels).explain
        entry = CacheEntry((scores, rows), self.answerable)
        hits, seconds = _read(self.snapshot, query, entry, explain, self.check)
        return QueryResult(
            entry,
            hits,
            seconds,
            self.seconds,
            failed=ranked.failed,
            channel_seconds=ranked.seconds,
            cut=ranked.cut,
        )

    def find(self, depth: int) -> RankedList:
        """Returns at least the `depth` best rows, or all, without limits and reranking."""
        return self._find(self.query, depth)

    def features(self, found: RankedList) -> Features:
        """Returns the features of the answerable score, given what `find` returns."""
        of_query = self.query.text, self.snapshot.most_hits
        if self.query.mode != "hybrid" or self._full_text is None:
            return measure(*of_query, (found.scores, found.rows))
        dense, lexical = (found.channels[channel][0] for channel in ("dense", "lexical"))
        return measure(*of_query, dense, lexical, self._full_text.idf(self.query.text))

    @property
    def _full_text(self) -> LexicalIndex | None:
        return self.snapshot.segment.full_text

    def _candidates_wanted(self) -> Query:
        """Returns the query that finds the candidates: with `rerank` more, of any score."""
        query = self.query
        return replace(query, top_k=query.rerank, min_score=None) if query.rerank else query

    def _depth(self, depth: int, least: int) -> int:
        """Returns how many hits of a channel are fused."""
        return min(self.snapshot.most_hits, max(least, depth))

    def _judged(self, found: RankedList) -> float | None:
        judge = self.snapshot.judges.get(self.query.mode) if self.query.mode else None
        if judge is None or found.failed or not len(found.rows):
            return None
        return answerable(judge, self.features(found))

    def _set_ranking(self, ranked: RankedList, seconds: float) -> None:
        self.ranked = replace(ranked, seconds={**ranked.seconds, "rerank": seconds})
        self.seconds += seconds

    def _find(self, query: Query, depth: int) -> RankedList:
        """Returns what `find` does, for a query that may have another filter than the task's."""
        most = None if is_limited(query) else depth
        if query.mode == "hybrid":
            return self._find_hybrid(query, depth, most)
        if query.mode == "lexical":
            k = self._depth(depth, LEXICAL_CANDIDATES)
            found = self._search_lexical(query, depth).found
        else:
            k = depth
            found = self._search_dense(query, k)
        cut = are_cut(found, k, self.snapshot.most_hits)
        return RankedList(*self.snapshot.ordered(found, most), bound=_lowest(found), cut=cut)

    def _find_hybrid(self, query: Query, depth: int, most: int | None) -> RankedList:
        """Fuses both channels; if one fails, the other one answers."""
        count, fusion = self.snapshot.most_hits, self.snapshot.manifest.fusion
        lexical = NOTHING
        seconds: dict[Channel, float] = {}
        try:
            lexical, seconds["lexical"] = self._lexical_candidates(query, depth)
        except (TimeoutError, UnavailableError):
            pass
        except ValueError as error:
            _LOG.error("full-text search failed", extra={"fields": describe(error)})
        started = time.perf_counter()
        weight, by_rank = lexical_weight(fusion), bool(fusion.get("rank_constant"))
        channels: dict[Channel, tuple[ScoredRows, float]] = {"lexical": (lexical, 1.0)}
        found, cut, bound = lexical, False, _lowest(lexical)
        try:
            k = self._depth(depth, DENSE_CANDIDATES)
            nearest = self._search_dense(query, k)
            dense = self._compared(nearest, lexical)
        except Exception as error:
            is_expected = error is self.vector or isinstance(error, UnavailableError)
            if not seconds or not is_expected:
                raise
        else:
            batched = self.nearest.seconds if self.nearest else 0.0
            seconds["dense"] = time.perf_counter() - started + batched
            cut = are_cut(nearest, k, count)
            if by_rank:
                dense, lexical = map(self.snapshot.ordered, (dense, lexical))
            channels = {"dense": (dense, 1.0), "lexical": (lexical, weight)}
            found, bound = fuse(dense, lexical, fusion), math.inf
            if is_limited(query) and not by_rank:
                bound = _lowest(nearest) + weight * max(0.0, _lowest(lexical))
        cut |= are_cut(lexical, self._depth(depth, LEXICAL_CANDIDATES), count)
        both: tuple[Channel, ...] = ("dense", "lexical")
        failed = tuple(channel for channel in both if channel not in seconds)
        ordered = self.snapshot.ordered(found, most)
        return RankedList(*ordered, failed, seconds, channels, bound, cut)

    def _lexical_candidates(self, query: Query, depth: int) -> ChannelResult:
        """Returns the candidates of a hybrid search; raises `TimeoutError` if they are late."""
        if "lexical" in self.failed:
            raise TimeoutError
        if self.lexical:
            return self.lexical.result(self.lexical_timeout)
        return self._search_lexical(query, depth)

    def _search_lexical(self, query: Query, depth: int) -> ChannelResult:
        started = time.perf_counter()
        if self._full_text is None:
            return ChannelResult(NOTHING, 0.0)
        alone = query.mode == "lexical"
        k = self._depth(depth, LEXICAL_CANDIDATES)
        selection = self._selection(query)
        found = self._full_text.search(query.text, k, selection, self.check, characters=alone)
        return ChannelResult(found, time.perf_counter() - started)

    def _search_dense(self, query: Query, k: int) -> ScoredRows:
        vector = self._unit_vector()
        if self.nearest:
            return self.nearest.found
        vectors = self.snapshot.segment.vectors
        return vectors.search(vector, k, self._selection(query), self.check)

    def _selection(self, query: Query) -> Selection | None:
        segment = self.snapshot.segment
        if not query.conditions:
            return None
        return Selection(segment.filters, query.conditions)

    def _compared(self, nearest: ScoredRows, lexical: ScoredRows) -> ScoredRows:
        """Returns the nearest rows, and then the lexical ones, all with their similarities."""
        rows = np.sort(without(lexical[1], nearest[1]))
        if not len(rows):
            return nearest
        vectors = self.snapshot.segment.vectors
        selection = Selection.of_rows(rows)
        compared = vectors.search(self._unit_vector(), len(rows), selection, self.check)
        return joined(nearest, compared)

    def _unit_vector(self) -> FloatArray:
        if "dense" in self.failed:
            raise UnavailableError
        if self.vector is None:
            raise ValueError("a dense search needs the vector of the query")
        if isinstance(self.vector, Exception):
            raise self.vector
        return self.vector


def _lowest_accepted(query: Query) -> float | None:
    return None if query.min_score is None else query.min_score - _SAME_SCORE


def _lowest(found: ScoredRows) -> float:
    return float(found[0][-1]) if len(found[0]) else -math.inf


def encode(tasks: Sequence[SearchTask], encoder: Encoder) -> None:
    """Sets the vectors of tasks and, where hits are ranked again, their token vectors."""
    tasks = [task for task in tasks if task.needs_vector]
    if not tasks:
        return
    texts = [task.query.text for task in tasks]
    if any(task.needs_tokens for task in tasks) and isinstance(encoder, TokenVectorEncoder):
        encoding, tokens = encoder.encode_token_vectors(encoder.tokenize(texts))
        for task, states in zip(tasks, tokens, strict=True):
            task.tokens = states
    else:
        encoding = encoder.encode(texts)
    for task, vector in zip(tasks, encoding.vectors, strict=True):
        task.vector = vector


def search_together(tasks: Iterable[SearchTask]) -> None:
    """Searches the vectors once for all tasks of a batch that search them in the same way."""
    groups: dict[tuple[Vectors, int], list[tuple[SearchTask, FloatArray]]] = defaultdict(list)
    for task in tasks:
        if isinstance(task.vector, np.ndarray) and (where := task.dense_search):
            groups[where].append((task, task.vector))
    for (vectors, k), group in groups.items():
        # If a search fails, each task searches by itself and gets its own error.
        with suppress(Exception):
            started = time.perf_counter()
            queries = np.stack([vector for _, vector in group])
            if len(group) > 1 and (found := vectors.search_together(queries, k)):
                seconds = time.perf_counter() - started
                for (task, _), rows in zip(group, found, strict=True):
                    task.nearest = ChannelResult(rows, seconds)


def read_cached(
    snapshot: Snapshot, entries: Iterable[tuple[Query, CacheEntry]]
) -> list[QueryResult]:
    """Reads the documents of queries whose rows are cached."""
    return [
        QueryResult(entry, *_read(snapshot, query, entry), cached=True) for query, entry in entries
    ]


def _read(
    snapshot: Snapshot,
    query: Query,
    entry: CacheEntry,
    explain: Callable[[int], dict[str, Any]] | None = None,
    check: Check = no_check,
) -> tuple[Hits, float]:
    """Returns the hits of a query, and the time to read them [s]."""
    started = time.perf_counter()
    segment = snapshot.segment
    weight = segment.full_text.weight if segment.full_text else None
    question = asked(query.text, weight) if query.evidence else None
    hits = Hits(segment.documents, entry.rows, explain, question, check)
    return hits, time.perf_counter() - started
