"""Rows of different lengths in memory-mapped files: texts, token ids, rows of documents.

NAME.values    the values of all rows, one after another
NAME.offsets   int64 [n + 1]; row i is values[offsets[i]:offsets[i + 1]]

Processes that open the same files share their pages, which the system can drop at any time.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray

from core.types import RowArray

# Rows that are copied at a time.
_BLOCK = 4_096


def mapped(path: Path, dtype: DTypeLike) -> NDArray[Any]:
    """Returns the array in a file, read-only; an empty file cannot be mapped."""
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, mode="r"))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of different lengths."""

    values: NDArray[Any]  # of all rows, one after another
    offsets: RowArray  # int64 [n + 1]; row i is values[offsets[i]:offsets[i + 1]]

    @classmethod
    def open(cls, folder: Path, name: str, dtype: DTypeLike) -> Self:
        """Maps the files that `RowsWriter` wrote."""
        paths = _paths(folder, name)
        return cls(mapped(paths[0], dtype), mapped(paths[1], np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Number of values of each row, int32 [n]."""
        lengths = np.empty(len(self), dtype=np.int32)
        return np.subtract(self.offsets[1:], self.offsets[:-1], out=lengths, casting="same_kind")

    def row_of(self, values: RowArray) -> RowArray:
        """Returns the row of each position in `values`."""
        return np.searchsorted(self.offsets, values, side="right") - 1

    def take(self, rows: RowArray) -> tuple[NDArray[Any], RowArray]:
        """Returns the values of some rows, one after another, and the number of each row's."""
        first = self.offsets[rows]
        lengths = self.offsets[rows + 1] - first
        ends = lengths.cumsum()
        positions = np.repeat(first - ends + lengths, lengths) + np.arange(ends[-1])
        return self.values[positions], lengths


class RowsWriter:
    """Writes the files of `Rows`; keeps the lengths of the rows in memory until it is closed."""

    def __init__(self, folder: Path, name: str) -> None:
        values, self._offsets = _paths(folder, name)
        self._values = values.open("wb")
        self._lengths = array("i")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._values:
            offsets_of(np.frombuffer(self._lengths, dtype=np.int32)).tofile(self._offsets)

    def __len__(self) -> int:
        return len(self._lengths)

    def append(self, row: bytes) -> None:
        self._values.write(row)
        self._lengths.append(len(row))

    def extend(self, values: NDArray[Any], lengths: Iterable[int]) -> None:
        """Appends rows, given as their values one after another and the length of each."""
        values.tofile(self._values)
        self._lengths.extend(lengths)


def write_selected(folder: Path, name: str, rows: RowArray, into: str) -> None:
    """Writes some rows of the bytes `name` as `into`, in the given order, and deletes `name`."""
    source = Rows.open(folder, name, np.uint8)
    if np.array_equal(rows, np.arange(len(source))):
        for path, target in zip(_paths(folder, name), _paths(folder, into), strict=True):
            path.rename(target)
        return
    with RowsWriter(folder, into) as writer:
        for start in range(0, len(rows), _BLOCK):
            writer.extend(*source.take(rows[start : start + _BLOCK]))
    for path in _paths(folder, name):
        path.unlink()


def offsets_of(lengths: NDArray[Any]) -> RowArray:
    """Returns the offsets, int64 [n + 1], of rows with these lengths."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.values", folder / f"{name}.offsets"


class Texts(Sequence[str]):
    """Texts in memory-mapped rows of UTF-8."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._rows[index % len(self)].tobytes().decode()


def blocks(count: int, size: int) -> Iterator[slice]:
    """Yields the slices of `size` rows that `count` rows consist of; the last may be shorter."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))
