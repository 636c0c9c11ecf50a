"""ZIP and tar archives, and gzip; nothing is written under a name of an archive."""

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import PurePosixPath
from tempfile import TemporaryFile
from typing import IO, BinaryIO, cast

from indexer import limits
from indexer.readers.office import check_sizes
from indexer.readers.source import UnreadableError

# The name of a file of an archive, and its content or the reason why it is not read.
Member = tuple[str, BinaryIO | str]

_PIECE = 1 << 20
_DAMAGED = (zipfile.BadZipFile, tarfile.TarError, LZMAError, zlib.error, EOFError, OSError)
_LINK = "is a link: put the file itself into the archive"


def zip_members(stream: BinaryIO) -> Iterator[Member]:
    """Yields the files of a ZIP archive; names that are not in UTF-8 are in GB18030."""
    with _unreadable("ZIP archive"), _open_zip(stream) as archive:
        check_sizes(archive)
        unpacked = _Unpacked()
        for member in archive.infolist():
            name = member.filename
            if member.is_dir() or _is_hidden(name):
                continue
            if _leads_out(name):
                yield name, "has a path that leads out of the archive"
            elif member.external_attr >> 28 == 0o12:
                yield name, _LINK
            elif member.flag_bits & 1:
                yield name, "is encrypted: save the archive without a password"
            else:
                try:
                    with archive.open(member) as opened:
                        copy = unpacked.copy(opened)
                except (*_DAMAGED, NotImplementedError) as error:
                    yield name, f"is damaged, or of an unknown compression: {error}"
                    continue
                with copy:
                    yield name, copy


def tar_members(stream: BinaryIO) -> Iterator[Member]:
    """Yields the files of a tar archive, also of a compressed one."""
    unpacked = _Unpacked()
    with _unreadable("tar archive"), tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            name = member.name
            if member.isdir() or _is_hidden(name):
                continue
            if _leads_out(name):
                yield name, "has a path that leads out of the archive"
            elif not member.isreg():
                yield name, _LINK
            elif (opened := archive.extractfile(member)) is not None:
                with unpacked.copy(opened) as copy:
                    yield name, copy


@contextmanager
def unzipped(stream: BinaryIO) -> Iterator[BinaryIO]:
    """Yields the content of a gzip file."""
    with _unreadable("gzip file"), gzip.open(stream) as opened:
        copy = _Unpacked().copy(cast("IO[bytes]", opened))
    with copy:
        yield copy


class _Unpacked:
    """Copies files of an archive to unnamed files; the archive's claims of sizes can be wrong."""

    def __init__(self) -> None:
        self._files = self._bytes = 0

    def copy(self, opened: IO[bytes]) -> BinaryIO:
        self._files += 1
        if self._files > limits.MAX_MEMBERS:
            raise UnreadableError(
                f"has more than {limits.MAX_MEMBERS} files: split it", "too_many_files"
            )
        copy = cast("BinaryIO", TemporaryFile())  # noqa: SIM115  # closed by the caller
        while piece := opened.read(_PIECE):
            self._bytes += len(piece)
            if self._bytes > limits.MAX_UNPACKED_BYTES:
                raise UnreadableError(
                    f"has more than {limits.MAX_UNPACKED_BYTES / 1e9:,.1f} GB when unpacked: "
                    "split it",
                    "file_too_large",
                )
            copy.write(piece)
        copy.seek(0)
        return copy


@contextmanager
def _unreadable(what: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGED as error:
        raise UnreadableError(f"is damaged, or no {what}: {error}") from error


def _open_zip(stream: BinaryIO) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(stream, metadata_encoding="gb18030")
    except UnicodeDecodeError:
        return zipfile.ZipFile(stream)


def _leads_out(name: str) -> bool:
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts


def _is_hidden(name: str) -> bool:
    """Returns whether a file is one of those that systems add."""
    return is_hidden(PurePosixPath(name.replace("\\", "/")).parts)


def is_hidden(parts: tuple[str, ...]) -> bool:
    """Returns whether a path, in its parts, is hidden or a lock file of an Office program."""
    return any(part.startswith((".", "~$")) or part == "__MACOSX" for part in parts if part != "..")
