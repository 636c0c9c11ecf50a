import inspect
import json
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from httpx2 import Response

from core.types import Encoding, IndexManifest
from service.logs import JsonFormatter
from service.pipeline import OverloadedError
from service.problems import add_problem_handlers
from tests.encoders import BigramEncoder
from tests.service.conftest import BLOCKED, BlockingEncoder, Serve

SECRET = "绝密病历"
JSON = {"Content-Type": "application/json"}


def problem(response: Response, status: int) -> dict[str, Any]:
    """Checks that a response is a problem of a status, without the query, and returns it."""
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body.keys() == {"type", "title", "status", "detail", "request_id", "errors"}
    assert (body["type"], body["status"]) == ("about:blank", status)
    assert body["request_id"] == response.headers["X-Request-ID"]
    assert "\n" not in body["detail"]
    assert SECRET not in response.text
    return body


def assert_one_fault(response: Response, field: str, message: str) -> None:
    body = problem(response, 422)
    assert body["errors"] == [{"field": field, "message": message}]
    assert body["detail"] == f"{field}: {message}"


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"query": ""}, "query", "is empty"),
        ({"query": " \u3000\n\u200b"}, "query", "is empty"),
        ({"query": SECRET * 501}, "query", "has 2004 characters; the limit is 2000"),
        ({"query": 5}, "query", "Input should be a valid string"),
        ({"query": None}, "query", "Input should be a valid string"),
        ({"query": [SECRET]}, "query", "Input should be a valid string"),
        ({"top_k": 0}, "top_k", "Input should be greater than or equal to 1"),
        ({"top_k": -1}, "top_k", "Input should be greater than or equal to 1"),
        ({"top_k": 2.0}, "top_k", "Input should be a valid integer"),
        ({"top_k": "2"}, "top_k", "Input should be a valid integer"),
        ({"top_k": True}, "top_k", "Input should be a valid integer"),
        ({"top_k": None}, "top_k", "Input should be a valid integer"),
        ({"top_k": 1001}, "top_k", "is 1001; the limit is 1000"),
        ({"top_k": 61}, "top_k", "is 61; the index holds 60 documents"),
        ({"min_score": 1.01}, "min_score", "Input should be less than or equal to 1"),
        ({"min_score": -1.01}, "min_score", "Input should be greater than or equal to -1"),
        ({"min_score": float("nan")}, "min_score", "Input should be less than or equal to 1"),
        ({"min_score": "0.5"}, "min_score", "Input should be a valid number"),
        ({"min_score": True}, "min_score", "Input should be a valid number"),
        ({"include": ["title"]}, "include.0", "Input should be 'text' or 'metadata'"),
        ({"include": "text"}, "include", "Input should be a valid array"),
        (
            {"filter": {"ward": [SECRET]}},
            "filter.ward",
            "unknown filter field; this index has: department, rare, tags",
        ),
        (
            {"filter": {"department": [SECRET, 1.5]}},
            "filter.department.1",
            "is not text, a whole number or a boolean",
        ),
        (
            {"filter": {"department": [None]}},
            "filter.department.0",
            "is not text, a whole number or a boolean",
        ),
        ({"filter": {"department": SECRET}}, "filter.department", "Input should be a valid array"),
        (
            {"filter": {"department": []}},
            "filter.department",
            "List should have at least 1 item after validation, not 0",
        ),
        ({"filter": [SECRET]}, "filter", "Input should be an object"),
        ({"topk": 3}, "topk", "Extra inputs are not permitted"),
        ({"x" * 99: 3}, "x" * 64, "Extra inputs are not permitted"),
    ],
)
def test_a_bad_field_is_named_alone_and_in_a_batch(
    client: TestClient, change: dict[str, Any], field: str, message: str
) -> None:
    bad = {"query": SECRET} | change
    response = client.post("/search", content=json.dumps(bad), headers=JSON)
    assert_one_fault(response, field, message)
    batch = {"queries": [{"query": SECRET}, bad]}
    response = client.post("/search/batch", content=json.dumps(batch), headers=JSON)
    assert_one_fault(response, f"queries.1.{field}", message)


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (b"", "body", "Field required"),
        (b"{}", "query", "Field required"),
        (b'{"query": "' + SECRET.encode(), "body", "is not valid JSON"),
        (b'{"query": "\xff"}', "body", "is not valid JSON"),
        (b'{"query": "\\ud800"}', "body", "is not valid JSON"),
        (b'{"query": "a", "filter": {"\\ud800": [1]}}', "body", "is not valid JSON"),
        (b"[" * 200_000, "body", "is not valid JSON"),
        (b'{"query": "a", "top_k": ' + b"1" * 5000 + b"}", "body", "is not valid JSON"),
        (
            json.dumps([SECRET]).encode(),
            "body",
            "Input should be an object",
        ),
    ],
)
def test_a_body_that_is_no_query_is_refused(
    client: TestClient, body: bytes, field: str, message: str
) -> None:
    assert_one_fault(client.post("/search", content=body, headers=JSON), field, message)


@pytest.mark.parametrize(
    ("changes", "queries", "message"),
    [
        ({}, [], "List should have at least 1 item after validation, not 0"),
        ({}, SECRET, "Input should be a valid array"),
        ({"max_batch": 2}, [{"query": SECRET}] * 3, "holds 3 texts; the limit is 2"),
    ],
)
def test_a_batch_that_can_never_be_answered_is_refused(
    serve: Serve,
    manifest: IndexManifest,
    changes: dict[str, int],
    queries: object,
    message: str,
) -> None:
    response = serve(**changes).post("/search/batch", json={"queries": queries})
    assert_one_fault(response, "queries", message)


def test_a_batch_of_faults_is_answered_with_the_first(client: TestClient) -> None:
    response = client.post("/search/batch", json={"queries": [{}] * 10_000})
    assert_one_fault(response, "queries.0.query", "Field required")


def test_no_more_than_sixteen_faults_are_listed(client: TestClient) -> None:
    body = {"query": SECRET} | {f"field{i}": i for i in range(1000)}
    assert len(problem(client.post("/search", json=body), 422)["errors"]) == 16


def test_all_faults_of_a_query_are_listed_and_the_first_is_the_sentence(
    client: TestClient,
) -> None:
    body = problem(client.post("/search", json={"query": 1, "top_k": 0}), 422)
    assert [error["field"] for error in body["errors"]] == ["query", "top_k"]
    assert body["detail"] == "query: Input should be a valid string"


def in_chunks(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 100):
        yield body[start : start + 100]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("excess", "status"), [(0, 200), (1, 413)])
def test_a_body_over_the_limit_is_refused_whatever_its_headers_say(
    serve: Serve, manifest: IndexManifest, chunked: bool, excess: int, status: int
) -> None:
    query = json.dumps({"query": SECRET}).encode()
    body = query + b" " * (1000 + excess - len(query))
    response = serve(max_body_bytes=1000).post(
        "/search", content=in_chunks(body) if chunked else body, headers=JSON
    )
    assert ("content-length" in response.request.headers) != chunked
    assert response.status_code == status
    if status == 413:
        assert problem(response, 413)["detail"] == "the body is longer than 1000 bytes"


@pytest.mark.parametrize(
    ("method", "path", "status", "detail"),
    [
        ("GET", f"/{SECRET}", 404, "Not Found"),
        ("GET", "/page/missing.js", 404, "Not Found"),
        ("GET", "/search", 405, "Method Not Allowed"),
        ("DELETE", "/index", 405, "Method Not Allowed"),
    ],
)
def test_unknown_routes_and_methods_are_problems_too(
    client: TestClient, method: str, path: str, status: int, detail: str
) -> None:
    response = client.request(method, path)
    assert problem(response, status)["detail"] == detail
    assert ("Allow" in response.headers) == (status == 405)


@pytest.mark.parametrize("given", ["a", "A-1_b.c", "x" * 64])
@pytest.mark.parametrize("query", ["高血压", ""])
def test_a_request_id_is_kept(client: TestClient, query: str, given: str) -> None:
    response = client.post("/search", json={"query": query}, headers={"X-Request-ID": given})
    assert response.headers["X-Request-ID"] == given


@pytest.mark.parametrize("given", [b"", b"x" * 65, b"a b", b"a\tb", b"a/b", SECRET.encode()])
def test_a_malformed_request_id_is_replaced(client: TestClient, given: bytes) -> None:
    response = client.post("/search", json={"query": ""}, headers={b"X-Request-ID": given})
    assert len(problem(response, 422)["request_id"]) == 32


def test_request_ids_differ(client: TestClient) -> None:
    assert len({client.get("/index").headers["X-Request-ID"] for _ in range(20)}) == 20


def test_one_query_more_than_is_admitted_is_told_to_come_again(
    serve: Serve, manifest: IndexManifest
) -> None:
    encoder = BlockingEncoder()
    client = serve(encoder, queue_tokens=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, "/search", json={"query": BLOCKED})
        assert encoder.entered.wait(30)
        for path, body in (
            ("/search", {"query": SECRET}),
            ("/search/batch", {"queries": [{"query": SECRET}]}),
        ):
            response = client.post(path, json=body)
            assert problem(response, 429)["detail"] == "the service is busy: try again"
            assert response.headers["Retry-After"] == "1"
        assert client.get("/health/live").status_code == 200
        encoder.release.set()
        assert first.result().status_code == 200
    assert client.post("/search", json={"query": SECRET}).status_code == 200


class FailingEncoder(BigramEncoder):
    """Fails once the index is loaded, with the text in its message."""

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
def test_an_unexpected_error_says_nothing_but_its_request_id(
    serve: Serve,
    manifest: IndexManifest,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    body: dict[str, Any] | None,
) -> None:
    caplog.set_level(logging.DEBUG)
    encoder = FailingEncoder()
    client = serve(encoder)
    encoder.failing = True
    response = client.request(method, path, json=body, headers={"Authorization": "Bearer secret"})
    answer = problem(response, 500)
    assert (answer["detail"], answer["errors"]) == ("an unexpected error", [])
    assert f"request {answer['request_id']} failed with RuntimeError" in caplog.text
    (record,) = (r for r in caplog.records if r.levelname == "ERROR")
    line = JsonFormatter().format(record)
    assert "in encode_tokens" in json.loads(line)["traceback"]
    assert "cannot encode [" not in line + caplog.text
    assert SECRET not in line + caplog.text
    encoder.failing = False
    assert client.get("/health/ready").status_code == 200


def test_errors_are_answered_without_a_thread() -> None:
    """Handlers that are no coroutines would be run in threads, which overload cannot afford."""
    app = FastAPI()
    given = set(app.exception_handlers)
    add_problem_handlers(app)
    added = {kind: handler for kind, handler in app.exception_handlers.items() if kind not in given}
    assert OverloadedError in added
    assert all(inspect.iscoroutinefunction(handler) for handler in added.values())
