"""Requests, retries, deadlines and errors of the client, without a service."""

import asyncio
import json
import time
from datetime import UTC, date, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx2
import pytest

from care_client import (
    AccessError,
    CareClientError,
    Client,
    ConnectionFailedError,
    DeadlineError,
    InvalidRequestError,
    InvalidResponseError,
    ServerError,
    UnavailableError,
)
from tests.clients.transport import Answer, Script, answer, both, call, problem

QUERY = "高血压能喝咖啡吗"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits of both clients, which take no time."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waited


@both
def test_a_search_sends_key_id_deadline_and_the_given_options_alone(kind: str) -> None:
    script = Script(answer())
    options = {"top_k": 3, "filter": {"year": {"gte": 2019}}, "min_score": None, "novel": 1}
    result = call(script, kind, "search", QUERY, api_key="SECRET", timeout=2, **options)
    (request,) = script.requests
    body = {"query": QUERY, "top_k": 3, "filter": {"year": {"gte": 2019}}, "novel": 1}
    assert json.loads(request.content) == body
    assert request.headers["Authorization"] == "Bearer SECRET"
    assert len(request.headers["X-Request-ID"]) == 32
    assert 1000 < int(request.headers["X-Request-Timeout-Ms"]) <= 2000
    assert [hit.id for hit in result.hits] == ["1"]


@both
def test_a_write_with_a_condition_sends_its_tag_once(kind: str) -> None:
    found = httpx2.Response(200, json={"id": "1"}, headers={"ETag": '"0123"'})
    changed = problem(412, "document_changed")
    script = Script(found, changed, problem(503, "writer_unavailable"), answer(), answer())
    assert call(script, kind, "document", "1").etag == '"0123"'
    document = {"_id": "1", "text": "a"}
    with pytest.raises(InvalidRequestError) as caught:
        call(script, kind, "put_document", document, if_match='"0123"')
    assert caught.value.code == "document_changed"
    with pytest.raises(UnavailableError):
        call(script, kind, "update_metadata", "1", {}, if_match="*")
    call(script, kind, "delete_document", "1", if_match='"0123"')
    call(script, kind, "put_document", document, only_new=True)
    sent = [(r.headers.get("If-Match"), r.headers.get("If-None-Match")) for r in script.requests]
    assert sent == [
        *((None, None), ('"0123"', None), ("*", None)),
        *(('"0123"', None), (None, "*")),
    ]
    assert json.loads(script.requests[1].content) == document
    with pytest.raises(InvalidRequestError):
        call(script, kind, "delete_document", "1", if_match="病")


def test_responses_keep_unknown_fields_and_may_lack_known_ones() -> None:
    script = Script(answer(novel={"sentence": 3}))
    result = call(script, "sync", "search", QUERY)
    assert result.novel == {"sentence": 3}
    assert result.index.version == "" and result.hits[0].text is None


@both
@pytest.mark.parametrize(
    "failure",
    [
        problem(429, "overloaded", {"Retry-After": "1"}),
        problem(503, "shutting_down"),
        httpx2.Response(502, text="bad gateway"),
        httpx2.ConnectError("refused"),
        httpx2.RemoteProtocolError("closed"),
    ],
    ids=lambda each: getattr(each, "status_code", None) or type(each).__name__,
)
def test_a_search_is_repeated_after_a_transient_failure(
    kind: str, failure: Answer, waits: list[float]
) -> None:
    script = Script(failure, answer())
    assert call(script, kind, "search", QUERY).hits
    first, second = (request.headers["X-Request-ID"] for request in script.requests)
    assert first == second
    (wait,) = waits
    assert wait == 1 if "Retry-After" in getattr(failure, "headers", {}) else 0 < wait <= 0.1


def test_retry_after_may_be_a_date(waits: list[float]) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=4), usegmt=True)
    script = Script(problem(429, "rate_limited", {"Retry-After": date}), answer())
    call(script, "sync", "search", QUERY)
    assert 2 < waits[0] <= 4


@both
def test_a_wait_beyond_the_time_out_is_an_error_at_once(kind: str, waits: list[float]) -> None:
    script = Script(problem(429, "rate_limited", {"Retry-After": "30"}))
    with pytest.raises(UnavailableError) as caught:
        call(script, kind, "search", QUERY, timeout=5)
    assert (caught.value.code, caught.value.retry_after) == ("rate_limited", 30)
    assert not waits


def test_retries_are_limited_and_their_waits_grow(waits: list[float]) -> None:
    script = Script(*[problem(503, "unavailable")] * 4)
    with pytest.raises(UnavailableError):
        call(script, "sync", "search", QUERY)
    assert len(script.requests) == 4
    assert 0 < waits[0] <= 0.1 < waits[2] <= 0.4


@both
@pytest.mark.parametrize("method", ["reload", "ready", "live"])
@pytest.mark.parametrize("failure", [problem(503, "u"), httpx2.ReadError("broken")])
def test_reload_and_health_are_never_repeated(
    kind: str, method: str, failure: Answer, waits: list[float]
) -> None:
    script = Script(failure)
    with pytest.raises(CareClientError):
        call(script, kind, method)
    assert len(script.requests) == 1 and not waits


@pytest.mark.parametrize(
    ("failure", "error", "code"),
    [
        (problem(401, "unauthorized"), AccessError, "unauthorized"),
        (problem(403, "forbidden"), AccessError, "forbidden"),
        (problem(422, "empty_text"), InvalidRequestError, "empty_text"),
        (problem(500, "internal_error"), ServerError, "internal_error"),
        (problem(504, "deadline_exceeded"), DeadlineError, "deadline_exceeded"),
        (httpx2.ReadTimeout("late"), DeadlineError, "deadline_exceeded"),
        (httpx2.Response(302, headers={"Location": "/"}), ServerError, "http_302"),
        (httpx2.Response(404, text="nginx"), InvalidRequestError, "http_404"),
        (httpx2.Response(200, text="<html>"), InvalidResponseError, "invalid_response"),
        (httpx2.Response(200, json={"hits": 1}), InvalidResponseError, "invalid_response"),
    ],
)
def test_other_failures_are_errors_at_once(
    failure: Answer, error: type[CareClientError], code: str, waits: list[float]
) -> None:
    script = Script(failure)
    with pytest.raises(error) as caught:
        call(script, "sync", "search", QUERY)
    assert type(caught.value) is error and caught.value.code == code
    assert caught.value.status == getattr(failure, "status_code", None)
    assert QUERY not in f"{caught.value}{caught.value.__cause__}"
    assert not waits


def test_an_error_has_the_fields_and_the_request_id_of_the_service() -> None:
    errors = [{"field": "top_k", "code": "top_k_too_large", "message": "m", "limit": 100}]
    script = Script(problem(422, "top_k_too_large", errors=errors))
    with pytest.raises(InvalidRequestError) as caught:
        call(script, "sync", "search", QUERY, top_k=1000)
    (field,) = caught.value.errors
    assert (field.field, field.limit, caught.value.request_id) == ("top_k", 100, "r")


@both
def test_a_failure_without_a_response_has_the_id_that_was_sent(kind: str) -> None:
    script = Script(httpx2.ConnectError("refused"))
    with pytest.raises(ConnectionFailedError) as caught:
        call(script, kind, "search", QUERY, retries=0)
    assert caught.value.request_id == script.requests[0].headers["X-Request-ID"]
    assert caught.value.__context__ is None  # a traceback would quote it


def test_a_wrong_type_is_an_error_before_a_request_is_sent() -> None:
    script = Script()
    with pytest.raises(InvalidRequestError) as caught:
        call(script, "sync", "search", QUERY, top_k="many")
    assert [field.field for field in caught.value.errors] == ["top_k"]
    assert QUERY not in str(caught.value) and not script.requests


@both
def test_search_many_sends_batches_within_the_limit_of_the_service(kind: str) -> None:
    limit = 3

    def respond(request: httpx2.Request) -> Answer:
        queries = json.loads(request.content)["queries"]
        if len(queries) > limit:
            errors = [{"field": "queries", "code": "batch_too_large", "limit": limit}]
            return problem(422, "batch_too_large", errors=errors)
        hits = [[{"id": q["query"], "score": 1, "rank": q["top_k"]}] for q in queries]
        return httpx2.Response(200, json={"results": [{"hits": each} for each in hits]})

    script = Script(*[respond] * 4)
    done: list[tuple[int, int]] = []
    queries = [*map(str, range(6)), {"query": "6", "top_k": 9}]
    results = call(
        script,
        kind,
        "search_many",
        queries,
        top_k=5,
        progress=lambda *numbers: done.append(numbers),
    )
    assert [result.hits[0].id for result in results] == list("0123456")
    assert [result.hits[0].rank for result in results] == [5] * 6 + [9]
    assert done == [(3, 7), (6, 7), (7, 7)]


@both
def test_an_error_names_the_position_among_all_queries(kind: str) -> None:
    found = {"results": [{"hits": []}] * 2}
    errors = [{"field": "queries.1.query", "code": "empty_text"}]
    wrong = problem(422, "empty_text", errors=errors)
    with pytest.raises(InvalidRequestError) as caught:
        script = Script(httpx2.Response(200, json=found), wrong)
        call(script, kind, "search_many", ["a", "b", "c", ""], batch=2)
    assert [each.field for each in caught.value.errors] == ["queries.3.query"]


@both
def test_documents_are_put_in_batches_within_the_limits_of_the_service(kind: str) -> None:
    def respond(request: httpx2.Request) -> Answer:
        ids = [document["_id"] for document in json.loads(request.content)]
        if len(ids) > 4:
            errors = [{"field": "body", "code": "batch_too_large", "limit": 4}]
            return problem(422, "batch_too_large", errors=errors)
        if len(ids) > 2:
            return problem(413, "body_too_long")
        rejected = [
            {"position": i, "id": None, "code": "invalid_record", "reason": "text is empty"}
            for i, id_ in enumerate(ids)
            if id_ == 3
        ]
        counts = {"added": len(ids) - len(rejected), "rejected": rejected}
        index = {"name": "mine", "version": f"v{ids[-1]}"}
        return httpx2.Response(200, json={"index": index, **counts})

    script = Script(*[respond] * 5)
    done: list[tuple[int, int]] = []
    documents = ({"_id": i, "text": "t"} for i in range(5))
    total = call(script, kind, "put_documents", documents, progress=lambda *n: done.append(n))
    assert (total.added, total.index.version) == (4, "v4")
    assert [each.position for each in total.rejected] == [3]
    assert done == [(2, 5), (4, 5), (5, 5)]


@both
def test_ids_are_deleted_in_batches_within_the_limit_of_the_service(kind: str) -> None:
    def respond(request: httpx2.Request) -> Answer:
        ids = json.loads(request.content)["ids"]
        if len(ids) > 2:
            errors = [{"field": "ids", "code": "batch_too_large", "limit": 2}]
            return problem(422, "batch_too_large", errors=errors)
        missing = [id_ for id_ in ids if id_ == "d"]
        index = {"name": "mine", "version": f"v{ids[-1]}"}
        counts = {"deleted": len(ids) - len(missing), "missing": missing}
        return httpx2.Response(200, json={"index": index, **counts})

    total = call(Script(*[respond] * 4), kind, "delete_documents", iter("abcde"))
    assert (total.deleted, total.missing, total.index.version) == (4, ["d"], "ve")
    assert call(Script(), kind, "delete_documents", []).deleted == 0


def test_the_document_that_json_cannot_have_is_named() -> None:
    documents = [{"_id": str(n), "text": "t", "metadata": {}} for n in range(5)]
    documents[4]["metadata"] = {"at": date(2026, 1, 2)}
    written = httpx2.Response(200, json={"added": 2})
    with pytest.raises(InvalidRequestError) as caught:
        call(Script(written, written), "sync", "put_documents", documents, batch=3)
    assert caught.value.errors[0].field == "documents.4"
    assert str(caught.value).startswith("documents.4: has an unpaired surrogate")


@pytest.mark.parametrize("documents", ["text", {"_id": "1"}, 7, ["text"], [{"text": {1}}]])
def test_what_is_no_list_of_documents_is_not_sent(documents: Any) -> None:
    script = Script()
    with pytest.raises(InvalidRequestError):
        call(script, "sync", "put_documents", documents)
    assert not script.requests


@both
def test_a_document_that_is_too_long_alone_is_an_error(kind: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        call(Script(problem(413, "body_too_long")), kind, "put_documents", [{"_id": "1"}])
    assert caught.value.code == "body_too_long"


@both
def test_a_submitted_request_has_an_id(kind: str) -> None:
    script = Script(httpx2.Response(202, json={"id": "a"}))
    assert call(script, kind, "submit_documents", [{"_id": "1"}]).id == "a"
    assert script.requests[0].url.raw_path == b"/documents?wait=accepted"


def test_search_many_of_no_queries_sends_nothing() -> None:
    assert call(Script(), "sync", "search_many", []) == []


def test_a_path_prefix_and_names_with_slashes_are_kept() -> None:
    script = Script(httpx2.Response(200, json={"id": "a/b"}))
    http = httpx2.Client(transport=httpx2.MockTransport(script))
    assert Client("http://host/care/", http=http).model("a/b").id == "a/b"
    assert script.requests[0].url.raw_path == b"/care/v1/models/a%2Fb"


@both
@pytest.mark.parametrize(
    ("id_", "path"),
    [
        ("d-1#0", b"d-1%230"),
        ("../a b?%2F", b"%2E%2E%2Fa%20b%3F%252F"),
        ("..", b"%2E%2E"),
        ("病历/1", b"%E7%97%85%E5%8E%86%2F1"),
        ("", b""),
        ("\ud800", b"%ED%A0%80"),
    ],
)
def test_an_id_is_one_segment_of_the_path(kind: str, id_: str, path: bytes) -> None:
    script = Script(httpx2.Response(200, json={"id": "d", "text": "t", "newer": 1}))
    document = call(script, kind, "document", id_)
    assert (document.id, document.text, document.passages) == ("d", "t", [])
    assert script.requests[0].url.raw_path == b"/documents/" + path


@both
def test_documents_are_listed_with_escaped_parameters(kind: str) -> None:
    listed = {"documents": [{"id": "d", "title": "t"}], "next": "d", "total": 2, "newer": 1}
    script = Script(*(httpx2.Response(200, json=listed) for _ in range(2)))
    response = call(script, kind, "documents")
    assert [(one.id, one.chunks) for one in response.documents] == [("d", None)]
    assert (response.next, response.total) == ("d", 2)
    call(script, kind, "documents", limit=5, after="a&limit=9")
    targets = [request.url.raw_path for request in script.requests]
    assert targets == [b"/documents", b"/documents?limit=5&after=a%26limit%3D9"]
    with pytest.raises(InvalidRequestError) as caught:
        call(script, kind, "documents", after=["d"])
    assert [error.field for error in caught.value.errors] == ["after"]


@both
def test_an_unknown_document_is_an_error_and_is_not_asked_for_again(kind: str) -> None:
    script = Script(problem(404, "unknown_document"))
    with pytest.raises(InvalidRequestError) as caught:
        call(script, kind, "document", "d-1")
    assert (caught.value.code, caught.value.status) == ("unknown_document", 404)
    assert len(script.requests) == 1


def test_an_error_of_the_client_itself_is_not_repeated(waits: list[float]) -> None:
    script = Script(httpx2.LocalProtocolError("a header"))
    with pytest.raises(InvalidRequestError):
        call(script, "sync", "search", QUERY)
    assert not waits


def test_the_key_is_not_shown() -> None:
    client = Client(api_key="SECRET")
    assert "SECRET" not in repr(vars(client))
