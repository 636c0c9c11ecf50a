"""Checksums, locks and atomic writes of files and folders."""

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
    """Flushes a file or folder to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder; it replaces `path` when the block succeeds.

    After an error or a kill, `path` is unchanged.
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
    """Locks a folder while the block runs; the kernel releases the lock if the process ends.

    Raises:
        CareError: If another process holds the lock.
    """
    with (folder / ".lock").open("w") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            reason = "is locked by another process: wait until it ends"
            raise CareError.at(folder, reason, "locked") from error
        yield


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

    After an error, `folder` is unchanged.

    Raises:
        CareError: If `folder` exists and `replace` is false, or a file cannot be written.
    """
    if folder.exists() and not replace:
        raise CareError.at(folder, "already exists: choose another folder", "folder_exists")
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
    """Flushes all files of a folder to disk, then renames it to its final path."""
    for path in (*temporary.rglob("*"), temporary):
        sync(path)
    temporary.rename(folder)
    sync(folder.parent)
