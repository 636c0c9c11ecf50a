"""Answers as JSON: made piece by piece, long ones outside of the event loop, within a budget."""

import base64
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from pydantic_core import to_json

from core.types import FloatArray, Query
from search.fusion import Channel
from search.hits import QueryResult
from search.snapshot import Snapshot
from service.limits import SMALL_ANSWER
from service.observe.metrics import Timings

# Size of a hit besides its document [bytes].
_HIT_BYTES = 128
# Numbers of vectors of one piece.
_NUMBERS = 4096

# Runs a function in a thread.
Run = Callable[..., Any]


def are_short(results: Iterable[QueryResult]) -> bool:
    """Returns whether the JSON of results takes the event loop less than some 2 ms.

    Hits whose documents are still to be read are not short, as the disk may be slow.
    """
    room = SMALL_ANSWER
    for result in results:
        size = result.hits.text_bytes
        if size is None:
            return False
        room -= len(result.hits) * _HIT_BYTES + size
        if room < 0:
            return False
    return True


def size_of_hits(index: Snapshot, hits: int) -> int:
    """Returns an estimate of the size of hits with text as JSON [bytes]."""
    return hits * (_HIT_BYTES + index.document_bytes)


async def sent_in_parts(pieces: Iterator[bytes], run: Run) -> AsyncGenerator[bytes, None]:
    """Yields JSON in parts of at least `SMALL_ANSWER` bytes, made in a thread once wanted."""
    while part := await run(_next_part, pieces):
        yield part


def _next_part(pieces: Iterator[bytes]) -> bytes:
    part = bytearray()
    while len(part) < SMALL_ANSWER and (piece := next(pieces, None)):
        part += piece
    return bytes(part)


def search_json(
    hits: Iterable[bytes],
    index: Snapshot,
    timings: Timings,
    query: Query,
    *,
    cached: bool,
    overflow: bool = False,
    failed: Sequence[Channel] = (),
    answerable: float | None = None,
) -> Iterator[bytes]:
    """Yields a `SearchResponse`, given its hits as JSON, separated by commas."""
    yield b'{"hits":['
    yield from hits
    how = to_json(query.mode), to_json(cached), to_json(overflow)
    yield b'],"index":%b,"timings_ms":%b,' % (index.reference, to_json(timings))
    yield b'"mode":%b,"cached":%b,"overflow":%b,' % how
    reranked = bool(query.rerank) and "rerank" not in failed
    found = to_json(failed), to_json(reranked), to_json(answerable)
    yield b'"failed_channels":%b,"reranked":%b,"answerable":%b}' % found


def batch_json(
    index: Snapshot,
    results: list[tuple[QueryResult, Timings]],
    included: Sequence[Sequence[str]],
    queries: Sequence[Query],
) -> Iterator[bytes]:
    """Yields a `BatchResponse`; each of `results` is removed once its JSON is made.

    `included` are the optional fields of the hits of each result.
    """
    separator = b'{"results":['
    results.reverse()
    for include, query in zip(included, queries, strict=True):
        result, timings = results.pop()
        yield separator
        hits = result.hits.json(include)
        yield from search_json(hits, index, timings, query, **result.how)
        separator = b","
    yield b"]}"


def embeddings_json(
    vectors: FloatArray, model: str, tokens: int, *, in_base64: bool
) -> Iterator[bytes]:
    """Yields an `EmbeddingsResponse` of vectors, float32 [n, dimension]."""
    step = max(1, _NUMBERS // vectors.shape[1])
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    parts = (
        _vectors(vectors[first : first + step], first, in_base64=in_base64)
        for first in range(0, len(vectors), step)
    )
    return chain(
        (b'{"object":"list","data":[',),
        parts,
        (b"]," + to_json({"model": model, "usage": usage})[1:],),
    )


def _vectors(vectors: FloatArray, first: int, *, in_base64: bool) -> bytes:
    values: list[Any] = vectors.tolist()
    if in_base64:
        values = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    data = [
        {"object": "embedding", "index": i, "embedding": value}
        for i, value in enumerate(values, first)
    ]
    return (b"," if first else b"") + to_json(data)[1:-1]
