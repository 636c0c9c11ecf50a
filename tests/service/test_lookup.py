"""`GET /documents/{id}`: each id that a search returns can be fetched."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest
from fastapi.testclient import TestClient
from httpx2 import Response
from pydantic import SecretStr

from core.documents import DocumentReader
from core.manifest import Chunking, IndexManifest
from service.observe.logs import JsonFormatter
from tests.conftest import SEARCH_KEY, Builder, make_records
from tests.service.conftest import UNUSUAL_IDS, Serve, read_samples, sample

ROUTE = "/documents/{id}"
RECORDS = {record["_id"]: record for record in make_records(60)}


def get(client: TestClient, id_: str, **options: Any) -> Response:
    # Dots are escaped because clients resolve the segments "." and "..".
    return client.get(f"/documents/{quote(id_, safe='').replace('.', '%2E')}", **options)


def fetched(client: TestClient, id_: str) -> dict[str, Any]:
    response = get(client, id_)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def assert_unknown(response: Response) -> None:
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"
    assert (response.json()["code"], response.json()["errors"]) == ("unknown_document", [])


def test_a_document_is_returned_with_the_index_version(
    client: TestClient, manifest: IndexManifest
) -> None:
    for id_, record in RECORDS.items():
        assert fetched(client, id_) == {
            "id": id_,
            "title": record["title"],
            "text": record["text"],
            "metadata": record["metadata"],
            "passages": [],
            "index": {"name": "test", "version": manifest.version},
        }


def test_ids_of_any_characters_are_found(serve: Serve, build_version: Builder) -> None:
    build_version([{"_id": id_, "text": f"文{i}"} for i, id_ in enumerate(UNUSUAL_IDS)])
    client = serve()
    assert {id_: fetched(client, id_)["text"] for id_ in UNUSUAL_IDS} == {
        id_: f"文{i}" for i, id_ in enumerate(UNUSUAL_IDS)
    }
    # Proxies decode slashes.
    assert client.get("/documents/a/b").json()["id"] == "a/b"


@pytest.mark.parametrize("id_", ["d-1", "", "/", "#0", "D0001", "a" * 7000, "\x00", "骨", "\ufffd"])
def test_an_unknown_id_is_404_and_is_not_quoted(client: TestClient, id_: str) -> None:
    assert_unknown(get(client, id_))


def test_an_id_of_invalid_bytes_is_unknown(client: TestClient) -> None:
    response = client.get("/documents/%FF%80secret-id")
    assert_unknown(response)
    assert "secret-id" not in response.text


CHUNKING = Chunking(tokens=40, overlap=10)
LONG = "".join(f"高血压患者第{i}号的护理要点。" for i in range(40))


@pytest.fixture
def chunked(serve: Serve, build_version: Builder) -> TestClient:
    """A service over an index of chunks; one document is not split."""
    records = [
        {"_id": "病历/1", "title": "护理", "text": LONG, "metadata": {"year": 2020}},
        {"_id": "short", "text": "骨折的护理。"},
        {"_id": "病历/2", "text": LONG[::-1]},
    ]
    build_version(records, chunking=CHUNKING)
    return serve()


@pytest.mark.parametrize("collapse", [False, True])
def test_each_hit_of_an_index_of_chunks_can_be_fetched(chunked: TestClient, collapse: bool) -> None:
    query = {"query": "护理", "top_k": 1000, "collapse": collapse}
    answer = chunked.post("/search", json=query).json()
    assert len(answer["hits"]) == 3 if collapse else len(answer["hits"]) > 10
    for hit in answer["hits"]:
        document = fetched(chunked, hit["id"])
        assert document.pop("passages") == []
        assert document.pop("index") == answer["index"]
        assert document == {name: hit[name] for name in hit if name not in ("score", "rank")}


def test_a_document_that_is_split_has_its_chunks_in_order(chunked: TestClient) -> None:
    document = fetched(chunked, "病历/1")
    passages = document["passages"]
    assert (document["id"], document["title"], document["text"]) == ("病历/1", "护理", None)
    assert document["metadata"] == {"year": 2020}
    assert document["chunks"] == len(passages) > 5
    assert [each["chunk"] for each in passages] == list(range(len(passages)))
    assert [each["id"] for each in passages] == [f"病历/1#{i}" for i in range(len(passages))]
    assert LONG.startswith(passages[0]["text"]) and LONG.endswith(passages[-1]["text"])
    for passage in passages:
        alone = fetched(chunked, passage["id"])
        assert (alone["text"], alone["parent"]) == (passage["text"], "病历/1")
    assert_unknown(get(chunked, f"病历/1#{len(passages)}"))


def test_a_document_of_one_chunk_is_returned_with_its_text(chunked: TestClient) -> None:
    document = fetched(chunked, "short")
    assert (document["text"], document["passages"]) == ("骨折的护理。", [])
    assert (document["parent"], document["chunk"], document["chunks"]) == ("short", 0, 1)


def test_a_long_document_is_sent_in_parts(serve: Serve, build_version: Builder) -> None:
    text = "".join(f"高血压患者第{i}号的护理要点。" for i in range(4_000))
    build_version([{"_id": "long", "text": text}], chunking=Chunking(tokens=200, overlap=0))
    client = serve()
    response = get(client, "long")
    assert "content-length" not in response.headers
    assert "".join(each["text"] for each in response.json()["passages"]) == text


def test_metrics_and_logs_name_the_route_and_no_id(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve()
    caplog.set_level(logging.DEBUG)
    series = read_samples(client).keys()
    for id_ in (*RECORDS, "patient-17", "patient/18"):
        get(client, id_)
    total = "care_http_requests_total"
    assert sample(client, total, route=ROUTE, status="200") == len(RECORDS)
    assert sample(client, total, route=ROUTE, status="404") == 2
    assert read_samples(client).keys() == series
    records = [record for record in caplog.records if record.name == "care.service"]
    lines = [JsonFormatter().format(record) for record in records]
    assert sum(f'"route":"{ROUTE}"' in line for line in lines) == len(RECORDS) + 2
    for text in (*lines, client.get("/metrics").text):
        assert "patient" not in text and "d0001" not in text


def test_a_key_is_needed_and_its_rate_is_charged(serve: Serve) -> None:
    client = serve(api_keys=SecretStr(SEARCH_KEY), rate_limit=0.001, rate_burst=2)
    assert get(client, next(iter(RECORDS))).status_code == 401
    assert sample(client, "care_http_requests_total", route=ROUTE, status="401") == 1
    headers = {"Authorization": "Bearer asks"}
    # An unknown id costs as much as a known one.
    statuses = [get(client, id_, headers=headers).status_code for id_ in (*[*RECORDS][:1], "", "")]
    assert statuses == [200, 404, 429]


def test_a_lookup_ends_at_its_deadline(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def blocked(*_: object) -> range:
        assert release.wait(30)
        return range(0)

    monkeypatch.setattr(DocumentReader, "find", blocked)
    with ThreadPoolExecutor(1) as pool:
        headers = {"X-Request-Timeout-Ms": "20"}
        response = pool.submit(get, client, "d0001", headers=headers).result(30)
        # The event loop was free.
        assert client.get("/health/live").status_code == 200
        release.set()
    assert (response.status_code, response.json()["code"]) == (504, "deadline_exceeded")
