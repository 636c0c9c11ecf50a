"""Finds the files of a corpus and reads them record by record.

JSONL and Parquet with the fields of a corpus are read here; other files in a child process.
"""

import hashlib
import json
import logging
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from core.errors import CorpusError, ProviderError
from core.files import sha256_file
from core.records import open_lines
from core.types import Document
from indexer import limits
from indexer.readers.archives import is_hidden
from indexer.readers.fields import FieldNames, known_text
from indexer.readers.formats import SHOWN, advice, format_of
from indexer.readers.process import ReaderProcess
from indexer.readers.source import Report, UnreadableError
from indexer.records import FIELDS, Reject, count_ignored, parse_line, parse_record, parse_row

# Exceptions of the JSON, gzip and Parquet readers for unreadable or malformed files.
READ_ERRORS = (OSError, EOFError, ValueError, OverflowError, zlib.error, pa.ArrowException)

PARQUET, _GZIP = ".parquet", ".gz"
_SUFFIXES = (".jsonl", f".jsonl{_GZIP}", PARQUET)
# Files that `datasets` writes beside the rows of a data set.
_DATASET = ("dataset_info.json", "dataset_dict.json", "state.json")
# Part of the checksum of a corpus of other formats: other readers give other records.
_READERS = 3
# Rows and bytes that are read at a time.
_PARQUET_ROWS, _PARQUET_BYTES = 1024, 64 * 1024 * 1024
_COLUMNS = list(FIELDS)
# Files that a warning names.
_NAMED = 5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Location:
    """A file and the number of a line, row, page or section, from 1; 0 for the whole file."""

    file: str
    line: int

    def __str__(self) -> str:
        format_ = format_of(self.file)
        unit = format_.unit if format_ else "line"
        return f"{self.file} {unit} {self.line}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Reading:
    """How the files of a corpus are read that have other fields than a corpus."""

    root: Path | None = None  # generated ids begin with the path of the file below it
    fields: FieldNames = FieldNames()  # noqa: RUF009
    ocr: bool = False  # whether the text of scanned pages is recognized

    def name(self, file: Path) -> str:
        within = self.root is not None and file.is_relative_to(self.root)
        return file.relative_to(self.root).as_posix() if within and self.root else file.name


Record = tuple[Location, Document | Reject]


def corpus_files(corpus: str) -> list[Path]:
    """Returns the corpus files of a path, a folder or a glob, sorted.

    A folder gives the files below it of all formats that are read, except symbolic links to files
    outside of it. A path and a glob follow links.

    Raises:
        CorpusError: If no file is found, or a file is of another format.
    """
    path = Path(corpus)
    if not corpus:
        raise CorpusError(
            "the corpus is not set: give a file, a folder or a glob", code="no_corpus"
        )
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if _belongs_to(path, p))
    elif path.is_file():
        files = [path]
    else:
        files = sorted(p for p in _glob(corpus) if p.is_file())
    if not files:
        found = f"has no file of {SHOWN}" if path.is_dir() else "is not a file or does not exist"
        message = f"{corpus} {found}: give a file, a folder or a glob"
        if links := sorted(p.name for p in path.rglob("*") if p.is_symlink() and p.exists()):
            more = f" and {len(links) - _NAMED} more" if len(links) > _NAMED else ""
            message += (
                f". Links that lead out of the folder are not followed: "
                f"{', '.join(links[:_NAMED])}{more}; a glob follows them"
            )
        raise CorpusError(message, code="corpus_missing", path=corpus)
    for file in files:
        if format_of(file.name) is None:
            raise CorpusError.at(file, advice(file.name), "unsupported_format")
    return files


def corpus_root(corpus: str) -> Path:
    """Returns the folder below which the files of a corpus have their names."""
    path = Path(corpus)
    if path.is_dir():
        return path
    root = path.parent
    while not root.is_dir() and root != root.parent:
        root = root.parent
    return root


def warn_about_unread(corpus: str) -> None:
    """Logs a warning that names files of a corpus folder that are not read, if there are any.

    Hidden files and folders are not named.
    """
    folder = Path(corpus)
    if not folder.is_dir():
        return
    unread = [
        str(name)
        for path, name in sorted((path, path.relative_to(folder)) for path in folder.rglob("*"))
        if not any(part.startswith(".") for part in name.parts)
        and (path.is_symlink() or not path.is_dir())
        and not _belongs_to(folder, path)
    ]
    if unread:
        more = f" and {len(unread) - _NAMED} more" if len(unread) > _NAMED else ""
        _log.warning(
            "%s: not read: files other than %s, special files, and links out of the folder: %s%s",
            folder,
            SHOWN,
            ", ".join(unread[:_NAMED]),
            more,
        )


def _belongs_to(folder: Path, path: Path) -> bool:
    return (
        (path.name.endswith(_SUFFIXES) or _is_other(path.relative_to(folder)))
        and path.is_file()
        and path.resolve().is_relative_to(folder.resolve())
    )


def _is_other(name: PurePath) -> bool:
    """Returns whether a file of a folder is one of the other formats, and no file of a system."""
    of_dataset = name.name in _DATASET or name.match("cache-*.arrow")
    return format_of(name.name) is not None and not is_hidden(name.parts) and not of_dataset


def _glob(pattern: str) -> Iterator[Path]:
    path = Path(pattern)
    try:
        yield from Path(path.anchor).glob(str(path.relative_to(path.anchor)))
    except ValueError as error:
        raise CorpusError(
            f"{pattern} is not a valid glob pattern: {error}", code="bad_glob"
        ) from error


def corpus_checksum(files: list[Path], reading: Reading | None = None) -> str:
    """Returns the SHA-256 of the SHA-256 checksums of all files, in order.

    It also depends on names, fields and OCR if files are of other formats.
    """
    reading = reading or Reading()
    digests = b"".join(bytes.fromhex(sha256_file(file)) for file in files)
    if others := [reading.name(file) for file in files if not has_corpus_fields(file, reading)]:
        facts = [_READERS, others, asdict(reading.fields), reading.ocr]
        digests += json.dumps(facts, ensure_ascii=False).encode()
    return hashlib.sha256(digests).hexdigest()


def has_corpus_fields(file: Path, reading: Reading) -> bool:
    """Returns whether a file is JSONL or Parquet with the fields of a corpus."""
    if not file.name.endswith(_SUFFIXES) or reading.fields:
        return False
    try:
        if file.suffix == PARQUET:
            names = pq.read_schema(file).names
        else:
            with open_lines(file) as lines:
                read = iter(lambda: lines.readline(limits.MAX_RECORD_BYTES), b"")
                first = json.loads(next(filter(bytes.strip, read), b"").decode("utf-8-sig"))
            names = list(first) if isinstance(first, dict) else []
    except (*READ_ERRORS, RecursionError):
        return True  # whose reader says what is wrong
    return "text" in names or not known_text(names)


def read_corpus(
    files: list[Path],
    max_chars: int = limits.MAX_TEXT_CHARS,
    ignored: Counter[str] | None = None,
    reading: Reading | None = None,
    report: Callable[[Report], None] = lambda _: None,
    process: ReaderProcess | None = None,
) -> Iterator[Record]:
    """Yields the location of each record, and its document or the reason why it is rejected.

    CorpusError if a file of records cannot be read, or the only file.

    Args:
        files: Files of all formats.
        max_chars: Maximum length of a text [characters].
        ignored: Counts the records by the names of fields that are not read.
        reading: How files are read that do not have the fields of a corpus.
        report: Takes how such a file is read, before its records.
        process: Reads such files, instead of a process of this call.
    """
    ignored = Counter() if ignored is None else ignored
    reading = reading or Reading()
    with nullcontext(process) if process else ReaderProcess() as process:
        for file in files:
            if has_corpus_fields(file, reading):
                yield from _read_records(file, max_chars, ignored)
                continue
            found = _read_other(process, file, reading, max_chars, report)
            try:
                yield from found
            except UnreadableError as error:
                if error.code == "not_installed":
                    raise ProviderError(f"{file} {error}", code=error.code, path=file) from error
                if len(files) == 1:
                    raise CorpusError.at(file, str(error), error.code) from error
                if error.code != "empty_file":  # as an empty file of JSONL
                    yield Location(str(file), 0), Reject(str(error))


def _read_other(
    process: ReaderProcess,
    file: Path,
    reading: Reading,
    max_chars: int,
    report: Callable[[Report], None],
) -> Iterator[Record]:
    own = reading.name(file)
    for found in process.read(file, own, reading.fields, ocr=reading.ocr):
        if isinstance(found, Report):
            report(found)
            continue
        name, number, content = found
        place = Location(f"{file}{name.removeprefix(own)}", number)
        if isinstance(content, str):
            yield place, Reject(content)
        else:
            yield place, parse_record(content, max_chars)


def _read_records(file: Path, max_chars: int, ignored: Counter[str]) -> Iterator[Record]:
    try:
        read = _read_parquet if file.suffix == PARQUET else _read_jsonl
        for number, record in enumerate(read(file, max_chars, ignored), start=1):
            if record:
                yield Location(str(file), number), record
    except READ_ERRORS as error:
        reason = " ".join(str(error).split())
        raise CorpusError.at(file, f"cannot be read: {reason}", "unreadable") from error


def read_byte_range(
    file: BinaryIO, start: int, end: int, max_chars: int
) -> Iterator[Document | Reject]:
    """Yields the records of the lines of a JSONL file that begin at a byte in [start, end).

    The file is opened by `open_lines`; a text has at most `max_chars` characters.
    """
    # Skip the rest of the line that begins before `start`.
    file.seek(max(start - 1, 0))
    if start:
        _skip_line(file)
    yield from filter(None, _parse_lines(file, end, max_chars, Counter()))


def read_row_group(
    path: Path, group: int, rows: int, chosen: slice, max_chars: int
) -> Iterator[list[Document | Reject]]:
    """Yields batches of `rows` records of the row group number `group` of a Parquet file.

    `chosen` says which batches; a text has at most `max_chars` characters.
    """
    file = pq.ParquetFile(path)
    batches = file.iter_batches(batch_size=rows, row_groups=[group], columns=_COLUMNS)
    for batch in islice(batches, chosen.start, chosen.stop, chosen.step):
        yield list(_parse_batch(batch, max_chars))


def _read_jsonl(
    path: Path, max_chars: int, ignored: Counter[str]
) -> Iterator[Document | Reject | None]:
    with open_lines(path) as file:
        yield from _parse_lines(file, math.inf, max_chars, ignored)


def _parse_lines(
    file: BinaryIO, end: float, max_chars: int, ignored: Counter[str]
) -> Iterator[Document | Reject | None]:
    """Yields the records of the lines that begin before byte `end`; None for empty lines."""
    limit = limits.MAX_RECORD_BYTES
    while (at := file.tell()) < end and (line := file.readline(limit)):
        if len(line) == limit and not line.endswith(b"\n"):
            _skip_line(file)
            yield Reject(f"the line is longer than {limit} bytes")
        else:
            first = at == 0
            yield parse_line(line, max_chars, ignored, first=first) if line.strip() else None


def _skip_line(file: BinaryIO) -> None:
    """Reads to the end of a line of any length in bounded memory."""
    while (piece := file.readline(limits.MAX_RECORD_BYTES)) and not piece.endswith(b"\n"):
        pass


def _read_parquet(path: Path, max_chars: int, ignored: Counter[str]) -> Iterator[Document | Reject]:
    file = pq.ParquetFile(path)
    count_ignored(ignored, file.schema_arrow.names, file.metadata.num_rows)
    for number in range(file.num_row_groups):
        rows = _rows_at_a_time(file.metadata.row_group(number))
        # Other columns can be large, or have values that Python cannot represent.
        for batch in file.iter_batches(batch_size=rows, row_groups=[number], columns=_COLUMNS):
            yield from _parse_batch(batch, max_chars)


def _rows_at_a_time(group: pq.RowGroupMetaData) -> int:
    columns = [group.column(number) for number in range(group.num_columns)]
    size: int = sum(
        column.total_uncompressed_size
        for column in columns
        if column.path_in_schema.split(".")[0] in _COLUMNS
    )
    fitting: int = _PARQUET_BYTES * group.num_rows // max(size, 1)
    return max(1, min(_PARQUET_ROWS, fitting))


def _parse_batch(batch: pa.RecordBatch, max_chars: int) -> Iterator[Document | Reject]:
    limit = limits.MAX_RECORD_BYTES
    if batch.nbytes <= limit:
        yield from (parse_row(row, max_chars) for row in batch.to_pylist(maps_as_pydicts="lossy"))
        return
    for row in (batch.slice(number, 1) for number in range(len(batch))):
        if row.nbytes > limit:
            yield Reject(f"the row is longer than {limit} bytes")
        else:
            yield parse_row(row.to_pylist(maps_as_pydicts="lossy")[0], max_chars)
