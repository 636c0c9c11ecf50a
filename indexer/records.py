"""Checks of one record of a corpus: a document, or the reason why it cannot be indexed."""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from typing import Any, NoReturn

from core.records import other_encoding
from core.text import normalize_text
from core.types import Document
from indexer import limits


@dataclass(frozen=True, slots=True)
class Reject:
    """Why a record cannot be indexed."""

    reason: str


# The fields of a record.
FIELDS = ("_id", "id", "title", "text", "metadata")
# Names of ignored fields that are counted.
_COUNTED = 1000


def count_ignored(ignored: Counter[str], names: Iterable[str], records: int = 1) -> None:
    """Counts the fields of records that are not read."""
    for name in names:
        if name not in FIELDS and (name in ignored or len(ignored) < _COUNTED):
            ignored[name] += records


def parse_line(
    line: bytes, max_chars: int, ignored: Counter[str], *, first: bool
) -> Document | Reject:
    """Returns the document of a line of JSONL, or the reason why it is rejected.

    `max_chars` is the maximum length of a text; `ignored` counts the records by the names of fields
    that are not read. The `first` line of a file may have a byte order mark.
    """
    try:
        text = line.rstrip().decode("utf-8-sig" if first else "utf-8")
        record = json.loads(text, parse_constant=_no_constant)
        document = _document(record, max_chars)
        count_ignored(ignored, record)
        return document
    except UnicodeDecodeError as error:
        return Reject(f"the line is not UTF-8 (byte {error.start + 1}): {other_encoding(line)}")
    except json.JSONDecodeError as error:
        return Reject(f"the line is not JSON: {error.msg} (column {error.colno})")
    except RecursionError:
        return Reject("the line is not JSON: nested too deeply")
    except _RecordError as fault:
        return Reject(str(fault))
    except ValueError:  # Python's limit on the digits of a whole number
        return Reject("the line is not JSON: a number has too many digits")


def parse_row(row: Any, max_chars: int) -> Document | Reject:
    """Returns the document of a row of Parquet, values by column, or why it is rejected."""
    try:
        if row.get("metadata") is not None:
            row = row | {"metadata": plain(row["metadata"], "metadata")}
        return _document(row, max_chars)
    except _RecordError as fault:
        return Reject(str(fault))


def parse_record(record: Any, max_chars: int) -> Document | Reject:
    """Returns the document of a record that a reader gives, or why it is rejected."""
    try:
        return _document(record, max_chars)
    except _RecordError as fault:
        return Reject(str(fault))


def valid_id(record: dict[str, Any]) -> str | None:
    """Returns the id of a record, or None if it has no valid one."""
    try:
        return _id(record)
    except _RecordError:
        return None


def plain(value: Any, field: str) -> Any:
    """Returns a typed value of Parquet as JSON has it.

    Dates and times are text in ISO 8601, decimals numbers or, if those are not exact, text.
    """
    if isinstance(value, dict):
        return {str(name): plain(inner, f"{field}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, field) for inner in value]
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Decimal):
        number = int(value) if value == value.to_integral_value() else float(value)
        return number if Decimal(repr(number)) == value else str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise _RecordError(
        f"{field} is of type {type(value).__name__}, which JSON does not have: convert it to text "
        "or to a number"
    )


class _RecordError(ValueError):
    """A record is invalid; the message is the reason."""


def _no_constant(name: str) -> NoReturn:
    raise _RecordError(f"the line is not JSON: {name} is not a JSON number")


def _document(record: Any, max_chars: int) -> Document:
    if not isinstance(record, dict):
        raise _RecordError("the line is not a JSON object")
    document = Document(
        id=_id(record),
        title=_string(record, "title", limits.MAX_TITLE_CHARS, "shorten it", default=""),
        text=_string(record, "text", max_chars, "split it"),
        metadata=_metadata(record),
    )
    if not normalize_text(document.text):
        raise _RecordError("text is empty")
    return document


def _id(record: dict[str, Any]) -> str:
    value = record.get("_id", record.get("id"))
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value:
        raise _RecordError(
            "_id is missing" if value in (None, "") else "_id is neither a string nor an integer"
        )
    if len(value) > limits.MAX_ID_CHARS or not value.isprintable():
        raise _RecordError(
            f"_id has more than {limits.MAX_ID_CHARS} characters or is not printable"
        )
    return value


def _string(
    record: dict[str, Any], field: str, limit: int, advice: str, default: str | None = None
) -> str:
    value = default if record.get(field) is None else record[field]
    if value is None:
        raise _RecordError(f"{field} is missing")
    if not isinstance(value, str):
        raise _RecordError(f"{field} is not a string")
    _check_length(field, value, limit, "characters", advice)
    return _encodable(field, value)


def _metadata(record: dict[str, Any]) -> dict[str, Any]:
    value = record.get("metadata")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _RecordError("metadata is not an object")
    # A row of Parquet has all fields of its column, most of them null.
    given = [name for name, content in value.items() if content is not None]
    _check_length("metadata", given, limits.MAX_FIELDS, "fields", "remove some")
    for name, content in value.items():
        _check_field(name, content)
    if _is_deeper(value, limits.MAX_METADATA_DEPTH):
        raise _RecordError(f"metadata is nested more than {limits.MAX_METADATA_DEPTH} levels deep")
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _RecordError(f"metadata cannot be written as JSON: {error}") from error
    written = _encodable("metadata", text).encode()
    _check_length("metadata", written, limits.MAX_METADATA_BYTES, "bytes as JSON", "shorten it")
    return value


def _check_field(name: str, content: Any) -> None:
    """Checks the lengths of a metadata field whose values can be used in filters."""
    _check_length(
        "the name of a metadata field", name, limits.MAX_FIELD_NAME_CHARS, "characters", "rename it"
    )
    field = f"metadata.{name}"
    if isinstance(content, list):
        _check_length(field, content, limits.MAX_LIST_VALUES, "values", "remove some")
    for value in content if isinstance(content, list) else (content,):
        if isinstance(value, str):
            _check_length(field, value, limits.MAX_VALUE_CHARS, "characters", "shorten it")
        elif isinstance(value, int) and abs(value) > sys.float_info.max:  # no filter could ask it
            raise _RecordError(f"{field} has a number beyond 1.7e308: write it as text")


def _check_length(
    field: str, value: str | bytes | list[Any] | dict[str, Any], limit: int, unit: str, advice: str
) -> None:
    if len(value) > limit:
        raise _RecordError(f"{field} has {len(value)} {unit}; the limit is {limit}: {advice}")


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
