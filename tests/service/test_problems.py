import json
import logging
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx2 import Response

from core.encoders import Encoding
from service.observe.logs import JsonFormatter
from service.pipeline.engine import Engine
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.service.conftest import BLOCKED, BlockingEncoder, Serve, sample

SECRET = "绝密病历"
JSON = {"Content-Type": "application/json"}


def problem(response: Response, status: int, code: str | None = None) -> dict[str, Any]:
    """Checks that a response is a problem with a status and without the query; returns it."""
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body.keys() == {"type", "title", "status", "code", "detail", "request_id", "errors"}
    assert (body["type"], body["status"]) == ("about:blank", status)
    assert re.fullmatch("[a-z][a-z0-9_]*", body["code"])
    assert code in (None, body["code"])
    assert body["request_id"] == response.headers["X-Request-ID"]
    assert "\n" not in body["detail"]
    assert SECRET not in response.text
    return body


def assert_one_fault(response: Response, field: str, code: str | None, status: int = 422) -> None:
    body = problem(response, status)
    (fault,) = body["errors"]
    assert fault["field"] == field
    assert code in (None, fault["code"])
    assert body["detail"] == f"{field}: {fault['message']}"
    # The code of the problem is that of its error, except for errors of validation.
    assert body["code"] in (fault["code"], "invalid_request")


@pytest.mark.parametrize(
    ("change", "field", "code"),
    [
        ({"query": ""}, "query", "empty_text"),
        ({"query": " \u3000\n\u200b"}, "query", "empty_text"),
        ({"query": SECRET * 501}, "query", "text_too_long"),
        ({"query": 5}, "query", "string_type"),
        ({"query": None}, "query", "string_type"),
        ({"query": [SECRET]}, "query", "string_type"),
        ({"top_k": 0}, "top_k", "greater_than_equal"),
        ({"top_k": -1}, "top_k", "greater_than_equal"),
        ({"top_k": 2.0}, "top_k", "int_type"),
        ({"top_k": "2"}, "top_k", "int_type"),
        ({"top_k": True}, "top_k", "int_type"),
        ({"limit_per": {"field": "tags", "hits": None}}, "limit_per.hits", "int_type"),
        ({"limit_per": {"field": "tags", "hits": "2"}}, "limit_per.hits", "int_type"),
        ({"limit_per": {"field": "tags", "hits": 0}}, "limit_per.hits", "greater_than_equal"),
        ({"limit_per": {"field": "no", "hits": 1}}, "limit_per.field", "unknown_filter_field"),
        ({"limit_per": {"field": "tags"}}, "limit_per.hits", "missing"),
        ({"limit_per": {"hits": 1}}, "limit_per.field", "missing"),
        ({"limit_per": {"field": "t", "hits": 1, "x": 1}}, "limit_per.x", "extra_forbidden"),
        ({"limit_per": 2}, "limit_per", "model_type"),
        ({"collapse": 1}, "collapse", "bool_type"),
        ({"collapse": "true"}, "collapse", "bool_type"),
        ({"mode": "sparse"}, "mode", "literal_error"),
        *(({"rerank": value}, "rerank", "rerank") for value in (0, -1, 2.0, "true", [1])),
        ({"filter": {"department": None}}, "filter.department", "invalid_filter"),
        ({"top_k": 1001}, "top_k", "top_k_too_large"),
        ({"min_score": 100.01}, "min_score", "less_than_equal"),
        ({"min_score": -100.01}, "min_score", "greater_than_equal"),
        ({"min_score": float("nan")}, "min_score", "less_than_equal"),
        ({"min_score": "0.5"}, "min_score", "float_type"),
        ({"min_score": True}, "min_score", "float_type"),
        ({"include": ["title"]}, "include.0", "literal_error"),
        ({"include": "text"}, "include", "list_type"),
        ({"filter": {"ward": [SECRET]}}, "filter.ward", None),
        ({"filter": {"department": [SECRET, None]}}, "filter.department", "invalid_filter"),
        ({"filter": {"department": []}}, "filter.department", "invalid_filter"),
        ({"filter": {"department": {"not": [[]]}}}, "filter.department", "invalid_filter"),
        ({"filter": {"department": {"gte": SECRET}}}, "filter.department", "invalid_filter"),
        ({"filter": {"department": {"gte": 2019}}}, "filter.department", "filter_not_numeric"),
        ({"filter": {"department": [SECRET] * 101}}, "filter.department", "filter_too_large"),
        ({"filter": [SECRET]}, "filter", "invalid_filter"),
        ({"topk": 3}, "topk", "extra_forbidden"),
        ({"x" * 99: 3}, "x" * 64, "extra_forbidden"),
    ],
)
def test_an_invalid_field_is_named_in_single_and_batch_requests(
    client: TestClient, change: dict[str, Any], field: str, code: str | None
) -> None:
    bad = {"query": SECRET} | change
    response = client.post("/search", content=json.dumps(bad), headers=JSON)
    assert_one_fault(response, field, code)
    batch = {"queries": [{"query": SECRET}, bad]}
    response = client.post("/search/batch", content=json.dumps(batch), headers=JSON)
    assert_one_fault(response, f"queries.1.{field}", code)


def test_errors_name_the_limit(client: TestClient) -> None:
    for change, limit in (({"query": SECRET * 501}, "2000"), ({"top_k": 1001}, "1000")):
        body = problem(client.post("/search", json={"query": SECRET} | change), 422)
        assert limit in body["detail"]


@pytest.mark.parametrize(
    ("body", "status", "field", "code"),
    [
        (b"", 422, "body", "missing"),
        (b"{}", 422, "query", "missing"),
        (json.dumps([SECRET]).encode(), 422, "body", None),
        (b'{"query": "' + SECRET.encode(), 400, "body", "invalid_json"),
        (b'{"query": "\xff"}', 400, "body", "invalid_json"),
        (b'{"query": "\\ud800"}', 400, "body", "invalid_json"),
        (b'{"query": "a", "filter": {"\\ud800": [1]}}', 400, "body", "invalid_json"),
        (b"[" * 100_000, 400, "body", "invalid_json"),
        (b'{"query": "a", "top_k": ' + b"1" * 5000 + b"}", 400, "body", "invalid_json"),
    ],
)
def test_an_invalid_body_is_rejected(
    client: TestClient, body: bytes, status: int, field: str, code: str | None
) -> None:
    assert_one_fault(client.post("/search", content=body, headers=JSON), field, code, status)


@pytest.mark.parametrize(
    ("media_type", "status"),
    [
        *(("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("json", 415)),
        *(("application/json", 200), ("Application/JSON; charset=utf-8", 200), ("", 200)),
    ],
)
def test_a_body_is_json_or_has_no_media_type(
    client: TestClient, media_type: str, status: int
) -> None:
    headers = {"Content-Type": media_type} if media_type else {}
    response = client.post("/search", content=json.dumps({"query": SECRET}), headers=headers)
    assert response.status_code == status
    if status != 200:
        problem(response, 415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("changes", "queries", "code"),
    [
        ({}, [], "too_short"),
        ({}, SECRET, "list_type"),
        ({"max_batch": 2}, [{"query": SECRET}] * 3, "batch_too_large"),
    ],
)
def test_an_invalid_batch_is_rejected(
    serve: Serve, changes: dict[str, int], queries: object, code: str
) -> None:
    response = serve(**changes).post("/search/batch", json={"queries": queries})
    assert_one_fault(response, "queries", code)


def test_validation_of_a_batch_stops_at_the_first_error(client: TestClient) -> None:
    response = client.post("/search/batch", json={"queries": [{}] * 64})
    assert_one_fault(response, "queries.0.query", "missing")


def test_at_most_sixteen_errors_are_listed(client: TestClient) -> None:
    body = {"query": SECRET} | {f"field{i}": i for i in range(1000)}
    assert len(problem(client.post("/search", json=body), 422)["errors"]) == 16


def test_all_errors_of_a_query_are_listed_and_the_first_is_the_detail(client: TestClient) -> None:
    response = client.post("/search", json={"query": 1, "top_k": 0})
    body = problem(response, 422, "invalid_request")
    assert [error["field"] for error in body["errors"]] == ["query", "top_k"]
    assert body["detail"] == f"query: {body['errors'][0]['message']}"


def in_chunks(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("excess", "status"), [(0, 200), (1, 413)])
def test_a_body_over_the_limit_gets_413_with_or_without_content_length(
    serve: Serve, chunked: bool, excess: int, status: int
) -> None:
    query = json.dumps({"query": SECRET}).encode()
    body = query + b" " * (1000 + excess - len(query))
    response = serve(max_body_bytes=1000).post(
        "/search", content=in_chunks(body) if chunked else body, headers=JSON
    )
    assert ("content-length" in response.request.headers) != chunked
    assert response.status_code == status
    if status == 413:
        assert "1000" in problem(response, 413, "body_too_long")["detail"]


def test_a_request_id_is_kept_unless_it_is_malformed(client: TestClient) -> None:
    def answered(given: bytes, query: str) -> str:
        headers = {b"X-Request-ID": given}
        response = client.post("/search", json={"query": query}, headers=headers)
        if not query:
            problem(response, 422)
        return str(response.headers["X-Request-ID"])

    for given in ("a", "A-1_b.c", "x" * 64):
        assert {answered(given.encode(), query) for query in ("高血压", "")} == {given}
    malformed = [b"", b"x" * 65, b"a b", b"a\tb", b"a/b", SECRET.encode()]
    made = {answered(given, "") for given in malformed}
    assert (len(made), {len(each) for each in made}) == (len(malformed), {32})


def test_a_full_queue_refuses_nothing_that_is_cached_or_in_flight(serve: Serve) -> None:
    encoder = BlockingEncoder()
    client = serve(encoder, queue_tokens=1)
    cached = {"query": "高血压"}
    assert client.post("/search", json=cached).json()["cached"] is False
    # Of the same rows, not of the same JSON.
    other_fields: dict[str, Any] = cached | {"include": []}
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(client.post, "/search", json={"query": BLOCKED}) for _ in range(2)]
        assert encoder.entered.wait(30)
        assert client.post("/search", json=cached).json()["cached"] is True
        assert client.post("/search", json=other_fields).json()["cached"] is True
        problem(client.post("/search", json=cached | {"top_k": 1}), 429, "overloaded")
        encoder.release.set()
        assert [each.result().status_code for each in both] == [200, 200]


def test_a_search_that_is_refused_starts_no_work(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = BlockingEncoder()
    client = serve(encoder, queue_tokens=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, "/search", json={"query": BLOCKED})
        assert encoder.entered.wait(30)
        with monkeypatch.context() as patched:
            patched.setattr(Engine, "search", None)
            for number in range(3):
                refused = client.post("/search", json={"query": SECRET * number + "?"})
                problem(refused, 429, "overloaded")
                assert refused.headers["Retry-After"] == "1"
        batch = {"queries": [{"query": SECRET}]}
        problem(client.post("/search/batch", json=batch), 429, "overloaded")
        assert client.get("/health/live").status_code == 200
        encoder.release.set()
        assert first.result().status_code == 200
    assert sample(client, "care_rejections_total", reason="queue") == 4
    assert client.post("/search", json={"query": SECRET}).status_code == 200


class FailingEncoder(BigramEncoder):
    """Fails once the index is loaded, with the query text in the message."""

    failing = False

    def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
        if self.failing:
            raise RuntimeError(f"cannot encode {tokens}")
        return super().encode_tokens(tokens)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/search", {"query": SECRET}),
        ("POST", "/search/batch", {"queries": [{"query": SECRET}]}),
        ("POST", "/index/reload", None),
    ],
)
def test_an_unexpected_error_returns_no_details(
    serve: Serve,
    build_version: Builder,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    body: dict[str, Any] | None,
) -> None:
    caplog.set_level(logging.DEBUG)
    encoder = FailingEncoder()
    build_version(make_records(20))
    client = serve(encoder)
    build_version(make_records(30))  # its canaries are encoded when it is loaded
    encoder.failing = True
    response = client.request(method, path, json=body, headers={"Authorization": "Bearer secret"})
    answer = problem(response, 500, "internal_error")
    assert answer["errors"] == []
    (record,) = (r for r in caplog.records if (r.name, r.levelname) == ("care.service", "ERROR"))
    line = JsonFormatter().format(record)
    fields = json.loads(line)
    assert (fields["request_id"], fields["error"]) == (answer["request_id"], "RuntimeError")
    assert "in encode_tokens" in fields["traceback"]
    assert "cannot encode [" not in line + caplog.text
    assert SECRET not in line + caplog.text
    encoder.failing = False
    assert client.get("/health/ready").status_code == 200
