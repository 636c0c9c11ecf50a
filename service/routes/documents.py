"""Documents by their ids: found in an index version, listed, and as JSON."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from pydantic_core import to_json

from core.documents import ListedDocument
from core.types import Conjunction, CountedValue, RowArray
from core.writes import document_tag
from search.snapshot import Snapshot
from service.errors import RequestError
from service.pipeline.engine import Engine
from service.pipeline.pipeline import DEADLINE_EXCEEDED

_T = TypeVar("_T")
# Chunks of a document that are read together.
_CHUNKS = 64


async def find(
    engine: Engine, index: Snapshot, id_: str, within: Conjunction, deadline: float
) -> range:
    """Returns the row with an id, or the rows of a document that is split; not empty.

    A search thread compares the ids. RequestError if no document or chunk of those `within` has
    the id, or the deadline, a time of the event loop [s], passes.
    """

    def found() -> range:
        return index.segment.documents.find(id_, rows_within(index, within) if within else None)

    return _known(await before(deadline, engine.run(found)))


def listed_after(
    index: Snapshot, id_: str | None, limit: int
) -> tuple[list[ListedDocument], str | None]:
    """Returns at most `limit` documents, and the id of the last one if others follow it.

    They are the first ones, or those behind the document or chunk with an id: RequestError if none
    has it. Only for callers who may see all documents.
    """
    documents = index.segment.documents
    start = 0 if id_ is None else _known(documents.find(id_))[-1] + 1
    listed = documents.listed(start, limit + 1)
    found = listed[:limit]
    return found, found[-1].id if len(listed) > limit else None


def _known(rows: range) -> range:
    if not rows:
        message = "no document or chunk of the served index version has this id"
        raise RequestError("unknown_document", message)
    return rows


def tag_of(index: Snapshot, rows: range, id_: str) -> str:
    """Returns the tag of a document, given the rows that `find` returns for its id.

    A chunk of a document that is split has none: "".
    """
    documents = [stored.document() for stored in index.segment.documents.read(rows)]
    if documents[0].parent not in (None, id_):
        return ""
    return document_tag(*documents)


def rows_within(index: Snapshot, within: Conjunction) -> RowArray:
    """Returns the rows of the documents that a caller may see, int64 [n], ascending."""
    filters = index.segment.filters
    return filters.rows(filters.check({}, within))


def counts_within(index: Snapshot, within: Conjunction) -> dict[str, Any]:
    """Returns the fields of an `IndexResponse` that count what a caller may see."""
    rows = rows_within(index, within)
    filters, fields = index.segment.filters.values_within(rows)
    documents = np.count_nonzero(index.segment.documents.first_chunks(rows) == rows)
    counts = {"count": len(rows), "documents": int(documents)}
    return {**counts, **filter_fields(filters), "filter_field_count": fields}


def filter_fields(listed: Mapping[str, Sequence[CountedValue]]) -> dict[str, Any]:
    """Returns the fields of an `IndexResponse` that list values, given these with their rows."""
    return {
        "filters": {field: [value for value, _ in values] for field, values in listed.items()},
        "filter_counts": {field: [n for _, n in values] for field, values in listed.items()},
    }


async def before(deadline: float, work: "asyncio.Future[_T]") -> _T:
    """Returns the result of work; RequestError if the deadline passes."""
    try:
        async with asyncio.timeout_at(deadline):
            return await work
    except TimeoutError as error:
        raise RequestError("deadline_exceeded", DEADLINE_EXCEEDED) from error


def document_json(index: Snapshot, rows: range, id_: str) -> Iterator[bytes]:
    """Yields a `DocumentResponse`, given the rows that `find` returns for an id."""
    read = index.segment.documents.read
    first = read(rows[:1])[0].json()
    yield b'{"id":%b,"title":%b,"metadata":%b,' % (to_json(id_), first.title, first.metadata)
    if len(rows) == 1:
        yield b'"text":%b%b,"passages":[' % (first.text, first.chunk)
    else:
        yield b'"text":null,"chunks":%d,"passages":[' % len(rows)
        parts = (rows[at : at + _CHUNKS] for at in range(0, len(rows), _CHUNKS))
        chunks = (stored.json() for part in parts for stored in read(part))
        for at, chunk in enumerate(chunks):
            passage = b'{"id":%b,"chunk":%d,"text":%b}' % (chunk.id, at, chunk.text)
            yield b"," * (at > 0) + passage
    yield b'],"index":%b}' % index.reference
