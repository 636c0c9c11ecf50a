"""Temporary folders, and arrays in unnamed temporary files for more records than fit into memory.

The kernel can evict the mapped pages of the arrays from memory. Their files are deleted when the
process ends, even if it is killed; a temporary folder at the latest when the next one is made.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISDIR
from tempfile import TemporaryFile, gettempdir, mkdtemp
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from core.errors import CareError
from core.files import remove_folder
from core.locks import exclusive

_PREFIX = "care-tmp-"
# Time for another process to see that a new folder is in use [s].
_WAIT = 10.0


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


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yields an empty temporary folder, which is removed when the block ends.

    The folder is locked in the meantime. Folders that killed processes left in `parent`, whose
    locks the kernel has released, are removed first.

    Args:
        parent: Folder to make it in; by default that of the system (`TMPDIR`).
    """
    parent = parent or Path(gettempdir())
    for left in parent.glob(f"{_PREFIX}*"):
        with suppress(CareError, OSError):
            facts = left.lstat()
            if S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
                with exclusive(left, "remove it"):
                    remove_folder(left)
    folder = Path(mkdtemp(prefix=_PREFIX, dir=parent))
    with exclusive(folder, "use it", wait=_WAIT):
        content = folder / "content"
        content.mkdir()
        try:
            yield content
        finally:
            remove_folder(folder)
