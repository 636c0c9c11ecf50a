"""Checksums, bounded reads and atomic writes of files and folders."""

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path

from core.errors import CareError
from core.locks import exclusive

# The default limit of files that a process reads whole, such as manifests and recipes [bytes].
SMALL_BYTES = 64 << 20

_TOKEN_BYTES = 8
_TEMPORARY = f".*.{'[0-9a-f]' * 2 * _TOKEN_BYTES}.tmp"


def open_regular(path: Path, *, links: bool = True) -> BufferedReader:
    """Opens a regular file, or a symbolic link to one if `links`, for reading.

    A FIFO or a device, for which a reader could wait for ever, raises OSError.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_small(path: Path, limit: int = SMALL_BYTES, *, links: bool = True) -> bytes:
    """Returns the content of a regular file; see `open_regular`.

    Raises:
        OSError: If it cannot be read, or is larger than `limit` bytes (`errno.EFBIG`).
    """
    with open_regular(path, links=links) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes", str(path))
    return content


def relative_path(path: Path, folder: Path) -> Path:
    """Returns a path relative to a folder, which holds also if symbolic links lead to either."""
    return Path(os.path.relpath(path.parent.resolve() / path.name, folder.resolve()))


def sha256_file(path: Path) -> str:
    """Returns the SHA-256 of a regular file as 64 hexadecimal digits."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flushes a file or folder to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic(path: Path, *, flushed: bool = False) -> Iterator[Path]:
    """Yields a temporary path in the same folder; it replaces `path` when the block succeeds.

    After an error or a kill, `path` is unchanged; a folder, device or pipe is an OSError. The
    temporary name is unique, so processes that write the same file do not disturb each other: the
    last one wins. A killed process leaves its temporary file to `remove_temporary`. With `flushed`
    the block flushes the file to disk.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.ENOTSUP, "is a device or pipe, not a file", str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(_TOKEN_BYTES)}.tmp")
    try:
        yield temporary
        if not flushed:
            sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a small UTF-8 file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def remove_temporary(folder: Path) -> None:
    """Removes the temporary files of killed processes from a folder.

    The caller holds the lock under which files of the folder are written.
    """
    for path in folder.glob(_TEMPORARY):
        path.unlink(missing_ok=True)


def remove_folder(folder: Path) -> None:
    """Removes a folder with its content; other processes may remove it at the same time."""

    def check(function: object, path: str, caught: tuple[type, BaseException, object]) -> None:
        if not isinstance(caught[1], FileNotFoundError):
            raise caught[1]

    shutil.rmtree(folder, onerror=check)


@contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """Turns an OSError of the block into a CareError that names the folder.

    The errors of some libraries name no path.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or f"a file cannot be written completely ({error})"
        path = error.filename or folder
        raise CareError(f"{path}: {reason}", code="input_output", path=path) from error


@contextmanager
def new_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields a hidden folder that is renamed to `folder` when the block succeeds.

    After an error, `folder` is unchanged. What a killed process left is removed; a folder that it
    was replacing is put back.

    Raises:
        CareError: If `folder` exists and `replace` is false, another process writes it, or a file
            cannot be written.
    """
    temporary, earlier = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    lock = f".{folder.name}.lock"
    with writing_in(folder), exclusive(folder.parent, f"write {folder.name}", lock):
        try:
            if earlier.exists() and not folder.exists():
                earlier.rename(folder)
            if folder.exists() and not replace:
                raise CareError.at(folder, "already exists: choose another folder", "folder_exists")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            yield temporary
            sync_folder(temporary)
            if replace and folder.exists():
                shutil.rmtree(earlier, ignore_errors=True)
                folder.rename(earlier)
            temporary.rename(folder)
            sync(folder.parent)
            shutil.rmtree(earlier, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):
                (folder.parent / lock).unlink()


def sync_folder(folder: Path) -> None:
    """Flushes a folder and everything in it to disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def publish(temporary: Path, folder: Path) -> None:
    """Flushes all files of a folder to disk, then renames it to its final path."""
    sync_folder(temporary)
    temporary.rename(folder)
    sync(folder.parent)
