import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from core.types import IndexManifest
from core.versions import set_current
from tests.conftest import ADMIN_KEY, SEARCH_KEY, Builder, make_records
from tests.service.conftest import ADMIN, BLOCKED, BlockingEncoder, Serve, sample

QUERY = "高血压患者的护理"


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


def test_a_reload_serves_the_version_that_current_names(
    serve: Serve, build_version: Builder
) -> None:
    old = build_version(make_records(20))
    client = serve()
    new = build_version(make_records(30))
    assert client.get("/index").json()["version"] == old.version
    described = reload(client)
    assert (described["version"], described["count"]) == (new.version, 30)
    assert client.get("/index").json() == described
    answer = client.post("/search", json={"query": QUERY, "top_k": 30}).json()
    assert answer["index"]["version"] == new.version
    assert len(answer["hits"]) == 30


def test_a_reload_goes_back_as_well(
    serve: Serve, versions: list[IndexManifest], tmp_path: Path
) -> None:
    client = serve()
    set_current(tmp_path / "indexes", "test", versions[0].version)
    assert reload(client)["version"] == versions[0].version


@pytest.mark.parametrize(
    ("keys", "header", "status", "detail"),
    [
        (ADMIN_KEY, None, 401, "the bearer key is missing or unknown"),
        (ADMIN_KEY, "Bearer wrong", 401, "the bearer key is missing or unknown"),
        (ADMIN_KEY, "Bearer secre", 401, "the bearer key is missing or unknown"),
        (ADMIN_KEY, "Bearer 密", 401, "the bearer key is missing or unknown"),
        (ADMIN_KEY, "Basic secret", 401, "the bearer key is missing or unknown"),
        (ADMIN_KEY, "Bearer ", 401, "the bearer key is missing or unknown"),
        (f"{ADMIN_KEY},{SEARCH_KEY}", "Bearer asks", 403, "the key 'app' has not the role admin"),
        ("", "Bearer secret", 401, "closed: CARE_API_KEYS has no admin key"),
        (SEARCH_KEY, "Bearer asks", 401, "closed: CARE_API_KEYS has no admin key"),
        ("", "Bearer ", 401, "closed: CARE_API_KEYS has no admin key"),
    ],
)
def test_only_the_administrator_reloads(
    serve: Serve,
    manifest: IndexManifest,
    keys: str,
    header: str | None,
    status: int,
    detail: str,
) -> None:
    client = serve(api_keys=SecretStr(keys))
    headers = {"Authorization": header.encode()} if header else {}
    response = client.post("/index/reload", headers=headers)
    assert (response.status_code, response.json()["detail"]) == (status, detail)
    assert ("WWW-Authenticate" in response.headers) == (status == 401)
    assert sample(client, "care_index_reloads_total", result="success") == 0


def test_a_corrupt_version_is_refused_and_the_old_one_keeps_serving(
    serve: Serve, build_version: Builder, tmp_path: Path
) -> None:
    old = build_version(make_records(20))
    client = serve()
    new = build_version(make_records(30))
    path = tmp_path / "indexes" / "test" / new.version / "vectors.faiss"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    response = client.post("/index/reload", headers=ADMIN)
    assert response.status_code == 503
    detail = response.json()["detail"]
    assert detail.startswith("the index was not loaded: ")
    assert detail.endswith("vectors.faiss is corrupt: its checksum is not the manifest's")
    answer = client.post("/search", json={"query": QUERY}).json()
    assert answer["index"]["version"] == old.version
    assert client.get("/health/ready").status_code == 200
    assert sample(client, "care_index_reloads_total", result="failure") == 1
    path.write_bytes(content)
    assert reload(client)["version"] == new.version


def test_the_old_version_is_released(serve: Serve, build_version: Builder) -> None:
    old = build_version(make_records(20))
    client = serve()
    vectors = weakref.ref(client.app.state.service.engine.index.vectors)
    assert old.version in Path("/proc/self/maps").read_text()
    client.post("/search", json={"query": QUERY, "filter": {"rare": [False]}})
    build_version(make_records(30))
    reload(client)
    gc.collect()
    assert vectors() is None
    assert old.version not in Path("/proc/self/maps").read_text()


def test_a_request_in_work_ends_with_the_version_that_it_began_with(
    serve: Serve, versions: list[IndexManifest], tmp_path: Path
) -> None:
    set_current(tmp_path / "indexes", "test", versions[0].version)
    encoder = BlockingEncoder()
    client = serve(encoder)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(client.post, "/search", json={"query": BLOCKED})
        assert encoder.entered.wait(30)
        set_current(tmp_path / "indexes", "test", versions[1].version)
        assert reload(client)["version"] == versions[1].version
        encoder.release.set()
        answer = pending.result().json()
    assert answer["index"]["version"] == versions[0].version
    assert editions(answer) == {0}


def mapped(manifest: IndexManifest) -> int:
    """Maps of a version's files that this process holds."""
    return Path("/proc/self/maps").read_text().count(manifest.version)


def resident() -> int:
    """Resident memory of this process [bytes]."""
    return psutil.Process().memory_info().rss


def test_no_request_fails_or_mixes_versions_and_nothing_leaks_over_200_swaps(
    serve: Serve, versions: list[IndexManifest], tmp_path: Path
) -> None:
    client = serve(threads=2)
    edition_of = {manifest.version: edition for edition, manifest in enumerate(versions)}
    done = threading.Event()

    def ask() -> set[int]:
        seen = set()
        while not done.is_set():
            body = {"queries": [{"query": QUERY}, {"query": "发热", "top_k": 3}]}
            response = client.post("/search/batch", json=body)
            assert response.status_code == 200
            results = response.json()["results"]
            (version,) = {result["index"]["version"] for result in results}
            assert editions(results[0]) == editions(results[1]) == {edition_of[version]}
            seen.add(edition_of[version])
        return seen

    with ThreadPoolExecutor(4) as pool:
        askers = [pool.submit(ask) for _ in range(4)]
        for swap, manifest in enumerate(versions * 100):
            set_current(tmp_path / "indexes", "test", manifest.version)
            assert reload(client)["version"] == manifest.version
            if swap == 50:
                before = resident()
        after = resident()
        done.set()
        seen = set().union(*(asker.result() for asker in askers))
    assert seen == {0, 1}
    gc.collect()
    assert mapped(versions[0]) == 0 < mapped(versions[1])
    # An index that stays behind holds some 100 kB; 150 of them would show.
    assert after - before < 8_000_000
