"""Whole files or none: checksums and atomic writes."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from core.errors import CareError


def sha256_file(path: Path) -> str:
    """Returns the SHA-256 of a file as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Forces a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path` that replaces it when the block succeeds.

    After an error or a kill `path` is what it was before.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a small UTF-8 file atomically."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Holds a folder against other processes; the kernel lets go when the process ends.

    Raises:
        CareError: If another process holds it.
    """
    with (folder / ".lock").open("w") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            raise CareError(
                f"another command is at work in {folder}: wait for it to end"
            ) from error
        yield


@contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """Says in one sentence where the disk failed; the errors of libraries name no file.

    Raises:
        CareError: In place of any OSError.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or f"a file cannot be written whole ({error})"
        raise CareError(f"{error.filename or folder}: {reason}") from error
