"""Checks Office documents, which are ZIP archives of XML, before a library reads them."""

import zipfile
from typing import IO, BinaryIO
from xml.parsers import expat

from indexer import limits
from indexer.readers.source import UnreadableError

_OLE = bytes.fromhex("d0cf11e0a1b11ae1")
_PIECE = 64 * 1024


def check_package(stream: BinaryIO) -> None:
    """Raises `UnreadableError` for what is no Office document, encrypted, or built to do harm.

    Sizes and the number of parts are limited, and no part may declare entities: a few bytes of
    them expand to gigabytes, or name files of this machine.
    """
    stream.seek(0)
    if stream.read(len(_OLE)) == _OLE:
        raise UnreadableError(
            "is encrypted, or of an Office before 2007: save it again, without a password, as "
            ".docx or .xlsx",
            "encrypted",
        )
    try:
        with zipfile.ZipFile(stream) as package:
            check_sizes(package)
            for part in package.infolist():
                if part.filename.endswith((".xml", ".rels")):
                    with package.open(part) as opened:
                        _check_prolog(opened, part.filename)
    except zipfile.BadZipFile as error:
        raise UnreadableError(f"is damaged, or no Office document: {error}") from error
    stream.seek(0)


def check_sizes(package: zipfile.ZipFile) -> None:
    """Raises `UnreadableError` for too many files, or too large ones.

    Python reads no more of a file than the size that it claims.
    """
    files = package.infolist()
    if len(files) > limits.MAX_MEMBERS:
        raise UnreadableError(
            f"has {len(files)} files; the limit is {limits.MAX_MEMBERS}: split it", "too_many_files"
        )
    size = sum(file.file_size for file in files)
    if size > limits.MAX_UNPACKED_BYTES:
        raise UnreadableError(
            f"has {size / 1e9:,.1f} GB when unpacked; the limit is "
            f"{limits.MAX_UNPACKED_BYTES / 1e9:,.1f} GB: split it",
            "file_too_large",
        )


class _Root(Exception):  # noqa: N818
    """The root element is reached."""


def _check_prolog(stream: IO[bytes], part: str) -> None:
    parser = expat.ParserCreate()

    def doctype(*_: object) -> None:
        raise UnreadableError(
            f"declares entities in {part}, which no Office program writes: it is not read",
            "unsafe_file",
        )

    def root(*_: object) -> None:
        raise _Root

    parser.StartDoctypeDeclHandler = doctype
    parser.StartElementHandler = root
    try:
        while piece := stream.read(_PIECE):
            parser.Parse(piece)
    except _Root:
        return
    except expat.ExpatError as error:
        raise UnreadableError(f"is damaged: {part}: {error}") from error
