"""Indexes that are created and deleted over HTTP, with the indexes of a real writer."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from care.live import LiveIndexes
from care.writer import Writer
from core.aliases import set_alias
from core.errors import EmbeddingServerError
from core.locks import exclusive
from indexer.publication import BUILD_LOCK
from service.access.api_keys import new_key
from service.settings import Settings
from tests.conftest import make_records
from tests.service.conftest import Serve, post_search, sample
from tests.service.live import running_writer

RECORDS = make_records(3)
QUERY = {"query": "高血压患者的护理"}
Start = Callable[..., TestClient]

pytestmark = pytest.mark.usefixtures("test_encoders", "manifest")


@pytest.fixture
def start(serve: Serve, settings: Settings, pair_file: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a service whose writer has the same settings."""
    pair = {"pair": str(pair_file)}
    with running_writer(tmp_path, later := _Later()) as path:

        def run(**changes: Any) -> TestClient:
            later.writer = Writer(LiveIndexes(settings.model_copy(update=pair | changes)), 1 << 20)
            return serve(writer=path, **changes)

        yield run


class _Later:
    """A writer that is chosen after it listens."""

    writer: Writer

    async def serve(self, reader: Any, writer: Any) -> None:
        await self.writer.serve(reader, writer)


def fault(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


def ids(client: TestClient, name: str, **query: Any) -> list[str]:
    answer = post_search(client, path=f"/indexes/{name}/search", **QUERY | query)
    return sorted(hit["id"] for hit in answer["hits"])


def test_a_created_index_is_searched_written_and_deleted(start: Start) -> None:
    client = start()
    answer = client.put("/indexes/mine")
    assert answer.status_code == 201, answer.text
    assert (answer.json()["name"], answer.json()["documents"]) == ("mine", 0)
    assert answer.json()["modes"] == client.get("/index").json()["modes"]
    assert client.get("/indexes/mine").json() == answer.json()
    names = [each["name"] for each in client.get("/indexes").json()["indexes"]]
    assert names == ["test", "mine"]
    for mode in ("dense", "lexical", "hybrid"):
        assert ids(client, "mine", mode=mode) == []
    assert client.get("/indexes/mine/documents").json()["documents"] == []
    written = client.put("/indexes/mine/documents", json=RECORDS)
    assert written.json()["added"] == 3
    assert ids(client, "mine", top_k=10) == ["d0000", "d0001", "d0002"]
    assert client.post("/indexes/mine/documents/delete", json={"ids": ["d0000"]}).status_code == 200
    gone = client.delete("/indexes/mine")
    assert (gone.status_code, gone.json()) == (200, {"name": "mine", "documents": 2})
    for method, path in (
        ("POST", "/search"),
        ("PUT", "/documents"),
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/documents/d0001"),
    ):
        body = QUERY if path == "/search" else RECORDS if path == "/documents" else None
        assert fault(client.request(method, f"/indexes/mine{path}", json=body))[0] == 404
    assert client.put("/indexes/mine").status_code == 201
    assert ids(client, "mine") == []
    client.put("/indexes/mine/documents", json=RECORDS[2])
    assert ids(client, "mine") == ["d0002"]
    assert ids(client, "test", top_k=100) == sorted(each["_id"] for each in make_records(60))


def test_filters_may_have_the_first_fields(start: Start) -> None:
    client = start()
    client.put("/indexes/mine", json={"filter_fields": ["department"]})
    assert ids(client, "mine", filter={"department": "儿科"}) == []
    unknown = client.post("/indexes/mine/search", json=QUERY | {"filter": {"rare": True}})
    assert fault(unknown) == (422, "unknown_filter_field")
    client.put("/indexes/mine/documents", json=RECORDS)
    assert ids(client, "mine", filter={"department": "儿科"}) == ["d0001"]
    assert ids(client, "mine", filter={"rare": True}) == ["d0001"]


def test_an_equal_index_is_left_and_another_one_refused(start: Start) -> None:
    client = start()
    client.put("/indexes/mine")
    client.put("/indexes/mine/documents", json=RECORDS)
    same = client.put("/indexes/mine", json={"like": "test"})
    assert (same.status_code, same.json()["documents"]) == (200, 3)
    other = client.put("/indexes/mine", json={"filter_fields": ["year"]})
    assert fault(other) == (409, "index_exists")
    assert client.put("/indexes/copy", json={"like": "mine"}).status_code == 201
    assert ids(client, "copy") == []


WRONG: list[tuple[str, Any, int, str]] = [
    ("-a", {}, 422, "bad_index_name"),
    ("a%20b", {}, 422, "bad_index_name"),
    ("a" * 65, {}, 422, "bad_index_name"),
    ("%E7%97%85", {}, 422, "bad_index_name"),
    (".hidden", {}, 422, "bad_index_name"),
    ("live", {}, 409, "index_is_alias"),
    ("closed-1", {}, 403, "index_not_served"),
    ("mine", {"like": "none"}, 404, "unknown_index"),
    ("mine", {"like": "../test"}, 404, "unknown_index"),
    ("mine", {"like": 1}, 422, "invalid_request"),
    ("mine", {"likes": "test"}, 422, "invalid_request"),
    ("mine", {"filter_fields": "year"}, 422, "invalid_request"),
    ("mine", {"filter_fields": ["a" * 5000]}, 422, "invalid_record"),
    ("mine", [], 422, "invalid_request"),
]


def test_what_is_no_new_index_is_refused(start: Start, settings: Settings) -> None:
    set_alias(settings.indexes, "live", "test")
    client = start(serve_indexes=("mine", "-*", "[!c]*"))
    for name, body, status, code in WRONG:
        assert fault(client.put(f"/indexes/{name}", json=body)) == (status, code), (name, body)
    assert [path.name for path in settings.indexes.glob("*/CURRENT")] == ["CURRENT"] * 2


def test_an_index_that_is_needed_is_not_deleted(start: Start, settings: Settings) -> None:
    client = start()
    client.put("/indexes/mine")
    set_alias(settings.indexes, "live", "mine")
    refused = {"test": "index_protected", "mine": "index_has_alias", "live": "index_is_alias"}
    for name, code in refused.items():
        assert fault(client.delete(f"/indexes/{name}")) == (409, code)
    assert fault(client.delete("/indexes/none")) == (404, "unknown_index")
    assert fault(client.delete("/indexes/..test")) == (404, "unknown_index")
    client.put("/indexes/other")
    with exclusive(settings.indexes / "other", "build", BUILD_LOCK):
        assert fault(client.delete("/indexes/other")) == (409, "index_busy")
        assert client.put("/indexes/other/documents", json=RECORDS).status_code == 200
    assert client.delete("/indexes/other").json()["documents"] == 3


def test_requests_for_one_index_at_once_get_answers_in_some_order(start: Start) -> None:
    client = start()

    def ask(i: int) -> int:
        path = "/indexes/mine"
        if i % 3 == 2:
            return client.put(f"{path}/documents", json=RECORDS).status_code
        return client.request("PUT" if i % 3 else "DELETE", path).status_code

    with ThreadPoolExecutor(6) as pool:
        statuses = list(pool.map(ask, range(60)))
    assert set(statuses) <= {200, 201, 404}
    client.delete("/indexes/mine")
    assert client.put("/indexes/mine").status_code == 201
    assert client.put("/indexes/mine/documents", json=RECORDS).json()["added"] == 3
    assert ids(client, "mine", top_k=10) == ["d0000", "d0001", "d0002"]


def test_quotas_bound_indexes_and_bytes(
    start: Start, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("care.live._MEASURED", 0.0)
    client = start(max_indexes=2)
    assert client.put("/indexes/a").status_code == 201
    assert fault(client.put("/indexes/b")) == (507, "quota_exceeded")
    assert client.put("/indexes/a").status_code == 200
    assert client.delete("/indexes/a").status_code == 200
    assert client.put("/indexes/b").status_code == 201
    files = [path for path in (settings.indexes / "b").rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    client = start(max_index_bytes=size + 1000)
    assert client.put("/indexes/b/documents", json=RECORDS).json()["added"] == 3
    full = client.put("/indexes/b/documents", json=make_records(4))
    assert fault(full) == (507, "quota_exceeded")
    assert "CARE_MAX_INDEX_BYTES" in full.json()["detail"]
    assert client.delete("/indexes/b/documents/d0000").json()["deleted"] == 1
    client = start(max_indexes_bytes=1000)
    assert fault(client.put("/indexes/c")) == (507, "quota_exceeded")
    assert fault(client.put("/documents", json=RECORDS)) == (507, "quota_exceeded")


def test_an_encoder_that_fails_leaves_nothing(
    start: Start, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise EmbeddingServerError("http://secret is down")

    monkeypatch.setattr("care.live.document_encoder", fail)
    answer = start().put("/indexes/mine")
    assert fault(answer) == (503, "encoding_failed")
    assert "secret" not in answer.text
    assert not (settings.indexes / "mine").exists()


def test_creating_and_deleting_needs_the_role_admin(start: Start, tmp_path: Path) -> None:
    def client(*grants: dict[str, Any], **changes: Any) -> TestClient:
        secret, entry = new_key("k", "search", grants)
        (tmp_path / "keys").write_text(entry)
        found = start(api_keys_file=tmp_path / "keys", **changes)
        found.headers["Authorization"] = f"Bearer {secret}"
        return found

    audit = tmp_path / "audit"
    admin = client({"indexes": "my-*", "role": "admin"}, audit_file=str(audit))
    assert admin.put("/indexes/my-1").status_code == 201
    assert fault(admin.put("/indexes/other")) == (403, "forbidden")
    # What an index is like must be visible, too.
    assert fault(admin.put("/indexes/my-2", json={"like": "test"})) == (404, "unknown_index")
    for role in ("search", "write"):
        other = client({"indexes": "*", "role": role})
        assert fault(other.put("/indexes/my-1"))[0] in (401, 403)
        assert fault(other.delete("/indexes/my-1"))[0] in (401, 403)
    hidden = client({"indexes": "a", "role": "admin"})
    assert fault(hidden.delete("/indexes/my-1")) == (404, "unknown_index")
    admin = client({"indexes": "my-*", "role": "admin"}, audit_file=str(audit))
    assert admin.delete("/indexes/my-1").status_code == 200
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line.get("written") for line in lines if line["status"] < 300] == [
        {"created": 1},
        {"deleted": 0},
    ]
    assert {line["index"] for line in lines} == {"my-1", "other", "my-2"}


def test_without_keys_a_page_of_another_site_creates_nothing(start: Start) -> None:
    foreign = {"Origin": "https://elsewhere.example"}
    for method in ("PUT", "DELETE"):
        answer = start().request(method, "/indexes/mine", headers=foreign)
        assert fault(answer) in ((403, "needs_key"), (404, "unknown_index"))


def test_creations_are_counted_as_writes(start: Start) -> None:
    client = start()
    client.put("/indexes/mine")
    client.delete("/indexes/mine")
    client.delete("/indexes/mine")
    assert sample(client, "care_writes_total", result="success") == 2
