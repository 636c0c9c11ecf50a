"""`filters.arrow`: the rows of each metadata field and value.

One Arrow table, sorted by field and value, memory-mapped and searched by bisection. When it is
opened, the values that many rows have get bitmaps in memory; others are read when they are needed.
The position of a value in the table is its label, an integer that replaces the value in Milvus. In
the full text, which several tables share, it is a hash of the field and the value.
"""

import heapq
import json
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from core.columns import array_of, number_column, text_column
from core.conditions import COMPARISONS, filter_field, parse_filter
from core.errors import IndexVersionError, QueryError
from core.filter_rows import HashedRequirement, MatchingRows, RecentRows, Requirement
from core.filter_table import FilterTable, Hashes, encode_value, hash_value
from core.scratch import scratch
from core.types import (
    NO_CONDITIONS,
    Check,
    Condition,
    Conjunction,
    CountedValue,
    Filter,
    FilterValue,
    RowArray,
    no_check,
)

FILE_NAME = "filters.arrow"

_SCHEMA = pa.schema(
    [("field", pa.string()), ("value", pa.string()), ("rows", pa.large_list(pa.int64()))]
)
# Values per batch of the table.
_BATCH_VALUES = 65_536
# Rows and values that are buffered in memory before they are written as a sorted run, and values
# that are read from a run at a time.
_BUFFERED_ROWS, _BUFFERED_VALUES = 1 << 20, 1 << 17
_READ_VALUES = 256
# Characters of the values of a run or a batch, and of those that are read at a time: a column of
# Arrow holds 2 GiB of text, and a character takes up to 4 bytes.
_BATCH_CHARS, _READ_CHARS = 1 << 25, 1 << 18
# Fields and values that are listed, and characters of each; characters of a name in errors.
_LISTED, _LISTED_CHARS, _NAME_CHARS = 100, 200, 64
# Values of a field that are counted.
_COUNTED = 10_000

# Field and JSON-encoded value.
_Key = tuple[str, str]
# A key and its rows in one sorted run.
_Entry = tuple[_Key, RowArray]


def filter_values(value: Any) -> set[str]:
    """Returns the values of a metadata field that filters know, as JSON.

    These are a string, a number, a boolean, or those of a list. Other values have none.
    """
    values = value if isinstance(value, list) else [value]
    return {encode_value(one) for one in values if _is_filter_value(one)}


def _is_filter_value(value: Any) -> bool:
    return math.isfinite(value) if isinstance(value, float) else isinstance(value, str | int)


def meets(metadata: Mapping[str, Any], conditions: Conjunction) -> bool:
    """Returns whether a document with some metadata meets conditions."""
    for field, condition in conditions.conditions:
        values = filter_values(metadata.get(field))
        if condition.accepted is not None and values.isdisjoint(
            map(encode_value, condition.accepted)
        ):
            return False
        if condition.bounds:
            numbers = [one for one in map(json.loads, values) if type(one) in (int, float)]
            if not any(
                all(COMPARISONS[name](number, bound) for name, bound in condition.bounds)
                for number in numbers
            ):
                return False
        if not values.isdisjoint(map(encode_value, condition.excluded)):
            return False
    return True


class FilterWriter:
    """Writes the rows of each metadata value; a context manager.

    Strings, numbers, booleans and lists of them can be used in filters. Other values (objects,
    null) are stored with the document only. Memory is bounded by an external merge sort:
    sorted runs are written next to the file and merged when the block ends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs_path = path.with_name(f".{path.name}.runs")
        self._open = ExitStack()
        self._runs = self._open.enter_context(_table(self._runs_path))
        self._rows: dict[tuple[str, str], array[int]] = defaultdict(lambda: array("q"))
        self._buffered = self._chars = 0
        self._fields: Counter[str] = Counter()

    def add(self, row: int, metadata: Mapping[str, Any]) -> None:
        """Adds the metadata of one document; rows must be added in ascending order."""
        for field, value in metadata.items():
            for item in filter_values(value):
                rows = self._rows[field, item]
                self._chars += 0 if rows else len(item)
                rows.append(row)
                self._buffered += 1
        if (
            self._buffered >= _BUFFERED_ROWS
            or len(self._rows) >= _BUFFERED_VALUES
            or self._chars >= _BATCH_CHARS
        ):
            self._write_run()

    def fields(self) -> dict[str, int]:
        """Returns the number of distinct values of each field; call it after the block."""
        return dict(self._fields)

    def _write_run(self) -> None:
        if keys := sorted(self._rows):
            rows = [np.frombuffer(self._rows[key], dtype=np.int64) for key in keys]
            self._runs.write_batch(_batch(keys, [len(r) for r in rows], np.concatenate(rows)))
        self._rows.clear()
        self._buffered = self._chars = 0

    def _merge(self) -> None:
        with pa.memory_map(str(self._runs_path)) as file, _table(self._path) as table:
            reader = pa.ipc.open_file(file)
            runs = [_entries(reader.get_batch(i)) for i in range(reader.num_record_batches)]
            # `heapq.merge` is stable: the rows of equal values stay in ascending order.
            merged = groupby(heapq.merge(*runs, key=itemgetter(0)), key=itemgetter(0))
            while batch := self._next_batch(islice(merged, _BATCH_VALUES)):
                table.write_batch(batch)

    def _next_batch(self, values: Iterable[tuple[_Key, Iterable[_Entry]]]) -> Any:
        keys: list[_Key] = []
        lengths: list[int] = []
        with scratch(self._path.parent, np.int64) as rows:
            chars = 0
            for key, entries in values:
                keys.append(key)
                lengths.append(0)
                for _, own in entries:
                    rows.append(own.data)
                    lengths[-1] += len(own)
                chars += len(key[1])
                if chars >= _BATCH_CHARS:
                    break
            self._fields.update(field for field, _ in keys)
            return _batch(keys, lengths, rows.array()) if keys else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._open:
                if kind is None:
                    self._write_run()
            if kind is None:
                self._merge()
        finally:
            self._runs_path.unlink(missing_ok=True)


@contextmanager
def _table(path: Path) -> Iterator[Any]:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, _SCHEMA) as writer:
        yield writer


def _batch(keys: Sequence[_Key], lengths: Sequence[int], rows: RowArray) -> Any:
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    columns = [
        text_column([field for field, _ in keys], pa.string()),
        text_column([value for _, value in keys], pa.string()),
        pa.LargeListArray.from_arrays(number_column(offsets), number_column(rows)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def _entries(run: Any) -> Iterator[_Entry]:
    fields, values, lists = run.columns
    rows, offsets = array_of(lists.values), array_of(lists.offsets)
    step = min(_READ_VALUES, 1 + len(run) * _READ_CHARS // (1 + values.nbytes))
    for start in range(0, len(run), step):
        keys = (column.slice(start, step).to_pylist() for column in (fields, values))
        for at, key in enumerate(zip(*keys, strict=True), start):
            yield key, rows[offsets[at] : offsets[at + 1]]


class FilterReader:
    """Finds the rows that match a filter; thread-safe.

    Args:
        fields: Number of distinct values of each field.
        count: Number of rows of the index.

    Raises:
        IndexVersionError: If the file is missing, truncated or of another schema.

    Attributes:
        by_labels: Whether a search finds rows by their labels sooner than these rows are read.
        segments: The filters of each segment, if there are several.
    """

    by_labels = False
    segments: "Sequence[FilterReader]" = ()

    def __init__(self, path: Path, fields: Mapping[str, int], count: int) -> None:
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except (OSError, pa.ArrowInvalid) as error:
            reason = "is not a readable Arrow file: build the index again"
            raise IndexVersionError.at(path, reason, "unreadable_filters") from error
        if table.schema != _SCHEMA or len(table) != sum(fields.values()):
            reason = "does not match the manifest's filter_fields: build the index again"
            raise IndexVersionError.at(path, reason, "unreadable_filters")
        self._table = table
        self._count = count
        self._by_label = FilterTable(table, fields)
        self._matching = MatchingRows(self._by_label, count)
        self._recent = RecentRows()
        self._set_fields(fields)

    def _set_fields(self, fields: Mapping[str, int]) -> None:
        self.fields = dict(fields)
        listed = heapq.nsmallest(_LISTED, fields)
        self._known = ", ".join(name[:_NAME_CHARS] for name in listed) or "none"
        if len(fields) > _LISTED:
            self._known += f" and {len(fields) - _LISTED} more"

    def check(self, filter_: Filter, within: Conjunction = NO_CONDITIONS) -> Conjunction:
        """Checks a filter against the fields of the index and returns its conditions.

        Args:
            within: What bounds the documents of the caller: it is part of the conditions. If no
                document has one of its fields, the conditions match nothing. The filter may then
                have fields that no document has, which match nothing too: an error would say
                which fields are those of other documents.

        Raises:
            QueryError: If the filter is not valid (`core/conditions.py`) or, without `within`, no
                document has one of the fields, or a range is required of a field whose values are
                no numbers.
        """
        checked = parse_filter(filter_)
        if within:
            lacking = [(field, Condition(accepted=())) for field in self.lacking(within)]
            return checked & within & Conjunction.of(lacking)
        for field, condition in checked.conditions:
            self.check_field(field, filter_field(field))
            if condition.bounds and self.fields[field] and not self.has_numbers(field):
                message = "has a range, but no document has a number in this field"
                raise QueryError(filter_field(field), message, code="filter_not_numeric")
        return checked

    def lacking(self, conditions: Conjunction) -> list[str]:
        """Returns those fields of conditions that no document has."""
        return [field for field, _ in conditions.conditions if field not in self.fields]

    def check_field(self, field: str, place: str) -> None:
        """Raises `QueryError`, which names `place`, if no document has a metadata field."""
        if field not in self.fields:
            message = f"unknown filter field; the fields of this index are: {self._known}"
            raise QueryError(place, message, code="unknown_filter_field")

    def has_numbers(self, field: str) -> bool:
        """Returns whether a document has a number in a field, which some document has."""
        return self._by_label.has_numbers(field)

    def rows(self, conditions: Conjunction, check: Check = no_check) -> RowArray:
        """Returns the rows that meet conditions, int64 [n], ascending.

        The rows of recent conditions are kept, so that the queries of a batch share them.
        `check` is called about once per millisecond, and stops the search by an exception.
        """
        rows = self._recent.get(conditions)
        if rows is None:
            rows = self._matching.find(self.requirements(conditions, check), check)
            self._recent.put(conditions, rows)
        return rows

    def count(self, conditions: Conjunction, check: Check = no_check) -> int:
        """Returns the number of rows that meet conditions; `check` is as in `rows`."""
        return len(self.rows(conditions, check))

    def requirements(self, conditions: Conjunction, check: Check = no_check) -> list[Requirement]:
        """Returns the labels that documents must or must not have to meet conditions."""
        required = []
        for field, condition in conditions.conditions:
            if condition.accepted is not None:
                required.append(Requirement(self._by_label.labels(field, condition.accepted)))
            if condition.bounds:
                labels = self._by_label.labels_in_range(field, condition.bounds, check)
                required.append(Requirement(labels))
            excluded = self._by_label.labels(field, condition.excluded)
            if len(excluded):
                required.append(Requirement(excluded, excluded=True))
        return required

    def hashed(self, conditions: Conjunction, check: Check = no_check) -> list[HashedRequirement]:
        """Returns the hashes that documents must or must not have to meet conditions.

        There are as many, in the same order, whatever the table has: those of several tables differ
        in the hashes of ranges alone, which are those of the numbers in the table.
        """
        required = []
        for field, condition in conditions.conditions:
            if condition.accepted is not None:
                hashes = [hash_value(field, value) for value in condition.accepted]
                required.append(HashedRequirement(hashes))
            if condition.bounds:
                labels = self._by_label.labels_in_range(field, condition.bounds, check)
                hashes = self._by_label.hashes(labels, check).astype(str).tolist()
                required.append(HashedRequirement(hashes))
            if condition.excluded:
                hashes = [hash_value(field, value) for value in condition.excluded]
                required.append(HashedRequirement(hashes, excluded=True))
        return required

    def hashes(self) -> Hashes:
        """Returns the hashes of all values by label, bytes [values]."""
        return self._by_label.hashes(np.arange(len(self._table)))

    def values(self) -> Iterator[tuple[str, str, int]]:
        """Yields field, value as JSON and number of rows of each value, in the order of labels."""
        for batch in self._table.to_batches():
            counts = pc.list_value_length(batch["rows"])
            columns = (batch["field"], batch["value"], counts)
            yield from zip(*(column.to_pylist() for column in columns), strict=True)

    def labels_of_rows(self) -> tuple[RowArray, RowArray]:
        """Returns the labels of all rows, as in a compressed sparse row matrix.

        Returns:
            offsets, int64 [rows + 1], and labels, int64 [n]: the labels of row i are
            `labels[offsets[i]:offsets[i + 1]]`, ascending.
        """
        column = self._table["rows"]
        lengths = array_of(pc.list_value_length(column))
        rows = array_of(pc.list_flatten(column))
        offsets = np.zeros(self._count + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=self._count), out=offsets[1:])
        return offsets, np.repeat(np.arange(len(lengths)), lengths)[np.argsort(rows, kind="stable")]

    def count_new(self, older: Sequence["FilterReader"]) -> dict[str, int]:
        """Returns the number of values of each field that none of `older` has."""
        found = {}
        for field in self.fields:
            texts = list(self._by_label.texts(field))
            for one in older:
                texts = one._by_label.lacking(field, texts)
            found[field] = len(texts)
        return found

    def frequent_values(self) -> dict[str, list[CountedValue]]:
        """Returns the first 100 fields by name, each with its 100 most frequent values.

        With each value stands the number of its rows. Names and texts of more than 200 characters
        are left out.
        """
        return self._frequent

    @property
    def is_counted(self) -> bool:
        """Whether `frequent_values` returns at once what it has counted before."""
        return "_frequent" in self.__dict__

    @cached_property
    def _frequent(self) -> dict[str, list[CountedValue]]:
        listed = heapq.nsmallest(_LISTED, (f for f in self.fields if len(f) <= _LISTED_CHARS))
        most = {field: self._by_label.frequent_values(field, _LISTED) for field in listed}
        return {field: _short(values) for field, values in most.items() if values}

    def count_values(self, rows: RowArray) -> dict[str, list[CountedValue]]:
        """Returns the values of given rows by field, each with the number of its rows.

        Of a field these are the 10,000 most frequent ones at most.
        """
        chosen = np.zeros(self._count, np.bool_)
        chosen[rows] = True
        found = {}
        for field in sorted(self.fields):
            if values := self._by_label.frequent_values(field, _COUNTED, chosen):
                found[field] = values
        return found

    def counts(self, values: Mapping[str, Iterable[FilterValue]]) -> dict[str, list[CountedValue]]:
        """Returns those of some values by field that the index has, with the number of rows."""
        found = self.count_values(np.arange(self._count))
        wanted = {field: set(map(encode_value, own)) for field, own in values.items()}
        return {
            field: [one for one in found.get(field, ()) if encode_value(one[0]) in own]
            for field, own in wanted.items()
        }

    def values_within(self, rows: RowArray) -> tuple[dict[str, list[CountedValue]], int]:
        """Returns what `frequent_values` does of given rows alone, and the number of their fields.

        All values of the index are counted, which takes some milliseconds for a million rows.
        """
        return listed_values(self.count_values(rows))


def listed_values(
    counted: Mapping[str, Sequence[CountedValue]],
) -> tuple[dict[str, list[CountedValue]], int]:
    """Returns what `FilterReader.values_within` does, given all values by field."""
    listed = heapq.nsmallest(_LISTED, (f for f in counted if len(f) <= _LISTED_CHARS))
    return {field: _short(counted[field][:_LISTED]) for field in listed}, len(counted)


def _short(values: Sequence[CountedValue]) -> list[CountedValue]:
    return [
        (value, count)
        for value, count in values
        if not isinstance(value, str) or len(value) <= _LISTED_CHARS
    ]


class Selection:
    """Which rows a search may find: those that meet conditions, or given ones."""

    def __init__(self, filters: FilterReader, conditions: Conjunction) -> None:
        self._filters: FilterReader | None = filters
        self._conditions = conditions
        self._rows: RowArray | None = None

    @classmethod
    def of_rows(cls, rows: RowArray) -> Self:
        """Returns the selection of rows, int64 [n], ascending."""
        self = cls.__new__(cls)
        self._filters, self._rows = None, rows
        return self

    def rows(self, check: Check = no_check) -> RowArray:
        """Returns the rows, int64 [n], ascending; computed when they are first needed.

        `check` is as in `FilterReader.rows`.
        """
        if self._rows is None and self._filters:
            self._rows = self._filters.rows(self._conditions, check)
        assert self._rows is not None
        return self._rows

    def count(self, check: Check = no_check) -> int:
        """Returns the number of rows; `check` is as in `FilterReader.rows`."""
        if self._rows is None and self._filters:
            return self._filters.count(self._conditions, check)
        return len(self.rows(check))

    def labels(self) -> list[Requirement] | None:
        """Returns what is required of the labels of rows; None if only the rows are known."""
        return self._filters.requirements(self._conditions) if self._filters else None

    def parts(self) -> "list[Selection] | None":
        """Returns the selection in each segment, if its rows are found by labels there."""
        if self._filters is None or not self._filters.by_labels:
            return None
        return [Selection(one, self._conditions) for one in self._filters.segments]

    def hashed(self, check: Check = no_check) -> list[HashedRequirement] | None:
        """Returns what `labels` does, as hashes; `check` is as in `FilterReader.rows`."""
        return self._filters.hashed(self._conditions, check) if self._filters else None
