"""Documents that are written over HTTP, with the test encoder and a writer in a thread."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from care.writer import Writer
from core.errors import CareError, CorpusError, EmbeddingServerError, EmbeddingSpaceError
from core.manifest import IndexManifest
from core.versions import IndexFolder
from tests.conftest import make_records
from tests.encoders import BigramEncoder
from tests.service.conftest import Serve, sample, wait_until
from tests.service.live import HeldLive, running_writer

NEW = {
    "_id": "new",
    "title": "流感",
    "text": "流感患者居家隔离的要点。",
    "metadata": {"year": 2026},
}
DOCUMENTS = "/documents"
NDJSON = {"Content-Type": "application/x-ndjson"}
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def writer(live: HeldLive, tmp_path: Path) -> Iterator[str]:
    """The socket of a writer."""
    with running_writer(tmp_path, Writer(live, 1 << 20)) as path:
        yield path


@pytest.fixture
def client(serve: Serve, writer: str) -> TestClient:
    return serve(writer=writer)


def ids(client: TestClient, query: str = NEW["text"]) -> list[str]:
    hits = client.post("/search", json={"query": query, "top_k": 3}).json()["hits"]
    return [hit["id"] for hit in hits]


def test_what_is_put_is_found_at_once(client: TestClient, manifest: IndexManifest) -> None:
    assert "new" not in ids(client)
    answer = client.put(DOCUMENTS, json=NEW)
    assert answer.status_code == 200
    body = answer.json()
    assert body.pop("index")["name"] == "test"
    counts = {"added": 1, "replaced": 0, "deleted": 0, "unchanged": 0}
    assert body == {**counts, "missing": [], "rejected": []}
    assert ids(client)[0] == "new"
    served = client.get("/index").json()["version"]
    assert served == answer.json()["index"]["version"] != manifest.version
    again = client.put(DOCUMENTS, json=NEW).json()
    assert (again["added"], again["unchanged"]) == (0, 1)
    assert again["index"]["version"] == served
    replaced = client.put("/indexes/test/documents", json=NEW | {"title": "other"}).json()
    assert (replaced["added"], replaced["replaced"]) == (0, 1)
    assert client.get("/documents/new").json()["title"] == "other"


def test_what_a_rollback_took_back_is_not_found_after_a_write_without_changes(
    client: TestClient, manifest: IndexManifest, indexes: Path
) -> None:
    client.put(DOCUMENTS, json=NEW)
    IndexFolder(indexes, "test").set_active(manifest.version)
    answer = client.delete("/documents/new").json()
    assert (answer["missing"], answer["index"]["version"]) == (["new"], manifest.version)
    assert client.get("/index").json()["version"] == manifest.version
    assert "new" not in ids(client)


def test_a_list_and_lines_are_written_but_for_what_is_invalid(client: TestClient) -> None:
    documents = [NEW, {"_id": "bad", "text": " "}, NEW | {"_id": 7}]
    listed = client.put(DOCUMENTS, json=documents)
    assert listed.status_code == 200
    assert listed.json()["added"] == 2
    (rejected,) = listed.json()["rejected"]
    assert (rejected["position"], rejected["code"]) == (1, "invalid_record")
    assert "empty" in rejected["reason"]
    lines = "\n\n".join(json.dumps(each) for each in (NEW, NEW | {"_id": "8"}))
    answer = client.put(DOCUMENTS, content=lines, headers=NDJSON)
    assert (answer.json()["added"], answer.json()["unchanged"]) == (1, 1)
    assert {client.get(f"/documents/{id_}").status_code for id_ in ("new", "7", "8")} == {200}


def test_documents_are_deleted_by_id_ids_and_filter(client: TestClient) -> None:
    assert client.delete("/documents/d0000").json()["deleted"] == 1
    assert client.delete("/documents/d0000").json()["missing"] == ["d0000"]
    answer = client.post("/documents/delete", json={"ids": ["d0001", "d0000"]}).json()
    assert (answer["deleted"], answer["missing"]) == (1, ["d0000"])
    answer = client.post("/documents/delete", json={"filter": {"rare": True}}).json()
    assert answer["deleted"] == 1
    for id_ in ("d0000", "d0001", "d0030"):
        assert client.get(f"/documents/{id_}").status_code == 404
    assert client.get("/index").json()["documents"] == 57


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "invalid_filter"),
        ({"ids": [], "filter": {}}, "invalid_filter"),
        ({"ids": ["a"], "filter": {"rare": True}}, "invalid_filter"),
        ({"filter": {"unknown": 1}}, "unknown_filter_field"),
        ({"filter": {"unknown": {"not": 1}}}, "unknown_filter_field"),
        ({"ids": ["a"] * 6}, "batch_too_large"),
        ({"ids": [1]}, "invalid_request"),
    ],
)
def test_a_wrong_choice_deletes_nothing(
    serve: Serve, writer: str, live: HeldLive, body: Any, code: str
) -> None:
    answer = serve(writer=writer, max_documents=5).post("/documents/delete", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, code)
    assert not live.writes


def test_metadata_are_replaced(client: TestClient) -> None:
    answer = client.patch("/documents/d0003", json={"metadata": {"year": 1}})
    assert (answer.status_code, answer.json()["replaced"]) == (200, 1)
    assert client.get("/documents/d0003").json()["metadata"] == {"year": 1}
    query = {"query": "发热", "filter": {"year": 1}}
    assert [hit["id"] for hit in client.post("/search", json=query).json()["hits"]] == ["d0003"]
    missing = client.patch("/documents/none", json={"metadata": {}})
    assert (missing.status_code, missing.json()["code"]) == (404, "unknown_document")
    for body in ({}, {"metadata": 1}, {"metadata": {}, "text": "a"}):
        assert client.patch("/documents/d0003", json=body).status_code == 422


def test_a_document_that_has_changed_is_not_replaced(client: TestClient) -> None:
    tag = client.get("/documents/d0003").headers["ETag"]
    assert client.head("/documents/d0003").headers["ETag"] == tag
    old = {"If-Match": tag}
    record = make_records(60)[3]
    written = client.put(DOCUMENTS, json=record | {"title": "second"}, headers=old)
    assert written.json()["replaced"] == 1
    new = client.get("/documents/d0003").headers["ETag"]
    assert new != tag

    def changes(headers: dict[str, str]) -> list[tuple[int, str]]:
        path = "/documents/d0003"
        answers = [
            client.put(DOCUMENTS, json=record, headers=headers),
            client.patch(path, json={"metadata": {}}, headers=headers),
            client.delete(path, headers=headers),
        ]
        return [(each.status_code, each.json().get("code")) for each in answers]

    assert changes(old) == [(412, "document_changed")] * 3
    assert client.get("/documents/d0003").headers["ETag"] == new
    for wrong in ("abc", '"a", "b"', f"W/{tag}", '""', ""):
        assert changes({"If-Match": wrong}) == [(422, "invalid_request")] * 3
    assert [status for status, _ in changes({"If-Match": "*"})] == [200] * 3
    assert changes({"If-Match": "*"}) == [(412, "document_changed")] * 3


def test_a_document_can_be_required_to_be_new(client: TestClient) -> None:
    absent = {"If-None-Match": "*"}
    assert client.put(DOCUMENTS, json=NEW, headers=absent).json()["added"] == 1
    assert client.put(DOCUMENTS, json=NEW, headers=absent).status_code == 412
    both = absent | {"If-Match": "*"}
    for body, headers in (([NEW], absent), (NEW, both), (NEW, {"If-None-Match": '"a"'})):
        assert client.put(DOCUMENTS, json=body, headers=headers).status_code == 422


def test_other_types_are_refused(client: TestClient, live: HeldLive) -> None:
    asks: list[tuple[str, str, Any]] = [
        ("PUT", DOCUMENTS, json.dumps(NEW)),
        ("POST", "/documents/delete", '{"ids": ["d0001"]}'),
        ("PATCH", "/documents/d0001", '{"metadata": {}}'),
    ]
    for content_type in (
        *("", "text/plain", "application/x-www-form-urlencoded"),
        *("multipart/form-data", "text/json"),
    ):
        headers = {"Content-Type": content_type} if content_type else {}
        for method, path, body in asks:
            answer = client.request(method, path, content=body.encode(), headers=headers)
            found = answer.status_code, answer.json()["code"]
            assert found == (415, "unsupported_media_type"), (content_type, path)
    assert not live.writes


def test_malformed_and_long_bodies_are_refused(serve: Serve, writer: str, live: HeldLive) -> None:
    client = serve(writer=writer, max_documents=5, max_body_bytes=50_000)
    for content, status, code in (
        ("", 422, "invalid_request"),
        ("[]", 422, "invalid_request"),
        ("{", 400, "invalid_json"),
        ('{"a": "\\ud800"}', 400, "invalid_json"),
        (f'{{"a": 1{"0" * 5000}}}', 400, "invalid_json"),
        ("1", 422, "invalid_request"),
        ('[{"_id": "1"}, 2]', 422, "invalid_request"),
        ("[{}, {}, {}, {}, {}, {}]", 422, "batch_too_large"),
        (f"[{'[],' * 2000}[]]", 413, "body_too_long"),
        (json.dumps(NEW | {"text": "a" * 100_000}), 413, "body_too_long"),
    ):
        answer = client.put(DOCUMENTS, content=content.encode(), headers=JSON)
        assert (answer.status_code, answer.json()["code"]) == (status, code), content[:99]
    assert not live.writes


def test_accepted_lines_are_one_request(serve: Serve, writer: str, live: HeldLive) -> None:
    client = serve(writer=writer, max_documents=5)
    for content, status, code in (
        ("\n \n", 422, "invalid_request"),
        ('{"_id": "1"}\n\n{"text": "secret', 400, "invalid_json"),
        ("[1]", 422, "invalid_request"),
        ("{}\n" * 6, 422, "batch_too_large"),
    ):
        answer = client.put(f"{DOCUMENTS}?wait=accepted", content=content.encode(), headers=NDJSON)
        assert (answer.status_code, answer.json()["code"]) == (status, code), content
        if code == "invalid_json":
            assert answer.json()["errors"][0]["field"] == "line.3"
        assert "secret" not in answer.text
    assert not live.writes


def test_one_invalid_document_is_an_error(client: TestClient) -> None:
    answer = client.put(DOCUMENTS, json={"_id": "1", "text": ""})
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_record")
    assert "empty" in answer.json()["detail"]


def test_arrivals_wait_and_form_the_next_commit(client: TestClient, live: HeldLive) -> None:
    live.hold.clear()
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(client.put, DOCUMENTS, json=NEW)
        assert live.began.wait(60)
        others = [pool.submit(client.put, DOCUMENTS, json=NEW | {"_id": str(i)}) for i in range(3)]
        wait_until(lambda: sample(client, "care_http_requests_in_flight") == 5)
        live.hold.set()
        answers = [each.result() for each in (first, *others)]
    assert [answer.json()["added"] for answer in answers] == [1] * 4
    assert sum(live.commits) == 4
    assert len({answer.json()["index"]["version"] for answer in answers}) == len(live.commits) <= 3


def test_a_full_queue_gets_429(serve: Serve, live: HeldLive, tmp_path: Path) -> None:
    live.hold.clear()
    with running_writer(tmp_path, Writer(live, 1000)) as path:
        client = serve(writer=path)
        big = NEW | {"text": "a" * 900}
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(client.put, DOCUMENTS, json=NEW)
            assert live.began.wait(60)
            waits = pool.submit(client.put, DOCUMENTS, json=big)
            wait_until(lambda: sample(client, "care_http_requests_in_flight") == 3)
            refused = client.put(DOCUMENTS, json=big)
            live.hold.set()
            assert {first.result().status_code, waits.result().status_code} == {200}
    assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
    assert int(refused.headers["Retry-After"]) >= 1


def test_an_accepted_write_has_an_id(client: TestClient, live: HeldLive) -> None:
    live.hold.clear()
    answer = client.put(f"{DOCUMENTS}?wait=accepted", json=NEW)
    assert answer.status_code == 202
    path = f"/writes/{answer.json()['id']}"
    assert client.get(path).json() == {"state": "waiting", "result": None}
    live.hold.set()
    wait_until(lambda: client.get(path).json()["state"] == "written")
    assert client.get(path).json()["result"]["added"] == 1
    assert ids(client)[0] == "new"
    assert client.delete("/documents/d0000?wait=accepted").status_code == 202
    wait_until(lambda: client.get("/documents/d0000").status_code == 404)  # nobody has asked
    unknown = client.get("/writes/none")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "unknown_write")
    assert client.put(f"{DOCUMENTS}?wait=done", json=NEW).status_code == 422


def test_the_error_of_an_accepted_write_is_that_of_its_id(
    client: TestClient, live: HeldLive
) -> None:
    live.failure = CorpusError("too many fields", code="too_many_fields")
    path = f"/writes/{client.put(f'{DOCUMENTS}?wait=accepted', json=NEW).json()['id']}"
    wait_until(lambda: client.get(path).status_code == 422)
    assert client.get(path).json()["code"] == "too_many_fields"


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (CorpusError("too many fields", code="too_many_fields"), 422, "too_many_fields"),
        (EmbeddingServerError("http://host/v1 is away"), 503, "encoding_failed"),
        (CareError("another command holds the lock", code="locked"), 503, "locked"),
        (CareError("full", code="overloaded", retry_after=7), 429, "overloaded"),
        (CareError("of an older release", code="old_full_text"), 409, "old_full_text"),
        (EmbeddingSpaceError("of another one", code="other_encoder"), 409, "other_encoder"),
    ],
)
def test_a_write_that_fails(
    client: TestClient, live: HeldLive, failure: CareError, status: int, code: str
) -> None:
    live.failure = failure
    answer = client.put(DOCUMENTS, json=NEW)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert "host" not in answer.text
    assert answer.headers.get("Retry-After") == ("7" if status == 429 else {503: "1"}.get(status))
    assert sample(client, "care_writes_total", result="failure") == 1


def test_an_encoder_that_fails_stops_neither_deletes_nor_metadata(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise EmbeddingServerError("http://host/v1 is away")

    with monkeypatch.context() as away:
        away.setattr(BigramEncoder, "encode", fail)
        refused = client.put(DOCUMENTS, json=NEW)
        assert (refused.status_code, refused.json()["code"]) == (503, "encoding_failed")
        (line,) = [one for one in caplog.records if one.message == "documents cannot be written"]
        assert "http://host/v1 is away" in line.__dict__["fields"]["reason"]
        assert client.delete("/documents/d0001").json()["deleted"] == 1
        patched = client.patch("/documents/d0002", json={"metadata": {"year": 1}})
        assert patched.json()["replaced"] == 1
    assert client.put(DOCUMENTS, json=NEW).json()["added"] == 1


def test_a_wrong_method_is_told_that_the_path_answers_post(client: TestClient) -> None:
    answer = client.request("TRACE", "/documents/delete")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")


def test_the_deadline_of_a_write_does_not_stop_it(client: TestClient, live: HeldLive) -> None:
    live.hold.clear()
    answer = client.put(DOCUMENTS, json=NEW, headers={"X-Request-Timeout-Ms": "100"})
    assert (answer.status_code, answer.json()["code"]) == (504, "deadline_exceeded")
    live.hold.set()
    wait_until(lambda: ids(client)[0] == "new")


def test_without_a_writer_writes_are_refused(serve: Serve) -> None:
    for writer in ("", "/nowhere"):
        client = serve(writer=writer)
        answer = client.put(DOCUMENTS, json=NEW)
        assert (answer.status_code, answer.json()["code"]) == (503, "writer_unavailable")
        assert client.post("/search", json={"query": "发热"}).status_code == 200


def test_the_size_of_a_version_is_that_of_all_its_segments(
    client: TestClient, folder: Path
) -> None:
    client.put(DOCUMENTS, json=NEW)
    client.delete("/documents/d0001")
    facts = {"manifest.json", "manifest.sha256", "segment.json"}
    *_, last = client.get("/index/versions").json()["versions"]
    deleted = (folder.parent / last["version"] / "deleted.roaring").stat().st_size
    sizes = [
        path.stat().st_size
        for path in folder.parent.glob("*/**/*")
        if path.is_file() and path.name not in facts | {"deleted.roaring"}
    ]
    assert last["bytes"] == sum(sizes) + deleted


def test_writes_are_counted(client: TestClient) -> None:
    client.put(DOCUMENTS, json=[NEW, {"_id": "1"}])
    client.delete("/documents/new")
    assert sample(client, "care_writes_total", result="success") == 2
    total = "care_written_documents_total"
    assert [sample(client, total, change=c) for c in ("added", "rejected", "deleted")] == [1, 1, 1]
    assert sample(client, "care_write_seconds_count") == 2
