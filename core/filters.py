"""`filters.arrow`: for each metadata field and value the rows that carry it.

One Arrow table sorted by field and value, memory-mapped and searched by bisection, so
that opening it costs nothing however many values a field has. The place of a value in it is
the value's label, a number that stands for it wherever rows are kept elsewhere.
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
# Values in a batch of the table.
_BATCH_VALUES = 65_536
# Rows and values that are held in memory until a part is written, and values of a part that are
# read at a time.
_HELD_ROWS, _HELD_VALUES = 1 << 20, 1 << 17
_READ_VALUES = 256
_NO_ROWS: RowArray = np.empty(0, np.int64)

# Field and value, and the rows of a part that carry them.
_Key = tuple[str, str]
_Entry = tuple[_Key, RowArray]


def _encode(value: FilterValue) -> str:
    return json.dumps(value, ensure_ascii=False)


class FilterWriter:
    """Writes the rows of each metadata value; a context manager.

    Text, whole numbers, booleans and lists of them can be filtered by; other values
    (fractions, objects, null) are kept with the document and not indexed. Memory is bounded:
    tables of parts of the rows are laid beside the file and merged when the block ends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._parts_path = path.with_name(f".{path.name}.parts")
        self._open = ExitStack()
        self._parts = self._open.enter_context(_table(self._parts_path))
        self._rows: dict[tuple[str, str], array[int]] = defaultdict(lambda: array("q"))
        self._held = 0
        self._fields: Counter[str] = Counter()

    def add(self, row: int, metadata: Mapping[str, Any]) -> None:
        """Notes the values of one document; rows must come in ascending order."""
        for field, value in metadata.items():
            values = value if isinstance(value, list) else [value]
            for item in {_encode(v) for v in values if isinstance(v, str | int | bool)}:
                self._rows[field, item].append(row)
                self._held += 1
        if self._held >= _HELD_ROWS or len(self._rows) >= _HELD_VALUES:
            self._write_part()

    def fields(self) -> dict[str, int]:
        """Returns the number of distinct values of each field, once the block has ended."""
        return dict(self._fields)

    def _write_part(self) -> None:
        if keys := sorted(self._rows):
            rows = [np.frombuffer(self._rows[key], dtype=np.int64) for key in keys]
            self._parts.write_batch(_batch(keys, [len(r) for r in rows], np.concatenate(rows)))
        self._rows.clear()
        self._held = 0

    def _merge(self) -> None:
        with pa.memory_map(str(self._parts_path)) as file, _table(self._path) as table:
            reader = pa.ipc.open_file(file)
            parts = [_entries(reader.get_batch(i)) for i in range(reader.num_record_batches)]
            # Equal values come in the order of their parts, so their rows ascend.
            merged = groupby(heapq.merge(*parts, key=itemgetter(0)), key=itemgetter(0))
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
                    self._write_part()
            if kind is None:
                self._merge()
        finally:
            self._parts_path.unlink(missing_ok=True)


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


def _entries(part: Any) -> Iterator[_Entry]:
    fields, values, lists = part.columns
    rows, offsets = lists.values.to_numpy(), lists.offsets.to_numpy()
    for start in range(0, len(part), _READ_VALUES):
        some = (column.slice(start, _READ_VALUES).to_pylist() for column in (fields, values))
        for at, key in enumerate(zip(*some, strict=True), start):
            yield key, rows[offsets[at] : offsets[at + 1]]


class FilterReader:
    """Finds the rows that a filter lets through.

    Raises:
        IndexVersionError: If the file is missing, truncated or of another schema.
    """

    def __init__(self, path: Path, fields: Mapping[str, int]) -> None:
        try:
            table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        except (OSError, pa.ArrowInvalid) as error:
            reason = "is not a readable Arrow file"
            raise IndexVersionError.at(path, reason, "unreadable_filters") from error
        if table.schema != _SCHEMA or len(table) != sum(fields.values()):
            reason = "does not hold the values that the manifest counts"
            raise IndexVersionError.at(path, reason, "unreadable_filters")
        self._table = table
        self.fields = dict(fields)
        ends = zip(sorted(fields), accumulate(fields[name] for name in sorted(fields)), strict=True)
        self._starts = {name: end - fields[name] for name, end in ends}

    def check(self, filter_: Filter) -> None:
        """Checks that documents of this index have the fields of a filter.

        Raises:
            QueryError: If none has one of them.
        """
        for field in filter_:
            if field not in self.fields:
                known = ", ".join(sorted(self.fields)) or "none"
                message = f"unknown filter field; this index has: {known}"
                raise QueryError(f"filter.{field[:64]}", message, code="unknown_filter_field")

    def rows(self, filter_: Filter) -> RowArray | None:
        """Returns the rows, ascending, with an accepted value in every field; None for all."""
        self.check(filter_)
        found: RowArray | None = None
        for field, values in filter_.items():
            rows = self._union(field, values)
            found = rows if found is None else np.intersect1d(found, rows, assume_unique=True)
        return found

    def labels(self, filter_: Filter) -> list[list[int]]:
        """Returns for each field the labels of the accepted values that documents have."""
        self.check(filter_)
        return [self._labels(field, values) for field, values in filter_.items()]

    def labels_of_rows(self, count: int) -> tuple[RowArray, RowArray]:
        """Returns places, int64 [count + 1], and labels, int64 [labels], of the first rows.

        The labels of row i lie from the i-th place to the next, ascending.
        """
        column = self._table["rows"]
        lengths = pc.list_value_length(column).to_numpy()
        rows = pc.list_flatten(column).to_numpy()
        places = np.zeros(count + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=count), out=places[1:])
        return places, np.repeat(np.arange(len(lengths)), lengths)[np.argsort(rows, kind="stable")]

    def values(self, field: str, limit: int) -> list[FilterValue]:
        """Returns up to `limit` values of `field`, the most frequent first."""
        start = self._starts[field]
        part = self._table.slice(start, self.fields[field])
        counts = pc.list_value_length(part["rows"]).to_numpy()
        order = np.argsort(-counts, kind="stable")[:limit]
        return [json.loads(part["value"][int(i)].as_py()) for i in order]

    def _union(self, field: str, values: Sequence[FilterValue]) -> RowArray:
        lists = self._table["rows"]
        rows = [lists[label].values.to_numpy() for label in self._labels(field, values)]
        return rows[0] if len(rows) == 1 else np.unique(np.concatenate([_NO_ROWS, *rows]))

    def _labels(self, field: str, values: Sequence[FilterValue]) -> list[int]:
        start = self._starts[field]
        places = range(start, start + self.fields[field])
        column = self._table["value"]
        labels = []
        for key in map(_encode, values):
            label = bisect_left(places, key, key=lambda i: column[i].as_py()) + start
            if label in places and column[label].as_py() == key:
                labels.append(label)
        return labels
