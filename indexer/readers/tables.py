"""Tables: CSV and TSV, Excel, JSON arrays, JSONL, Parquet, Arrow; and the rules for all tables."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from itertools import chain, islice
from statistics import median
from typing import Any

from core.records import parse_json
from indexer import limits
from indexer.readers.archives import unzipped
from indexer.readers.fields import FieldNames, guess_fields, known_id
from indexer.readers.office import check_package
from indexer.readers.source import Item, Report, Source, UnreadableError
from indexer.readers.text import detect, open_text, shown
from indexer.records import plain

# Rows by which fields are guessed.
_FIRST = 200
# Most columns that an error names.
_NAMED = 20
_DELIMITERS = ",;\t|"
# Rows of Parquet and Arrow that are read together.
_BATCH_ROWS = 64

Row = tuple[int, dict[str, Any] | str]


def read_csv(source: Source) -> Iterator[Item]:
    """Reads CSV: its delimiter is the one that most of the first lines have."""
    text, encoding = open_text(source)
    first = [line for line in islice(text, 20) if line.strip()]
    text.seek(0)
    delimiter = max(_DELIMITERS, key=lambda sign: (_columns(first, sign), sign == ","))
    yield from _delimited(source, text, delimiter, Report(source.name, "CSV", shown(encoding)))


def read_tsv(source: Source) -> Iterator[Item]:
    """Reads text that is separated by tabs, quoted as spreadsheet programs do."""
    text, encoding = open_text(source)
    yield from _delimited(source, text, "\t", Report(source.name, "TSV", shown(encoding)))


def _columns(lines: Sequence[str], delimiter: str) -> tuple[int, int]:
    """Returns how many lines have as many fields as the first, and that number, if above 1."""
    counts = []
    with suppress(csv.Error):  # is an error later
        counts += [len(row) for row in _csv_lines(lines, delimiter)]
    if not counts or counts[0] < 2:
        return 0, 0
    return counts.count(counts[0]), counts[0]


def _delimited(
    source: Source, text: io.TextIOWrapper, delimiter: str, report: Report
) -> Iterator[Item]:
    rows = _csv_rows(_csv_lines(text, delimiter))
    _, header = next(rows, (0, []))
    columns = _column_names(header)

    def records() -> Iterator[Row]:
        for number, values in rows:
            if len(values) == len(columns):
                yield number, dict(zip(columns, values, strict=True))
            else:
                reason = f"the row has {len(values)} fields, the first row has {len(columns)}: put "
                reason += "text with delimiters or line ends between double quotes"
                yield number, reason

    yield from _table_items(source, columns, records(), report)


def _csv_lines(lines: Iterable[str], delimiter: str) -> Any:
    csv.field_size_limit(limits.MAX_RECORD_BYTES)
    return csv.reader(lines, delimiter=delimiter, strict=True)


def _csv_rows(lines: Any) -> Iterator[tuple[int, list[str]]]:
    """Yields the line on which each row ends, and its fields; empty rows are skipped."""
    while True:
        try:
            values = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            raise UnreadableError(
                f"line {lines.line_num} is not CSV: {error}; check the double quotes before it",
                "not_csv",
            ) from error
        if any("\0" in value for value in values):
            reason = f"line {lines.line_num} has a NUL character: it is damaged, or no text file"
            raise UnreadableError(reason, "not_text")
        if any(values):
            yield lines.line_num, values


def read_excel(source: Source) -> Iterator[Item]:
    """Reads the visible sheets of a workbook: values, not formulas, macros or links."""
    from openpyxl import load_workbook

    check_package(source.stream)
    book = load_workbook(source.stream, read_only=True, data_only=True, keep_links=False)
    found = False
    for sheet in book.worksheets:
        if sheet.sheet_state != "visible":
            continue
        # The size that the sheet claims can be wrong.
        sheet.reset_dimensions()
        rows = (
            (number, list(values))
            for number, values in enumerate(sheet.iter_rows(values_only=True), start=1)
            if any(value not in (None, "") for value in values)
        )
        first = list(islice(rows, 10))
        if not first:
            continue
        # A line above the header, such as a merged title, fills fewer cells than most rows; a row
        # with a note beside the table fills more than the header.
        filled = [sum(value not in (None, "") for value in values) for _, values in first]
        most, usual = max(filled), median(filled)
        at = next(i for i, count in enumerate(filled) if count >= usual and count > most / 2)
        columns = _column_names([_text(value) for value in first[at][1]])
        found = True
        label = f"sheet {sheet.title}" if len(book.worksheets) > 1 else ""
        report = Report(source.name, "Excel", sheet=label)
        records = (
            (number, dict(zip(columns, values, strict=False)))
            for number, values in chain(first[at + 1 :], rows)
        )
        extra = {"sheet": sheet.title} if label else {}
        prefix = f"{sheet.title}!" if label else ""
        try:
            yield from _table_items(source, columns, records, report, extra, prefix)
        except UnreadableError as error:
            if not label:
                raise
            reason = f"{label} {error}; hide a sheet that has no documents"
            raise UnreadableError(reason, error.code) from None
    if not found:
        raise UnreadableError("has no rows", "empty_file")


def read_json(source: Source) -> Iterator[Item]:
    """Reads a JSON array of objects or texts, an object around one, or JSONL of any fields."""
    encoding = detect(source.stream)
    report = Report(source.name, "JSON", shown(encoding))
    text = source.stream.read().decode(encoding)
    try:
        value = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and "\n" in text.strip():
            source.stream.seek(0)
            yield from read_jsonl(source)
            return
        raise UnreadableError(
            f"line {error.lineno} is not JSON: {error.msg} (column {error.colno})", "not_json"
        ) from error
    except ValueError as error:
        raise UnreadableError(f"is not JSON: {error}", "not_json") from error
    if isinstance(value, dict):
        lists = [each for each in value.values() if _is_table(each)]
        value = lists[0] if len(lists) == 1 else [value]
    if not isinstance(value, list) or not value:
        raise UnreadableError("is no array of objects or texts", "not_json")
    yield from _objects(source, enumerate(value, start=1), report)


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def read_jsonl(source: Source) -> Iterator[Item]:
    """Reads JSONL whose fields have other names than those of a corpus."""
    encoding = detect(source.stream)
    lines = io.TextIOWrapper(source.stream, encoding=encoding, newline="\n")

    def values() -> Iterator[tuple[int, Any]]:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield number, parse_json(line)
            except ValueError as error:
                yield number, ValueError(f"the line is not JSON: {error}")

    yield from _objects(source, values(), Report(source.name, "JSONL", shown(encoding)))


def read_jsonl_gz(source: Source) -> Iterator[Item]:
    """Reads JSONL that is compressed by gzip, as `read_jsonl`."""
    with unzipped(source.stream) as stream:
        yield from read_jsonl(replace(source, stream=stream))


def _objects(source: Source, values: Iterable[tuple[int, Any]], report: Report) -> Iterator[Item]:
    def rows() -> Iterator[Row]:
        for number, value in values:
            if isinstance(value, dict):
                yield number, value
            elif isinstance(value, str):
                yield number, {"text": value}
            else:
                yield (
                    number,
                    (
                        str(value)
                        if isinstance(value, ValueError)
                        else "is neither an object nor text"
                    ),
                )

    every = rows()
    first = list(islice(every, _FIRST))
    columns = list(dict.fromkeys(name for _, row in first if isinstance(row, dict) for name in row))
    yield from _table_items(source, columns, chain(first, every), report)


def read_parquet(source: Source) -> Iterator[Item]:
    """Reads Parquet whose columns have other names than those of a corpus."""
    from pyarrow.parquet import ParquetFile

    file = ParquetFile(source.stream)
    batches = file.iter_batches(batch_size=_BATCH_ROWS)
    yield from _batches(source, file.schema_arrow, batches, "Parquet")


def read_arrow(source: Source) -> Iterator[Item]:
    """Reads a file of a data set that `save_to_disk` wrote: an Arrow stream or file."""
    import pyarrow as pa

    try:
        stream = pa.ipc.open_stream(source.stream)
        yield from _batches(source, stream.schema, stream, "Arrow")
    except pa.ArrowInvalid:
        source.stream.seek(0)
        file = pa.ipc.open_file(source.stream)
        batches = map(file.get_batch, range(file.num_record_batches))
        yield from _batches(source, file.schema, batches, "Arrow")


def _batches(source: Source, schema: Any, batches: Iterable[Any], format_: str) -> Iterator[Item]:
    rows = (
        row
        for batch in batches
        for start in range(0, len(batch), _BATCH_ROWS)
        for row in batch.slice(start, _BATCH_ROWS).to_pylist(maps_as_pydicts="lossy")
    )
    report = Report(source.name, format_)
    yield from _table_items(source, list(schema.names), enumerate(rows, start=1), report)


def _table_items(
    source: Source,
    columns: Sequence[str],
    rows: Iterable[Row],
    report: Report,
    extra: Mapping[str, Any] | None = None,
    prefix: str = "",
) -> Iterator[Item]:
    """Yields the records of a table, after a report of its fields.

    `rows` have a number each and the values by column, or why there are none; `prefix` stands
    before the number of a row in its id, if no column has ids. UnreadableError if a given field is
    missing, or no column can be the text.
    """
    if not columns:  # no record has fields
        yield from ((number, str(row)) for number, row in rows)
        return
    given = source.fields
    listed = ", ".join(columns[:_NAMED]) + (" …" if len(columns) > _NAMED else "")
    if missing := [name for name in given.named if name not in columns]:
        raise UnreadableError(
            f"has no field '{missing[0]}': its fields are {listed}", "unknown_field"
        )
    rows = iter(rows)
    first = list(islice(rows, _FIRST))
    values = [row for _, row in first if isinstance(row, dict)]
    fields = guess_fields(given, columns, values)
    if fields is None:
        raise UnreadableError(
            f"has no field that looks like text: name it (--text-field); its fields are {listed}",
            "no_text_field",
        )
    known = {*given.named, "_id", "id", "title", "text", None}
    guessed = not {fields.id, fields.title, fields.text} <= known
    guessed |= fields.id is None and known_id(columns) is not None  # it has no ids in some rows
    source.report(
        Report(report.name, report.format, report.encoding, fields, guessed, report.sheet)
    )
    for number, row in chain(first, rows):
        if isinstance(row, str):
            yield number, row
            continue
        try:
            if given.metadata is None:  # objects may have more fields than the first ones
                others = (
                    name for name in row if name not in (fields.id, fields.title, fields.text)
                )
                fields = replace(fields, metadata=tuple(others))
            yield number, _record(row, fields, f"{source.name}#{prefix}{number}", extra or {})
        except ValueError as error:  # of a value that JSON does not have
            yield number, str(error)


def _record(
    row: Mapping[str, Any], fields: FieldNames, id_: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    record: dict[str, Any] = {"_id": _id(row.get(fields.id)) if fields.id else id_}
    if fields.title:
        record["title"] = _text(row.get(fields.title))
    record["text"] = _text(row.get(fields.text or ""))
    metadata: dict[str, Any] = dict(extra)
    for name in fields.metadata or ():
        value = _plain(row.get(name), name)
        if name == "metadata" and isinstance(value, dict):
            metadata.update(value)
        elif value not in (None, ""):
            metadata[name] = value
    return record | {"metadata": metadata}


def _id(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value.strip() if isinstance(value, str) else value


def _text(value: Any) -> Any:
    """Returns a value as text; objects and lists stay, and are rejected later."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, int | float | date) else value


def _plain(value: Any, name: str) -> Any:
    value = plain(value, name)
    # Tables of data frames have NaN in place of missing values.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _column_names(header: Sequence[Any]) -> list[str]:
    """Returns the names of columns from the first row; empty and repeated ones are numbered."""
    names = [str(name or "").strip() for name in header]
    while names and not names[-1] and len(names) > limits.MAX_COLUMNS:
        names.pop()
    if len(names) > limits.MAX_COLUMNS:
        raise UnreadableError(
            f"has {len(names)} columns; the limit is {limits.MAX_COLUMNS}: remove some",
            "too_many_columns",
        )
    if not any(names):
        raise UnreadableError("has no rows", "empty_file")
    columns: list[str] = []
    for number, name in enumerate(names, start=1):
        unique = name or f"column {number}"
        columns.append(f"{unique} ({number})" if unique in columns else unique)
    return columns
