"""The full text of a version in Milvus, and of segments that were written after its build.

Scores have the statistics of the build, so that they do not depend on what was written since.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from threading import Lock
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from core.analysis import terms
from core.documents import DocumentReader
from core.filters import Selection
from core.terms import TermList
from core.types import Check, FloatArray, ScoredRows, no_check
from stores.lexical import WHOLE, LexicalIndex, idf
from stores.milvus.collection import Collection
from stores.milvus.names import MAX_HITS, METRIC, labels_expression
from stores.milvus.segment import READ, both, parts
from stores.milvus.tables import (
    COUNT,
    NUMBER,
    NUMBERS,
    TERM,
    TERM_KEY,
    TERMS,
    hash_of,
    term_shares,
)

_Words = Sequence[Sequence[set[str]]]
_Mask = NDArray[np.bool_]

# Entries that are kept of terms.
_KEPT_TERMS = 1 << 16
_HOW = {"metric_type": METRIC, "params": {}}
_NOTHING: ScoredRows = np.empty(0, np.float32), np.empty(0, np.int64)


class _ByShares(LexicalIndex):
    """BM25 as the inner product of what terms contribute to a row, and of their idf in a query."""

    def search(
        self,
        query: str,
        k: int,
        selection: Selection | None = None,
        check: Check = no_check,
        *,
        characters: bool = True,
    ) -> ScoredRows:
        self._learn(query)
        return super().search(query, k, selection, check, characters=characters)

    def idf(self, query: str) -> float:
        self._learn(query)
        return super().idf(query)

    def _learn(self, query: str) -> None:
        """Reads what is to be known of all terms of a query in one request."""

    def _shares(self, wanted: Mapping[str, float]) -> dict[str, float]:
        """Returns the share of each term of a query in the highest score, without unknown ones."""
        weights = {term: self.weight(term) * boost for term, boost in wanted.items()}
        total = sum(weights.values())
        return {term: weight / total for term, weight in weights.items() if weight}


class MilvusFullText(_ByShares):
    """The full text of a version in Milvus.

    The sparse vector of a row has the share of each of its terms, that of a query the idf of its
    terms.

    Attributes:
        mean: Mean number of terms of a row.
    """

    def __init__(
        self,
        rows: Collection,
        terms_: Collection,
        count: int,
        term_list: TermList | None,
        mean: float,
    ) -> None:
        self._rows, self._terms_table = rows, terms_
        self.term_list = term_list
        self.live = self.count = count
        self.mean = mean
        self.weight = self._weight_of
        # Number and weight of terms; 0 for those that no document has.
        self._known: dict[str, tuple[int, float]] = {}
        self._learning = Lock()

    def _learn(self, query: str) -> None:
        own = terms(query, characters=False, names=False)
        self._read_terms({*terms(query), *own, *self._meant(query)})

    def _read_terms(self, wanted: set[str]) -> None:
        new = wanted - self._known.keys()
        if not new:
            return
        fields = [TERM, NUMBER, COUNT]
        found = {}
        for part in parts([hash_of(term) for term in new], READ):
            for entity in self._terms_table.query(f"{TERM_KEY} in {part}", fields):
                found[entity[TERM]] = entity[NUMBER], idf(self.count, entity[COUNT])
        with self._learning:
            if len(self._known) > _KEPT_TERMS:
                self._known = {}
            self._known |= {term: found.get(term, (0, 0.0)) for term in new}

    def of(self, term: str) -> tuple[int, float]:
        """Returns number and weight of a term; 0 if no document has it."""
        while (known := self._known.get(term)) is None:
            self._read_terms({term})
        return known

    def _weight_of(self, term: str) -> float:
        return self.of(term)[1]

    def _finder(
        self,
        wanted: Mapping[str, float],
        words: _Words,
        highest: float,
        selection: Selection | None,
        k: int,
        check: Check,
    ) -> Callable[[int], ScoredRows]:
        return self.finder(self._shares(wanted), words, selection, check)

    def finder(
        self,
        shares: Mapping[str, float],
        words: _Words,
        selection: Selection | None,
        check: Check,
        dead: _Mask | None = None,
    ) -> Callable[[int], ScoredRows]:
        """Returns what finds a number of best rows, without those that are dead, bool [rows]."""
        query = {self.of(term)[0]: share for term, share in shares.items() if self.of(term)[0]}
        condition, passing = "", None
        if selection:
            condition, complete = labels_expression(selection.labels() or ())
            passing = None if complete else selection.rows(check)
        whole = self._having_words(words)
        has_rows = bool(query) and (selection is None or selection.count(check) > 0)
        more = 0 if dead is None else int(dead.sum())

        def best(condition: str, wanted: int) -> ScoredRows:
            fetch = min(wanted + min(wanted, more), MAX_HITS)
            while True:
                check()
                scores, rows = self._rows.nearest(TERMS, query, fetch, condition, _HOW)
                found = len(rows)
                kept = scores > 0
                if passing is not None:
                    kept &= np.isin(rows, passing, assume_unique=True)
                if dead is not None:
                    kept &= ~dead[rows]
                scores, rows = scores[kept], rows[kept]
                if len(rows) >= wanted or found < fetch or fetch == MAX_HITS:
                    return scores[:wanted], rows[:wanted]
                fetch = min(4 * fetch, MAX_HITS)

        def find(wanted: int) -> ScoredRows:
            if not has_rows:
                return _NOTHING
            scores, rows = best(condition, wanted)
            if not whole:
                return scores, rows
            first, own = best(both(condition, whole), wanted)
            others = ~np.isin(rows, own)
            return _ordered(
                [(first + np.float32(WHOLE), own), (scores[others], rows[others])], wanted
            )

        return find

    def _having_words(self, words: _Words) -> str:
        """Returns a condition for rows that have all words; "" if none has."""
        conditions = []
        for ways in words:
            numbers = [sorted(self.of(term)[0] for term in way) for way in ways]
            having = [f"array_contains_all({NUMBERS}, {own})" for own in numbers if all(own)]
            if not having:
                return ""
            conditions.append(f"({' or '.join(having)})")
        return " and ".join(conditions)


class JoinedFullText(_ByShares):
    """The full text of a version in Milvus, and of segments that were written into the index.

    A term that the version does not have counts as in one of its documents.

    Args:
        documents: Those of each segment but the base.
        firsts: The first row of each of these, and the number of all rows.
        deleted: bool [rows], rows that no search returns.
    """

    def __init__(
        self,
        base: MilvusFullText,
        documents: Sequence[DocumentReader],
        firsts: Sequence[int],
        deleted: _Mask,
    ) -> None:
        self._base, self._starts, self._dead = base, firsts, deleted
        self.term_list = base.term_list
        self.count = len(deleted)
        self.live = self.count - int(deleted.sum())
        self._postings = [_postings_of(own, base.mean) for own in documents]
        self.weight = self._weight_of

    def _learn(self, query: str) -> None:
        self._base._learn(query)

    def _weight_of(self, term: str) -> float:
        weight = self._base.weight(term)
        if not weight and any(term in own.by_term for own in self._postings):
            return idf(self._base.count, 1)
        return weight

    def _finder(
        self,
        wanted: Mapping[str, float],
        words: _Words,
        highest: float,
        selection: Selection | None,
        k: int,
        check: Check,
    ) -> Callable[[int], ScoredRows]:
        shares = self._shares(wanted)
        selected = selection.parts() if selection else None
        assert selected or not selection
        found = []
        spans = pairwise(self._starts)
        for at, (own, (start, end)) in enumerate(zip(self._postings, spans, strict=True), start=1):
            check()
            scores = own.scores(shares)
            scores[self._dead[start:end]] = 0
            if selected:
                passing = np.zeros(len(scores), np.bool_)
                passing[selected[at].rows(check)] = True
                scores[~passing] = 0
            if words:
                scores[(scores > 0) & own.having(words)] += WHOLE
            rows = np.flatnonzero(scores)
            found.append((scores[rows], rows + start))
        dead = self._dead[: self._starts[0]]
        own_selection = selected[0] if selected else None
        in_base = self._base.finder(shares, words, own_selection, check, dead)
        return lambda wanted: _ordered([in_base(wanted), *found], wanted)


class _Postings:
    """The terms of some rows in memory, each with its rows and what it contributes to them."""

    def __init__(self, documents: DocumentReader, mean: float) -> None:
        by_term: dict[str, tuple[array[int], array[float]]] = {}
        for row, document in enumerate(documents):
            for term, share in term_shares(document, mean).items():
                rows, shares = by_term.setdefault(term, (array("q"), array("f")))
                rows.append(row)
                shares.append(share)
        self.by_term = by_term
        self._count = len(documents)

    def scores(self, query: Mapping[str, float]) -> FloatArray:
        """Returns the score of each row, float32 [rows]."""
        scores = np.zeros(self._count, np.float32)
        for term, weight in query.items():
            if term in self.by_term:
                rows, shares = self.by_term[term]
                scores[np.asarray(rows)] += np.float32(weight) * np.asarray(shares)
        return scores

    def having(self, words: _Words) -> _Mask:
        """Returns which rows have all words, each by all terms of one of its sets."""

        def having_all(way: set[str]) -> _Mask:
            counts = np.zeros(self._count, np.int64)
            for term in way & self.by_term.keys():
                counts[np.asarray(self.by_term[term][0])] += 1
            having: _Mask = counts == len(way)
            return having

        found = np.ones(self._count, np.bool_)
        for ways in words:
            found &= np.any([having_all(way) for way in ways], axis=0)
        return found


# Those of segments that are open: a new version has most segments of the one before.
_KNOWN: WeakKeyDictionary[DocumentReader, _Postings] = WeakKeyDictionary()


def _postings_of(documents: DocumentReader, mean: float) -> _Postings:
    if documents not in _KNOWN:
        _KNOWN[documents] = _Postings(documents, mean)
    return _KNOWN[documents]


def _ordered(found: Sequence[ScoredRows], most: int) -> ScoredRows:
    """Returns the best of several lists of scored rows."""
    scores, rows = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(-scores, kind="stable")[:most]
    return scores[order], rows[order]
