"""Searches of judged queries in an opened index, in this process."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from core.encoders import Encoder
from core.errors import CareError
from core.progress import progress_bar
from core.types import FloatArray, Hit, Query
from evaluation.beir import Run
from search.hits import QueryResult
from search.query import QueryLimits, checked_query
from search.snapshot import Snapshot
from search.task import SearchTask, encode

_BATCH = 32

# Returns the scores of texts for a query, float32 [n].
Reranker = Callable[[str, Sequence[str]], FloatArray]


class ChannelHit(NamedTuple):
    """A hit of a hybrid search, with its scores in both channels; 0 if full text lacks it."""

    document: str
    dense: float
    lexical: float


class Searcher:
    """Searches an opened index as the service does."""

    def __init__(
        self,
        snapshot: Snapshot,
        encoder: Encoder,
        reranker: Reranker | None,
        max_query_chars: int,
    ) -> None:
        self._snapshot = snapshot
        self._encoder = encoder
        self._reranker = reranker
        self._vectors: dict[str, FloatArray] = {}
        self._limits = QueryLimits(
            max_query_chars, sys.maxsize, sys.maxsize, sys.maxsize, server=reranker is not None
        )

    def run(self, queries: Mapping[str, str], how: Query, name: str) -> Run:
        """Searches all queries in batches; returns scores by document id, by query id.

        In an index of chunks, the score of a document is that of its best chunk. `how` is a query
        with the mode, `top_k` and `rerank` of all; the progress bar shows `name`. CareError if a
        channel of a search fails, or the hits are not ranked again.
        """
        found = self._search(queries, replace(how, collapse=True), name)
        return {id_: {_document(hit): hit.score for hit in hits} for id_, hits in found.items()}

    def channels(self, queries: Mapping[str, str], top_k: int) -> dict[str, list[ChannelHit]]:
        """Returns the hits of a hybrid search with the scores of the channels, by query id.

        Hits of an index of chunks are chunks, under the ids of their documents. Errors are those of
        `run`.
        """
        how = Query("", top_k, mode="hybrid", explain=True)
        return {
            id_: [
                ChannelHit(
                    _document(hit),
                    hit.explain["dense"]["score"],
                    hit.explain["lexical"]["score"] or 0.0,
                )
                for hit in hits
                if hit.explain
            ]
            for id_, hits in self._search(queries, how, "weights").items()
        }

    def times(self, queries: Sequence[str], systems: Mapping[str, Query]) -> dict[str, list[float]]:
        """Returns the time of each search, from the text to its hits, by system [s].

        Systems take turns: each query is searched by all of them before the next one. Errors are
        those of `run`.
        """
        times: dict[str, list[float]] = {name: [] for name in systems}
        for query in progress_bar("times", queries, unit="queries"):
            for name, taken in times.items():
                started = time.perf_counter()
                task = self._task(query, systems[name])
                encode([task], self._encoder)
                list(self._result(task).hits)
                taken.append(time.perf_counter() - started)
        return times

    def _search(
        self, queries: Mapping[str, str], how: Query, name: str
    ) -> dict[str, Sequence[Hit]]:
        # Texts of about one length are encoded together, and each of them once.
        ids = sorted(queries, key=lambda id_: len(queries[id_]))
        found: dict[str, Sequence[Hit]] = {}
        for start in progress_bar(f"{name} search", range(0, len(ids), _BATCH), unit="batches"):
            part = ids[start : start + _BATCH]
            tasks = [self._task(queries[id_], how) for id_ in part]
            for task in tasks:
                task.vector = self._vectors.get(task.query.text)
            encode(
                [task for task in tasks if task.vector is None or task.needs_tokens], self._encoder
            )
            for id_, task in zip(part, tasks, strict=True):
                if isinstance(task.vector, np.ndarray):
                    self._vectors[task.query.text] = task.vector
                result = self._result(task)
                if result.failed:
                    message = f"query '{id_}': the channel {result.failed[0]} of the search failed"
                    raise CareError(message, code="search_failed", id=id_, failed=[*result.failed])
                found[id_] = result.hits
        return {id_: found[id_] for id_ in queries}

    def _task(self, text: str, how: Query) -> SearchTask:
        query = checked_query(self._snapshot, replace(how, text=text), self._limits)
        by_server = bool(query.rerank and self._reranker)
        return SearchTask(snapshot=self._snapshot, query=query, by_server=by_server)

    def _result(self, task: SearchTask) -> QueryResult:
        if not (task.by_server and self._reranker):
            return task.search()
        task.channels()
        if texts := self._snapshot.texts(task.ranked.rows):
            task.rerank_by(self._reranker(task.query.text, texts), 0.0)
        return task.read()


def _document(hit: Hit) -> str:
    return hit.parent or hit.id
