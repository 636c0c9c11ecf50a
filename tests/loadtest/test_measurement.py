"""The HTTP client, and measurement at a fixed rate."""

import asyncio
import socket
import time

import pytest

from loadtest.measurement import Client, Measurement, measure
from tests.loadtest.known_service import KnownService, served

pytestmark = pytest.mark.e2e


def _send(url: str, count: int) -> list[tuple[int, bytes]]:
    async def run() -> list[tuple[int, bytes]]:
        async with Client(url) as client:
            message = client.message("POST", "/search", b'{"query": "a"}')
            return [await client.send(message) for _ in range(count)]

    return asyncio.run(run())


def test_a_connection_is_reused() -> None:
    service = KnownService()
    with served(service) as url:
        assert _send(url, 5) == [(200, b"{}")] * 5
    assert len(set(service.clients)) == 1


def test_a_connection_closed_by_the_server_is_not_reused() -> None:
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


def test_a_connection_is_not_reused_after_a_time_out() -> None:
    """Otherwise its late response would be read as the response to the next request."""
    service = KnownService(stall_at=0, stall_seconds=0.3)

    async def run(url: str) -> int:
        async with Client(url, timeout=0.2) as client:
            message = client.message("POST", "/search", b"{}")
            with pytest.raises(TimeoutError):
                await client.send(message)
            await asyncio.sleep(0.2)
            return (await client.send(message))[0]

    with served(service) as url:
        assert asyncio.run(run(url)) == 200
    assert len(set(service.clients)) == 2


@pytest.mark.parametrize(
    "response", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"]
)
def test_a_truncated_response_or_one_without_length_is_an_error(response: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Client(f"http://127.0.0.1:{port}") as client:
            with pytest.raises(ConnectionError):
                await client.send(client.message("GET", "/index"))

    asyncio.run(run())


def test_addresses_must_be_http() -> None:
    with pytest.raises(ValueError):
        Client("https://localhost")


def _measure(
    url: str, rate: float, count: int, limit: int = 100, timeout: float = 10
) -> Measurement:
    async def run() -> Measurement:
        async with Client(url, limit=limit, timeout=timeout) as client:
            message = client.message("POST", "/search", b'{"query": "a"}')
            return await measure(client.send, [message] * count, rate)

    return asyncio.run(run())


def test_each_request_is_sent_and_counted_once() -> None:
    service = KnownService()
    with served(service) as url:
        measurement = _measure(url, rate=200, count=100)
    assert len(service.arrivals) == measurement.sent == measurement.succeeded == 100
    assert measurement.statuses == {"200": 100}
    assert measurement.error_rate == 0
    # The last request is scheduled after 99 intervals.
    assert measurement.seconds >= 99 / 200
    assert measurement.goodput == pytest.approx(100 / measurement.seconds)


def test_a_stall_counts_for_requests_that_could_not_be_sent_during_it() -> None:
    """With one connection, one request is in flight during the stall and thirty are scheduled."""
    service = KnownService(stall_at=50, stall_seconds=0.3)
    with served(service) as url:
        measurement = _measure(url, rate=100, count=100, limit=1)
    start = service.arrivals[50]
    assert not [a for a in service.arrivals if start < a < service.stall_end]
    assert measurement.latency_ms["p90"] > 150
    assert measurement.latency_ms["p99"] > 250


def test_rejected_requests_are_counted_separately() -> None:
    """The three accepted requests get responses after all requests have arrived."""
    service = KnownService(limit=3, hold_until=20)
    with served(service) as url:
        measurement = _measure(url, rate=200, count=20)
    assert measurement.statuses == {"200": 3, "429": 17}
    assert measurement.error_rate == pytest.approx(17 / 20)
    assert measurement.goodput == pytest.approx(3 / measurement.seconds)


def test_latencies_are_those_of_successful_requests() -> None:
    async def refuse_quickly(message: bytes) -> tuple[int, bytes]:
        if message == b"refused":
            return 429, b""
        await asyncio.sleep(0.1)
        return 200, b""

    measurement = asyncio.run(measure(refuse_quickly, [b"refused", b"answered"] * 10, 500))
    assert measurement.statuses == {"200": 10, "429": 10}
    assert measurement.latency_ms["p50"] >= 99


def test_each_status_is_counted_separately() -> None:
    with served(KnownService(statuses=(200, 503, 200, 504))) as url:
        measurement = _measure(url, rate=200, count=40)
    assert measurement.statuses == {"200": 20, "503": 10, "504": 10}


def test_time_outs_are_errors() -> None:
    with served(KnownService(stall_at=0, stall_seconds=0.5)) as url:
        measurement = _measure(url, rate=100, count=5, timeout=0.2)
    assert measurement.statuses == {"timeout": 5}
    assert measurement.latency_ms == {}
    assert not measurement.within(bound_ms=1000, max_error_rate=1)


def test_refused_connections_are_errors() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        measurement = _measure(f"http://127.0.0.1:{unused.getsockname()[1]}", rate=100, count=5)
    assert measurement.statuses == {"connection": 5}


def test_a_driver_that_falls_behind_is_marked() -> None:
    async def slow_driver(_: bytes) -> tuple[int, bytes]:
        time.sleep(0.02)  # noqa: ASYNC251 - the driver itself is what is slow
        return 200, b""

    measurement = asyncio.run(measure(slow_driver, [b""] * 30, 1000))
    assert measurement.statuses == {"200": 30}
    assert measurement.late > 20
    assert measurement.latency_ms["p50"] > measurement.lag_ms["p50"] > 100
    assert not measurement.kept_schedule
    assert not measurement.within(bound_ms=10_000, max_error_rate=0)


@pytest.mark.parametrize(
    ("lag", "latency", "kept"), [(4, 10, True), (6, 10, False), (9, 100, True), (11, 100, False)]
)
def test_the_allowed_lag_grows_with_the_latency(lag: float, latency: float, kept: bool) -> None:
    measurement = Measurement(10, 1, 10, {"200": 10}, {"p99": latency}, {"p99": lag}, 0, 0)
    assert measurement.kept_schedule is kept
