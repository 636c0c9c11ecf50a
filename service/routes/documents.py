"""A document by its id: found in an index version, and as JSON."""

import asyncio
from collections.abc import Iterator

from pydantic_core import to_json

from search.snapshot import Snapshot
from service.errors import RequestError
from service.pipeline.engine import Engine
from service.pipeline.pipeline import DEADLINE_EXCEEDED


async def find(engine: Engine, index: Snapshot, id_: str, deadline: float) -> range:
    """Returns the row with an id, or the rows of a document that is split; not empty.

    A search thread compares the ids. RequestError if no document or chunk has the id, or the
    deadline, a time of the event loop [s], passes.
    """
    try:
        async with asyncio.timeout_at(deadline):
            rows = await engine.run(index.segment.documents.find, id_)
    except TimeoutError as error:
        raise RequestError("deadline_exceeded", DEADLINE_EXCEEDED) from error
    if not rows:
        message = "no document or chunk of the served index version has this id"
        raise RequestError("unknown_document", message)
    return rows


def document_json(index: Snapshot, rows: range, id_: str) -> Iterator[bytes]:
    """Yields a `DocumentResponse`, given the rows that `find` returns for an id."""
    first = index.segment.documents.json(rows[0])
    yield b'{"id":%b,"title":%b,"metadata":%b,' % (to_json(id_), first.title, first.metadata)
    if len(rows) == 1:
        yield b'"text":%b%b,"passages":[' % (first.text, first.chunk)
    else:
        yield b'"text":null,"chunks":%d,"passages":[' % len(rows)
        for at, row in enumerate(rows):
            chunk = index.segment.documents.json(row)
            passage = b'{"id":%b,"chunk":%d,"text":%b}' % (chunk.id, at, chunk.text)
            yield b"," * (at > 0) + passage
    yield b'],"index":%b}' % index.reference
