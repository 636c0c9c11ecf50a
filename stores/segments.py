"""Several segments searched as one: their rows follow each other, without those deleted.

Each class has the interface of the one for a single segment. A row is its place in its segment,
counted on from the rows of the segments before.
"""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby, pairwise

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from core.documents import DocumentReader, StoredDocument
from core.filter_rows import HashedRequirement, RecentRows
from core.filter_table import encode_value
from core.filters import FilterReader, Selection, listed_values
from core.packs import MOST_ROWS
from core.types import Check, Conjunction, CountedValue, Document, FloatArray, RowArray, no_check
from stores.base import ScoredRows, Vectors
from stores.faiss.search import FaissVectors, flat
from stores.order import rounded
from stores.token_vectors import TokenVectors

# How many times more rows are searched for, as long as too few of those found are not deleted.
_WIDEN = 4


class RowMap:
    """Where the rows of each segment start, and which are deleted.

    Args:
        counts: Number of rows of each segment.
        deleted: Rows that are deleted.

    Attributes:
        first: int64 [segments + 1], the first row of each segment, and the number of all rows.
        deleted: bool [rows].
        dead: Number of deleted rows of each segment.
    """

    def __init__(self, counts: Sequence[int], deleted: BitMap) -> None:
        self.first: RowArray = np.cumsum([0, *counts], dtype=np.int64)
        self._starts: list[int] = self.first.tolist()  # a row is found in it ten times as fast
        self.deleted: NDArray[np.bool_] = np.zeros(int(self.first[-1]), np.bool_)
        self.deleted[np.frombuffer(deleted.to_array(), np.uint32)] = True
        self.dead = [int(self.deleted[a:b].sum()) for a, b in self.spans()]

    @property
    def count(self) -> int:
        """Number of rows, with those deleted."""
        return self._starts[-1]

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yields the first row of each segment, and the one after its last."""
        return pairwise(self.first.tolist())

    def locate(self, row: int) -> tuple[int, int]:
        """Returns the number of a row's segment, and its place in it; IndexError if none has it."""
        if not 0 <= row < self.count:
            raise IndexError(f"row {row} is out of range: there are {self.count} rows")
        segment = bisect_right(self._starts, row) - 1
        return segment, row - self._starts[segment]

    def split(self, rows: RowArray) -> Iterator[tuple[int, RowArray, NDArray[np.intp]]]:
        """Yields each segment with some of the rows: its number, their places in it and in `rows`.

        `rows` are int64 [n], in any order.
        """
        segments = np.searchsorted(self.first, rows, "right") - 1
        for segment in np.unique(segments).tolist():
            at = np.flatnonzero(segments == segment)
            yield segment, rows[at] - self.first[segment], at


class JoinedDocuments(DocumentReader):
    """The documents of several segments."""

    def __init__(self, parts: Sequence[DocumentReader], rows: RowMap) -> None:
        self._parts = parts
        self._map = rows
        self._count = rows.count
        self.chunked = parts[0].chunked

    def __iter__(self) -> Iterator[Document]:
        return (document for _, document in self.numbered())

    def numbered(self) -> Iterator[tuple[int, Document]]:
        for row, document in enumerate(chain.from_iterable(self._parts)):
            if not self._map.deleted[row]:
                yield row, document

    def find(self, id_: str, within: RowArray | None = None) -> range:
        found = range(0)
        # The newest segment first: it has most of the ids that are asked for again.
        for segment in reversed(range(len(self._parts))):
            first, end = self._map.first[segment : segment + 2].tolist()
            own = within
            if within is not None:
                own = within[np.searchsorted(within, first) : np.searchsorted(within, end)] - first
            rows = self._parts[segment].find(id_, own)
            if len(rows) and not self._map.deleted[first + rows.start]:
                found = range(first + rows.start, first + rows.stop)
                if within is None:  # else the rows of others take the same work
                    break
        return found

    def first_chunks(self, rows: RowArray) -> RowArray:
        if not self.chunked:
            return rows
        firsts = np.empty_like(rows)
        for segment, own, at in self._map.split(rows):
            firsts[at] = self._parts[segment].first_chunks(own) + self._map.first[segment]
        return firsts

    def _beginning(self, start: int, limit: int) -> RowArray:
        rows: list[int] = []
        for part, (first, end) in zip(self._parts, self._map.spans(), strict=True):
            start = max(start, first)
            while start < end and len(rows) < limit:
                found = first + part._beginning(start - first, limit)
                if not len(found):
                    break
                rows += found[~self._map.deleted[found]].tolist()
                start = int(found[-1]) + 1
        return np.array(rows[:limit], np.int64)

    def read(self, rows: Sequence[int]) -> list[StoredDocument]:
        places = list(map(self._map.locate, rows))
        own: dict[int, list[int]] = defaultdict(list)
        for segment, row in places:
            own[segment].append(row)
        read = {segment: iter(self._parts[segment].read(one)) for segment, one in own.items()}
        return [next(read[segment]) for segment, _ in places]


class JoinedFilters(FilterReader):
    """The filter values of several segments.

    Args:
        fields: Number of distinct values of each field in all segments.
    """

    def __init__(
        self, parts: Sequence[FilterReader], fields: Mapping[str, int], rows: RowMap
    ) -> None:
        self.segments = self._parts = parts
        self.by_labels = parts[0].by_labels
        self._map = rows
        self._recent = RecentRows()
        self._set_fields(fields)

    def rows(self, conditions: Conjunction, check: Check = no_check) -> RowArray:
        rows = self._recent.get(conditions)
        if rows is None:
            parts = [part.rows(conditions, check) for part in self._parts]
            firsts = self._map.first[:-1].tolist()
            rows = np.concatenate([own + first for own, first in zip(parts, firsts, strict=True)])
            rows = rows[~self._map.deleted[rows]]
            self._recent.put(conditions, rows)
        return rows

    def hashed(self, conditions: Conjunction, check: Check = no_check) -> list[HashedRequirement]:
        # In all segments the same is required, but of ranges those numbers that each has.
        required = zip(*(part.hashed(conditions, check) for part in self._parts), strict=True)
        return [
            HashedRequirement(
                list(dict.fromkeys(chain.from_iterable(one.hashes for one in same))),
                same[0].excluded,
            )
            for same in required
        ]

    def has_numbers(self, field: str) -> bool:
        return any(field in part.fields and part.has_numbers(field) for part in self._parts)

    @cached_property
    def _frequent(self) -> dict[str, list[CountedValue]]:
        live = np.flatnonzero(~self._map.deleted)
        base = self._parts[0]
        if not base.by_labels:
            return self.values_within(live)[0]
        # The labels of all rows of the base are not read, but only those of the deleted ones.
        end = int(self._map.first[1])
        added = self.count_values(live[live >= end])
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for field, values in base.counts(
            {field: [value for value, _ in own] for field, own in added.items()}
        ).items():
            counts[field].update({encode_value(value): count for value, count in values})
        for field, values in base.frequent_values().items():
            counts[field] |= Counter({encode_value(value): count for value, count in values})
        for field, values in added.items():
            counts[field].update({encode_value(value): count for value, count in values})
        gone = base.count_values(np.flatnonzero(self._map.deleted[:end]))
        for field, values in gone.items():
            if field in counts:
                counts[field] -= Counter({encode_value(value): count for value, count in values})
        return listed_values(_most_frequent(counts))[0]

    def count_values(self, rows: RowArray) -> dict[str, list[CountedValue]]:
        # By JSON: 1 and True are equal keys.
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for segment, own, _ in self._map.split(rows):
            for field, values in self._parts[segment].count_values(own).items():
                counts[field].update({encode_value(value): count for value, count in values})
        return _most_frequent(counts)


def _most_frequent(counts: Mapping[str, Counter[str]]) -> dict[str, list[CountedValue]]:
    """Returns the values of each field, given as JSON, the most frequent first."""
    return {
        field: [
            (json.loads(value), count)
            for value, count in sorted(own.items(), key=lambda item: (-item[1], item[0]))
        ]
        for field, own in sorted(counts.items())
        if own
    }


def join_small(parts: Sequence[Vectors]) -> list[Vectors]:
    """Joins the vectors of small segments that follow each other, besides the base, in memory.

    Each is a call of FAISS less, after which a thread waits for the interpreter.
    """
    joined: list[Vectors] = [parts[0]]
    for is_small, some in groupby(parts[1:], lambda part: part.count <= MOST_ROWS):
        own = list(some)
        if is_small and len(own) > 1:
            rows = [part.take(np.arange(part.count)) for part in own]
            joined.append(FaissVectors(flat(np.concatenate(rows)), {}))
        else:
            joined += own
    return joined


class JoinedVectors:
    """The vectors of several segments; each is searched by itself."""

    def __init__(self, parts: Sequence[Vectors], rows: RowMap) -> None:
        self._parts = parts
        self._map = rows
        self.count = rows.count
        self.dimension = parts[0].dimension

    def search(
        self,
        query: FloatArray,
        k: int,
        selection: Selection | None = None,
        check: Check = no_check,
    ) -> ScoredRows:
        """Finds the nearest vectors that are not deleted; see `Vectors.search`."""
        within: Sequence[Selection | None] | None = selection.parts() if selection else None
        if selection is None or within:
            chosen = within or [None] * len(self._parts)
            parts = [self._live(s, query, k, check, one) for s, one in enumerate(chosen)]
            return self._best(parts, k)
        found = []
        for segment, own, _ in self._map.split(selection.rows(check)):
            of_rows = Selection.of_rows(own)
            scores, rows = self._parts[segment].search(query, k, of_rows, check)
            found.append((scores, rows + self._map.first[segment]))
        return self._best(found, k)

    def search_together(self, queries: FloatArray, k: int) -> list[ScoredRows] | None:
        """Finds the nearest vectors to several queries, as far as the base does so at once."""
        together = self._parts[0].search_together(queries, k + min(k, self._map.dead[0]))
        if together is None:
            return None
        found = []
        for query, nearest in zip(queries, together, strict=True):
            scores, rows = self._without_dead(0, nearest)
            if len(rows) < k and self._map.dead[0]:
                found.append(self.search(query, k))
                continue
            others = range(1, len(self._parts))
            own = [self._live(segment, query, k, no_check) for segment in others]
            found.append(self._best([(scores, rows), *own], k))
        return found

    def take(self, rows: RowArray) -> FloatArray:
        vectors = np.empty((len(rows), self.dimension), np.float32)
        for segment, own, at in self._map.split(rows):
            vectors[at] = self._parts[segment].take(own)
        return vectors

    def _live(
        self,
        segment: int,
        query: FloatArray,
        k: int,
        check: Check,
        selection: Selection | None = None,
    ) -> ScoredRows:
        """Returns the k nearest rows of a segment that are not deleted, and their ties."""
        dead = self._map.dead[segment]
        more = min(k, dead)
        while True:
            nearest = self._parts[segment].search(query, k + more, selection, check)
            found = self._without_dead(segment, nearest)
            if len(found[1]) >= k or more == dead:
                return found
            more = min(_WIDEN * more, dead)

    def _without_dead(self, segment: int, found: ScoredRows) -> ScoredRows:
        scores, rows = found[0], found[1] + self._map.first[segment]
        live = ~self._map.deleted[rows]
        return scores[live], rows[live]

    @staticmethod
    def _best(found: Sequence[ScoredRows], k: int) -> ScoredRows:
        """Returns the k best of all, and those with the score of the last, best first."""
        if not found:
            return np.empty(0, np.float32), np.empty(0, np.int64)
        scores, rows = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(-scores, kind="stable")
        scores, rows = scores[order], rows[order]
        if len(scores) > k:
            values = rounded(scores)
            kept = values >= values[k - 1]
            scores, rows = scores[kept], rows[kept]
        return scores, rows


class JoinedTokens(TokenVectors):
    """The token vectors of several segments."""

    def __init__(self, parts: Sequence[TokenVectors], rows: RowMap) -> None:
        self._parts = parts
        self._map = rows
        self.spec = parts[0].spec

    def row(self, row: int) -> NDArray[np.uint8]:
        segment, own = self._map.locate(row)
        return self._parts[segment].row(own)

    def scores(self, query: FloatArray, rows: RowArray) -> FloatArray:
        scores = np.empty(len(rows), np.float32)
        for segment, own, at in self._map.split(rows):
            scores[at] = self._parts[segment].scores(query, own)
        return scores
