"""Arrays in unnamed temporary files, for more records than fit into memory.

The kernel can evict their mapped pages from memory. The files are deleted when the process ends,
even if it is killed.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Scratch:
    """Records of one dtype that are appended to a temporary file."""

    def __init__(self, file: IO[bytes], dtype: DTypeLike) -> None:
        self._file = file
        self._dtype = np.dtype(dtype)

    def append(self, records: bytes | memoryview) -> None:
        """Appends the bytes of records."""
        self._file.write(records)

    def array(self) -> NDArray[Any]:
        """Returns the records [n], memory-mapped; the array stays valid after the block."""
        self._file.flush()
        if not self._file.tell():
            return np.empty(0, self._dtype)
        return np.asarray(np.memmap(self._file, self._dtype, mode="r"))


@contextmanager
def scratch(folder: Path, dtype: DTypeLike) -> Iterator[Scratch]:
    """Yields an empty `Scratch` whose file is in `folder`."""
    with TemporaryFile(dir=folder) as file:
        yield Scratch(file, dtype)


def allocate(folder: Path, dtype: DTypeLike, count: int) -> NDArray[Any]:
    """Returns a writable array [count] of zeros, mapped from a temporary file in `folder`.

    Raises:
        OSError: If the disk is full. The space is reserved, so later writes cannot fail.
    """
    if not count:
        return np.empty(0, dtype)
    with TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, count * np.dtype(dtype).itemsize)
        return np.asarray(np.memmap(file, dtype, mode="r+"))
