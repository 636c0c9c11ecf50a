"""The real service with Milvus: searches, reloads, and failures of Milvus."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from core.errors import CareError
from core.service_process import running_service, start_service
from indexer.build import build
from indexer.publication import IndexWriter
from indexer.versions import activate, prune, rollback
from models.encoders.onnx import OnnxEncoder
from models.pairs import load_pair
from service.app import create_app
from tests.conftest import ADMIN_KEY, Builder, make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.engines.distributed.conftest import milvus_settings
from tests.engines.distributed.milvus_server import MilvusAt, MilvusServer
from tests.errors import error_code, raises
from tests.indexer.builds import build_options
from tests.service.conftest import wait_until

QUERIES = [f"{record['title']}护理要点" for record in make_records(12)]
UNAVAILABLE = "unavailable"


def ask(
    address: str, path: str, body: Any = None, method: str | None = None
) -> tuple[int, Any, float]:
    """Returns status, content and seconds."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    request = urllib.request.Request(address + path, data, headers, method=method)
    started = time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=90) as response:
            return response.status, json.load(response), time.monotonic() - started
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), time.monotonic() - started


def test_a_service_process_gives_the_same_hits_and_reloads_under_load(
    tmp_path: Path, milvus: MilvusAt
) -> None:
    pair = load_pair("care-mini")
    encoders = OnnxEncoder(pair.document, pair.folder, 1), OnnxEncoder(pair.query, pair.folder, 1)
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(60))
    on_files = build_options(tmp_path, corpus, indexes=tmp_path / "files")
    in_milvus = build_options(tmp_path, corpus, store="milvus", stores=milvus.stores)
    build(on_files, *encoders)
    first = build(in_milvus, *encoders)[0].version
    over_milvus = {"STORE": "milvus", "MILVUS_URI": milvus.uri, "API_KEYS": ADMIN_KEY}
    asked = [
        {"query": query, "filter": {"department": ["儿科", "骨科"]} if i % 2 else {}}
        for i, query in enumerate(QUERIES)
    ]
    with (
        running_service(tmp_path / "files", "test") as files,
        running_service(tmp_path / "indexes", "test", CACHE_ENTRIES="0", **over_milvus) as service,
    ):
        address = service.url
        for body in asked:
            _, expected, _ = ask(files.url, "/search", body)
            _, ours, _ = ask(address, "/search", body)
            assert [hit["id"] for hit in ours["hits"]] == [hit["id"] for hit in expected["hits"]]
            for hit, same in zip(ours["hits"], expected["hits"], strict=True):
                assert hit["score"] == pytest.approx(same["score"], abs=2e-6)
                assert hit | {"score": 0} == same | {"score": 0}
        write_jsonl(corpus, make_records(61))
        with Asking(address) as asking:
            second = build(in_milvus, *encoders)[0].version
            assert ask(address, "/index/reload", {})[1]["version"] == second
            asking.wait_for(second)
            assert rollback(IndexWriter(tmp_path / "indexes", "test", milvus.stores)) == first
            assert ask(address, "/index/reload", {})[1]["version"] == first
            asking.wait_for(first)
            activate(IndexWriter(tmp_path / "indexes", "test", milvus.stores), second)
            assert ask(address, "/index/reload", {})[1]["version"] == second
            prune(
                IndexWriter(tmp_path / "indexes", "test", milvus.stores),
                tmp_path / "builds",
                keep=1,
            )
            asking.wait_for(second)
        assert asking.statuses == {200}
        assert asking.versions == [first, second, first, second]


def test_processes_of_two_services_write_and_follow(tmp_path: Path, milvus: MilvusAt) -> None:
    pair = load_pair("care-mini")
    encoders = OnnxEncoder(pair.document, pair.folder, 1), OnnxEncoder(pair.query, pair.folder, 1)
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(20))
    build(build_options(tmp_path, corpus, store="milvus", stores=milvus.stores), *encoders)
    how = {"STORE": "milvus", "MILVUS_URI": milvus.uri, "API_KEYS": ADMIN_KEY}
    how |= {"MILVUS_TIMEOUT_MS": "20000", "TIMEOUT_MS": "60000", "WATCH_SECONDS": "1"}

    def ids(address: str) -> set[str]:
        status, answer, _ = ask(address, "/search", {"query": "术后第一天可以下床吗", "top_k": 3})
        assert status == 200, answer
        return {hit["id"] for hit in answer["hits"]}

    with (
        running_service(tmp_path / "one", "test", WORKERS="2", **how) as first,
        running_service(tmp_path / "two", "test", **how) as second,
    ):
        new = {"_id": "new", "text": "术后第一天可在护士陪同下床活动。"}
        status, answer, _ = ask(first.url, "/documents", new, "PUT")
        assert status == 200, answer
        assert all("new" in ids(first.url) for _ in range(6))  # in both workers
        wait_until(lambda: "new" in ids(second.url))
        assert ask(first.url, "/documents/new", method="DELETE")[1]["deleted"] == 1
        assert not any("new" in ids(first.url) for _ in range(6))
        wait_until(lambda: "new" not in ids(second.url))


class Asking:
    """Sends queries continuously from a thread; records statuses and the order of versions."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.statuses: set[int] = set()
        self.versions: list[str] = []
        self._answers = 0

    def __enter__(self) -> "Asking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def wait_for(self, version: str) -> None:
        """Waits for some responses from a version."""
        wanted = self._answers + 20
        while self._answers < wanted or self.versions[-1] != version:
            assert self._thread.is_alive()
            time.sleep(0.01)

    def _ask(self) -> None:
        while not self._ended.is_set():
            query = QUERIES[self._answers % len(QUERIES)]
            status, answer, _ = ask(self._address, "/search", {"query": query})
            self.statuses.add(status)
            if status == 200 and self.versions[-1:] != [answer["index"]["version"]]:
                self.versions.append(answer["index"]["version"])
            self._answers += 1


@dataclass
class Served:
    client: TestClient
    milvus: MilvusAt


@pytest.fixture
def served(tmp_path: Path, build_version: Builder, own_milvus: MilvusServer) -> Iterator[Served]:
    build_version(make_records(60), store="milvus", stores=own_milvus.stores)
    settings = milvus_settings(tmp_path / "indexes", own_milvus.uri)
    app = create_app(settings, BigramEncoder())
    with TestClient(
        app, "http://127.0.0.1", raise_server_exceptions=False, client=("127.0.0.1", 1)
    ) as client:
        yield Served(client, own_milvus)


def search(client: TestClient, number: int = 0) -> tuple[int, str | None]:
    answer = client.post("/search", json={"query": f"高血压患者第{number}号"})
    if answer.status_code != 200:
        assert answer.headers["content-type"] == "application/problem+json"
        assert int(answer.headers["retry-after"]) >= 1
    return answer.status_code, answer.json().get("code")


def wait_until_found(client: TestClient) -> None:
    deadline = time.monotonic() + 60
    while search(client)[0] != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ask_at_once(client: TestClient, queries: int) -> list[tuple[int, str | None]]:
    """Sends different queries, each from its own thread."""
    answers: list[tuple[int, str | None]] = []
    threads = [
        threading.Thread(target=lambda i=i: answers.append(search(client, i)))
        for i in range(queries)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize("end", ["kill", "hang"])
def test_requests_get_503_while_milvus_is_down(served: Served, end: str) -> None:
    client, milvus = served.client, served.milvus
    assert search(client)[0] == 200
    getattr(milvus, end)()
    # No request waits for its deadline of ten seconds, which would give 504.
    assert ask_at_once(client, 24) == [(503, UNAVAILABLE)] * 24
    assert search(client) == (503, UNAVAILABLE)
    for answer in (
        client.post("/search", json={"query": "糖尿病", "mode": "lexical"}),
        client.get("/indexes/test/documents/d0003"),
        client.get("/indexes/test/documents"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (503, UNAVAILABLE)
    assert client.get("/health/ready").status_code == 503
    assert client.get("/health/live").status_code == 200
    reload = client.post("/index/reload", headers={"Authorization": "Bearer secret"})
    assert reload.status_code == 503
    assert reload.json()["code"] == "store_unavailable"
    if end == "kill":
        milvus.start()
    else:
        milvus.resume()
    wait_until_found(client)
    assert client.get("/health/ready").status_code == 200


def test_requests_in_flight_get_503_when_milvus_is_killed(served: Served) -> None:
    client, milvus = served.client, served.milvus
    assert search(client)[0] == 200
    milvus.hang()
    killing = threading.Timer(0.3, milvus.kill)
    killing.start()
    assert ask_at_once(client, 24) == [(503, UNAVAILABLE)] * 24
    killing.join()
    milvus.start()
    wait_until_found(client)


def test_cached_hits_are_returned_while_milvus_is_down(
    tmp_path: Path, build_version: Builder, own_milvus: MilvusServer
) -> None:
    build_version(make_records(60), store="milvus", stores=own_milvus.stores)
    settings = milvus_settings(tmp_path / "indexes", own_milvus.uri)
    app = create_app(settings.model_copy(update={"cache_entries": 10}), BigramEncoder())
    with TestClient(app, raise_server_exceptions=False) as client:
        before = client.post("/search", json={"query": "发热"}).json()["hits"]
        own_milvus.kill()
        after = client.post("/search", json={"query": "发热"}).json()
        assert (after["hits"], after["cached"]) == (before, True)


def test_a_service_does_not_start_without_milvus(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dead = {"STORE": "milvus", "MILVUS_URI": "http://127.0.0.1:1", "MILVUS_TIMEOUT_MS": "300"}
    with raises(CareError, "server_ended", status=1):
        start_service(tmp_path, "test", dead)
    assert error_code(capfd.readouterr().err) == "store_unavailable"
