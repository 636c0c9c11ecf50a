"""Limits of the hits per document and per metadata value, and the search that keeps them."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from core.documents import DocumentReader
from core.filters import filter_values
from core.types import DOCUMENT, Condition, Conjunction, Query, RowArray
from search.fusion import NOTHING, RankedList, joined
from stores.base import ScoredRows
from stores.order import DECIMALS

# Under a limit, this many rows are searched for each hit wanted; as long as too few of them are
# within the limit, `_WIDEN` times more. The last search then takes three quarters of the time.
_OVERFETCH = 4
_WIDEN = 4
# Rows whose values are read together at first; each further piece has `_WIDEN` times more.
_READ = 16
# Steps that scores are compared in (`stores/order.py`).
_STEP = 10.0**-DECIMALS


class HitLimits:
    """The limits of one query, checked by `search/query.py`.

    Rows are taken from the best one on; a row is left out if its document, or one of its values of
    the field, has as many hits as it may have. Rows without a value of the field are not limited.
    """

    def __init__(self, query: Query, documents: DocumentReader) -> None:
        self._top_k = query.top_k
        self._documents = documents
        self._per_document = 1 if query.collapse else None
        self._field: str | None = None
        self._per_value = 0
        if query.limit_per and query.limit_per.field != DOCUMENT:
            self._field, self._per_value = query.limit_per
        elif query.limit_per and not query.collapse:
            self._per_document = query.limit_per.hits
        self._conditions = query.conditions
        self._full: set[str] = set()

    def apply(self, found: ScoredRows) -> ScoredRows:
        """Returns the best `top_k` rows within the limits, given rows and scores, best first."""
        scores, rows = found
        if self._per_document:
            kept = within(self._documents.first_chunks(rows), self._per_document)
            scores, rows = scores[kept], rows[kept]
        if self._field is not None:
            best = self._within_values(rows, self._field)
            scores, rows = scores[best], rows[best]
        return scores[: self._top_k], rows[: self._top_k]

    def narrow(self, query: Query) -> Query:
        """Returns a query without the values that have all their hits."""
        if self._field is None or not self._full:
            return query
        full = Condition(excluded=tuple(map(json.loads, sorted(self._full))))
        narrower = self._conditions & Conjunction(((self._field, full),))
        return replace(query, conditions=narrower)

    def _within_values(self, rows: RowArray, field: str) -> list[int]:
        counts: Counter[str] = Counter()
        kept: list[int] = []
        pieces = map(self._documents.read, _pieces(rows))
        for at, stored in enumerate(chain.from_iterable(pieces)):
            values = filter_values(stored.metadata.get(field))
            if any(counts[value] >= self._per_value for value in values):
                continue
            counts.update(values)
            kept.append(at)
            if len(kept) == self._top_k:
                break
        self._full = {value for value, count in counts.items() if count >= self._per_value}
        return kept


def _pieces(rows: RowArray) -> Iterator[list[int]]:
    start, size = 0, _READ
    while start < len(rows):
        yield rows[start : start + size].tolist()
        start, size = start + size, _WIDEN * size


def within(groups: NDArray[np.int64], limit: int) -> NDArray[np.bool_]:
    """Returns which elements are among the first `limit` ones of their group, bool [n]."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    kept = np.empty(len(groups), np.bool_)
    kept[order] = np.arange(len(groups)) - np.searchsorted(ordered, ordered) < limit
    return kept


def is_limited(query: Query) -> bool:
    return query.collapse or query.limit_per is not None


def first_depth(query: Query, count: int) -> int:
    """Returns how many rows are searched first, in an index of `count` rows."""
    return min(count, query.top_k * (_OVERFETCH if is_limited(query) else 1))


def search_limited(
    search: Callable[[Query, int], RankedList],
    query: Query,
    limits: HitLimits,
    count: int,
    min_score: float | None,
    order: Callable[[ScoredRows], ScoredRows],
    *,
    narrow: bool,
) -> RankedList:
    """Finds the best rows within limits.

    Args:
        search: Returns this many of the best rows of a query, or more, or all.
        min_score: Lowest score; the search widens no further below it.
        narrow: Whether further searches may leave out values that have all their hits. Scores of
            a row must not depend on the others.

    Returns:
        At most `top_k` rows, best first; fewer if the index has no more within the limits, or if
        the others are below `min_score`; some that are returned may be below it too.
    """
    fetch = first_depth(query, count)
    kept = NOTHING
    while True:
        found = search(query, fetch)
        # What is kept of values that are excluded by now is not found again.
        others = ~np.isin(kept[1], found.rows)
        earlier = kept[0][others], kept[1][others]
        kept = limits.apply(order(joined(earlier, (found.scores, found.rows))))
        exhausted = fetch == count or len(found.rows) < fetch
        is_below = min_score is not None and found.bound < min_score - _STEP
        if len(kept[1]) == query.top_k or exhausted or is_below:
            return replace(found, scores=kept[0], rows=kept[1])
        fetch = min(count, _WIDEN * fetch)
        if narrow:
            query = limits.narrow(query)
