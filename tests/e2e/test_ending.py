import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.service_process import start_service

if TYPE_CHECKING:
    from subprocess import Popen

BATCH = {"queries": [{"query": f"第{i}个病人夜里咳嗽怎么办"} for i in range(64)]}


@pytest.fixture
def service(indexes: Path) -> Iterator[tuple["Popen[str]", str]]:
    """A service without a cache that goes on for a second after SIGTERM."""
    process, url = start_service(indexes, "sample", CACHE_ENTRIES="0", DRAIN_SECONDS="1")
    yield process, url
    process.kill()
    process.wait()


def wait_for_work(url: str) -> None:
    end = time.monotonic() + 30
    while "care_queue_queries 0.0" in httpx2.get(f"{url}/metrics").text:
        assert time.monotonic() < end


def post(url: str) -> Any:
    return httpx2.post(f"{url}/search/batch", json=BATCH, timeout=60)


def test_sigterm_ends_the_service_when_its_work_is_done(service: tuple["Popen[str]", str]) -> None:
    process, url = service
    assert httpx2.get(f"{url}/health/ready").status_code == 200
    with ThreadPoolExecutor(3) as pool:
        before = [pool.submit(post, url) for _ in range(2)]
        wait_for_work(url)
        process.send_signal(signal.SIGTERM)
        ready = httpx2.get(f"{url}/health/ready")
        assert (ready.status_code, ready.json()["detail"]) == (503, "the service is ending")
        assert httpx2.get(f"{url}/health/live").status_code == 200
        after = pool.submit(post, url)
        assert [pending.result().status_code for pending in (*before, after)] == [200] * 3
    assert process.wait(30) == 0
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)


def test_a_second_signal_does_not_wait_for_balancers(service: tuple["Popen[str]", str]) -> None:
    process, _ = service
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert process.wait(30) == 0


def test_a_killed_service_starts_again(service: tuple["Popen[str]", str], indexes: Path) -> None:
    process, url = service
    with ThreadPoolExecutor(1) as pool:
        unanswered = pool.submit(post, url)
        wait_for_work(url)
        process.kill()
        process.wait()
        with pytest.raises(httpx2.HTTPError):
            unanswered.result()
    again, url = start_service(indexes, "sample")
    try:
        assert httpx2.get(f"{url}/health/ready").status_code == 200
    finally:
        again.terminate()
        assert again.wait(20) == 0
