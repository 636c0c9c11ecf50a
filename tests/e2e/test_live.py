"""Documents that are written over HTTP, in the processes of a real service."""

import os
import signal
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from core.service_process import ServerProcess, start_service
from tests.e2e.services import wait_until
from tests.e2e.test_workers import ask, build_small
from tests.models.encoders.embedding_server import FakeServer, Handler, item

pytestmark = pytest.mark.e2e

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(own_indexes: Path) -> Iterator[Start]:
    """Starts a service that loads no version by itself."""
    started: list[ServerProcess] = []

    def start(workers: int, **more: str) -> ServerProcess:
        settings = {"WORKERS": str(workers), "WATCH_SECONDS": "0", "TIMEOUT_MS": "60000"}
        started.append(start_service(own_indexes, "sample", settings | more))
        return started[-1]

    yield start
    for process in started:
        process.stop()


class Asking:
    """Connections to a service, enough for all of its workers."""

    def __init__(self, service: ServerProcess) -> None:
        address = urlsplit(service.url)
        self._connections = [
            HTTPConnection(address.hostname or "", address.port, timeout=90) for _ in range(12)
        ]
        self._queries = 0

    @property
    def connection(self) -> HTTPConnection:
        return self._connections[0]

    def write(self, method: str, path: str, body: Any = None, status: int = 200) -> dict[str, Any]:
        got, answer = ask(self.connection, path, body, method)
        assert got == status, answer
        found: dict[str, Any] = answer
        return found

    def request(self, method: str, path: str) -> int:
        """The status that all connections get."""
        (status,) = {ask(each, path, None, method)[0] for each in self._connections}
        return status

    def found(self, text: str, prefix: str = "") -> set[str]:
        """The first hits of each connection, each for a query that no cache has."""
        ids = set()
        for connection in self._connections:
            self._queries += 1
            query = {"query": f"{text}{self._queries}", "top_k": 1}
            status, answer = ask(connection, f"{prefix}/search", query)
            assert status == 200
            ids.add(answer["hits"][0]["id"])
        return ids


def writers(service: ServerProcess) -> list[int]:
    """The ids of the writer processes of a service."""
    parent = service.process.pid
    found = Path(f"/proc/{parent}/task").glob("*/children")
    ids = [int(id_) for each in found for id_ in each.read_text().split()]
    return [i for i in ids if b"care.writer" in Path(f"/proc/{i}/cmdline").read_bytes()]


@pytest.mark.parametrize("workers", [1, 2])
def test_every_search_after_the_answer_finds_what_was_written(
    start: Start, tmp_path: Path, workers: int
) -> None:
    build_small(tmp_path, "clinic")
    service = start(workers)
    asking = Asking(service)
    assert writers(service) == []
    for prefix in ("", "/indexes/clinic"):
        for i, text in enumerate(["蓝色独角兽在月球上弹钢琴", "深海章鱼研究量子力学"]):
            asking.found(text, prefix)  # each worker has the index open
            document = {"_id": f"new{i}", "text": f"{text}。"}
            assert asking.write("PUT", f"{prefix}/documents", document)["added"] == 1
            assert asking.found(text, prefix) == {f"new{i}"}
            assert asking.write("PUT", f"{prefix}/documents", document)["unchanged"] == 1
        asking.write("PATCH", f"{prefix}/documents/new0", {"metadata": {"ward": 7}})
        deleted = asking.write("POST", f"{prefix}/documents/delete", {"filter": {"ward": 7}})
        assert deleted["deleted"] == 1
        assert "new0" not in asking.found("蓝色独角兽在月球上弹钢琴", prefix)
    assert len(writers(service)) == 1


def test_all_workers_and_services_follow_indexes_that_come_and_go(start: Start) -> None:
    services = [Asking(start(2)) for _ in range(2)]
    text = "蓝色独角兽在月球上弹钢琴"
    for round_ in range(2):
        one, other = services if round_ % 2 else services[::-1]
        statuses = {service.request("GET", "/indexes/mine") for service in services}
        assert statuses == {404}
        assert one.write("PUT", "/indexes/mine", status=201)["documents"] == 0
        assert other.write("PUT", "/indexes/mine")["documents"] == 0
        document = {"_id": f"new{round_}", "text": f"{text}。"}
        for service in (one, other):
            service.write("PUT", "/indexes/mine/documents", document)
            assert service.found(text, "/indexes/mine") == {f"new{round_}"}
        assert one.write("DELETE", "/indexes/mine") == {"name": "mine", "documents": 1}


def test_a_killed_writer_is_started_by_the_next_write(start: Start) -> None:
    service = start(2)
    asking = Asking(service)
    text = "蓝色独角兽在月球上弹钢琴"
    asking.write("PUT", "/documents", {"_id": "new", "text": f"{text}。"})
    (first,) = writers(service)
    os.kill(first, signal.SIGKILL)
    assert asking.found(text) == {"new"}
    assert asking.write("DELETE", "/documents/new")["deleted"] == 1
    (second,) = writers(service)
    assert second != first
    assert "new" not in asking.found(text)
    assert service.stop() == 0
    wait_until(lambda: not Path(f"/proc/{second}").exists())


def test_the_writer_ends_with_a_killed_service(start: Start) -> None:
    service = start(1)
    Asking(service).write("DELETE", "/documents/none")
    (writer,) = writers(service)
    service.process.kill()
    wait_until(lambda: not Path(f"/proc/{writer}").exists())


def test_a_server_encodes_documents_and_without_it_others_are_deleted(start: Start) -> None:
    def answer(handler: Handler, body: dict[str, Any]) -> None:
        handler.send_items([item(i, np.eye(1, 384)[0]) for i, _ in enumerate(body["input"])])

    server = FakeServer()
    server.answer = answer
    Thread(target=server.serve_forever, daemon=True).start()
    service = start(1, DOCUMENT_URL=f"{server.url}/v1", DOCUMENT_MODEL="served")
    asking = Asking(service)
    documents = [{"_id": f"new{i}", "text": f"蓝色独角兽{i}"} for i in range(50)]
    assert asking.write("PUT", "/documents", documents)["added"] == 50
    assert sum(len(body["input"]) for body in server.requests) == 1 + 50
    assert {body["model"] for body in server.requests} == {"served"}
    server.shutdown()
    server.server_close()
    status, refused = ask(asking.connection, "/documents", {"_id": "x", "text": "一"}, "PUT")
    assert (status, refused["code"]) == (503, "encoding_failed")
    assert asking.write("DELETE", "/documents/new0")["deleted"] == 1
    patched = asking.write("PATCH", "/documents/new1", {"metadata": {"ward": 7}})
    assert patched["replaced"] == 1
