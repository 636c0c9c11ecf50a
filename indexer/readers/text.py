"""Text files: their encoding, found by their bytes, and plain text."""

import codecs
import io
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePosixPath
from typing import BinaryIO

from indexer import limits
from indexer.readers.passages import Section, passages
from indexer.readers.source import Item, Report, Source, UnreadableError

_SAMPLE = 64 * 1024
_PIECE = 1 << 20
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SHOWN = {"utf-8": "", "utf-8-sig": "UTF-8 with byte order mark", "gb18030": "GB18030"}
# Other encodings that a page may declare; not all that Python has, some of which decompress.
_DECLARED = {"big5", "big5-hkscs", "iso-8859-1", "windows-1252", "us-ascii"}
# Share of frequent characters below which a text is in another encoding.
_FREQUENT = 0.7
_META = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_-]{2,20})", re.IGNORECASE)


def shown(encoding: str) -> str:
    """Returns an encoding as a report names it; empty for plain UTF-8."""
    return _SHOWN.get(encoding, encoding.upper())


def detect(stream: BinaryIO, *, html: bool = False) -> str:
    """Returns the encoding of a text: by its mark, or the first that decodes all of it.

    With `html` the encoding that the page declares is tried after UTF-8. UnreadableError if the
    text is empty, or neither in UTF-8, UTF-16 nor GB18030.
    """
    stream.seek(0)
    sample = stream.read(_SAMPLE)
    if not sample.strip():
        raise UnreadableError("is empty", "empty_file")
    declared = _META.search(sample[:4096]) if html else None
    candidates = ["utf-8", "gb18030"]
    if declared:
        name = declared[1].decode().lower()
        candidates.insert(1, name if name in _DECLARED else "utf-8")
    mark = next((encoding for bom, encoding in _MARKS if sample.startswith(bom)), None)
    if mark:
        candidates = [mark]
    elif b"\0" in sample:
        candidates = [name for name in ("utf-16-le", "utf-16-be") if _is_text(sample, name)]
    for encoding in candidates:
        if _decodes(stream, encoding) and (encoding != "gb18030" or _is_chinese(sample)):
            stream.seek(0)
            return encoding
    if b"\0" in sample and not mark:
        raise UnreadableError("has NUL characters: it is no text file, or damaged", "not_text")
    raise UnreadableError(
        f"is neither in UTF-8 (line {_bad_line(stream)} is not), UTF-16 nor GB18030: save it as "
        "UTF-8, or correct the line if it alone is wrong",
        "unknown_encoding",
    )


def _decodes(stream: BinaryIO, encoding: str) -> bool:
    stream.seek(0)
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
        while piece := stream.read(_PIECE):
            decoder.decode(piece)
        decoder.decode(b"", final=True)
    except (UnicodeError, LookupError):
        return False
    return True


def _bad_line(stream: BinaryIO) -> int:
    """Returns the number of the first line that is not UTF-8."""
    stream.seek(0)
    number = 1
    decoder = codecs.getincrementaldecoder("utf-8")()
    with suppress(UnicodeDecodeError):
        while line := stream.readline(_PIECE):
            decoder.decode(line)
            number += line.endswith(b"\n")
    return number


def _is_text(sample: bytes, encoding: str) -> bool:
    text = sample[: len(sample) // 2 * 2].decode(encoding, errors="replace")
    return "\0" not in text and _frequent(text) >= _FREQUENT


def _is_chinese(sample: bytes) -> bool:
    """Returns whether GB18030 gives frequent characters: nearly any bytes of Big5 are valid too."""
    return _frequent(sample.decode("gb18030", errors="ignore")) >= _FREQUENT


def _frequent(text: str) -> float:
    """Returns the share of frequent characters among those that are not in ASCII."""
    others = [character for character in text if not character.isascii()]
    codes = [character.encode("gb2312", errors="ignore") for character in others]
    # Symbols and punctuation are in rows A1 to A9, characters by frequency of use in B0 to D7.
    frequent = sum(bool(code) and code[0] <= 0xD7 for code in codes)
    return frequent / len(others) if others else 1.0


def open_text(source: Source) -> tuple[io.TextIOWrapper, str]:
    """Returns a text with line ends as they are, and its encoding."""
    encoding = detect(source.stream)
    return io.TextIOWrapper(source.stream, encoding=encoding, newline=""), encoding


def read_text(source: Source, *, html: bool = False) -> tuple[str, str]:
    """Returns the whole text of a document, and its encoding."""
    size = source.stream.seek(0, io.SEEK_END)
    if size > limits.MAX_DOCUMENT_BYTES:
        most = limits.MAX_DOCUMENT_BYTES >> 20
        raise UnreadableError(f"is larger than {most} MiB: split it", "file_too_large")
    encoding = detect(source.stream, html=html)
    return source.stream.read().decode(encoding), encoding


def read_plain(source: Source) -> Iterator[Item]:
    """Reads plain text: paragraphs, packed into passages."""
    text, encoding = read_text(source)
    source.report(Report(source.name, "text", shown(encoding)))
    blocks = [block for block in text.replace("\r\n", "\n").split("\n") if block.strip()]
    title = PurePosixPath(source.name).stem
    yield from passages(source.name, [Section(title, blocks)])
