"""The rows that match the conditions of a filter."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.filter_table import FilterTable
from core.types import Check, RowArray

# Below this share of all rows, the rows are kept as numbers instead of as a mask of all rows.
_FEW = 1 / 64
# Time to search the rows of a label, for each row searched for, and to mark a row in a mask [ns].
_SEARCH_LABEL, _SEARCH_ROW, _MARK_ROW = 3000.0, 50.0, 1.5

_Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Requirement:
    """Labels of which a row must have at least one or, if `excluded`, none.

    Attributes:
        labels: int64 [n], ascending.
    """

    labels: RowArray
    excluded: bool = False


def matching_rows(
    table: FilterTable, requirements: Iterable[Requirement], count: int, check: Check
) -> RowArray:
    """Returns the rows that meet all requirements, int64 [n], ascending.

    Requirements are applied until no row is left: first those of accepted labels in the order of
    their numbers of rows, the smallest first, then those of excluded labels alike. While many rows
    are left, they are a mask of all rows, and marking the rows of the next labels takes 1.2 ms per
    million. Few rows are searched for in the rows of each label, if that is faster.
    """
    sized = [(table.count_rows(one.labels), one) for one in requirements]
    sized.sort(key=lambda pair: (pair[1].excluded, pair[0]))
    few = _FEW * count
    mask: _Mask | None = None
    rows: RowArray | None = None
    for size, required in sized:
        labels = required.labels
        if rows is not None:
            if not len(rows):
                break
            rows = rows[_have(table, rows, labels, size, count, check) != required.excluded]
            continue
        if required.excluded:
            mask = np.ones(count, np.bool_) if mask is None else mask
            for part in table.rows(labels, check):
                mask[part] = False
        elif mask is None and size < few:
            rows = np.unique(np.concatenate([np.empty(0, np.int64), *table.rows(labels, check)]))
            continue
        else:
            marked = _mark(table, labels, count, check)
            mask = marked if mask is None else mask & marked
        if np.count_nonzero(mask) < few:
            rows = np.flatnonzero(mask)
    if rows is None:
        rows = np.arange(count) if mask is None else np.flatnonzero(mask)
    return rows


def _mark(table: FilterTable, labels: RowArray, count: int, check: Check) -> _Mask:
    mask = np.zeros(count, np.bool_)
    for part in table.rows(labels, check):
        mask[part] = True
    return mask


def _have(
    table: FilterTable, rows: RowArray, labels: RowArray, size: int, count: int, check: Check
) -> _Mask:
    """Returns which of the rows have at least one of the labels, whose rows are `size` in all."""
    searched = len(labels) * (_SEARCH_LABEL + _SEARCH_ROW * len(rows))
    if searched >= _MARK_ROW * size:
        return _mark(table, labels, count, check)[rows]
    have = np.zeros(len(rows), np.bool_)
    for own in table.rows_by_label(labels):
        check()
        have |= own[np.minimum(np.searchsorted(own, rows), len(own) - 1)] == rows
    return have
