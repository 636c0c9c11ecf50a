import asyncio

import pytest

from loadtest.connections import Client
from tests.loadtest.known_service import KnownService, served


def _send(url: str, count: int, **options: float) -> list[tuple[int, bytes]]:
    async def run() -> list[tuple[int, bytes]]:
        async with Client(url, **options) as client:  # type: ignore[arg-type]
            message = client.message("POST", "/search", b'{"query": "a"}')
            return [await client.send(message) for _ in range(count)]

    return asyncio.run(run())


def test_a_connection_is_used_again() -> None:
    service = KnownService()
    with served(service) as url:
        assert _send(url, 5) == [(200, b"{}")] * 5
    assert len(set(service.clients)) == 1


def test_a_connection_that_the_server_closes_is_not() -> None:
    service = KnownService(close=True)
    with served(service) as url:
        assert _send(url, 3) == [(200, b"{}")] * 3
    assert len(set(service.clients)) == 3


def test_no_more_connections_than_the_limit() -> None:
    service = KnownService()

    async def run(url: str) -> None:
        async with Client(url, limit=2) as client:
            message = client.message("POST", "/search", b"{}")
            await asyncio.gather(*(client.send(message) for _ in range(20)))

    with served(service) as url:
        asyncio.run(run(url))
    assert len(service.arrivals) == 20
    assert len(set(service.clients)) == 2


def test_a_connection_given_up_on_is_not_used_again() -> None:
    """Its late answer would be taken for that of the next request."""
    service = KnownService(stall_at=0, stall_seconds=0.8)

    async def run(url: str) -> int:
        async with Client(url, timeout=0.5) as client:
            message = client.message("POST", "/search", b"{}")
            with pytest.raises(TimeoutError):
                await client.send(message)
            await asyncio.sleep(0.6)
            return (await client.send(message))[0]

    with served(service) as url:
        assert asyncio.run(run(url)) == 200
    assert len(set(service.clients)) == 2


def test_only_http_addresses() -> None:
    with pytest.raises(ValueError, match="not an http"):
        Client("https://localhost")
