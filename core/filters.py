"""`filters.arrow`: the rows of each metadata field and value.

One Arrow table, sorted by field and value, memory-mapped and searched by bisection: the time to
open it does not depend on the number of values. The position of a value in the table is its
label, an integer that replaces the value in other stores such as Milvus.
"""

import heapq
import json
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from core.errors import IndexVersionError, QueryError
from core.scratch import scratch
from core.types import Filter, FilterValue, RowArray

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
_NO_ROWS: RowArray = np.empty(0, np.int64)

# Field and JSON-encoded value.
_Key = tuple[str, str]
# A key and its rows in one sorted run.
_Entry = tuple[_Key, RowArray]


def _encode(value: FilterValue) -> str:
    return json.dumps(value, ensure_ascii=False)


class FilterWriter:
    """Writes the rows of each metadata value; a context manager.

    Strings, integers, booleans and lists of them can be used in filters. Other values (floats,
    objects, null) are stored with the document only. Memory is bounded by an external merge sort:
    sorted runs are written next to the file and merged when the block ends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._runs_path = path.with_name(f".{path.name}.runs")
        self._open = ExitStack()
        self._runs = self._open.enter_context(_table(self._runs_path))
        self._rows: dict[tuple[str, str], array[int]] = defaultdict(lambda: array("q"))
        self._buffered = 0
        self._fields: Counter[str] = Counter()

    def add(self, row: int, metadata: Mapping[str, Any]) -> None:
        """Adds the metadata of one document; rows must be added in ascending order."""
        for field, value in metadata.items():
            values = value if isinstance(value, list) else [value]
            for item in {_encode(v) for v in values if isinstance(v, str | int | bool)}:
                self._rows[field, item].append(row)
                self._buffered += 1
        if self._buffered >= _BUFFERED_ROWS or len(self._rows) >= _BUFFERED_VALUES:
            self._write_run()

    def fields(self) -> dict[str, int]:
        """Returns the number of distinct values of each field; call it after the block."""
        return dict(self._fields)

    def _write_run(self) -> None:
        if keys := sorted(self._rows):
            rows = [np.frombuffer(self._rows[key], dtype=np.int64) for key in keys]
            self._runs.write_batch(_batch(keys, [len(r) for r in rows], np.concatenate(rows)))
        self._rows.clear()
        self._buffered = 0

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
            for key, entries in values:
                keys.append(key)
                lengths.append(0)
                for _, own in entries:
                    rows.append(own.data)
                    lengths[-1] += len(own)
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
        pa.array([field for field, _ in keys], pa.string()),
        pa.array([value for _, value in keys], pa.string()),
        pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(rows)),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def _entries(run: Any) -> Iterator[_Entry]:
    fields, values, lists = run.columns
    rows, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    for start in range(0, len(run), _READ_VALUES):
        keys = (column.slice(start, _READ_VALUES).to_pylist() for column in (fields, values))
        for at, key in enumerate(zip(*keys, strict=True), start):
            yield key, rows[offsets[at] : offsets[at + 1]]


class FilterReader:
    """Finds the rows that match a filter.

    Raises:
        IndexVersionError: If the file is missing, truncated or of another schema.
    """

    def __init__(self, path: Path, fields: Mapping[str, int]) -> None:
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except (OSError, pa.ArrowInvalid) as error:
            reason = "is not a readable Arrow file: build the index again"
            raise IndexVersionError.at(path, reason, "unreadable_filters") from error
        if table.schema != _SCHEMA or len(table) != sum(fields.values()):
            reason = "does not match the manifest's filter_fields: build the index again"
            raise IndexVersionError.at(path, reason, "unreadable_filters")
        self._table = table
        self.fields = dict(fields)
        ends = zip(sorted(fields), accumulate(fields[name] for name in sorted(fields)), strict=True)
        self._starts = {name: end - fields[name] for name, end in ends}

    def check(self, filter_: Filter) -> None:
        """Checks that the fields of a filter exist in the index.

        Raises:
            QueryError: If no document has one of the fields.
        """
        for field in filter_:
            if field not in self.fields:
                known = ", ".join(sorted(self.fields)) or "none"
                message = f"unknown filter field; the fields of this index are: {known}"
                raise QueryError(f"filter.{field[:64]}", message, code="unknown_filter_field")

    def rows(self, filter_: Filter) -> RowArray | None:
        """Returns the matching rows, int64 [n], ascending, or None if the filter is empty.

        Raises:
            QueryError: If a field is unknown.
        """
        self.check(filter_)
        found: RowArray | None = None
        for field, values in filter_.items():
            rows = self._union(field, values)
            found = rows if found is None else np.intersect1d(found, rows, assume_unique=True)
        return found

    def labels(self, filter_: Filter) -> list[list[int]]:
        """Returns, for each field of a filter, the labels of the values that exist.

        Raises:
            QueryError: If a field is unknown.
        """
        self.check(filter_)
        return [self._labels(field, values) for field, values in filter_.items()]

    def labels_of_rows(self, count: int) -> tuple[RowArray, RowArray]:
        """Returns the labels of rows 0 to `count` - 1, as in a compressed sparse row matrix.

        Returns:
            offsets, int64 [count + 1], and labels, int64 [n]: the labels of row i are
            `labels[offsets[i]:offsets[i + 1]]`, ascending.
        """
        column = self._table["rows"]
        lengths = pc.list_value_length(column).to_numpy()
        rows = pc.list_flatten(column).to_numpy()
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
        return offsets, np.repeat(np.arange(len(lengths)), lengths)[np.argsort(rows, kind="stable")]

    def values(self, field: str, limit: int) -> list[FilterValue]:
        """Returns up to `limit` values of `field`, the most frequent first."""
        start = self._starts[field]
        rows_of_field = self._table.slice(start, self.fields[field])
        counts = pc.list_value_length(rows_of_field["rows"]).to_numpy()
        order = np.argsort(-counts, kind="stable")[:limit]
        return [json.loads(rows_of_field["value"][int(i)].as_py()) for i in order]

    def _union(self, field: str, values: Sequence[FilterValue]) -> RowArray:
        lists = self._table["rows"]
        rows = [lists[label].values.to_numpy() for label in self._labels(field, values)]
        return rows[0] if len(rows) == 1 else np.unique(np.concatenate([_NO_ROWS, *rows]))

    def _labels(self, field: str, values: Sequence[FilterValue]) -> list[int]:
        start = self._starts[field]
        labels_of_field = range(start, start + self.fields[field])
        column = self._table["value"]
        labels = []
        for key in map(_encode, values):
            label = bisect_left(labels_of_field, key, key=lambda i: column[i].as_py()) + start
            if label in labels_of_field and column[label].as_py() == key:
                labels.append(label)
        return labels
