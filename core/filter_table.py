"""Access to the values and rows of `filters.arrow`, whose pages are read when they are needed."""

import hashlib
import json
from base64 import urlsafe_b64encode
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from core.columns import array_of
from core.conditions import COMPARISONS, canonical_number
from core.types import Check, CountedValue, FilterValue, RowArray, no_check

FloatNumbers = NDArray[np.float64]
Hashes = NDArray[np.bytes_]
_Mask = NDArray[np.bool_]

# `json.dumps` would make an encoder for each value.
_encode = json.JSONEncoder(ensure_ascii=False).encode

# The first characters of JSON numbers, and the first character after them: the values of a field
# are ordered as text, that is strings, numbers, false, true.
_NUMBERS_FROM, _NUMBERS_TO = b"-", b":"
# Rows that are read between two checks, about a millisecond.
_READ_ROWS = 1 << 20
# With more runs of consecutive labels than this, labels are selected by a mask of the batch.
_MANY_RUNS = 256
# Bytes of the hash of a value, 16 characters in base64: among 10^9 values, two have the same one
# with a probability of 10^-11. Values that are hashed between two checks, about two milliseconds.
_HASH_BYTES, _HASHED = 12, 1024


class FilterTable:
    """The rows of each value, by label: the position of the value in the table.

    Args:
        table: Columns `field`, `value` (JSON) and `rows`, sorted by field and value.
        fields: Number of values of each field.
    """

    def __init__(self, table: Any, fields: Mapping[str, int]) -> None:
        self._batches = [_Batch(batch) for batch in table.to_batches() if len(batch)]
        self._firsts = [0, *accumulate(len(batch) for batch in self._batches)][:-1]
        self._spans = label_spans(fields)
        self._starts = [span.start for span in self._spans.values()]
        self._names = [name.encode() for name in self._spans]
        self._numbers: dict[str, tuple[RowArray, FloatNumbers]] = {}
        # Of all values, empty until it is asked for: such pages of the array take no memory.
        self._hashes: Hashes = np.zeros(sum(fields.values()), f"S{_HASH_BYTES * 4 // 3}")
        self._hashing = Lock()

    def labels(self, field: str, values: Sequence[FilterValue]) -> RowArray:
        """Returns the labels of those values that the field has, int64 [n], ascending."""
        span = self._spans.get(field, range(0))
        found = []
        texts = (encode_value(value).encode(errors="surrogatepass") for value in values)
        for text in sorted(texts):
            label = self._first_at(span, text)
            if label < span.stop and self._text(label) == text:
                found.append(label)
        return np.array(found, np.int64)

    def texts(self, field: str) -> Iterator[bytes]:
        """Yields the values of a field as JSON, in the order of their labels."""
        return map(self._text, self._spans[field])

    def lacking(self, field: str, texts: Sequence[bytes]) -> list[bytes]:
        """Returns those of some values, given as JSON, that a field does not have."""
        span = self._spans.get(field, range(0))

        def has(text: bytes) -> bool:
            label = self._first_at(span, text)
            return label < span.stop and self._text(label) == text

        return [text for text in texts if not has(text)]

    def has_numbers(self, field: str) -> bool:
        """Returns whether the field has a number in any document."""
        return len(self._number_span(field)) > 0

    def labels_in_range(
        self, field: str, bounds: Sequence[tuple[str, float]], check: Check = no_check
    ) -> RowArray:
        """Returns the labels of the numbers that satisfy all bounds, int64 [n], ascending.

        The first call for a field sorts its numbers and keeps them, 16 bytes for each.
        """
        if field not in self._spans:
            return np.empty(0, np.int64)
        labels, numbers = self._sorted_numbers(field, check)
        start, stop = 0, len(numbers)
        # Integers beyond 2^53 that are different numbers may be equal floats.
        ties: set[int] = set()
        for name, bound in bounds:
            left = int(np.searchsorted(numbers, float(bound), "left"))
            right = int(np.searchsorted(numbers, float(bound), "right"))
            if name in ("gt", "gte"):
                start = max(start, right)
            else:
                stop = min(stop, left)
            ties.update(labels[left:right].tolist())
        inside = [
            label
            for label in ties
            if all(COMPARISONS[name](self._value(label), bound) for name, bound in bounds)
        ]
        # Ties are outside of the others. They are sorted, as `np.unique` hashes, which is slower.
        return np.sort(np.concatenate([labels[start:stop], np.array(inside, np.int64)]))

    def hashes(self, labels: RowArray, check: Check = no_check) -> Hashes:
        """Returns what `hash_value` does for the values of labels, bytes [n]; each is kept."""
        parts = [self._hashes[:0]]
        for start in range(0, len(labels), _HASHED):
            check()
            own = labels[start : start + _HASHED]
            with self._hashing:
                new = own[self._hashes[own] == b""].tolist()
                self._hashes[new] = [_hash(self._field(label), self._text(label)) for label in new]
                parts.append(self._hashes[own])
        return np.concatenate(parts)

    def count_rows(self, labels: RowArray) -> int:
        """Returns the number of rows of labels; a row with several of them counts each time."""
        return sum(int(batch.lengths(own).sum()) for batch, own in self._by_batch(labels))

    def frequent_labels(self, least: int) -> RowArray:
        """Returns the labels that at least `least` rows have, int64 [n], ascending."""
        parts = [np.empty(0, np.int64)]
        for first, batch in zip(self._firsts, self._batches, strict=True):
            parts.append(first + np.flatnonzero(np.diff(batch.offsets) >= least))
        return np.concatenate(parts)

    def rows(self, labels: RowArray, check: Check = no_check) -> Iterator[RowArray]:
        """Yields the rows of labels, in parts of at most a million."""
        for batch, own in self._by_batch(labels):
            for part in batch.rows_of(own):
                for start in range(0, len(part), _READ_ROWS):
                    check()
                    yield part[start : start + _READ_ROWS]

    def rows_by_label(self, labels: RowArray) -> Iterator[RowArray]:
        """Yields the rows of each label, ascending."""
        for batch, own in self._by_batch(labels):
            for start, end in zip(batch.offsets[own], batch.offsets[own + 1], strict=True):
                yield batch.rows[start:end]

    def frequent_values(
        self, field: str, limit: int, within: _Mask | None = None
    ) -> list[CountedValue]:
        """Returns up to `limit` values of a field with their rows, the most frequent first.

        With `within`, bool [rows], these are the values of the rows that it marks.
        """
        span = self._spans[field]
        parts = self._by_batch(np.arange(span.start, span.stop))
        none = np.empty(0, np.int64)  # of a field that no document has yet
        counts = np.concatenate([none, *(batch.count(own, within) for batch, own in parts)])
        order = np.argsort(-counts, kind="stable")[:limit]
        return [(self._value(span[at]), int(counts[at])) for at in order.tolist() if counts[at]]

    def _first_at(self, span: range, text: bytes) -> int:
        """Returns the first label of a span whose text is not before `text`, or its end."""
        return span.start + bisect_left(span, text, key=self._text)

    def _number_span(self, field: str) -> range:
        span = self._spans[field]
        return range(self._first_at(span, _NUMBERS_FROM), self._first_at(span, _NUMBERS_TO))

    def _sorted_numbers(self, field: str, check: Check) -> tuple[RowArray, FloatNumbers]:
        """Returns the labels of a field's numbers by ascending number, and these as floats."""
        if field not in self._numbers:
            span = self._number_span(field)
            labels = np.arange(span.start, span.stop)
            parts = [np.empty(0)]
            for batch, own in self._by_batch(labels):
                check()
                parts.append(batch.numbers(own))
            numbers = np.concatenate(parts)
            order = np.argsort(numbers, kind="stable")
            self._numbers[field] = labels[order], numbers[order]
        return self._numbers[field]

    def _by_batch(self, labels: RowArray) -> Iterator[tuple["_Batch", RowArray]]:
        """Yields the batches of ascending labels, each with the positions of its labels."""
        if not len(labels):
            return
        at = bisect_right(self._firsts, int(labels[0])) - 1
        while len(labels):
            batch, first = self._batches[at], self._firsts[at]
            own = labels[: np.searchsorted(labels, first + len(batch))]
            if len(own):
                yield batch, own - first
            labels, at = labels[len(own) :], at + 1

    def _field(self, label: int) -> bytes:
        return self._names[bisect_right(self._starts, label) - 1]

    def _text(self, label: int) -> bytes:
        at = bisect_right(self._firsts, label) - 1
        return self._batches[at].text(label - self._firsts[at])

    def _value(self, label: int) -> Any:
        return json.loads(self._text(label))


class _Batch:
    """A record batch of the table; positions count from its first value."""

    def __init__(self, batch: Any) -> None:
        _, self._values, lists = batch.columns
        _, ends, data = self._values.buffers()
        self._ends = memoryview(ends).cast("B").cast("i")
        self._data = memoryview(data or b"")
        # int64 [values + 1], where the rows of each value start in `rows`.
        self.offsets: RowArray = np.asarray(np.from_dlpack(lists.offsets), np.int64)
        self.rows: RowArray = np.asarray(np.from_dlpack(lists.values), np.int64)

    def __len__(self) -> int:
        return len(self._values)

    def text(self, at: int) -> bytes:
        """Returns a value as JSON in UTF-8."""
        return bytes(self._data[self._ends[at] : self._ends[at + 1]])

    def numbers(self, at: RowArray) -> FloatNumbers:
        """Returns consecutive values that are numbers; beyond the range of floats, infinity."""
        texts = self._values.slice(int(at[0]), len(at))
        numbers: FloatNumbers = array_of(texts.cast(pa.float64()))
        return numbers

    def lengths(self, at: RowArray) -> RowArray:
        """Returns the number of rows of values."""
        return self.offsets[at + 1] - self.offsets[at]

    def count(self, at: RowArray, within: _Mask | None) -> RowArray:
        """Returns the number of rows of consecutive values, of all or of those that are marked."""
        if within is None:
            return self.lengths(at)
        starts, end = self.offsets[at], self.offsets[at[-1] + 1]
        marked = within[self.rows[starts[0] : end]]
        return np.add.reduceat(marked, starts - starts[0], dtype=np.int64)

    def rows_of(self, at: RowArray) -> Iterator[RowArray]:
        """Yields the rows of values at ascending positions."""
        ends = np.flatnonzero(np.diff(at) != 1) + 1
        if len(ends) > _MANY_RUNS:
            chosen = np.zeros(len(self), np.bool_)
            chosen[at] = True
            yield self.rows[np.repeat(chosen, np.diff(self.offsets))]
            return
        for run in np.split(at, ends):
            yield self.rows[self.offsets[run[0]] : self.offsets[run[-1] + 1]]


def label_spans(fields: Mapping[str, int]) -> dict[str, range]:
    """Returns the labels of each field, by name and in this order, given its number of values."""
    names = sorted(fields)
    ends = accumulate(fields[name] for name in names)
    return {name: range(end - fields[name], end) for name, end in zip(names, ends, strict=True)}


def encode_value(value: FilterValue) -> str:
    """Returns a value as it is written in the table: JSON, a whole float as an integer."""
    if isinstance(value, float):
        value = canonical_number(value)
    return _encode(value)


def hash_value(field: str, value: FilterValue) -> str:
    """Returns a hash of a field and a value, 16 characters that are the same in every table."""
    names = (field, encode_value(value))
    return _hash(*(name.encode(errors="surrogatepass") for name in names)).decode()


def _hash(field: bytes, text: bytes) -> bytes:
    # JSON has no zero byte, so only this field and value make the text that is hashed.
    digest = hashlib.blake2b(text + b"\0" + field, digest_size=_HASH_BYTES).digest()
    return urlsafe_b64encode(digest)
