import gc
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi.testclient import TestClient

from core.breaker import UnavailableError
from core.encoders import Encoding
from core.manifest import IndexManifest
from core.types import FloatArray
from core.versions import IndexFolder
from models.pairs import load_pair, write_pair
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.service.conftest import (
    ADMIN,
    BLOCKED,
    BlockingEncoder,
    Serve,
    read_samples,
    sample,
    wait_until,
)

QUERY = "高血压患者的护理"
FAILS = "不可编码"


class FailingEncoder(BigramEncoder):
    """Fails on each batch with the text `FAILS`."""

    def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
        if FAILS in tokens:
            raise RuntimeError("cannot encode")
        return super().encode_tokens(tokens)


@pytest.fixture
def versions(build_version: Builder) -> list[IndexManifest]:
    """Two versions of the same questions; each document names its own. The second is active."""

    def records(edition: int) -> list[dict[str, Any]]:
        return [
            record | {"title": f"第{edition}版", "metadata": {"edition": edition}}
            for record in make_records(20 + 10 * edition)
        ]

    return [build_version(records(edition)) for edition in (0, 1)]


def reload(client: TestClient) -> dict[str, Any]:
    response = client.post("/index/reload", headers=ADMIN)
    assert response.status_code == 200
    described: dict[str, Any] = response.json()
    return described


def editions(answer: dict[str, Any]) -> set[int]:
    return {hit["metadata"]["edition"] for hit in answer["hits"]}


def test_the_old_version_is_released_after_a_reload(serve: Serve, build_version: Builder) -> None:
    old = build_version(make_records(20))
    client = serve()
    vectors = weakref.ref(client.app.state.service.catalog.served.index.segment.vectors)
    assert old.version in Path("/proc/self/maps").read_text()
    client.post("/search", json={"query": QUERY, "filter": {"rare": [False]}})
    build_version(make_records(30))
    reload(client)
    gc.collect()
    assert vectors() is None
    assert old.version not in Path("/proc/self/maps").read_text()


def test_a_request_uses_one_version_during_a_reload(
    serve: Serve, versions: list[IndexManifest], tmp_path: Path
) -> None:
    IndexFolder(tmp_path / "indexes", "test").set_active(versions[0].version)
    encoder = BlockingEncoder()
    client = serve(encoder)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(client.post, "/search", json={"query": BLOCKED})
        assert encoder.entered.wait(30)
        IndexFolder(tmp_path / "indexes", "test").set_active(versions[1].version)
        assert reload(client)["version"] == versions[1].version
        encoder.release.set()
        answer = pending.result().json()
    assert answer["index"]["version"] == versions[0].version
    assert editions(answer) == {0}


def mapped(manifest: IndexManifest) -> int:
    """Memory maps of a version's files in this process."""
    return Path("/proc/self/maps").read_text().count(manifest.version)


def resident() -> int:
    """Resident memory of this process [bytes]."""
    return psutil.Process().memory_info().rss


@pytest.mark.e2e
def test_two_hundred_reloads_fail_no_request_and_leak_nothing(
    serve: Serve, versions: list[IndexManifest], tmp_path: Path
) -> None:
    client = serve(threads=2)
    edition_of = {manifest.version: edition for edition, manifest in enumerate(versions)}
    done = threading.Event()

    def ask() -> set[int]:
        seen = set()
        while not done.wait(0.002):
            body = {"queries": [{"query": QUERY}, {"query": "发热", "top_k": 3}]}
            response = client.post("/search/batch", json=body)
            assert response.status_code == 200
            results = response.json()["results"]
            (version,) = {result["index"]["version"] for result in results}
            assert editions(results[0]) == editions(results[1]) == {edition_of[version]}
            seen.add(edition_of[version])
        return seen

    with ThreadPoolExecutor(2) as pool:
        askers = [pool.submit(ask) for _ in range(2)]
        for swap, manifest in enumerate(versions * 100):
            IndexFolder(tmp_path / "indexes", "test").set_active(manifest.version)
            assert reload(client)["version"] == manifest.version
            if swap == 50:
                before = resident()
        after = resident()
        done.set()
        seen = set().union(*(asker.result() for asker in askers))
    assert seen == {0, 1}
    gc.collect()
    assert mapped(versions[0]) == 0 < mapped(versions[1])
    # An index that is not released takes some 100 kB; 150 of them would be visible.
    assert after - before < 8_000_000


def test_an_unavailable_store_is_503(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    client = serve()

    def search(self: object, query: FloatArray, *_: Any) -> Any:
        raise UnavailableError

    monkeypatch.setattr(
        type(client.app.state.service.catalog.served.index.segment.vectors), "search", search
    )
    for path, body in (
        ("/search", {"query": "发热"}),
        ("/search/batch", {"queries": [{"query": "发热"}, {"query": "骨折"}]}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["code"] == "unavailable"


@pytest.mark.parametrize("path", ["/search/batch", "/v1/embeddings"])
def test_a_failed_batch_leaves_no_unretrieved_exceptions(
    serve: Serve, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """The event loop logs exceptions of futures that were never retrieved."""
    gc.collect()  # what earlier tests left
    caplog.clear()
    client = serve(FailingEncoder())
    texts = [*(f"第{i}个病人" for i in range(8)), FAILS]
    body = {"input": texts} if "v1" in path else {"queries": [{"query": text} for text in texts]}
    assert client.post(path, json=body).status_code == 500
    gc.collect()
    client.get("/health/live")
    failures = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(failures) == 1


@pytest.mark.parametrize("size", [1, 3])
def test_top_k_above_the_number_of_documents_returns_all(
    serve: Serve, build_version: Builder, size: int
) -> None:
    build_version(make_records(size))
    client = serve()
    answer = client.post("/search", json={"query": QUERY})
    assert (answer.status_code, len(answer.json()["hits"])) == (200, size)
    queries = [{"query": QUERY, "top_k": 1000}, {"query": QUERY, "top_k": 1}, {"query": "发热"}]
    results = client.post("/search/batch", json={"queries": queries}).json()["results"]
    assert [len(result["hits"]) for result in results] == [size, 1, size]
    assert results[0]["hits"] == answer.json()["hits"]
    # All values of top_k above the size of the index share a cache key.
    assert [result["cached"] for result in results] == [True, size == 1, False]
    assert client.post("/search", json={"query": QUERY, "top_k": 1001}).status_code == 422


def served(client: TestClient) -> str:
    return str(client.get("/index").json()["version"])


@pytest.mark.parametrize("seconds", [0.02, 600.0])
def test_a_watching_service_loads_a_new_version(
    serve: Serve, build_version: Builder, seconds: float
) -> None:
    old = build_version(make_records(20))
    client, other = serve(watch_seconds=seconds), serve()
    new = build_version(make_records(30))
    wait_until(lambda: served(client) == new.version)
    assert served(other) == old.version
    assert sample(client, "care_index_reloads_total", result="success") == 1


def test_a_watching_service_survives_bad_and_missing_versions(
    serve: Serve, build_version: Builder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def codes() -> list[str]:
        service = [record for record in caplog.records if record.name == "care.service"]
        logged = [record for record in service if record.levelname == "ERROR"]
        return [record.fields["code"] for record in logged]  # type: ignore[attr-defined]

    old, bad = (build_version(make_records(count)) for count in (20, 30))
    current = tmp_path / "indexes" / "test" / "CURRENT"
    vectors = current.parent / bad.version / "vectors.faiss"
    content = vectors.read_bytes()
    vectors.write_bytes(b"")
    IndexFolder(tmp_path / "indexes", "test").set_active(old.version)
    client = serve(watch_seconds=0.02)
    IndexFolder(tmp_path / "indexes", "test").set_active(bad.version)
    wait_until(lambda: sample(client, "care_index_reloads_total", result="failure") >= 2)
    current.unlink()
    wait_until(lambda: "no_active_version" in codes())
    assert served(client) == old.version
    assert client.get("/health/ready").status_code == 200
    vectors.write_bytes(content)
    IndexFolder(tmp_path / "indexes", "test").set_active(bad.version)
    wait_until(lambda: served(client) == bad.version)
    assert codes() == ["wrong_size", "no_active_version"]


def test_a_pair_loaded_from_a_file_is_shown_by_its_name(serve: Serve, tmp_path: Path) -> None:
    """Neither responses nor metrics show a path on the server."""
    path = tmp_path / "pair.toml"
    write_pair(load_pair("care-mini").model_copy(update={"name": "mine"}), path)
    client = serve(pair=str(path))
    for model in ({"model": "mine"}, {}):
        answer = client.post("/v1/embeddings", json={"input": "发热"} | model)
        assert (answer.status_code, answer.json()["model"]) == (200, "mine")
    unknown = client.post("/v1/embeddings", json={"input": "发热", "model": "other"})
    assert (unknown.status_code, unknown.json()["code"]) == (422, "unknown_model")
    assert client.get("/index").json()["pair"] == "mine"
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["mine"]
    shown = [dict(labels) for name, labels in read_samples(client) if name == "care_index_info"]
    assert [labels["pair"] for labels in shown] == ["mine"]
    assert str(tmp_path) not in client.get("/metrics").text
