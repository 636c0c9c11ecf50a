import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from core.service_process import ServerProcess, free_port, running_service, start_service
from tests.e2e.services import wait_until
from tests.errors import error_code

pytestmark = pytest.mark.e2e

BATCH = {"queries": [{"query": f"第{i}个病人夜里咳嗽怎么办"} for i in range(64)]}


@pytest.fixture
def service(indexes: Path) -> Iterator[ServerProcess]:
    """A service without cache that drains for one second after SIGTERM."""
    settings = {"CACHE_ENTRIES": "0", "DRAIN_SECONDS": "1"}
    service = start_service(indexes, "sample", settings)
    yield service
    service.process.kill()
    service.process.wait()


@pytest.fixture
def client(service: ServerProcess) -> Iterator[httpx2.Client]:
    """A client; creating one takes longer than a request."""
    with httpx2.Client(base_url=service.url, timeout=60) as client:
        yield client


def wait_for_work(client: httpx2.Client) -> None:
    """Waits until a batch has been admitted: more than the 512 tokens of a readiness check.

    A counter, as the page of metrics is renewed once a second: a queue may be empty by then.
    """

    def admitted() -> float:
        lines = client.get("/metrics").text.splitlines()
        (line,) = (line for line in lines if line.startswith("care_admitted_tokens_total "))
        return float(line.split()[1])

    wait_until(lambda: admitted() > 512)


def post(client: httpx2.Client) -> Any:
    return client.post("/search/batch", json=BATCH)


def keep_posting(client: httpx2.Client) -> None:
    while True:
        post(client)


def test_sigterm_stops_the_service_after_its_requests_complete(
    service: ServerProcess, client: httpx2.Client
) -> None:
    assert client.get("/health/ready").status_code == 200
    with ThreadPoolExecutor(5) as pool:
        before = [pool.submit(post, client) for _ in range(4)]
        wait_for_work(client)
        service.process.send_signal(signal.SIGTERM)
        after = pool.submit(post, client)
        ready = client.get("/health/ready")
        assert (ready.status_code, ready.json()["code"]) == (503, "shutting_down")
        assert client.get("/health/live").status_code == 200
        assert [pending.result().status_code for pending in (*before, after)] == [200] * 5
    assert service.process.wait(30) == 0
    with pytest.raises(httpx2.ConnectError):
        client.get("/")


def test_a_second_signal_skips_the_drain_time(service: ServerProcess) -> None:
    for _ in range(2):
        service.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert service.process.wait(30) == 0


def test_a_killed_service_starts_again(
    service: ServerProcess, client: httpx2.Client, indexes: Path
) -> None:
    with ThreadPoolExecutor(1) as pool:
        unanswered = pool.submit(keep_posting, client)
        wait_for_work(client)
        service.process.kill()
        service.process.wait()
        with pytest.raises(httpx2.HTTPError):
            unanswered.result()
    with running_service(indexes, "sample") as again:
        assert httpx2.get(f"{again.url}/health/ready").status_code == 200
        assert again.stop() == 0


def test_of_two_services_started_at_once_on_one_port_one_fails_with_an_error(
    indexes: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both services listen only after loading the index, so at first both can bind the address."""
    variables = {"CARE_INDEXES": str(indexes), "CARE_INDEX": "sample", "CARE_LOG_LEVEL": "warning"}
    environment = os.environ | variables | {"CARE_PORT": str(free_port())}
    both = [
        subprocess.Popen([sys.executable, "-m", "care", "serve"], env=environment) for _ in range(2)
    ]
    try:
        wait_until(lambda: any(process.poll() is not None for process in both))
        (loser,) = (process for process in both if process.poll() is not None)
        assert loser.returncode == 1
        error = capfd.readouterr().err
        assert (error.count("\n"), error_code(error)) == (1, "address_unavailable")
    finally:
        for process in both:
            process.terminate()
    (winner,) = (process for process in both if process is not loser)
    assert winner.wait(30) == 0
