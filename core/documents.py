"""`documents.arrow`: the documents of an index, memory-mapped; row i has vector i."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic_core import to_json

from core.columns import array_of, number_column, text_column
from core.errors import IndexVersionError
from core.types import Document, RowArray

FILE_NAME = "documents.arrow"

# All batches but the last have this many rows, so that a row is located by a division.
_BATCH_ROWS = 4096
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("title", pa.string()),
        ("text", pa.large_string()),
        ("metadata", pa.string()),
    ]
)
# The chunks of a document are stored in consecutive rows.
_CHUNK_SCHEMA = pa.schema(
    [*_SCHEMA, ("parent", pa.string()), ("chunk", pa.int32()), ("chunks", pa.int32())]
)


class DocumentWriter:
    """Writes documents in row order; a context manager.

    If `chunked`, the documents are chunks, and the chunks of a document must be consecutive.
    """

    def __init__(self, path: Path, *, chunked: bool = False) -> None:
        self._file = pa.OSFile(str(path), "wb")
        self._schema = _CHUNK_SCHEMA if chunked else _SCHEMA
        self._writer = pa.ipc.new_file(self._file, self._schema)
        self._rows: list[dict[str, Any]] = []

    def write(self, document: Document) -> None:
        self._rows.append(columns_of(document, chunked=self._schema is _CHUNK_SCHEMA))
        if len(self._rows) == _BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_batch(_batch(self._rows, self._schema))
        self._rows.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            if self._rows:
                self._flush()
            self._writer.close()
        self._file.close()


def columns_of(document: Document, *, chunked: bool) -> dict[str, Any]:
    """Returns the row of a document or chunk, by the names of the columns."""
    row = {name: getattr(document, name) for name in column_names(chunked=chunked)}
    metadata = json.dumps(document.metadata, ensure_ascii=False, separators=(",", ":"))
    return row | {"metadata": metadata}


def column_names(*, chunked: bool) -> list[str]:
    names: list[str] = (_CHUNK_SCHEMA if chunked else _SCHEMA).names
    return names


class JsonDocument(NamedTuple):
    """The fields of a document as JSON; `chunk` is `,"parent":…,"chunk":…,"chunks":…` or empty."""

    id: bytes
    title: bytes
    text: bytes
    metadata: bytes
    chunk: bytes


class ListedDocument(NamedTuple):
    """A document as a list shows it; `chunks` is None in an index without chunks."""

    id: str
    title: str
    chunks: int | None


class DocumentReader:
    """Random access to the documents of an index; the file is memory-mapped.

    Raises:
        IndexVersionError: If the file is missing, truncated or of another schema, or the
            chunks of a document are not consecutive.
    """

    def __init__(self, path: Path) -> None:
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        except (OSError, pa.ArrowInvalid) as error:
            raise _unreadable(path, "is not a readable Arrow file") from error
        if reader.schema not in (_SCHEMA, _CHUNK_SCHEMA):
            raise _unreadable(path, f"does not have the columns {', '.join(_SCHEMA.names)}")
        if any(len(batch) != _BATCH_ROWS for batch in batches[:-1]):
            raise _unreadable(path, f"does not have batches of {_BATCH_ROWS} rows")
        self._batches = [_Rows(batch) for batch in batches]
        self._table = pa.Table.from_batches(batches, reader.schema)
        self._count = sum(len(batch) for batch in batches)
        self.chunked = reader.schema == _CHUNK_SCHEMA
        self._chunks = np.empty(0, np.int32)
        if self.chunked and batches:
            self._chunks = _column(batches, "chunk")
            is_last = self._chunks + 1 == _column(batches, "chunks")
            following = np.where(is_last, 0, self._chunks + 1)
            if following[-1] or (self._chunks != np.roll(following, 1)).any():
                raise _unreadable(
                    path, "does not have the chunks of each document in consecutive rows"
                )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int) -> Document:
        return self.read([row])[0].document()

    def read(self, rows: Sequence[int]) -> "list[StoredDocument]":
        """Returns what is stored of rows, in their order; IndexError if there is none of one."""
        return [StoredDocument(*self._locate(row)) for row in rows]

    def __iter__(self) -> Iterator[Document]:
        for batch in self._batches:
            for at in range(batch.count):
                yield StoredDocument(batch, at).document()

    def numbered(self) -> Iterator[tuple[int, Document]]:
        """Yields each document with its row."""
        return enumerate(self)

    def find(self, id_: str, within: RowArray | None = None) -> range:
        """Returns the row of the document or chunk with an id, or the rows of a split document.

        The range is empty if the id is unknown. All ids are compared, which takes some 10 ms of a
        processor for a million rows; twice that if they are chunks and none has the id. Of rows
        `within`, int64 [n] and ascending, only these are found; the id of another row then takes
        the same work as one that no row has.
        """
        try:
            wanted = pa.scalar(id_)
        except UnicodeEncodeError:  # an unpaired surrogate, which no file can contain
            return range(0)
        if within is not None:
            return self._find_within(wanted, within)
        row: int = pc.index(self._table["id"], wanted).as_py()
        if row >= 0:
            return range(row, row + 1)
        first: int = pc.index(self._table["parent"], wanted).as_py() if self.chunked else -1
        if first < 0:
            return range(0)
        return range(first, first + self._table["chunks"][first].as_py())

    def _find_within(self, wanted: Any, within: RowArray) -> range:
        for column in ("id", "parent") if self.chunked else ("id",):
            # Not `pc.index`, which ends at the first row that has the id.
            equal = pc.equal(self._table[column], wanted)
            rows = array_of(pc.indices_nonzero(equal)).astype(np.int64)
            first = np.searchsorted(within, rows)
            rows = rows[np.searchsorted(within, rows, "right") > first]
            if len(rows):
                return range(int(rows[0]), int(rows[-1]) + 1)
        return range(0)

    def find_documents(self, ids: Sequence[str]) -> dict[str, range]:
        """Returns the rows of the documents with some of these different ids, by id.

        All ids are compared with each at once: a million rows take some 30 ms of a processor.
        """
        if not ids:
            return {}
        if not self.chunked:
            return {id_: range(row, row + 1) for id_, row in self._join("id", ids).items()}
        last = self._join("parent", ids)
        return {id_: range(row - int(self._chunks[row]), row + 1) for id_, row in last.items()}

    def find_rows(self, ids: Sequence[str]) -> dict[str, int]:
        """Returns the rows of the documents or chunks with some of these different ids, by id."""
        return self._join("id", ids) if ids else {}

    def _join(self, column: str, ids: Sequence[str]) -> dict[str, int]:
        """Returns by id the last row that has it in a column."""
        at = pc.index_in(self._table[column], value_set=text_column(ids, pa.string()))
        rows = pc.indices_nonzero(pc.is_valid(at))
        numbers = at.take(rows).to_pylist()
        return {ids[n]: row for n, row in zip(numbers, rows.to_pylist(), strict=True)}

    def listed(self, start: int, limit: int) -> list[ListedDocument]:
        """Returns at most `limit` documents that begin in row `start` or later, in row order."""
        rows = self._beginning(start, limit).tolist()
        return [document.listed() for document in self.read(rows)]

    def _beginning(self, start: int, limit: int) -> RowArray:
        """Returns the first rows from `start` on in which a document begins, int64 [n]."""
        if self.chunked:
            return start + np.flatnonzero(self._chunks[start:] == 0)[:limit]
        return np.arange(start, min(self._count, start + limit))

    def first_chunks(self, rows: RowArray) -> RowArray:
        """Returns the row of the first chunk of each row's document, int64 [n]."""
        return rows - self._chunks[rows] if self.chunked else rows

    def _locate(self, row: int) -> tuple["_Rows", int]:
        if not 0 <= row < self._count:
            raise IndexError(f"row {row} is out of range: there are {self._count} rows")
        return self._batches[row // _BATCH_ROWS], row % _BATCH_ROWS


def _unreadable(path: Path, reason: str) -> IndexVersionError:
    return IndexVersionError.at(path, f"{reason}: build the index again", "unreadable_documents")


def _column(batches: list[pa.RecordBatch], name: str) -> NDArray[np.int32]:
    return np.concatenate([array_of(batch[name]) for batch in batches])


class _Texts:
    """A column of texts, read from Arrow's buffers without a scalar of Arrow for each."""

    def __init__(self, column: pa.Array) -> None:
        _, offsets, data = column.buffers()
        whole = memoryview(offsets)
        is_large = pa.types.is_large_string(column.type)
        self._offsets = (whole.cast("q") if is_large else whole.cast("i"))[column.offset :]
        self._data = memoryview(data or b"")

    def __getitem__(self, at: int) -> str:
        return str(self._data[self._offsets[at] : self._offsets[at + 1]], "utf-8")


class _Rows:
    """The columns of one batch of the file."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.count = len(batch)
        self.ids, self.titles, self.texts, self.metadata = map(_Texts, batch.columns[:4])
        self.chunks = batch.columns[4:]


class StoredDocument(NamedTuple):
    """A row of a file of documents; each of its fields is read when it is asked for."""

    batch: _Rows
    at: int

    @property
    def id(self) -> str:
        return self.batch.ids[self.at]

    @property
    def title(self) -> str:
        return self.batch.titles[self.at]

    @property
    def text(self) -> str:
        return self.batch.texts[self.at]

    @property
    def metadata(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.batch.metadata[self.at])
        return found

    def document(self) -> Document:
        return Document(self.id, self.text, self.title, self.metadata, *self._chunk())

    def listed(self) -> ListedDocument:
        parent, _, chunks = self._chunk() or (None,) * 3
        return ListedDocument(self.id if parent is None else parent, self.title, chunks)

    def json(self) -> JsonDocument:
        batch, at = self
        chunk = b""
        if batch.chunks:
            names = "parent", "chunk", "chunks"
            chunk = b"," + to_json(dict(zip(names, self._chunk(), strict=True)))[1:-1]
        id_, title, text = (to_json(c[at]) for c in (batch.ids, batch.titles, batch.texts))
        return JsonDocument(id_, title, text, batch.metadata[at].encode(), chunk)

    def _chunk(self) -> tuple[Any, ...]:
        return tuple(column[self.at].as_py() for column in self.batch.chunks)


def stored(rows: Sequence[Mapping[str, Any]], *, chunked: bool) -> list[StoredDocument]:
    """Returns rows of which `columns_of` has made the columns, as those of a file are read."""
    schema = _CHUNK_SCHEMA if chunked else _SCHEMA
    batch = _Rows(_batch(rows, schema))
    return [StoredDocument(batch, at) for at in range(batch.count)]


def _batch(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = [
        number_column(np.array([row[field.name] for row in rows], np.int32))
        if field.type == pa.int32()
        else text_column([row[field.name] for row in rows], field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
