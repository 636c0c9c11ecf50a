"""Exact search in parts of a memory-mapped index, with a check between them."""

import math
from typing import Protocol

import faiss
import numpy as np
from numpy.typing import NDArray

from core.types import Check, FloatArray, RowArray
from stores.base import ScoredRows

# Codes that are scanned between two checks [bytes]: 4 to 10 ms.
PART_BYTES = 1 << 25
# A scan of one in this many rows or more is cheaper with a mask over all rows, one of fewer row by
# row or with a copy of their codes: with a copy 250 rows take 0.4 instead of 0.7 ms of 15,000, and
# 0.5 instead of 4 ms of 500,000 (SQ8, 768 dimensions).
_COPIED = 50


class Scan(Protocol):
    """Compares a query with all stored vectors, or those of some rows."""

    def search(self, query: FloatArray, k: int, rows: RowArray | None, check: Check) -> ScoredRows:
        """Returns the k nearest rows, or fewer if fewer are compared, best first."""
        ...


class CodesScan:
    """Scans vectors that are stored in the order of rows.

    A part is a FAISS index of consecutive rows that shares the codes of the whole index. Few rows
    are compared where they are or, if they are quantised, copied to an index of their own: after
    each call of FAISS a thread waits for the interpreter, and a copy takes more calls.

    Args:
        storage: `IndexFlat` or `IndexScalarQuantizer`; it must outlive this object.
    """

    def __init__(self, storage: faiss.IndexFlatCodes) -> None:
        self._count: int = storage.ntotal
        self._storage = storage
        self._is_flat = isinstance(storage, faiss.IndexFlat)
        # A multiple of eight, so that a part's bits of a packed mask start at a byte.
        self._part_rows = max(8, PART_BYTES // storage.code_size // 8 * 8)
        codes = faiss.rev_swig_ptr(storage.codes.data(), storage.ntotal * storage.code_size)
        self._codes: NDArray[np.uint8] = codes.reshape(storage.ntotal, storage.code_size)
        self._parts: list[faiss.IndexFlatCodes] = []
        for first in range(0, self._count, self._part_rows):
            count = min(self._part_rows, self._count - first)
            start = first * storage.code_size
            part = _empty_like(storage)
            part.codes = faiss.MaybeOwnedVectorUInt8.create_view(
                faiss.swig_ptr(codes[start:]), count * storage.code_size, storage.codes.owner
            )
            part.ntotal = count
            self._parts.append(part)

    def search(self, query: FloatArray, k: int, rows: RowArray | None, check: Check) -> ScoredRows:
        if rows is not None and len(rows) * _COPIED <= self._count:
            return self._search_few(query, k, rows, check)
        bits = None if rows is None else _packed(rows, self._count)
        nearest = _Nearest(k)
        for first, part in zip(range(0, self._count, self._part_rows), self._parts, strict=True):
            check()
            selector = None
            if bits is not None:
                own = bits[first // 8 : (first + self._part_rows) // 8]
                if not own.any():
                    continue
                selector = faiss.IDSelectorBitmap(own)
            parameters = faiss.SearchParameters(sel=selector)
            scores, found = part.search(query[None], min(k, part.ntotal), params=parameters)
            nearest.add(scores, np.where(found < 0, found, found + first))
        return nearest.best()

    def _search_few(self, query: FloatArray, k: int, rows: RowArray, check: Check) -> ScoredRows:
        compare = self._compare_flat if self._is_flat else self._compare_copy
        found = []
        for first in range(0, len(rows), self._part_rows):
            check()
            found.append(compare(query, k, rows[first : first + self._part_rows]))
        if len(found) == 1:
            return found[0]
        nearest = _Nearest(k)
        for scores, own in found:
            nearest.add(scores[None], own[None])
        return nearest.best()

    def _compare_flat(self, query: FloatArray, k: int, rows: RowArray) -> ScoredRows:
        query, rows = np.ascontiguousarray(query), np.ascontiguousarray(rows)
        scores = np.empty(len(rows), np.float32)
        x, distances, labels = map(faiss.swig_ptr, (query, scores, rows))
        self._storage.compute_distance_subset(1, x, len(rows), distances, labels)
        best = np.argsort(-scores, kind="stable")[:k]
        return scores[best], rows[best]

    def _compare_copy(self, query: FloatArray, k: int, rows: RowArray) -> ScoredRows:
        part = _empty_like(self._storage)
        part.add_sa_codes(self._codes[rows])
        scores, found = part.search(query[None], min(k, len(rows)))
        return scores[0], rows[found[0]]


class ListsScan:
    """Scans all inverted lists, in groups."""

    def __init__(self, lists: faiss.IndexIVF) -> None:
        self._lists = lists
        parts = max(1, math.ceil(lists.ntotal * lists.code_size / PART_BYTES))
        self._group = math.ceil(lists.nlist / parts)

    def search(self, query: FloatArray, k: int, rows: RowArray | None, check: Check) -> ScoredRows:
        selector = None
        if rows is not None:
            selector = faiss.IDSelectorBitmap(_packed(rows, self._lists.ntotal))
        query = np.ascontiguousarray(query, np.float32)
        distances, lists = self._lists.quantizer.search(query[None], self._lists.nlist)
        nearest = _Nearest(k)
        for start in range(0, self._lists.nlist, self._group):
            check()
            chosen = lists[0, start : start + self._group]
            scores, found = np.empty((1, k), np.float32), np.empty((1, k), np.int64)
            # `search_preassigned` of FAISS's numpy interface takes no parameters.
            arrays = (chosen, distances[0, start : start + self._group], scores, found)
            parameters = faiss.SearchParametersIVF(sel=selector, nprobe=len(chosen))
            self._lists.search_preassigned_c(
                1, faiss.swig_ptr(query), k, *map(faiss.swig_ptr, arrays), False, parameters
            )
            nearest.add(scores, found)
        return nearest.best()


class _Nearest:
    """The k best of several results for one query."""

    def __init__(self, k: int) -> None:
        self._heap = faiss.ResultHeap(1, k, keep_max=True)

    def add(self, scores: FloatArray, rows: RowArray) -> None:
        """Adds a result, [1, n]; rows of -1 are ignored."""
        found = rows >= 0
        if found.any():
            self._heap.add_result(scores[found][None], rows[found][None])

    def best(self) -> ScoredRows:
        self._heap.finalize()
        return first_hits((self._heap.D, self._heap.I))


def first_hits(result: tuple[FloatArray, RowArray]) -> ScoredRows:
    """Returns the hits of the first query of a result of FAISS, which pads with row -1."""
    scores, rows = result[0][0], result[1][0]
    found = rows >= 0
    return scores[found], rows[found]


def _packed(rows: RowArray, count: int) -> NDArray[np.uint8]:
    mask = np.zeros(count, np.bool_)
    mask[rows] = True
    return np.packbits(mask, bitorder="little")


def _empty_like(storage: faiss.IndexFlatCodes) -> faiss.IndexFlatCodes:
    if isinstance(storage, faiss.IndexScalarQuantizer):
        empty = faiss.IndexScalarQuantizer(storage.d, storage.sq.qtype, storage.metric_type)
        empty.sq.trained = storage.sq.trained
        empty.is_trained = True
        return empty
    return faiss.IndexFlat(storage.d, storage.metric_type)
