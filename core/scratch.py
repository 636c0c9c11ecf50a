"""Records that are too many for memory, in files without a name, which a kill leaves no trace of.

What is mapped from them is the kernel's to drop from memory.
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
    """Records of one dtype, appended one after the other to an empty file."""

    def __init__(self, file: IO[bytes], dtype: DTypeLike) -> None:
        self._file = file
        self._dtype = np.dtype(dtype)

    def append(self, records: bytes | memoryview) -> None:
        """Appends records by their bytes."""
        self._file.write(records)

    def array(self) -> NDArray[Any]:
        """Returns the records [n], mapped from the file; they outlive it."""
        self._file.flush()
        if not self._file.tell():
            return np.empty(0, self._dtype)
        return np.asarray(np.memmap(self._file, self._dtype, mode="r"))


@contextmanager
def scratch(folder: Path, dtype: DTypeLike) -> Iterator[Scratch]:
    """Yields an empty `Scratch` that takes its space in `folder`."""
    with TemporaryFile(dir=folder) as file:
        yield Scratch(file, dtype)


def allocate(folder: Path, dtype: DTypeLike, count: int) -> NDArray[Any]:
    """Returns records [count] to be written, all zero, mapped from a file.

    Raises:
        OSError: If there is no space; never later, when they are written.
    """
    if not count:
        return np.empty(0, dtype)
    with TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, count * np.dtype(dtype).itemsize)
        return np.asarray(np.memmap(file, dtype, mode="r+"))
