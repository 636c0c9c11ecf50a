"""Reads a corpus, JSONL or Parquet, record by record; invalid records become rejects."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from core.errors import CorpusError
from core.files import sha256_file
from core.text import normalize_text
from core.types import Document

_MAX_TEXT_CHARS, _MAX_CHUNKED_TEXT_CHARS = 100_000, 1_000_000
MAX_ID_CHARS = 512
MAX_METADATA_DEPTH = 32
# Longer lines are rejected without being read into memory.
MAX_LINE_BYTES = 16 * 1024 * 1024

# Exceptions of the JSON and Parquet readers for unreadable or malformed files.
READ_ERRORS = (OSError, ValueError, OverflowError, pa.ArrowException)

_SUFFIXES = (".jsonl", ".parquet")
_PARQUET_ROWS = 1024
_COLUMNS = ["_id", "id", "title", "text", "metadata"]


@dataclass(frozen=True, slots=True)
class Location:
    """A file and the number of a line (JSONL) or row (Parquet), from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file} line {self.line}"


@dataclass(frozen=True, slots=True)
class Reject:
    """Why a record cannot be indexed."""

    reason: str


Record = tuple[Location, Document | Reject]


def max_text_chars(*, chunked: bool) -> int:
    """Returns the maximum length of a text [characters], with and without chunking."""
    return _MAX_CHUNKED_TEXT_CHARS if chunked else _MAX_TEXT_CHARS


def corpus_files(corpus: str) -> list[Path]:
    """Returns the corpus files of a path, a folder or a glob, sorted.

    Raises:
        CorpusError: If no file is found, or a file is neither JSONL nor Parquet.
    """
    path = Path(corpus)
    if not corpus:
        raise CorpusError(
            "the corpus is not set: give a file, a folder or a glob", code="no_corpus"
        )
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
    elif path.is_file():
        files = [path]
    else:
        files = sorted(p for p in _glob(corpus) if p.is_file())
    if not files:
        found = "has no *.jsonl and no *.parquet file" if path.is_dir() else "does not exist"
        message = f"{corpus} {found}: give a file, a folder or a glob"
        raise CorpusError(message, code="corpus_missing", path=corpus)
    for file in files:
        if file.suffix not in _SUFFIXES:
            reason = "is not supported: use .jsonl or .parquet"
            raise CorpusError.at(file, reason, "unsupported_format")
    return files


def _glob(pattern: str) -> Iterator[Path]:
    path = Path(pattern)
    try:
        yield from Path(path.anchor).glob(str(path.relative_to(path.anchor)))
    except ValueError as error:
        raise CorpusError(
            f"{pattern} is not a valid glob pattern: {error}", code="bad_glob"
        ) from error


def corpus_checksum(files: list[Path]) -> str:
    """Returns the SHA-256 of the SHA-256 checksums of all files, in order."""
    digests = (bytes.fromhex(sha256_file(file)) for file in files)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def read_corpus(files: list[Path], max_chars: int = _MAX_TEXT_CHARS) -> Iterator[Record]:
    """Yields the location of each record, and its document or the reason why it is rejected.

    Args:
        files: JSONL and Parquet files.
        max_chars: Maximum length of a text [characters].

    Raises:
        CorpusError: If a file cannot be read.
    """
    for file in files:
        try:
            read = _read_parquet if file.suffix == ".parquet" else _read_jsonl
            for number, record in enumerate(read(file, max_chars), start=1):
                if record:
                    yield Location(str(file), number), record
        except READ_ERRORS as error:
            reason = " ".join(str(error).split())
            raise CorpusError.at(file, f"cannot be read: {reason}", "unreadable") from error


def read_byte_range(
    path: Path, start: int, end: int, max_chars: int
) -> Iterator[Document | Reject]:
    """Yields the records of the lines of a JSONL file that begin at a byte in [start, end)."""
    with path.open("rb") as file:
        if start:
            # Skip the rest of the line that begins before `start`.
            file.seek(start - 1)
            _skip_line(file)
        yield from filter(None, _parse_lines(file, end, max_chars))


def read_row_group(
    path: Path, group: int, rows: int, chosen: slice, max_chars: int
) -> Iterator[list[Document | Reject]]:
    """Yields batches of `rows` records of a row group of a Parquet file.

    Args:
        path: The Parquet file.
        group: Number of the row group.
        rows: Records per batch.
        chosen: Which batches to yield.
        max_chars: Maximum length of a text [characters].
    """
    file = pq.ParquetFile(path)
    batches = file.iter_batches(batch_size=rows, row_groups=[group], columns=_COLUMNS)
    for batch in islice(batches, chosen.start, chosen.stop, chosen.step):
        yield [_parse_row(row, max_chars) for row in batch.to_pylist()]


def _parse_row(row: Any, max_chars: int) -> Document | Reject:
    try:
        return _parse_record(row, max_chars)
    except _RecordError as fault:
        return Reject(str(fault))


def _read_jsonl(path: Path, max_chars: int) -> Iterator[Document | Reject | None]:
    with path.open("rb") as file:
        yield from _parse_lines(file, math.inf, max_chars)


def _parse_lines(file: BinaryIO, end: float, max_chars: int) -> Iterator[Document | Reject | None]:
    """Yields the records of the lines that begin before byte `end`; None for empty lines."""
    while (at := file.tell()) < end and (line := file.readline(MAX_LINE_BYTES)):
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            _skip_line(file)
            yield Reject(f"the line is longer than {MAX_LINE_BYTES} bytes")
        else:
            yield _parse_line(line, max_chars, first=at == 0) if line.strip() else None


def _skip_line(file: BinaryIO) -> None:
    """Reads to the end of a line of any length in bounded memory."""
    while (piece := file.readline(MAX_LINE_BYTES)) and not piece.endswith(b"\n"):
        pass


def _parse_line(line: bytes, max_chars: int, *, first: bool) -> Document | Reject:
    try:
        text = line.rstrip().decode("utf-8-sig" if first else "utf-8")
        return _parse_record(json.loads(text, parse_constant=_no_constant), max_chars)
    except UnicodeDecodeError as error:
        return Reject(f"the line is not UTF-8 (byte {error.start + 1})")
    except json.JSONDecodeError as error:
        return Reject(f"the line is not JSON: {error.msg} (column {error.colno})")
    except RecursionError:
        return Reject("the line is not JSON: nested too deeply")
    except _RecordError as fault:
        return Reject(str(fault))
    except ValueError:  # Python's limit on the digits of a whole number
        return Reject("the line is not JSON: a number has too many digits")


def _read_parquet(path: Path, max_chars: int) -> Iterator[Document | Reject]:
    # Other columns can be large, or have values that Python cannot represent.
    for batch in pq.ParquetFile(path).iter_batches(batch_size=_PARQUET_ROWS, columns=_COLUMNS):
        for row in batch.to_pylist():
            yield _parse_row(row, max_chars)


class _RecordError(ValueError):
    """A record is invalid; the message is the reason."""


def _no_constant(name: str) -> NoReturn:
    raise _RecordError(f"the line is not JSON: {name} is not a JSON number")


def _parse_record(record: Any, max_chars: int) -> Document:
    if not isinstance(record, dict):
        raise _RecordError("the line is not a JSON object")
    document = Document(
        id=_id(record),
        title=_string(record, "title", default=""),
        text=_string(record, "text"),
        metadata=_metadata(record),
    )
    if not normalize_text(document.text):
        raise _RecordError("text is empty")
    if len(document.text) > max_chars:
        raise _RecordError(
            f"text has {len(document.text)} characters; the limit is {max_chars}: split it"
        )
    return document


def _id(record: dict[str, Any]) -> str:
    value = record.get("_id", record.get("id"))
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise _RecordError(
            "_id is missing" if value in (None, "") else "_id is neither a string nor an integer"
        )
    if len(value) > MAX_ID_CHARS or not value.isprintable():
        raise _RecordError(f"_id has more than {MAX_ID_CHARS} characters or is not printable")
    return value


def _string(record: dict[str, Any], field: str, default: str | None = None) -> str:
    value = default if record.get(field) is None else record[field]
    if value is None:
        raise _RecordError(f"{field} is missing")
    if not isinstance(value, str):
        raise _RecordError(f"{field} is not a string")
    return _encodable(field, value)


def _metadata(record: dict[str, Any]) -> dict[str, Any]:
    value = record.get("metadata")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _RecordError("metadata is not an object")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _RecordError(f"metadata cannot be written as JSON: {error}") from error
    if _is_deeper(value, MAX_METADATA_DEPTH):
        raise _RecordError(f"metadata is nested more than {MAX_METADATA_DEPTH} levels deep")
    _encodable("metadata", text)
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)


def _encodable(field: str, value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise _RecordError(f"{field} contains an unpaired surrogate") from error
    return value
