import hashlib
import logging
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from core.manifest import IndexManifest
from service.app import create_app
from service.observe.logs import JsonFormatter
from service.settings import Settings
from tests.conftest import ADMIN_KEY, SEARCH_KEY
from tests.encoders import BigramEncoder
from tests.service.conftest import Serve, sample

pytestmark = pytest.mark.usefixtures("manifest")

QUERY = {"query": "高血压患者的护理"}
OTHER_KEY = f"other:search:{hashlib.sha256(b'too').hexdigest()}"
ASKS: list[tuple[str, str, Any]] = [
    ("POST", "/search", QUERY),
    ("POST", "/search/batch", {"queries": [QUERY]}),
    ("POST", "/v1/embeddings", {"input": "高血压"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/care-mini", None),
    ("GET", "/index", None),
]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def closed(serve: Serve, manifest: IndexManifest) -> TestClient:
    """A service with API keys."""
    return serve(api_keys=SecretStr(f"{ADMIN_KEY},{SEARCH_KEY}"))


def test_a_request_without_a_valid_key_gets_401(closed: TestClient) -> None:
    for headers in ({}, bearer("wrong"), {"Authorization": "Basic asks"}):
        response = closed.post("/search", json=QUERY, headers=headers)
        assert response.status_code == 401, headers
        assert response.headers["WWW-Authenticate"] == "Bearer"
        assert response.json()["code"] == "unauthorized"


OPEN = ("/", "/docs", "/health/live", "/health/ready", "/metrics", "/page/search.js")


def test_probes_pages_and_metrics_need_no_key(closed: TestClient) -> None:
    assert {path: closed.get(path).status_code for path in OPEN} == dict.fromkeys(OPEN, 200)


def test_every_other_path_needs_a_key_before_it_is_looked_up(closed: TestClient) -> None:
    closed.follow_redirects = False
    for path in (
        *("/openapi.json", "/nowhere", "/v1/nowhere", "/docs/", "/health", "/health/other"),
        *("/page", "/search/", "/metrics/", "/docs%0A", "/health/live%0A", "/Docs"),
    ):
        for method in ("GET", "HEAD", "POST", "OPTIONS", "PROPFIND"):
            assert closed.request(method, path).status_code == 401, path
            known = closed.request(method, path, headers=bearer("asks"))
            assert known.status_code != 401, path


def test_a_wrong_key_appears_nowhere(closed: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    response = closed.post("/search", json=QUERY, headers=bearer("care_mistyped"))
    assert response.status_code == 401
    lines = [JsonFormatter().format(r) for r in caplog.records if r.name == "care.service"]
    assert lines
    for text in (response.text, str(response.headers), closed.get("/metrics").text, *lines):
        assert "mistyped" not in text


def test_a_route_needs_a_key_unless_it_is_listed_as_open(serve: Serve) -> None:
    client = serve(api_keys=SecretStr(SEARCH_KEY))

    async def forgotten(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    cast("Any", client.app).router.add_route("/added", forgotten)
    assert client.get("/added").status_code == 401


def test_every_documented_route_but_the_open_ones_needs_a_key(closed: TestClient) -> None:
    paths = closed.get("/openapi.json", headers=bearer("asks")).json()["paths"]
    for path, methods in paths.items():
        for method, operation in methods.items():
            assert ("security" in operation) == (path not in OPEN)
            assert (closed.request(method, path).status_code == 401) == (path not in OPEN)


def test_metrics_need_a_key_by_setting(serve: Serve) -> None:
    keys = SecretStr(f"{ADMIN_KEY},{SEARCH_KEY}")
    client = serve(api_keys=keys, open_metrics=False)
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers=bearer("asks")).status_code == 200
    assert client.get("/health/live").status_code == 200
    # Without any key they are open.
    assert serve(open_metrics=False).get("/metrics").status_code == 200


def test_requests_without_a_key_are_counted_by_route(closed: TestClient) -> None:
    closed.post("/search", json=QUERY)
    closed.get("/v1/models/any", headers=bearer("wrong"))
    closed.get("/nowhere")
    total = "care_http_requests_total"
    for route in ("/search", "/v1/models/{model}", "unmatched"):
        assert sample(closed, total, route=route, status="401") == 1
    assert sample(closed, "care_rejections_total", reason="key") == 3


@pytest.mark.parametrize(("keys", "secret"), [(ADMIN_KEY, "secret"), (SEARCH_KEY, "asks")])
def test_any_configured_key_closes_search_which_is_open_otherwise(
    serve: Serve, client: TestClient, keys: str, secret: str
) -> None:
    closed = serve(api_keys=SecretStr(keys))
    for method, path, body in ASKS:
        assert client.request(method, path, json=body).status_code == 200, path
        assert closed.request(method, path, json=body).status_code == 401, path
        known = closed.request(method, path, json=body, headers=bearer(secret))
        assert known.status_code == 200, path


@pytest.mark.parametrize(
    ("keys", "header", "status", "code"),
    [
        (ADMIN_KEY, None, 401, "unauthorized"),
        (ADMIN_KEY, "Bearer wrong", 401, "unauthorized"),
        (ADMIN_KEY, "Bearer secre", 401, "unauthorized"),
        (ADMIN_KEY, "Bearer 密", 401, "unauthorized"),
        (ADMIN_KEY, "Basic secret", 401, "unauthorized"),
        (ADMIN_KEY, "Bearer ", 401, "unauthorized"),
        (f"{ADMIN_KEY},{SEARCH_KEY}", "Bearer asks", 403, "forbidden"),
        (SEARCH_KEY, "Bearer asks", 401, "no_admin_key"),
        (SEARCH_KEY, None, 401, "unauthorized"),
    ],
)
def test_a_reload_needs_an_admin_key(
    serve: Serve, keys: str, header: str | None, status: int, code: str
) -> None:
    client = serve(api_keys=SecretStr(keys))
    headers = {"Authorization": header.encode()} if header else {}
    response = client.post("/index/reload", headers=headers)
    assert (response.status_code, response.json()["code"]) == (status, code)
    assert ("WWW-Authenticate" in response.headers) == (status == 401)
    assert sample(client, "care_index_reloads_total", result="success") == 0


@pytest.mark.parametrize(
    ("host", "peer", "headers", "allowed"),
    [
        ("127.0.0.1", "127.0.0.1", {}, True),
        ("localhost", "::1", {}, True),
        ("127.0.0.1", "127.0.0.1", {"Authorization": "Bearer wrong"}, True),
        ("127.0.0.1", "127.0.0.1", {"Origin": "http://localhost:8000"}, True),
        ("127.0.0.1", "127.0.0.1", {"Host": "[::1]:8000", "Origin": "http://[::1]"}, True),
        ("127.0.0.1", "192.0.2.7", {}, False),
        ("127.0.0.1", None, {}, False),
        ("0.0.0.0", "127.0.0.1", {}, False),
        ("care.example", "127.0.0.1", {}, False),
        ("127.0.0.1", "127.0.0.1", {"Origin": "https://other.example"}, False),
        ("127.0.0.1", "127.0.0.1", {"Origin": "http://localhost.other.example"}, False),
        ("127.0.0.1", "127.0.0.1", {"Origin": "null"}, False),
        ("127.0.0.1", "127.0.0.1", {"Origin": "http://[::1"}, False),
        ("127.0.0.1", "127.0.0.1", {"Host": "other.example"}, False),
        ("127.0.0.1", "127.0.0.1", {"Host": "127.0.0.1.other.example:8000"}, False),
        ("127.0.0.1", "127.0.0.1", {"X-Forwarded-For": "192.0.2.7"}, False),
        ("127.0.0.1", "127.0.0.1", {"Forwarded": "for=192.0.2.7"}, False),
    ],
)
def test_without_configured_keys_local_clients_may_write_and_administer(
    settings: Settings, host: str, peer: str | None, headers: dict[str, str], allowed: bool
) -> None:
    app = create_app(settings.model_copy(update={"host": host}), BigramEncoder())
    address: Any = (peer, 1) if peer else None
    with TestClient(app, "http://127.0.0.1:8000", client=address) as client:
        for index in ("/index", "/indexes/test"):
            answer = client.post(f"{index}/reload", headers=headers)
            assert answer.status_code == (200 if allowed else 403)
        for prefix in ("", "/indexes/test", "/indexes/unknown"):
            answer = client.delete(f"{prefix}/documents/d0001", headers=headers)
            expected = 404 if prefix.endswith("unknown") else 503  # it has no writer
            assert answer.status_code == (expected if allowed else 403)
            assert allowed or answer.json()["code"] == "needs_key"
        assert client.post("/search", json=QUERY, headers=headers).status_code == 200


def test_a_key_over_its_rate_gets_429_with_retry_after(serve: Serve) -> None:
    keys = SecretStr(f"{SEARCH_KEY},{OTHER_KEY}")
    client = serve(api_keys=keys, rate_limit=0.1, rate_burst=2)
    statuses = [
        client.post("/search", json=QUERY, headers=bearer("asks")).status_code for _ in range(2)
    ]
    assert statuses == [200, 200]
    refused = client.post("/search", json=QUERY, headers=bearer("asks"))
    assert refused.status_code == 429
    assert refused.json()["code"] == "rate_limited"
    assert 1 <= int(refused.headers["Retry-After"]) <= 10
    assert sample(client, "care_rejections_total", reason="rate") == 1
    assert client.post("/search", json=QUERY, headers=bearer("too")).status_code == 200


def test_each_query_of_a_batch_is_charged(serve: Serve) -> None:
    client = serve(rate_limit=0.1, rate_burst=4)
    batch = {"queries": [QUERY] * 4}
    assert client.post("/search/batch", json=batch).status_code == 200
    assert client.post("/search", json=QUERY).status_code == 429


def test_an_invalid_query_is_not_charged(serve: Serve) -> None:
    client = serve(rate_limit=0.1, rate_burst=1)
    assert client.post("/search", json={"query": 1}).status_code == 422
    assert client.post("/search", json=QUERY).status_code == 200


ORIGIN = "https://clinic.example"
PREFLIGHT = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}


def test_other_origins_are_blocked_by_default(client: TestClient) -> None:
    response = client.post("/search", json=QUERY, headers={"Origin": ORIGIN})
    assert "Access-Control-Allow-Origin" not in response.headers
    assert client.options("/search", headers=PREFLIGHT).status_code == 405
