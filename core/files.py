"""Whole files or none: checksums and atomic writes."""

import hashlib
import os
import shutil
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
    """Locks a folder that no other process may have locked; the kernel unlocks it at our end."""
    with (folder / ".lock").open("w") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            reason = "is locked by another process: wait until it ends"
            raise CareError.at(folder, reason, "locked") from error
        yield


@contextmanager
def writing_in(folder: Path) -> Iterator[None]:
    """Raises a CareError in place of any OSError: those of libraries do not name the folder."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or f"a file cannot be written whole ({error})"
        path = error.filename or folder
        raise CareError(f"{path}: {reason}", code="input_output", path=path) from error


@contextmanager
def new_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yields a hidden folder that becomes `folder` when the block succeeds.

    After an error `folder` is what it was before.

    Raises:
        CareError: If it exists and is not replaced; in place of any OSError.
    """
    if folder.exists() and not replace:
        raise CareError.at(folder, "exists already: name another folder", "folder_exists")
    temporary, earlier = (folder.with_name(f".{folder.name}.{end}") for end in ("tmp", "old"))
    with writing_in(folder):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            if replace and folder.exists():
                shutil.rmtree(earlier, ignore_errors=True)
                folder.rename(earlier)
            publish(temporary, folder)
            shutil.rmtree(earlier, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def publish(temporary: Path, folder: Path) -> None:
    """Renames a whole folder to its place, after its files have reached the disk."""
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    temporary.rename(folder)
    sync(folder.parent)
