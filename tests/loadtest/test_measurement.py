"""Measurement at a fixed rate, over HTTP."""

import json
import socket
import threading
import time
from typing import Any

import pytest

from loadtest.measurement import Measurement, Target, measure
from tests.loadtest.known_service import KnownService, served

pytestmark = pytest.mark.e2e


def _measure(
    url: str, rate: float, count: int, limit: int = 100, timeout: float = 10, size: int = 0
) -> Measurement:
    target = Target(url)
    message = target.message("POST", "/search", json.dumps({"query": "a" * size}).encode())
    return measure(target, [message] * count, rate, limit, timeout)


@pytest.mark.parametrize(
    ("close", "rate", "limit", "connections"),
    [(False, 20, 1, 1), (True, 20, 1, 5), (False, 10_000, 2, 2)],
    ids=["reused", "closed by the server", "no more than the limit"],
)
def test_connections_are_reused_while_they_are_open(
    close: bool, rate: float, limit: int, connections: int
) -> None:
    service = KnownService(close=close)
    with served(service) as url:
        assert _measure(url, rate=rate, count=5, limit=limit).statuses == {"200": 5}
    assert len(service.arrivals) == 5
    assert len(set(service.clients)) == connections


def test_a_request_that_a_socket_does_not_take_at_once_is_sent_whole() -> None:
    service = KnownService()
    with served(service) as url:
        assert _measure(url, rate=100, count=2, size=20_000_000).statuses == {"200": 2}
    assert [len(body["query"]) for body in service.bodies] == [20_000_000] * 2


def test_a_connection_is_not_reused_after_a_time_out() -> None:
    """Otherwise its late response would be read as the response to the next request."""
    service = KnownService(stall_at=0, stall_seconds=0.3)
    with served(service) as url:
        measurement = _measure(url, rate=2.5, count=2, limit=1, timeout=0.2)
    assert measurement.statuses == {"200": 1, "timeout": 1}
    assert len(set(service.clients)) == 2


@pytest.mark.parametrize(
    "response", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}"]
)
def test_a_truncated_response_or_one_without_length_is_an_error(response: bytes) -> None:
    def answer(listener: socket.socket) -> None:
        connection = listener.accept()[0]
        with connection:
            connection.recv(1000)
            connection.sendall(response)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=answer, args=[listener])
        server.start()
        port = listener.getsockname()[1]
        assert _measure(f"http://127.0.0.1:{port}", rate=1, count=1).statuses == {"connection": 1}
        server.join()


def test_addresses_must_be_http() -> None:
    with pytest.raises(ValueError):
        Target("https://localhost")


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
    # Latencies are those of successful requests: the last one of 20 arrives after 95 ms.
    assert measurement.latency_ms["p50"] > 80


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
    class Slow(list[bytes]):
        def __getitem__(self, at: Any) -> Any:
            time.sleep(0.02)
            return super().__getitem__(at)

    with served(KnownService()) as url:
        target = Target(url)
        messages = Slow([target.message("POST", "/search", b"{}")] * 30)
        measurement = measure(target, messages, 1000)
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
