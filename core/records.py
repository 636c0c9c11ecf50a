"""Reading and writing JSONL, JSON, TSV and CSV files; writes are atomic."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.errors import DataError
from core.files import atomic, read_small

# First characters of formulas in spreadsheet programs.
_FORMULA = ("=", "+", "-", "@")


def read_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields line numbers, starting at 1, and records; empty lines are skipped.

    Raises:
        DataError: If the file cannot be read or a line is not a JSON object.
    """
    number = 0
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise record_error(path, number, "is not a JSON object", code="not_json")
                yield number, record
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error
    except json.JSONDecodeError as error:
        raise record_error(path, number, "is not valid JSON", code="not_json") from error


def read_text(path: Path) -> str:
    """Returns the content of a UTF-8 file without its byte order mark.

    Raises:
        DataError: If the file cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def read_small_text(path: Path) -> str:
    """Returns the content of a small UTF-8 file, as `read_text`; see `core.files.read_small`.

    Raises:
        DataError: If the file cannot be read or is not UTF-8.
    """
    try:
        return read_small(path).decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error


def parse_json(content: bytes | str) -> Any:
    """Returns a JSON value.

    Raises:
        ValueError: If it is not JSON, or is nested too deeply or has too long a number to be read.
            NaN and Infinity are not JSON.
    """
    try:
        return json.loads(content, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("the value is nested too deeply") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def string(path: Path, number: int, record: Mapping[str, Any], name: str) -> str:
    """Returns the string field `name` of the record on line `number` of `path`.

    Raises:
        DataError: If the field is missing or not a string.
    """
    value = record.get(name)
    if not isinstance(value, str):
        raise field_error(path, number, name, "is missing or not a string")
    return value


def record_id(path: Path, number: int, record: Mapping[str, Any], name: str = "_id") -> str:
    """Returns the id of a record as a string; `id` is read if `_id` is missing.

    Raises:
        DataError: If it is neither a non-empty string nor an integer.
    """
    value = record.get(name, record.get("id") if name == "_id" else None)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise field_error(path, number, name, "must be a non-empty string or an integer")
    return value


def record_error(path: Path, number: int, reason: str, *, code: str = "bad_record") -> DataError:
    """Returns an error of a line."""
    return DataError(f"{path} line {number} {reason}", code=code, path=path, line=number)


def field_error(
    path: Path, number: int, name: str, reason: str, *, code: str = "bad_field"
) -> DataError:
    """Returns an error of a field of a record."""
    message = f"{path} line {number}: {name} {reason}"
    return DataError(message, code=code, path=path, line=number, field=name)


def duplicate_error(path: Path, number: int, id_: str, name: str = "_id") -> DataError:
    """Returns the error of an id that occurs in an earlier record."""
    message = f"{path} line {number}: {name} '{id_}' occurs in an earlier line: use unique ids"
    return DataError(message, code="duplicate_id", path=path, line=number, field=name, id=id_)


def unreadable(path: Path, error: OSError | UnicodeDecodeError) -> DataError:
    """Returns the error of a file that cannot be read or is not UTF-8."""
    if isinstance(error, UnicodeDecodeError):
        return DataError(f"{path} is not encoded in UTF-8", code="not_utf8", path=path)
    return DataError(f"{path} cannot be read: {error.strerror}", code="unreadable", path=path)


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes one record per line."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def write_json(path: Path, value: Any) -> None:
    """Writes one JSON value, indented."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=2)
        file.write("\n")


def write_tsv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Writes tab-separated rows; the first is the header."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows(rows)


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Writes comma-separated rows for spreadsheet programs.

    The file has a byte order mark, and values that look like formulas are escaped with "'".
    """
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([_escaped(value) for value in row] for row in rows)


def _escaped(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
