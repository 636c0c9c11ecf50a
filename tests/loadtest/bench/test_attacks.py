"""Attacks on servers that answer, close the connection, or do nothing."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from loadtest.bench.attacks import ATTACKS, Target, ask, batch, bodies, post, send

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LONG = ("header of 20 MB", "3 million trailers")
HELD = ("100 clients that do not read", "100 slow heads", "180 idle connections")


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 431 Too Large\r\nContent-Length: 2\r\n\r\n{}")
    writer.close()


async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(1 << 16):
        pass


def attack(handler: Handler, run: Callable[[Target], Awaitable[object]]) -> object:
    """Runs an attack that holds connections for half a second against a server."""

    async def main() -> object:
        async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            return await run(Target(host, port, hold=0.5))

    return asyncio.run(main())


def test_the_outcome_of_a_request_is_its_status_or_a_closed_connection() -> None:
    request = post("/search", b"{}")
    assert attack(answer, lambda target: ask(target, [request])) == "431"
    assert attack(close, lambda target: ask(target, [request])) == "closed"
    assert attack(answer, lambda target: send(target, request, clients=3)) == Counter({"431": 3})


@pytest.mark.parametrize("name", LONG)
def test_a_long_head_ends_when_the_server_closes_the_connection(name: str) -> None:
    assert attack(close, ATTACKS[name]) == Counter({"closed": 1})


@pytest.mark.parametrize("name", HELD)
def test_connections_are_held_until_the_server_closes_them(name: str) -> None:
    count = 180 if "idle" in name else 100
    assert attack(ignore, ATTACKS[name]) == Counter({"waiting": count})
    assert attack(close, ATTACKS[name]) == Counter({"closed": count})


def test_bodies_fill_their_size() -> None:
    size = 1 << 16
    for name, (_, body) in bodies(size).items():
        assert name == "wide filters" or size - 128 <= len(body) <= size, name
    head, _, body = batch(3, top_k=5).partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
