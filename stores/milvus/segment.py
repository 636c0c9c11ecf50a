"""Documents, filter values and token vectors of a version, read from Milvus.

The classes have the interface of those that read files. `stores/milvus/tables.py` says what is in
the collections. Rows never change, so what is read of them can be kept.
"""

import json
from base64 import b64decode
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from core.conditions import COMPARISONS
from core.documents import (
    DocumentReader,
    StoredDocument,
    column_names,
    stored,
)
from core.errors import IndexVersionError
from core.filter_rows import RecentRows, Requirement
from core.filter_table import FilterTable, label_spans
from core.filters import FilterReader
from core.manifest import TOKENS, IndexManifest
from core.types import (
    Check,
    Conjunction,
    CountedValue,
    Document,
    FilterValue,
    RowArray,
    no_check,
)
from stores.milvus.collection import STRONG, Collection, Entity
from stores.milvus.names import (
    LABELS,
    MAX_HITS,
    MAX_LABELS,
    ROW,
    labels_expression,
    rows_expression,
)
from stores.milvus.tables import (
    COUNT,
    FIELD,
    ID_KEY,
    IS_NUMBER,
    KEY,
    LABEL,
    NUMBER,
    PARENT_KEY,
    RANK,
    VALUE,
    hash_of,
    nearest_float,
    value_key,
)

_T = TypeVar("_T")

# Rows of a request that reads texts, and of one that reads numbers.
READ, _SCAN = 1024, MAX_HITS
# Values of a field that are counted; entries that are kept of conditions.
_COUNTED, _KEPT = 10_000, 1024


def check_count(table: Collection, expected: int, manifest: IndexManifest) -> None:
    """Raises IndexVersionError if a collection has another number of rows."""
    if (found := table.count(consistency=STRONG)) != expected:
        message = f"Milvus: collection '{table.name}' has {found:,} rows instead of {expected:,}, "
        message += f"so version {manifest.version} is not complete: build the index again"
        raise IndexVersionError(message, code="wrong_document_count", collection=table.name)


def _windows(start: int, end: int, size: int, of: str = ROW) -> Iterator[str]:
    """Yields conditions that have the numbers from `start` to before `end`, `size` at a time."""
    for first in range(start, end, size):
        yield f"{of} >= {first} and {of} < {min(end, first + size)}"


def both(*conditions: str) -> str:
    """Joins conditions by `and`, without those that are empty."""
    return " and ".join(filter(None, conditions))


def parts(values: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yields values, `size` at a time."""
    for start in range(0, len(values), size):
        yield list(values[start : start + size])


class MilvusDocuments(DocumentReader):
    """The documents of a version; some rows that were read are kept if `kept` is not 0."""

    def __init__(self, rows: Collection, count: int, *, chunked: bool, kept: int = 0) -> None:
        self._rows = rows
        self._recent: dict[int, Entity] = {}
        self._kept = kept
        self._count = count
        self.chunked = chunked
        self._columns = column_names(chunked=chunked)

    def read(self, rows: Sequence[int]) -> list[StoredDocument]:
        recent = self._recent
        found = {row: recent[row] for row in rows if row in recent}
        for part in parts([row for row in dict.fromkeys(rows) if row not in found], READ):
            read = self._rows.query(rows_expression(part), [ROW, *self._columns])
            found |= {entity[ROW]: entity for entity in read}
        if self._kept:
            self._recent = found if len(recent) > self._kept else recent | found
        if missing := [row for row in rows if row not in found]:
            if not 0 <= missing[0] < self._count:
                raise IndexError(f"row {missing[0]} is out of range: there are {self._count} rows")
            message = f"Milvus: collection '{self._rows.name}' has no row {missing[0]}"
            raise IndexVersionError(message, code="row_missing", row=missing[0])
        return stored([found[row] for row in rows], chunked=self.chunked)

    def __iter__(self) -> Iterator[Document]:
        for start in range(0, self._count, READ):
            for one in self.read(range(start, min(self._count, start + READ))):
                yield one.document()

    def find(self, id_: str, within: RowArray | None = None) -> range:
        found = self.find_rows([id_])
        spans = {id_: range(row, row + 1) for id_, row in found.items()}
        if not spans and self.chunked:
            spans = self.find_documents([id_])
        span = spans.get(id_, range(0))
        # The same work for a row that may not be found as for none.
        if within is not None and len(span) and not np.isin(span.start, within):
            return range(0)
        return span

    def find_documents(self, ids: Sequence[str]) -> dict[str, range]:
        if not self.chunked:
            return {id_: range(row, row + 1) for id_, row in self.find_rows(ids).items()}
        first = self._with("parent", PARENT_KEY, ids, "chunk == 0")
        return {e["parent"]: range(e[ROW], e[ROW] + e["chunks"]) for e in first}

    def find_rows(self, ids: Sequence[str]) -> dict[str, int]:
        return {entity["id"]: entity[ROW] for entity in self._with("id", ID_KEY, ids)}

    def _beginning(self, start: int, limit: int) -> RowArray:
        if not self.chunked:
            return np.arange(start, min(self._count, start + limit))
        rows: list[int] = []
        windows = _windows(start, self._count, max(limit, READ))
        while len(rows) < limit and (window := next(windows, None)):
            found = self._rows.query(both(window, "chunk == 0"), [ROW])
            rows += sorted(entity[ROW] for entity in found)
        return np.array(rows[:limit], np.int64)

    def first_chunks(self, rows: RowArray) -> RowArray:
        if not self.chunked:
            return rows
        chunk = np.zeros(len(rows), np.int64)
        for start in range(0, len(rows), READ):
            own = rows[start : start + READ].tolist()
            found = self._rows.query(rows_expression(own), [ROW, "chunk"])
            by_row = {entity[ROW]: entity["chunk"] for entity in found}
            chunk[start : start + len(own)] = [by_row[row] for row in own]
        return rows - chunk

    def _with(self, name: str, key: str, ids: Sequence[str], also: str = "") -> list[Entity]:
        """Returns the rows that have one of some ids in a column, whose hashes another has."""
        wanted = set(ids)
        found: list[Entity] = []
        for part in parts([hash_of(id_) for id_ in wanted], READ):
            fields = [ROW, name, *(["chunks"] if also else ())]
            found += self._rows.query(both(f"{key} in {part}", also), fields)
        return [entity for entity in found if entity[name] in wanted]


def _keep(kept: dict[str, _T], key: str, value: _T) -> None:
    """Keeps what was read; once there is much of it, all of it is forgotten."""
    if len(kept) >= _KEPT:
        kept.clear()
    kept[key] = value


class MilvusValues(FilterTable):
    """The labels of the filter values of a version.

    Args:
        fields: Number of values of each field: their labels follow each other, by name.

    Attributes:
        spans: The labels of each field.
    """

    def __init__(self, values: Collection, fields: Mapping[str, int]) -> None:
        self._values = values
        self.spans = label_spans(fields)

    def has_numbers(self, field: str) -> bool:
        span = self.spans[field]
        condition = f"{LABEL} >= {span.start} and {LABEL} < {span.stop} and {IS_NUMBER}"
        return bool(self._values.query(condition, [LABEL], limit=1))

    def labels(self, field: str, values: Sequence[FilterValue]) -> RowArray:
        found: list[int] = []
        if field in self.spans:
            for part in parts([value_key(field, value) for value in values], READ):
                found += [e[LABEL] for e in self._values.query(f"{KEY} in {part}", [LABEL])]
        return np.array(sorted(found), np.int64)

    def lacking(self, field: str, texts: Sequence[bytes]) -> list[bytes]:
        keys = {value_key(field, json.loads(text)): text for text in texts}
        for part in parts(list(keys), READ) if field in self.spans else ():
            for entity in self._values.query(f"{KEY} in {part}", [KEY]):
                del keys[entity[KEY]]
        return list(keys.values())

    def labels_in_range(
        self, field: str, bounds: Sequence[tuple[str, float]], check: Check = no_check
    ) -> RowArray:
        if field not in self.spans:
            return np.empty(0, np.int64)
        # Different integers beyond 2^53 can be equal floats, so each number is compared here.
        limits = [
            f"{NUMBER} {'>=' if name in ('gt', 'gte') else '<='} {nearest_float(bound)!r}"
            for name, bound in bounds
        ]
        span = self.spans[field]
        labels = []
        for window in _windows(span.start, span.stop, _SCAN, LABEL):
            check()
            found = self._values.query(both(window, IS_NUMBER, *limits), [LABEL, VALUE])
            for entity in found:
                number = json.loads(entity[VALUE])
                if all(COMPARISONS[name](number, bound) for name, bound in bounds):
                    labels.append(entity[LABEL])
        return np.array(sorted(labels), np.int64)


class MilvusFilters(FilterReader):
    """The filter values of a version.

    Args:
        fields: Number of values of each field: their labels follow each other, by name.
    """

    by_labels = True

    def __init__(
        self, rows: Collection, values: Collection, fields: Mapping[str, int], count: int
    ) -> None:
        self._rows_table, self._values = rows, values
        self._by_label = MilvusValues(values, fields)
        self._count = count
        self._recent = RecentRows()
        self._set_fields(fields)
        self._spans = self._by_label.spans
        # By conditions as JSON, as 1 and True are equal keys.
        self._required: dict[str, list[Requirement]] = {}
        self._counts: dict[str, int] = {}

    def rows(self, conditions: Conjunction, check: Check = no_check) -> RowArray:
        rows = self._recent.get(conditions)
        if rows is None:
            required = self.requirements(conditions, check)
            rows = np.arange(self._count)
            if any(not one.excluded and not len(one.labels) for one in required):
                rows = rows[:0]
            # Each requirement of more labels than a condition takes is several conditions.
            fitting = [one for one in required if len(one.labels) <= MAX_LABELS]
            if fitting and len(rows):
                rows = self._scan(labels_expression(fitting)[0], check)
            for one in required:
                if len(one.labels) > MAX_LABELS and len(rows):
                    having = [
                        self._scan(labels_expression([Requirement(part)])[0], check)
                        for part in np.array_split(one.labels, -(-len(one.labels) // MAX_LABELS))
                    ]
                    rows = rows[np.isin(rows, np.concatenate(having), invert=one.excluded)]
            self._recent.put(conditions, rows)
        return rows

    def count(self, conditions: Conjunction, check: Check = no_check) -> int:
        key = json.dumps(conditions.as_json())
        count = self._counts.get(key)
        if count is None:
            required = self.requirements(conditions, check)
            expression, complete = labels_expression(required)
            if any(not one.excluded and not len(one.labels) for one in required):
                count = 0
            elif complete:
                check()
                count = self._rows_table.count(expression)
            else:
                count = len(self.rows(conditions, check))
            _keep(self._counts, key, count)
        return count

    def requirements(self, conditions: Conjunction, check: Check = no_check) -> list[Requirement]:
        key = json.dumps(conditions.as_json())
        required = self._required.get(key)
        if required is None:
            required = super().requirements(conditions, check)
            _keep(self._required, key, required)
        return required

    @cached_property
    def _frequent(self) -> dict[str, list[CountedValue]]:
        found = self._values.query(f"{RANK} >= 0", [LABEL, VALUE, COUNT, RANK])
        found.sort(key=lambda entity: entity[RANK])
        return {
            field: [(json.loads(e[VALUE]), e[COUNT]) for e in found if e[LABEL] in span]
            for field, span in self._spans.items()
            if any(entity[LABEL] in span for entity in found)
        }

    def count_values(self, rows: RowArray) -> dict[str, list[CountedValue]]:
        counts = np.zeros(sum(self.fields.values()), np.int64)
        for part in parts(rows.tolist(), READ):
            for entity in self._rows_table.query(rows_expression(part), [LABELS]):
                counts[list(entity[LABELS])] += 1
        found = {}
        for field, span in self._spans.items():
            order = np.argsort(-counts[span.start : span.stop], kind="stable")[:_COUNTED]
            labels = [span[at] for at in order.tolist() if counts[span[at]]]
            if labels:
                values = self._values_of(labels)
                found[field] = [(values[label], int(counts[label])) for label in labels]
        return found

    def counts(self, values: Mapping[str, Iterable[FilterValue]]) -> dict[str, list[CountedValue]]:
        """Returns the values of each field that a row has, with the number of rows."""
        keys = {value_key(field, one): field for field, own in values.items() for one in own}
        found: dict[str, list[CountedValue]] = defaultdict(list)
        for part in parts(list(keys), READ):
            for entity in self._values.query(f"{KEY} in {part}", [FIELD, VALUE, COUNT]):
                found[entity[FIELD]].append((json.loads(entity[VALUE]), entity[COUNT]))
        return found

    def _values_of(self, labels: Sequence[int]) -> dict[int, Any]:
        values = {}
        for part in parts(labels, READ):
            for entity in self._values.query(f"{LABEL} in {part}", [LABEL, VALUE]):
                values[entity[LABEL]] = json.loads(entity[VALUE])
        return values

    def _scan(self, condition: str, check: Check) -> RowArray:
        """Returns the rows that meet a condition, int64 [n], ascending."""
        rows: list[int] = []
        for window in _windows(0, self._count, _SCAN):
            check()
            rows += [e[ROW] for e in self._rows_table.query(both(window, condition), [ROW])]
        return np.array(sorted(rows), np.int64)


class MilvusTokenRows:
    """The token vectors of a version, as `stores.token_vectors.TokenVectors` reads rows."""

    def __init__(self, rows: Collection) -> None:
        self._rows = rows

    def __getitem__(self, row: int) -> NDArray[np.uint8]:
        return self.take(np.array([row]))[0]

    def take(self, rows: RowArray) -> tuple[NDArray[np.uint8], RowArray]:
        found: dict[int, bytes] = {}
        for part in parts(rows.tolist(), READ):
            for entity in self._rows.query(rows_expression(part), [ROW, TOKENS]):
                found[entity[ROW]] = b64decode(entity[TOKENS])
        own = [np.frombuffer(found[row], np.uint8) for row in rows.tolist()]
        lengths = np.array(list(map(len, own)), np.int64)
        return np.concatenate([np.empty(0, np.uint8), *own]), lengths
