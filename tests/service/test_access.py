import hashlib
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from core.types import IndexManifest
from tests.conftest import ADMIN_KEY, SEARCH_KEY
from tests.service.conftest import Serve, sample

QUERY = {"query": "高血压患者的护理"}
OTHER_KEY = f"other:search:{hashlib.sha256(b'too').hexdigest()}"
ASKS: list[tuple[str, str, Any]] = [
    ("POST", "/search", QUERY),
    ("POST", "/search/batch", {"queries": [QUERY]}),
    ("POST", "/v1/embeddings", {"input": "高血压"}),
    ("GET", "/index", None),
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def closed(serve: Serve, manifest: IndexManifest) -> TestClient:
    """A service that asks for keys."""
    return serve(api_keys=SecretStr(f"{ADMIN_KEY},{SEARCH_KEY}"))


@pytest.mark.parametrize(("method", "path", "body"), ASKS)
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"Authorization": "Basic asks"}])
def test_who_has_no_key_is_refused(
    closed: TestClient, method: str, path: str, body: Any, headers: dict[str, str]
) -> None:
    response = closed.request(method, path, json=body, headers=headers)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert response.json()["detail"] == "the bearer key is missing or unknown"


@pytest.mark.parametrize(("method", "path", "body"), ASKS)
@pytest.mark.parametrize("key", ["asks", "secret"])
def test_a_key_for_search_or_administration_may_ask(
    closed: TestClient, method: str, path: str, body: Any, key: str
) -> None:
    assert closed.request(method, path, json=body, headers=bearer(key)).status_code == 200


@pytest.mark.parametrize("path", ["/", "/health/live", "/health/ready", "/metrics", "/docs"])
def test_what_tells_nothing_of_the_index_is_open(closed: TestClient, path: str) -> None:
    assert closed.get(path).status_code == 200


def test_without_a_key_for_search_anyone_may_ask(client: TestClient) -> None:
    assert client.post("/search", json=QUERY).status_code == 200


def test_a_key_that_asks_too_often_is_told_when_to_come_again(
    serve: Serve, manifest: IndexManifest
) -> None:
    keys = SecretStr(f"{SEARCH_KEY},{OTHER_KEY}")
    client = serve(api_keys=keys, rate_limit=0.1, rate_burst=2)
    statuses = [
        client.post("/search", json=QUERY, headers=bearer("asks")).status_code for _ in range(2)
    ]
    assert statuses == [200, 200]
    refused = client.post("/search", json=QUERY, headers=bearer("asks"))
    assert refused.status_code == 429
    assert refused.json()["detail"] == "this key asks too often: try again"
    assert 1 <= int(refused.headers["Retry-After"]) <= 10
    assert sample(client, "care_rejections_total", reason="rate") == 1
    assert client.post("/search", json=QUERY, headers=bearer("too")).status_code == 200


def test_each_query_of_a_batch_counts(serve: Serve, manifest: IndexManifest) -> None:
    client = serve(rate_limit=0.1, rate_burst=4)
    batch = {"queries": [QUERY] * 4}
    assert client.post("/search/batch", json=batch).status_code == 200
    assert client.post("/search", json=QUERY).status_code == 429


def test_a_refused_query_costs_nothing(serve: Serve, manifest: IndexManifest) -> None:
    client = serve(rate_limit=0.1, rate_burst=1)
    assert client.post("/search", json={"query": 1}).status_code == 422
    assert client.post("/search", json=QUERY).status_code == 200


ORIGIN = "https://clinic.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_pages_of_other_origins_are_shut_out_by_default(client: TestClient) -> None:
    response = client.post("/search", json=QUERY, headers={"Origin": ORIGIN})
    assert "Access-Control-Allow-Origin" not in response.headers
    assert client.options("/search", headers=PREFLIGHT).status_code == 405


def test_pages_of_named_origins_may_call(serve: Serve, manifest: IndexManifest) -> None:
    client = serve(cors_origins=(ORIGIN,))
    preflight = client.options("/search", headers=PREFLIGHT)
    assert preflight.status_code == 200
    assert preflight.headers["Access-Control-Allow-Origin"] == ORIGIN
    response = client.post("/search", json=QUERY, headers={"Origin": ORIGIN})
    assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
    other = client.post("/search", json=QUERY, headers={"Origin": "https://other.example"})
    assert "Access-Control-Allow-Origin" not in other.headers


@pytest.mark.parametrize("path", ["/", "/search", "/index", "/page/search.js", "/nowhere"])
def test_answers_are_kept_by_no_cache_and_read_as_what_they_are(
    client: TestClient, path: str
) -> None:
    headers = client.get(path).headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
