"""Columns of Arrow without pandas, which `pyarrow.array` and `to_numpy` import if they can."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def text_column(values: Sequence[str], kind: pa.DataType) -> pa.Array:
    """Returns a column of type `string` or `large_string`.

    Raises:
        ArrowCapacityError: If a column of type `string` has more than 2 GiB.
    """
    encoded = [value.encode() for value in values]
    offsets = np.fromiter(accumulate(map(len, encoded), initial=0), np.int64, len(encoded) + 1)
    if kind == pa.string():
        if offsets[-1] > np.iinfo(np.int32).max:
            raise pa.ArrowCapacityError(f"{offsets[-1]:,} bytes are too many for a column of texts")
        offsets = offsets.astype(np.int32)
    buffers = None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))
    return pa.Array.from_buffers(kind, len(encoded), buffers)


def number_column(values: NDArray[np.integer]) -> pa.Array:
    """Returns a column of integers, which shares the memory of `values`, [n] and contiguous."""
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), (None, pa.py_buffer(values)))


def array_of(column: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
    """Returns the numbers of a column without nulls, [n]; one in several parts is copied."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    found: NDArray[Any] = np.from_dlpack(whole)
    return found
