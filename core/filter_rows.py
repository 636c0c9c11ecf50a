"""The rows that match the conditions of a filter."""

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap

from core.filter_table import FilterTable
from core.types import Check, Conjunction, RowArray

# A value has a bitmap if at least this share of all rows has it: at most 1,024 bitmaps for each
# field with one value per document, however many values the field has.
_FREQUENT = 1 / 1024
# Up to this share of all rows, the rows of other values are turned into a bitmap, in 20 ns each;
# more are marked in a mask of all rows, in 1.5 ns each.
_FEW = 1 / 64
# Bitmaps that are joined between two checks, about a millisecond.
_JOINED = 256
# Rows of recent filters that are kept, and what each entry takes besides [bytes].
_KEPT_BYTES, _ENTRY_BYTES = 1 << 26, 256

_Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Requirement:
    """Labels, int64 [n] and ascending, of which a row must have one or, if `excluded`, none."""

    labels: RowArray
    excluded: bool = False


@dataclass(frozen=True, slots=True)
class HashedRequirement:
    """Hashes of values, of which a row must have one of or, if `excluded`, none."""

    hashes: Sequence[str]
    excluded: bool = False


class MatchingRows:
    """Finds those of the `count` rows of an index that meet requirements; thread-safe."""

    def __init__(self, table: FilterTable, count: int) -> None:
        self._table = table
        self._count = count
        self._frequent = table.frequent_labels(max(1, int(_FREQUENT * count)))
        self._bitmaps = [_bitmap(rows) for rows in table.rows_by_label(self._frequent)]

    def find(self, requirements: Iterable[Requirement], check: Check) -> RowArray:
        """Returns the rows that meet all requirements, int64 [n], ascending.

        Accepted labels come first, those with the fewest rows before others. Only what is required
        of many rare labels is checked last, row by row.
        """
        found = BitMap(range(self._count))
        masks: list[_Mask] = []
        for required in sorted(requirements, key=self._order):
            check()
            bitmaps, rare = self._split(required.labels)
            if self._table.count_rows(rare) > _FEW * self._count:
                mask = self._mark(bitmaps, rare, check)
                masks.append(~mask if required.excluded else mask)
                continue
            rows = np.concatenate([np.empty(0, np.int64), *self._table.rows(rare, check)])
            having = _joined([_bitmap(np.sort(rows)), *bitmaps], check)
            found = found - having if required.excluded else found & having
            if not found:
                break
        if masks and len(found) == self._count:
            return np.flatnonzero(np.logical_and.reduce(masks))
        matching = _rows(found)
        for mask in masks:
            matching = matching[mask[matching]]
        return matching

    def _order(self, required: Requirement) -> tuple[bool, int]:
        return required.excluded, self._table.count_rows(required.labels)

    def _split(self, labels: RowArray) -> tuple[list[BitMap], RowArray]:
        """Returns the bitmaps of labels, and those labels that have none."""
        if not len(labels):
            return [], labels
        at = np.minimum(np.searchsorted(labels, self._frequent), len(labels) - 1)
        held = np.flatnonzero(labels[at] == self._frequent)
        return [self._bitmaps[i] for i in held.tolist()], np.delete(labels, at[held])

    def _mark(self, bitmaps: Sequence[BitMap], labels: RowArray, check: Check) -> _Mask:
        mask = np.zeros(self._count, np.bool_)
        for part in self._table.rows(labels, check):
            mask[part] = True
        mask[_rows(_joined(bitmaps, check))] = True
        return mask


class RecentRows:
    """The rows of recent filters, `_KEPT_BYTES` in all; thread-safe."""

    def __init__(self) -> None:
        self._rows: OrderedDict[bytes, RowArray] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def get(self, conditions: Conjunction) -> RowArray | None:
        """Returns the rows that meet conditions, if they are kept."""
        key = _key(conditions)
        with self._lock:
            if key in self._rows:
                self._rows.move_to_end(key)
            return self._rows.get(key)

    def put(self, conditions: Conjunction, rows: RowArray) -> None:
        """Keeps rows, which become read-only; forgets those that were used least recently."""
        key = _key(conditions)
        rows.flags.writeable = False
        with self._lock:
            if key in self._rows or rows.nbytes > _KEPT_BYTES:
                return
            self._rows[key] = rows
            self._bytes += rows.nbytes + _ENTRY_BYTES
            while self._bytes > _KEPT_BYTES:
                self._bytes -= self._rows.popitem(last=False)[1].nbytes + _ENTRY_BYTES


def _key(conditions: Conjunction) -> bytes:
    return hashlib.blake2b(json.dumps(conditions.as_json()).encode(), digest_size=16).digest()


def _bitmap(rows: RowArray) -> BitMap:
    return BitMap(array("I", rows.astype(np.uint32).tobytes()))


def _rows(bitmap: BitMap) -> RowArray:
    return np.frombuffer(bitmap.to_array(), np.uint32).astype(np.int64)


def _joined(bitmaps: Sequence[BitMap], check: Check) -> BitMap:
    joined = BitMap()
    for start in range(0, len(bitmaps), _JOINED):
        check()
        joined |= BitMap.union(*bitmaps[start : start + _JOINED])
    return joined
