"""Temporary folders, and arrays in unnamed temporary files for more records than fit into memory.

The kernel can evict the mapped pages of the arrays from memory. Their files are deleted when the
process ends, even if it is killed; a temporary folder at the latest when the next one is made.
"""

import atexit
import errno
import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile, gettempdir, mkdtemp
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from core.files import remove_folder

_PREFIX = "care-tmp-"
# Where small files are kept in memory, and the room that must be left there [bytes].
_MEMORY, _ROOM = Path("/dev/shm"), 16 << 20


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
        OSError: If the disk is full. On Linux the space is reserved, so later writes cannot fail.
    """
    if not count:
        return np.empty(0, dtype)
    with TemporaryFile(dir=folder) as file:
        size = count * np.dtype(dtype).itemsize
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:  # macOS
            file.truncate(size)
        return np.asarray(np.memmap(file, dtype, mode="r+"))


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yields an empty temporary folder, in `parent` or that of the system (`TMPDIR`).

    It is removed when the block ends, and locked in the meantime. Folders that killed processes
    left in the same place, whose locks the kernel has released, are removed first.
    """
    try:
        parent = parent or Path(gettempdir())
    except FileNotFoundError as error:
        message = "no folder for temporary files can be written: free some space, or set TMPDIR"
        raise OSError(errno.ENOSPC, message) from error
    for left in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), _locked(left) as facts:
            if facts.st_uid == os.geteuid():
                remove_folder(left)
    with ExitStack() as stack:
        while True:
            folder = Path(mkdtemp(prefix=_PREFIX, dir=parent))
            try:
                facts = stack.enter_context(_locked(folder))
                if os.path.samestat(facts, folder.stat()):
                    break
            except (BlockingIOError, FileNotFoundError):
                pass  # another process has found it before it was locked, and removes it
            except OSError:
                break  # the file system has no locks of folders, so others cannot remove it
        try:
            yield folder
        finally:
            remove_folder(folder)


class MemoryFolder:
    """An empty folder in memory or, where none has room, on disk; removed with this object."""

    def __init__(self) -> None:
        in_memory = os.access(_MEMORY, os.W_OK | os.X_OK)
        in_memory = in_memory and shutil.disk_usage(_MEMORY).free > _ROOM
        self.path = Path(mkdtemp(dir=_folder_of_process(_MEMORY if in_memory else None)))
        weakref.finalize(self, remove_folder, self.path)


@cache
def _folder_of_process(parent: Path | None) -> Path:
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(temporary_folder(parent))


@contextmanager
def _locked(folder: Path) -> Iterator[os.stat_result]:
    """Locks a folder itself, without a file in it; raises `BlockingIOError` if it is locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
        yield os.fstat(descriptor)
    finally:
        os.close(descriptor)
