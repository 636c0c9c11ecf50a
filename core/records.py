"""Reading and writing JSONL, JSON, TSV and CSV files, and reading YAML; writes are atomic.

Files that cannot be read, and values that are not what a function returns, are `DataError`s at the
file or its line.
"""

import codecs
import csv
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from core.errors import DataError
from core.files import atomic, read_small
from core.text import document_text, normalize_text

# First characters of formulas in spreadsheet programs.
_FORMULA = ("=", "+", "-", "@")
# A line: the longest text of a corpus (a million characters of up to 12 bytes, escaped) with title
# and metadata.
MAX_LINE_BYTES = 16 << 20


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields line numbers, starting at 1, and records; empty lines are skipped.

    A file whose name ends with `.gz` is decompressed as it is read.
    """
    for number, line in read_lines(path):
        try:
            record = parse_json(line)
        except json.JSONDecodeError as error:
            reason = f"is not valid JSON: {error.msg} (column {error.colno})"
            raise record_error(path, number, reason, code="not_json") from error
        except ValueError as error:
            reason = f"is not valid JSON: {error}"
            raise record_error(path, number, reason, code="not_json") from error
        if not isinstance(record, dict):
            raise record_error(path, number, "is not a JSON object", code="not_json")
        yield number, record


def read_tsv(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields line numbers, starting at 1, and the fields of lines; empty lines are skipped.

    Quotes have no meaning: a field is what is between two tabs.
    """
    for number, line in read_lines(path):
        yield number, line.rstrip("\r\n").split("\t")


def open_lines(path: Path) -> BinaryIO:
    """Opens a file of lines; one compressed by gzip is decompressed piece by piece as it is read.

    Positions are those in the decompressed file.
    """
    return cast("BinaryIO", gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the number and text of each line that is not empty, without a byte order mark."""
    number = 0
    try:
        with open_lines(path) as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    reason = f"is longer than {MAX_LINE_BYTES} bytes: split it"
                    raise record_error(path, number, reason, code="line_too_long")
                if line.strip():
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 (byte {error.start + 1}): {other_encoding(error.object)}"
        raise record_error(path, number, reason, code="not_utf8") from error
    except (EOFError, zlib.error) as error:
        raise DataError.at(path, f"is not a whole gzip file: {error}", "unreadable") from error
    except OSError as error:
        raise unreadable(path, error) from error


def other_encoding(content: bytes) -> str:
    """Returns what to do with content that is not UTF-8."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "its byte order mark is that of UTF-16; save the file as UTF-8"
    return "save the file as UTF-8 (from GBK: iconv -f GB18030 -t UTF-8)"


def read_text(path: Path) -> str:
    """Returns the content of a UTF-8 file without its byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def read_small_text(path: Path) -> str:
    """Returns the content of a small UTF-8 file, as `read_text`; see `core.files.read_small`."""
    try:
        return read_small(path).decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def parse_json(content: bytes | str) -> Any:
    """Returns a JSON value; NaN, Infinity and what cannot be read are a `ValueError`."""
    try:
        return json.loads(content, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if "digits" not in str(error):
            raise
        raise ValueError("a number has too many digits") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def string(path: Path, number: int, record: Mapping[str, Any], name: str) -> str:
    """Returns the string field `name` of the record on line `number` of `path`."""
    value = record.get(name)
    if not isinstance(value, str):
        raise field_error(path, number, name, "is missing or not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise field_error(path, number, name, "contains an unpaired surrogate") from error
    return value


def record_id(path: Path, number: int, record: Mapping[str, Any]) -> str:
    """Returns the id of a record as a string; `id` is read if `_id` is missing."""
    value = record.get("_id", record.get("id"))
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise field_error(path, number, "_id", "must be a non-empty string or an integer")
    return value


def record_error(path: Path, number: int, reason: str, *, code: str = "bad_record") -> DataError:
    return DataError(f"{path} line {number} {reason}", code=code, path=path, line=number)


def field_error(
    path: Path, number: int, name: str, reason: str, *, code: str = "bad_field"
) -> DataError:
    message = f"{path} line {number}: {name} {reason}"
    return DataError(message, code=code, path=path, line=number, field=name)


def duplicate_error(path: Path, number: int, id_: str) -> DataError:
    """Returns the error of an id that occurs in an earlier record."""
    message = f"{path} line {number}: _id '{id_}' occurs in an earlier line: use unique ids"
    return DataError(message, code="duplicate_id", path=path, line=number, field="_id", id=id_)


def unreadable(path: Path, error: OSError | UnicodeDecodeError) -> DataError:
    """Returns the error of a file that cannot be read or is not UTF-8."""
    if isinstance(error, UnicodeDecodeError):
        reason = f"is not UTF-8: {other_encoding(error.object)}"
        return DataError.at(path, reason, "not_utf8")
    return DataError.at(path, f"cannot be read: {error.strerror or error}", "unreadable")


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def write_json(path: Path, value: Any) -> None:
    """Writes one JSON value, indented."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=2)
        file.write("\n")


def write_tsv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Writes tab-separated rows, as `read_tsv` reads them; the first is the header."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        for number, row in enumerate(rows, start=1):
            fields = [str(field) for field in row]
            if any(character in field for field in fields for character in "\t\r\n"):
                raise record_error(path, number, "would have a field with a tab or a line end")
            file.write("\t".join(fields) + "\n")


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Writes comma-separated rows for spreadsheet programs.

    The file has a byte order mark, and values that look like formulas are escaped with "'".
    """
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([_escaped(value) for value in row] for row in rows)


def _escaped(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def parse_yaml(text: str) -> Any:
    """Returns a YAML value: mappings, lists and plain values; a bad one is a `ValueError`."""
    import yaml  # not installed where the open loop runs

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


class Triple(NamedTuple):
    """A query, its relevant documents (positives) and hard negatives, as normalised texts."""

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...] = ()


def read_triples(path: Path) -> Iterator[tuple[int, Triple]]:
    """Yields line numbers and triples; `positives` and `negatives` may be missing or empty."""
    for number, record in read_jsonl(path):
        lists = []
        for name in ("positives", "negatives"):
            values = record.get(name) or []
            if not isinstance(values, list):
                raise field_error(path, number, name, "is not a list of texts")
            lists.append(tuple(read_field(path, number, value, name) for value in values))
        yield number, Triple(read_field(path, number, record.get("query"), "query"), *lists)


def read_field(path: Path, number: int, value: Any, name: str) -> str:
    """Returns a normalised text; a document may be an object with `title` and `text`."""
    text = ""
    if isinstance(value, str):
        text = normalize_text(value)
    elif isinstance(value, dict):
        title, body = value.get("title") or "", value.get("text")
        if isinstance(title, str) and isinstance(body, str):
            text = document_text(title, body)
    if not text:
        raise field_error(path, number, name, "is missing, empty or not a text")
    return text
