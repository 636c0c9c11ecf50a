"""A service of several indexes: by name and alias, opened on first use, closed for others."""

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from core.aliases import read_aliases, remove_alias, set_alias
from core.errors import IndexVersionError
from core.manifest import IndexManifest
from core.versions import IndexFolder
from service.access.api_keys import new_key
from service.catalog import Budget, Catalog
from service.http.connections import available_connections
from service.observe.metrics import Metrics
from service.settings import Settings
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.service.conftest import Serve, build_in, post_search, sample, wait_until

QUERY = "高血压患者的护理"

pytestmark = pytest.mark.usefixtures("two")


Two = tuple[Path, dict[str, IndexManifest]]


@pytest.fixture(scope="module")
def built_two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    folder = tmp_path_factory.mktemp("two")
    others = [record | {"_id": f"o{record['_id']}"} for record in make_records(20)]
    both = {"test": make_records(60), "other": others}
    return folder / "indexes", {n: build_in(folder, r, name=n)[1] for n, r in both.items()}


@pytest.fixture
def two(settings: Settings, built_two: Two) -> dict[str, IndexManifest]:
    """The index 'test' of 60 documents and the index 'other' of 20, whose ids begin with o."""
    shutil.copytree(built_two[0], settings.indexes)
    return dict(built_two[1])


def ids(client: TestClient, path: str, **body: Any) -> list[str]:
    answer = post_search(client, path=path, query=QUERY, top_k=100, **body)
    return [hit["id"] for hit in answer["hits"]]


def catalog_of(client: TestClient) -> Catalog:
    catalog: Catalog = client.app.state.service.catalog  # type: ignore[attr-defined]
    return catalog


def open_indexes(client: TestClient) -> list[str]:
    """Returns the names of the open indexes besides the default one, the least used first."""
    return list(catalog_of(client)._served)


def status(client: TestClient, path: str) -> tuple[int, str]:
    answer = client.post(path, json={"query": QUERY})
    return answer.status_code, answer.json()["code"]


def test_each_index_answers_on_its_paths(serve: Serve, two: dict[str, IndexManifest]) -> None:
    client = serve()
    assert ids(client, "/indexes/test/search") == ids(client, "/search")
    found = ids(client, "/indexes/other/search")
    assert len(found) == 20 and all(id_.startswith("o") for id_ in found)
    batch = client.post("/indexes/other/search/batch", json={"queries": [{"query": QUERY}] * 2})
    assert [r["index"]["name"] for r in batch.json()["results"]] == ["other", "other"]
    document = client.get(f"/indexes/other/documents/{found[0]}")
    assert document.json()["index"] == {"name": "other", "version": two["other"].version}
    assert client.get(f"/documents/{found[0]}").status_code == 404
    described = client.get("/indexes/other").json()
    assert (described["documents"], described["active"]) == (20, True)
    assert client.get("/index").json() == client.get("/indexes/test").json()


def test_indexes_are_listed_with_their_aliases(serve: Serve, settings: Any) -> None:
    set_alias(settings.indexes, "clinic", "other")
    set_alias(settings.indexes, "main", "test")
    listed = serve().get("/indexes").json()["indexes"]
    assert listed == [
        {"name": "test", "aliases": ["main"], "default": True},
        {"name": "other", "aliases": ["clinic"], "default": False},
    ]


def test_only_the_configured_indexes_are_served(serve: Serve) -> None:
    client = serve(serve_indexes=("clinic-*",))
    assert [one["name"] for one in client.get("/indexes").json()["indexes"]] == ["test"]
    assert status(client, "/indexes/other/search") == (404, "unknown_index")
    assert ids(client, "/indexes/test/search")


def test_an_unknown_index_is_answered_like_any_other(serve: Serve) -> None:
    client = serve()
    for name in ("missing", ".hidden", "%2E%2E", "a b", "%00", "é" * 99):
        assert status(client, f"/indexes/{name}/search") == (404, "unknown_index"), name
        assert client.get(f"/indexes/{name}").json()["code"] == "unknown_index", name


def test_an_alias_changes_at_once(serve: Serve, settings: Any) -> None:
    client = serve()
    set_alias(settings.indexes, "live", "test")
    assert len(ids(client, "/indexes/live/search")) == 60
    set_alias(settings.indexes, "live", "other")
    assert len(ids(client, "/indexes/live/search")) == 20
    remove_alias(settings.indexes, "live")
    assert status(client, "/indexes/live/search") == (404, "unknown_index")


def test_the_default_index_may_be_an_alias(serve: Serve, settings: Any) -> None:
    set_alias(settings.indexes, "live", "test")
    client = serve(index="live", watch_seconds=0.05)
    assert len(ids(client, "/search")) == 60
    set_alias(settings.indexes, "live", "other")
    wait_until(lambda: len(ids(client, "/search")) == 20)


@pytest.mark.parametrize(
    ("alias", "name", "code"),
    [
        ("other", "test", "alias_is_index"),
        ("a", "missing", "no_active_version"),
        ("a", "live", "index_is_alias"),
        ("a b", "test", "bad_index_name"),
    ],
)
def test_a_wrong_alias_is_refused(settings: Any, alias: str, name: str, code: str) -> None:
    set_alias(settings.indexes, "live", "test")
    with pytest.raises(IndexVersionError) as error:
        set_alias(settings.indexes, alias, name)
    assert error.value.code == code
    assert read_aliases(settings.indexes) == {"live": "test"}


def test_a_new_version_is_served_after_a_reload(serve: Serve, build_version: Builder) -> None:
    client = serve(api_keys=None)
    assert len(ids(client, "/indexes/other/search")) == 20
    new = build_version(make_records(30), name="other")
    assert len(ids(client, "/indexes/other/search")) == 20
    answer = client.post("/indexes/other/reload")
    assert answer.json()["version"] == new.version
    assert len(ids(client, "/indexes/other/search")) == 30


@pytest.mark.parametrize("seconds", [0.05, 600.0])
def test_a_new_version_is_found_by_itself(
    serve: Serve, build_version: Builder, seconds: float
) -> None:
    client = serve(watch_seconds=seconds)
    assert len(ids(client, "/indexes/other/search")) == 20
    build_version(make_records(30), name="other")
    wait_until(lambda: len(ids(client, "/indexes/other/search")) == 30)


def test_the_versions_of_an_index_are_listed_for_administrators(
    serve: Serve, two: dict[str, IndexManifest], build_version: Builder
) -> None:
    client = serve()
    assert ids(client, "/indexes/other/search")
    new = build_version(make_records(30), name="other")
    listed = client.get("/indexes/other/versions").json()
    assert listed["name"] == "other"
    assert [
        (one["version"], one["active"], one["served"], one["documents"])
        for one in listed["versions"]
    ] == [(two["other"].version, False, True, 20), (new.version, True, False, 30)]
    assert all(one["bytes"] > 0 for one in listed["versions"])
    (of_default,) = client.get("/index/versions").json()["versions"]
    assert of_default["version"] == two["test"].version
    secret, entry = new_key("app", "search")
    client = serve(api_keys=SecretStr(entry))
    client.headers["Authorization"] = f"Bearer {secret}"
    assert client.get("/index/versions").status_code == 401


def test_a_removed_index_is_closed(serve: Serve, settings: Any) -> None:
    client = serve(watch_seconds=0.05)
    assert ids(client, "/indexes/other/search")
    shutil.rmtree(settings.indexes / "other")
    assert status(client, "/indexes/other/search") == (404, "unknown_index")
    wait_until(lambda: open_indexes(client) == [])


def test_a_damaged_index_disturbs_no_other(
    serve: Serve, two: dict[str, IndexManifest], settings: Any
) -> None:
    path = IndexFolder(settings.indexes, "other").version(two["other"].version) / "documents.arrow"
    path.write_bytes(path.read_bytes()[:-1])
    client = serve()
    for _ in range(3):
        assert status(client, "/indexes/other/search") == (503, "wrong_size")
        assert ids(client, "/search")


def before_opening(client: TestClient, wait: Callable[[], object]) -> None:
    """Lets the catalog wait before it opens a version."""
    catalog = catalog_of(client)
    ((space, opened),) = catalog._open_version.items()

    def later(folder: Path, **how: Any) -> Any:
        wait()
        return opened(folder, **how)

    catalog._open_version = {space: later}


def test_an_index_that_opens_slowly_delays_no_other(serve: Serve) -> None:
    client, release = serve(), threading.Event()
    before_opening(client, lambda: release.wait(30))
    answer = client.post(
        "/indexes/other/search", json={"query": QUERY}, headers={"X-Request-Timeout-Ms": "50"}
    )
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")
    assert ids(client, "/search")
    release.set()
    assert len(ids(client, "/indexes/other/search")) == 20


def test_a_version_that_is_published_while_its_index_opens_is_served(
    serve: Serve,
    build_version: Builder,
    two: dict[str, IndexManifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = serve()
    catalog = catalog_of(client)
    opening, publish = threading.Event(), threading.Event()
    real = Catalog._open_folder

    def slow(self: Catalog, folder: Path, **options: Any) -> Any:
        snapshot = real(self, folder, **options)
        opening.set()
        assert publish.wait(30)
        return snapshot

    monkeypatch.setattr(Catalog, "_open_folder", slow)
    loop = client.portal
    assert loop
    found = loop.start_task_soon(catalog.open, "other", time.monotonic() + 60)
    assert opening.wait(30)
    newer = build_version(make_records(21), name="other")
    followed = loop.start_task_soon(catalog.follow, "other", newer.number)
    publish.set()
    followed.result(60)
    found.result(60)
    assert client.get("/indexes/other").json()["version"] == newer.version
    before = sample(client, "care_index_reloads_total", result="success")
    for number in (newer.number, two["other"].number):
        loop.call(catalog.follow, "other", number)
    assert sample(client, "care_index_reloads_total", result="success") == before
    loop.call(catalog.follow, "other")
    assert sample(client, "care_index_reloads_total", result="success") == before + 1


def test_the_index_used_longest_ago_closes_for_another(
    serve: Serve, build_version: Builder
) -> None:
    build_version(make_records(10), name="third")
    client = serve(open_bytes=1)
    for name, count in [("other", 20), ("third", 10), ("other", 20)]:
        assert len(ids(client, f"/indexes/{name}/search")) == count
        assert open_indexes(client) == [name]


def test_an_index_stays_open_while_it_is_read(serve: Serve, build_version: Builder) -> None:
    build_version(make_records(10), name="third")
    client = serve(open_bytes=1)
    catalog = catalog_of(client)

    async def read_while_others_open() -> list[Any]:
        loop = asyncio.get_running_loop()
        opened = await catalog.open("other", loop.time() + 60)
        await catalog.open("third", loop.time() + 60)
        return [opened.snapshot.segment.documents[row].id for row in range(20)]

    read = client.portal.call(read_while_others_open)  # type: ignore[union-attr]
    assert open_indexes(client) == ["third"]
    assert all(id_.startswith("o") for id_ in read)


def test_many_requests_open_an_index_once(serve: Serve) -> None:
    client = serve()
    opened: list[None] = []
    before_opening(client, lambda: opened.append(time.sleep(0.1)))

    async def open_at_once() -> None:
        end = asyncio.get_running_loop().time() + 60
        await asyncio.gather(*(catalog_of(client).open("other", end) for _ in range(20)))

    client.portal.call(open_at_once)  # type: ignore[union-attr]
    assert len(opened) == 1


def test_all_canaries_of_a_document_encoder_are_checked_once(
    serve: Serve, two: dict[str, IndexManifest], build_version: Builder
) -> None:
    build_version(make_records(10), name="third")
    encoder = BigramEncoder()
    checked: list[int] = []

    def count(given: Any, canaries: Sequence[Any]) -> None:
        checked.append(len(canaries))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("search.snapshot.check_canaries", count)
        client = serve(encoder)
        for name in ("other", "third"):
            assert ids(client, f"/indexes/{name}/search")
    assert checked == [len(two["test"].canaries), 1, 1]


def test_equal_queries_to_two_indexes_are_cached_apart(serve: Serve) -> None:
    client = serve()
    for _ in range(2):
        assert len(ids(client, "/search")) == 60
        assert len(ids(client, "/indexes/other/search")) == 20
    assert sample(client, "care_cache_lookups_total", tier="memory", result="hit") == 2


def test_an_index_of_another_space_needs_its_pair(serve: Serve, build_version: Builder) -> None:
    build_version(make_records(20), name="other", space="bigrams-2")
    client = serve()
    code, problem = status(client, "/indexes/other/search")
    assert (code, problem) == (503, "embedding_space_mismatch")
    detail = client.post("/indexes/other/search", json={"query": QUERY}).json()["detail"]
    assert "CARE_OTHER_PAIRS" in detail


def test_the_budget_counts_memory_maps_and_open_files(serve: Serve) -> None:
    snapshot = catalog_of(serve()).served.index
    maps = len(snapshot.files.stamps) + 8
    assert Budget(10**9, maps, 1).allows([snapshot])
    assert not Budget(10**9, maps, 2).allows([snapshot] * 2)
    assert not Budget(10**9, 10**9, 1).allows([snapshot] * 2)
    assert not Budget(1, 10**9, 1).allows([snapshot])


def test_files_are_reserved_for_the_indexes_of_the_folder(serve: Serve) -> None:
    budget = catalog_of(serve()).budget
    assert budget.descriptors == 2 + 64
    most = available_connections(10**9, 0)[0]
    assert available_connections(10**9, budget.descriptors)[0] < most


def test_an_index_without_a_name_on_disk_is_not_listed(serve: Serve, settings: Any) -> None:
    (settings.indexes / "empty").mkdir()
    (settings.indexes / "file.json").write_text(json.dumps({}))
    names = [one["name"] for one in serve().get("/indexes").json()["indexes"]]
    assert names == ["test", "other"]


def test_queries_of_one_index_are_limited_whoever_asks(serve: Serve) -> None:
    client = serve(index_rate_limit=0.001, index_rate_burst=2)
    codes = [client.post("/indexes/other/search", json={"query": QUERY}) for _ in range(3)]
    assert [answer.status_code for answer in codes] == [200, 200, 429]
    assert codes[-1].json()["code"] == "rate_limited"
    assert ids(client, "/search")


def test_queries_are_counted_by_index_for_those_who_may_see_all(
    serve: Serve, tmp_path: Path
) -> None:
    client = serve()
    ids(client, "/search")
    client.post("/indexes/other/search/batch", json={"queries": [{"query": QUERY}] * 2})
    assert sample(client, "care_index_queries_total", index="other") == 2
    assert sample(client, "care_index_queries_total", index="test") == 1
    grants = [("app", "*", "search"), ("one", "other", "admin"), ("operator", "*", "admin")]
    secrets, entries = zip(
        *(new_key(n, "search", [{"indexes": i, "role": r}]) for n, i, r in grants), strict=True
    )
    (tmp_path / "keys.toml").write_text("\n".join(entries), encoding="utf-8")
    for is_open, sent, seen in [(True, "", 0), *zip([False] * 3, secrets, (0, 0, 1), strict=True)]:
        client = serve(api_keys_file=tmp_path / "keys.toml", open_metrics=is_open)
        client.headers["Authorization"] = f"Bearer {secrets[0]}"
        ids(client, "/indexes/other/search")
        page = client.get("/metrics", headers={"Authorization": f"Bearer {sent}"}).text
        assert page.count('care_index_queries_total{index="other"}') == seen


def test_metrics_name_a_bounded_number_of_indexes() -> None:
    metrics = Metrics()
    for i in range(150):
        metrics.queried(f"index-{i}", 1)
    page = asyncio.run(metrics.page(with_indexes=True)).decode()
    lines = [line for line in page.splitlines() if line.startswith("care_index_queries_total{")]
    assert len(lines) == 101
    assert 'care_index_queries_total{index="(others)"} 50.0' in lines


@pytest.fixture
def clinic(
    serve: Serve, two: dict[str, IndexManifest], build_version: Builder, tmp_path: Path
) -> TestClient:
    """Four indexes, and a key that opens a part of one and all of another."""
    for name in ("third", "secret"):
        build_version(make_records(10), name=name)
    grants = [
        {"indexes": "other", "role": "search", "filter": {"department": "儿科"}},
        {"indexes": "th*", "role": "admin"},
    ]
    secret, entry = new_key("clinic", "search", grants)
    (tmp_path / "keys.toml").write_text(entry, encoding="utf-8")
    client = serve(api_keys_file=tmp_path / "keys.toml")
    client.headers["Authorization"] = f"Bearer {secret}"
    return client


def test_a_key_opens_the_indexes_of_its_grants_and_no_other(clinic: TestClient) -> None:
    listed = clinic.get("/indexes").json()["indexes"]
    assert [one["name"] for one in listed] == ["other", "third"]
    assert len(ids(clinic, "/indexes/third/search")) == 10
    assert clinic.post("/indexes/third/reload").status_code == 200
    answer = clinic.post("/indexes/other/search", json={"query": QUERY, "top_k": 100}).json()
    assert {hit["metadata"]["department"] for hit in answer["hits"]} == {"儿科"}
    assert clinic.get("/indexes/other").json()["count"] == len(answer["hits"]) < 20
    assert clinic.post("/indexes/other/reload").status_code == 403
    assert status(clinic, "/search") == (403, "forbidden")


def test_an_index_of_others_looks_as_one_that_does_not_exist(clinic: TestClient) -> None:
    batch = {"queries": [{"query": QUERY}]}
    for method, rest, body in (
        *(("POST", "/search", {"query": QUERY}), ("POST", "/search/batch", batch)),
        *(("POST", "/reload", batch), ("GET", "", None), ("GET", "/documents/d0001", None)),
    ):
        problems = []
        for name in ("secret", "test", "missing"):
            answer = clinic.request(method, f"/indexes/{name}{rest}", json=body)
            problems.append((answer.status_code, answer.json() | {"request_id": ""}))
            assert name not in answer.text
        assert problems[0] == problems[1] == problems[2], rest
        assert problems[0][0] == 404, rest


def test_an_alias_opens_what_the_key_may_see_of_its_index(
    clinic: TestClient, settings: Any
) -> None:
    set_alias(settings.indexes, "live", "secret")
    assert status(clinic, "/indexes/live/search") == (404, "unknown_index")
    set_alias(settings.indexes, "live", "third")
    assert len(ids(clinic, "/indexes/live/search")) == 10
