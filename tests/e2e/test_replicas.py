"""Services of one folder of indexes, as processes: damaged files, new versions, restarts."""

import json
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from core.service_process import ServerProcess, free_port, start_service
from core.versions import IndexFolder
from tests.conftest import make_records
from tests.e2e.services import build_index, wait_until

pytestmark = pytest.mark.e2e

QUERY = {"query": "高血压患者的护理", "top_k": 30, "filter": {"department": ["儿科", "骨科"]}}
FILES = ("documents.arrow", "filters.arrow", "vectors.faiss")


def publish(root: Path, count: int) -> str:
    """Builds a version of some documents with care-mini and returns its id."""
    return IndexFolder(build_index(root, "test", make_records(count)), "test").active()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Two versions; the second is active."""
    root = tmp_path_factory.mktemp("replicas")
    return root, [publish(root, count) for count in (20, 30)]


@pytest.fixture
def root(built: tuple[Path, list[str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(built[0], tmp_path / "root"))


@pytest.fixture
def versions(built: tuple[Path, list[str]]) -> list[str]:
    return built[1]


Start = Callable[..., ServerProcess]


@pytest.fixture
def start(root: Path) -> Iterator[Start]:
    """Starts services, which are killed at the end of the test."""
    with ExitStack() as stack:

        def run(**settings: str) -> ServerProcess:
            service = start_service(root / "indexes", "test", settings)
            stack.callback(service.process.wait)
            stack.callback(service.process.kill)
            return service

        yield run


def described(service: ServerProcess) -> dict[str, Any]:
    """The answer of `GET /index`; empty while the service does not respond."""
    try:
        answer = httpx2.get(f"{service.url}/index", timeout=30, verify=False)
    except httpx2.TransportError:
        return {}
    return dict(answer.json())


def test_a_service_whose_file_is_truncated_starts_again_on_the_last_whole_version(
    start: Start, root: Path, versions: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    service = start(WATCH_SECONDS="0", PORT=str(free_port()))
    assert described(service)["version"] == versions[1]
    path = root / "indexes" / "test" / versions[1] / "documents.arrow"
    content = path.read_bytes()
    os.truncate(path, 0)
    with pytest.raises(httpx2.TransportError):
        httpx2.post(f"{service.url}/search", json=QUERY, timeout=60)
    wait_until(lambda: bool(described(service)))
    index = described(service)
    assert (index["version"], index["active"]) == (versions[0], False)
    assert httpx2.post(f"{service.url}/search", json=QUERY).status_code == 200
    assert "care_index_fallback 1.0" in httpx2.get(f"{service.url}/metrics").text
    assert service.process.poll() is None
    path.write_bytes(content)
    assert httpx2.post(f"{service.url}/index/reload").json()["version"] == versions[1]
    assert service.stop() == 0
    logged = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[0] == "{"]
    assert [line["code"] for line in logged] == ["bus_error", "wrong_size"]


def test_a_service_without_a_whole_version_ends_with_one_error(
    start: Start, root: Path, versions: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    service = start(WATCH_SECONDS="0")
    for version in versions:
        os.truncate(root / "indexes" / "test" / version / "vectors.faiss", 0)
    with pytest.raises(httpx2.TransportError):
        httpx2.post(f"{service.url}/search", json=QUERY, timeout=60)
    assert service.process.wait(60) == 1
    assert capfd.readouterr().err.splitlines()[-1].endswith("[wrong_size]")


class Balancer:
    """Sends searches to replicas that are ready, from several threads, and counts the answers."""

    def __init__(self, *replicas: ServerProcess) -> None:
        self.replicas = list(replicas)
        self.answers: Counter[tuple[int, str]] = Counter()
        self._ready = list(replicas)
        self._done = threading.Event()

    def _probe(self) -> None:
        with httpx2.Client(timeout=60) as client:
            while not self._done.wait(0.05):
                ready = [r for r in self.replicas if self._is_ready(client, r)]
                # A busy machine may fail all probes.
                self._ready = ready or self._ready

    def _is_ready(self, client: httpx2.Client, replica: ServerProcess) -> bool:
        try:
            return client.get(f"{replica.url}/health/ready").status_code == 200
        except httpx2.TransportError:
            return False

    def _ask(self, number: int) -> None:
        # A connection for each request: one that is kept open could be closed by the server.
        while not self._done.is_set():
            number += 1
            ready = self._ready
            replica = ready[number % len(ready)]
            body = {"query": f"第{number}个病人夜里咳嗽怎么办", "top_k": 3}
            answer = httpx2.post(f"{replica.url}/search", json=body, timeout=60, verify=False)
            self.answers[answer.status_code, answer.json()["index"]["version"]] += 1

    def serves(self, version: str) -> bool:
        """Returns whether answers of a version have arrived."""
        return self.answers[200, version] > 0

    def __enter__(self) -> "Balancer":
        self._pool = ThreadPoolExecutor(3)
        self._running = [self._pool.submit(self._probe)]
        self._running += [self._pool.submit(self._ask, 1_000_000 * i) for i in range(2)]
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for running in self._running:
            running.result()
        self._pool.shutdown()


def test_no_request_fails_while_replicas_are_restarted_and_a_version_is_published(
    start: Start, root: Path, versions: list[str]
) -> None:
    settings = {"WATCH_SECONDS": "0.2", "DRAIN_SECONDS": "5", "CACHE_ENTRIES": "0"}
    replicas = [start(**settings) for _ in range(2)]
    with Balancer(*replicas) as balancer:
        wait_until(lambda: balancer.serves(versions[1]))
        third = publish(root, 40)
        wait_until(lambda: {described(r)["version"] for r in replicas} == {third})
        wait_until(lambda: balancer.serves(third))
        for old in replicas:
            balancer.replicas.append(start(**settings))
            old.process.send_signal(signal.SIGTERM)
            assert old.process.wait(60) == 0
            balancer.replicas.remove(old)
        IndexFolder(root / "indexes", "test").set_active(versions[0])
        wait_until(lambda: balancer.serves(versions[0]))
    assert {status for status, _ in balancer.answers} == {200}
    assert {version for _, version in balancer.answers} == {*versions, third}


def test_replicas_wait_for_a_version_that_is_copied_after_current(
    start: Start, root: Path, versions: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    folder = root / "indexes" / "test" / versions[1]
    elsewhere = folder.rename(root / "elsewhere")
    IndexFolder(root / "indexes", "test").set_active(versions[0])
    replicas = [start(WATCH_SECONDS="0.1") for _ in range(2)]
    (folder.parent / "CURRENT").write_text(versions[1])
    wait_until(lambda: not any(described(replica)["active"] for replica in replicas))
    folder.mkdir()
    shutil.copytree(elsewhere / "lexical", folder / "lexical")
    for name in ("manifest.json", *FILES):
        content = (elsewhere / name).read_bytes()
        for part in (content[: len(content) // 2], content):
            (folder / name).write_bytes(part)
            assert {described(replica)["version"] for replica in replicas} <= set(versions)
    wait_until(lambda: all(described(replica)["active"] for replica in replicas))
    assert {described(replica)["version"] for replica in replicas} == {versions[1]}
    logged = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line[0] == "{"]
    assert {line["logger"] for line in logged} == {"care.service"}
    assert len(logged) < 20
