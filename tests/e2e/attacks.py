"""Requests and connections that try to stall the service or to fill its memory.

An attack is a function from a `Target` to the number of outcomes: a status, "closed" if the service
closed the connection without a status, or "waiting" if it did neither before the attack ended.
"""

import asyncio
import json
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import repeat
from typing import Any

# The default of CARE_MAX_BODY_BYTES: longer bodies are not read.
BODY_BYTES = 4 << 20
# Sizes of hostile bodies: the shortest is within the limits of JSON values of a body.
_BODY_SIZES = (1 << 18, 1 << 20, BODY_BYTES)
# Fields of the attacked index, each with this many values (tests/e2e/victim.py).
FIELDS = tuple(f"field-{i:02d}" for i in range(16))
VALUES = tuple(f"value-{i:02d}" for i in range(100))

_QUESTION = "高血压患者饮食上要注意什么？"
# A field that takes long to decode.
_ESCAPED = r'"f%06d":"eX\u0082vi\u0085*\u00bf&r\udaeb\udf60\u00fa"'
_READ_BYTES = 1 << 18
_DRIP_SECONDS = 0.2
_SIP_BYTES = 1024
# How long a client that sends waits for the answer [s].
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Target:
    """The attacked service.

    Attributes:
        host: Its address.
        port: Its port.
        hold: How long connections are held open that do not read, or do not send [s].
    """

    host: str
    port: int
    hold: float = 20.0


Attack = Callable[[Target], Coroutine[Any, Any, Counter[str]]]


def post(path: str, body: bytes, *headers: str, connection: str = "close") -> bytes:
    """Returns a POST of JSON."""
    length, kind = f"Content-Length: {len(body)}", "Content-Type: application/json"
    return _head("POST", path, f"Connection: {connection}", length, kind, *headers) + body


def batch(queries: int, **fields: Any) -> bytes:
    """Returns a POST of different queries, each with the same other fields, to /search/batch."""
    questions = [{"query": f"{_QUESTION}{i}", **fields} for i in range(queries)]
    return post("/search/batch", json.dumps({"queries": questions}).encode())


async def ask(target: Target, parts: Iterable[bytes]) -> str:
    """Sends a request while it reads the response; returns the outcome.

    Raises:
        TimeoutError: If the response does not end within a minute.
        OSError: If the connection is refused.
    """
    async with _connection(target) as (reader, writer), asyncio.timeout(_PATIENCE):
        sending = asyncio.create_task(_write(writer, parts))
        try:
            return await _status(reader)
        finally:
            sending.cancel()


async def send(target: Target, request: bytes, clients: int = 1) -> Counter[str]:
    """Sends a request over some connections at once and reads the responses."""
    return await _all(ask(target, [request]) for _ in range(clients))


def _head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: x", *headers, "\r\n")).encode()


@asynccontextmanager
async def _connection(
    target: Target, buffer: int = _READ_BYTES
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Opens a connection, which is reset at the end, whatever is unsent.

    `buffer` is how many bytes are read before they are asked for.
    """
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=buffer)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _write(writer: asyncio.StreamWriter, parts: Iterable[bytes]) -> None:
    with suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()


async def _status(reader: asyncio.StreamReader) -> str:
    """Reads a response to its end; returns its status."""
    status = "closed"
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        status = head.split(maxsplit=2)[1].decode()
        length = head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
        left = int(length) if length else None
        while left is None or left > 0:
            part = await reader.read(_READ_BYTES)
            if not part:
                break
            left = left - len(part) if left is not None else None
    return status


async def _closed(reader: asyncio.StreamReader, seconds: float) -> str:
    """Waits until the service closes a connection; returns the status that it sent before."""
    received = b""
    try:
        async with asyncio.timeout(seconds):
            while part := await reader.read(_READ_BYTES):
                received = (received + part)[:64]
    except TimeoutError:
        return "waiting"
    except ConnectionError:
        pass
    return _outcome(received)


def _outcome(received: bytes) -> str:
    """Returns the status of a response, of which only the first bytes are given."""
    return received.split(maxsplit=2)[1].decode() if b" " in received else "closed"


async def _all(outcomes: Iterable[Awaitable[str]]) -> Counter[str]:
    async def settled(outcome: Awaitable[str]) -> str:
        try:
            return await outcome
        except TimeoutError:
            return "waiting"
        except OSError:
            return "closed"

    return Counter(await asyncio.gather(*map(settled, outcomes)))


# Bodies


@cache
def bodies(size: int = BODY_BYTES) -> dict[str, tuple[str, bytes]]:
    """Returns hostile bodies of at most `size` bytes with their paths, by name."""

    def filled(start: str, item: str, end: str) -> bytes:
        count = (size - len(start) - len(end)) // (len(item) + 1)
        return (start + ",".join(repeat(item, count)) + end).encode()

    def numbered(start: str, item: str, end: str) -> bytes:
        count = (size - len(start) - len(end)) // (len(item % 999_999) + 1)
        return (start + ",".join(item % i for i in range(count)) + end).encode()

    question, nested = '{"query":"a"', size // 2 - 40
    wide = {field: list(VALUES) for field in FIELDS}
    filters = [{"query": f"问题{i}", "filter": wide} for i in range(min(64, size // 21_000))]
    return {
        "token ids": ("/v1/embeddings", filled('{"input":[', "1", "]}")),
        "short texts": ("/v1/embeddings", filled('{"input":[', '"a"', "]}")),
        "lists of token ids": ("/v1/embeddings", filled('{"input":[', "[1]", "]}")),
        "include of numbers": ("/search", filled(question + ',"include":[', "1", "]}")),
        "include of texts": ("/search", filled(question + ',"include":[', '"text"', "]}")),
        "unknown fields": ("/search", numbered(question + ",", '"f%06d":1', "}")),
        "escaped fields": ("/search", numbered(question + ",", _ESCAPED, "}")),
        "repeated field": ("/search", filled(question + ",", '"query":"a"', "}")),
        "values of a filter": ("/search", filled(question + ',"filter":{"a":[', '"a"', "]}}")),
        "wrong values of a filter": ("/search", filled(question + ',"filter":{"a":[', "{}", "]}}")),
        "fields of a filter": (
            "/search",
            numbered(question + ',"filter":{', '"f%06d":["a"]', "}}"),
        ),
        "escapes": ("/search", b'{"query":"' + b"\\u00e9" * (size // 6 - 4) + b'"}'),
        "huge number": ("/search", b'{"query":"a","top_k":' + b"9" * (size - 40) + b"}"),
        "huge exponent": ("/search", b'{"query":"a","min_score":1e' + b"9" * (size - 40) + b"}"),
        "list of numbers": ("/search", filled("[", "1.5e308", "]")),
        "nested lists": ("/search", b"[" * nested + b"]" * nested),
        "unclosed lists": ("/search", b"[" * size),
        "nested objects": ("/search", b'{"filter":' * (size // 10)),
        "white space": ("/search", b" " * size),
        "empty queries": ("/search/batch", filled('{"queries":[', "{}", "]}")),
        "valid queries": ("/search/batch", filled('{"queries":[', '{"query":"a"}', "]}")),
        "numbers as queries": ("/search/batch", filled('{"queries":[', "1", "]}")),
        "wide filters": ("/search/batch", json.dumps({"queries": filters}).encode()),
    }


async def _body(target: Target, name: str, size: int) -> Counter[str]:
    return await send(target, post(*bodies(size)[name]), clients=2)


# Heads


def _stream(start: bytes, item: bytes, end: bytes, size: int) -> Iterator[bytes]:
    part = item * max(1, (64 << 10) // len(item))
    yield start
    yield from repeat(part, size // len(part))
    yield end


async def _long(target: Target, start: bytes, item: bytes, end: bytes, size: int) -> Counter[str]:
    return await _all([ask(target, _stream(start, item, end, size))])


_LIVE = b"GET /health/live HTTP/1.1\r\nHost: x\r\n"
_CHUNKED = _head("POST", "/search", "Content-Type: application/json", "Transfer-Encoding: chunked")
_END = b"\r\n\r\n"
# Start, repeated bytes, end, and their size [bytes].
_STREAMS = {
    "header of 20 MB": (_LIVE + b"X: ", b"a", _END, 20 << 20),
    "header of 100 MB": (_LIVE + b"X: ", b"a", _END, 100 << 20),
    "3 million headers": (_LIVE, b"A: b\r\n", b"\r\n", 20 << 20),
    "URL of 20 MB": (b"GET /", b"a", b" HTTP/1.1\r\nHost: x" + _END, 20 << 20),
    "chunk extension of 100 MB": (_CHUNKED + b"1;", b"a", b"\r\n0" + _END, 100 << 20),
    "3 million trailers": (_CHUNKED + b"0\r\n", b"A: b\r\n", b"\r\n", 20 << 20),
    "3 million chunks": (_CHUNKED, b"1\r\n \r\n", b"0" + _END, 18 << 20),
}


# Connections


async def _unread(target: Target, clients: int, request: bytes) -> Counter[str]:
    async def client() -> str:
        async with _connection(target, buffer=1) as (reader, writer):
            writer.write(request)
            # The transport stops reading at two bytes; what the kernel holds stays there.
            await asyncio.sleep(target.hold)
            return await _closed(reader, 0.2)

    return await _all(client() for _ in range(clients))


async def _drip(target: Target, clients: int, start: bytes, byte: bytes) -> Counter[str]:
    """Sends the start of a request, then one byte at a time."""

    async def client() -> str:
        async with _connection(target) as (reader, writer):
            writer.write(start)
            ended = asyncio.create_task(_closed(reader, target.hold))
            while not ended.done():
                writer.write(byte)
                await asyncio.sleep(_DRIP_SECONDS)
            return await ended

    return await _all(client() for _ in range(clients))


async def _sip(target: Target, clients: int, request: bytes) -> Counter[str]:
    """Reads the response 1 KiB at a time."""

    async def client() -> str:
        async with _connection(target, buffer=1) as (reader, writer):
            writer.transport.max_size = _SIP_BYTES  # type: ignore[attr-defined]
            writer.write(request)
            received = b""
            with suppress(ConnectionError):
                async with asyncio.timeout(target.hold):
                    while part := await reader.read(_SIP_BYTES):
                        received = (received + part)[:64]
                        await asyncio.sleep(_DRIP_SECONDS)
            return _outcome(received)

    return await _all(client() for _ in range(clients))


async def _idle(target: Target, clients: int) -> Counter[str]:
    async def client() -> str:
        async with _connection(target) as (reader, _):
            return await _closed(reader, target.hold)

    return await _all(client() for _ in range(clients))


async def _abort(target: Target, clients: int) -> Counter[str]:
    async def client() -> str:
        async with _connection(target) as (_, writer):
            await _write(writer, [post("/search", b" " * (1 << 20))[: 1 << 19]])
        return "aborted"

    return await _all(client() for _ in range(clients))


async def _pipeline(target: Target, request: bytes, count: int, clients: int) -> Counter[str]:
    """Sends many requests in one go and reads nothing."""

    async def client() -> str:
        async with _connection(target, buffer=1) as (reader, writer):
            with suppress(TimeoutError):
                async with asyncio.timeout(target.hold):
                    await _write(writer, repeat(request * 100, count // 100))
            return await _closed(reader, 0.2)

    return await _all(client() for _ in range(clients))


_UNREAD = batch(24, top_k=1000)
_UPGRADE = ("Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ")
_SEARCH = json.dumps({"query": _QUESTION}).encode()
_REPEATED = json.dumps(
    {"query": _QUESTION, "filter": {field: [VALUES[0]] * 100 for field in FIELDS}}
).encode()
_TEXTS = json.dumps({"input": [f"{_QUESTION}{i}" for i in range(2048)]}).encode()

# Attacks whose requests are complete and whose responses are read.
REQUESTS: Mapping[str, Attack] = {
    **{
        f"{name}, {size >> 10:,} KiB": partial(_body, name=name, size=size)
        for name in bodies(1 << 10)
        for size in _BODY_SIZES
    },
    **{
        name: partial(_long, start=start, item=item, end=end, size=size)
        for name, (start, item, end, size) in _STREAMS.items()
    },
    "64 × top_k 1000 with text": partial(send, request=batch(64, top_k=1000), clients=2),
    "2048 texts": partial(send, request=post("/v1/embeddings", _TEXTS), clients=1),
    "repeated values of 16 fields": partial(
        send, request=post("/search", _REPEATED, "X-Request-Timeout-Ms: 1000"), clients=4
    ),
    "Upgrade: h2c": partial(send, request=post("/search", _SEARCH, *_UPGRADE), clients=4),
}
# Attacks with connections that do not send, do not read, or send without reading.
CONNECTIONS: Mapping[str, Attack] = {
    "30 clients that do not read": partial(_unread, clients=30, request=_UNREAD),
    "100 clients that do not read": partial(_unread, clients=100, request=_UNREAD),
    "100 clients that read slowly": partial(_sip, clients=100, request=_UNREAD),
    "100 slow heads": partial(_drip, clients=100, start=b"GET / HTTP/1.1\r\nX: ", byte=b"a"),
    "100 slow bodies": partial(
        _drip, clients=100, start=_head("POST", "/search", "Content-Length: 1000000"), byte=b" "
    ),
    "180 idle connections": partial(_idle, clients=180),
    "500 aborted uploads": partial(_abort, clients=500),
    "20,000 pipelined requests": partial(
        _pipeline, request=_head("GET", "/health/live"), count=20_000, clients=4
    ),
    "4,000 pipelined searches": partial(
        _pipeline, request=post("/search", _SEARCH, connection="keep-alive"), count=4000, clients=4
    ),
}
ATTACKS = {**REQUESTS, **CONNECTIONS}
