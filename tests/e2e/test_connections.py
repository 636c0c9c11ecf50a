"""Clients that do not send, do not read or do not go away, against the whole service."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from core.service_process import ServerProcess, start_service
from tests.e2e.services import wait_until

pytestmark = pytest.mark.e2e

QUERIES = {"queries": [{"query": f"第{i}个病人夜里咳嗽怎么办"} for i in range(64)]}
BODY = json.dumps({"queries": [{"query": f"咳嗽{i}", "top_k": 400} for i in range(64)]}).encode()
POST = b"POST /search/batch HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
BATCH = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


@contextmanager
def service(indexes: Path, **settings: str) -> Iterator[ServerProcess]:
    running = start_service(indexes, "sample", settings)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def connect(url: str, receives: int | None = None) -> socket.socket:
    address = urlsplit(url)
    connection = socket.socket()
    if receives:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
    connection.settimeout(30)
    connection.connect((address.hostname, address.port))
    return connection


def metric(url: str, name: str) -> float:
    lines = httpx2.get(f"{url}/metrics", verify=False).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def until(url: str, name: str, least: float) -> None:
    wait_until(lambda: metric(url, name) >= least)


def test_sigterm_stops_the_service_after_its_requests_complete(indexes: Path) -> None:
    settings = {"CACHE_ENTRIES": "0", "DRAIN_SECONDS": "1"}
    with (
        service(indexes, **settings) as running,
        httpx2.Client(base_url=running.url, timeout=60) as client,
        ThreadPoolExecutor(5) as pool,
    ):
        post = partial(client.post, "/search/batch", json=QUERIES)
        assert client.get("/health/ready").status_code == 200
        before = [pool.submit(post) for _ in range(4)]
        # A batch has been admitted: more tokens than the 512 of a readiness check.
        until(running.url, "care_admitted_tokens_total", 513)
        running.process.send_signal(signal.SIGTERM)
        after = pool.submit(post)
        ready = client.get("/health/ready")
        assert (ready.status_code, ready.json()["code"]) == (503, "shutting_down")
        assert client.get("/health/live").status_code == 200
        assert [pending.result().status_code for pending in (*before, after)] == [200] * 5
        assert running.process.wait(30) == 0
        with pytest.raises(httpx2.ConnectError):
            client.get("/")


def test_sigterm_ends_the_service_whatever_clients_do(indexes: Path) -> None:
    """Clients that do not read, hang in a body or in a head, or idle; and a second signal."""
    settings = {
        "CLIENT_TIMEOUT_SECONDS": "60",
        "TIMEOUT_MS": "60000",
        "CACHE_ENTRIES": "0",
        "MAX_ANSWER_BYTES": str(1 << 30),
    }
    with ExitStack() as stack:
        running = stack.enter_context(service(indexes, **settings))
        url = running.url
        for _ in range(20):
            stack.enter_context(connect(url, receives=4096)).sendall(BATCH)
        for data in (POST + b"Content-Length: 9\r\n\r\na", POST, b""):
            stack.enter_context(connect(url)).sendall(data)
        until(url, "care_http_requests_in_flight", 22)
        until(url, "care_unsent_bytes", 1)
        started = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(30) == 0
        assert time.monotonic() - started < 12
