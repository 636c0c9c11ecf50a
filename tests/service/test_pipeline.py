import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.testclient import TestClient
from starlette.types import Message

from core.types import FloatArray
from stores.base import ScoredRows
from stores.faiss.search import FaissVectors
from tests.service.conftest import BLOCKED, BlockingEncoder, Serve, sample, wait_until

if TYPE_CHECKING:
    from httpx2 import Response

QUERY = {"query": "高血压患者的护理"}


@pytest.fixture
def encoder() -> BlockingEncoder:
    return BlockingEncoder()


@contextmanager
def blocked(client: TestClient, encoder: BlockingEncoder) -> Iterator["Future[Response]"]:
    """Blocks the encoder with one request; yields the future of its response."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(client.post, "/search", json={"query": BLOCKED})
        assert encoder.entered.wait(30)
        try:
            yield pending
        finally:
            encoder.release.set()


def queued(client: TestClient) -> float:
    return sample(client, "care_queue_queries")


@pytest.mark.parametrize("batch", [False, True])
def test_single_and_batch_requests_are_admitted_by_the_same_rule(
    serve: Serve, encoder: BlockingEncoder, batch: bool
) -> None:
    # Room for the blocked query (4 tokens) and one of 12.
    client = serve(encoder, queue_tokens=16)
    path, body = ("/search/batch", {"queries": [QUERY]}) if batch else ("/search", QUERY)
    with blocked(client, encoder), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, path, json=body)
        wait_until(lambda: queued(client) == 2)
        for refused in (
            client.post("/search", json={"query": "发热"}),
            client.post("/search/batch", json={"queries": [{"query": "发热"}]}),
            client.post("/v1/embeddings", json={"input": "发热"}),
        ):
            assert refused.status_code == 429
        encoder.release.set()
        assert waiting.result().status_code == 200
    assert sample(client, "care_rejections_total", reason="queue") == 3
    assert (queued(client), sample(client, "care_queue_tokens")) == (0, 0)


def test_a_request_larger_than_the_queue_is_admitted_to_an_empty_queue(serve: Serve) -> None:
    client = serve(queue_tokens=1, batch_tokens=1)
    queries = [{"query": f"第{i}个很长的问题"} for i in range(8)]
    assert client.post("/search/batch", json={"queries": queries}).status_code == 200


def test_a_batch_is_admitted_as_a_whole_or_not_at_all(
    serve: Serve, encoder: BlockingEncoder
) -> None:
    client = serve(encoder, queue_tokens=20)
    with blocked(client, encoder):
        queries = [{"query": "高血压"}, {"query": "发热"}, {"query": "骨折的处理和护理"}]
        assert client.post("/search/batch", json={"queries": queries}).status_code == 429
        assert queued(client) == 1


def test_a_query_past_its_deadline_gets_504_and_is_not_encoded(
    serve: Serve, encoder: BlockingEncoder
) -> None:
    client = serve(encoder)
    with blocked(client, encoder):
        response = client.post("/search", json=QUERY, headers={"X-Request-Timeout-Ms": "30"})
        assert response.status_code == 504
        assert response.json()["code"] == "deadline_exceeded"
        assert queued(client) == 1
        seen = encoder.texts_seen
    wait_until(lambda: queued(client) == 0)
    assert encoder.texts_seen == seen + 1
    assert sample(client, "care_rejections_total", reason="deadline") == 1


@pytest.mark.parametrize("value", ["0", "-1", "60001", "soon", "1.5", ""])
def test_an_invalid_deadline_is_rejected(client: TestClient, value: str) -> None:
    response = client.post("/search", json=QUERY, headers={"X-Request-Timeout-Ms": value})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "X-Request-Timeout-Ms"


def test_equal_queries_in_flight_are_computed_once(serve: Serve, encoder: BlockingEncoder) -> None:
    client = serve(encoder, cache_entries=0)
    with blocked(client, encoder), ThreadPoolExecutor(5) as pool:
        seen = encoder.texts_seen
        same = [pool.submit(client.post, "/search", json=QUERY) for _ in range(5)]
        lookups = "care_cache_lookups_total"
        wait_until(lambda: sample(client, lookups, tier="in_flight", result="hit") == 4)
        encoder.release.set()
        answers = [pending.result().json()["hits"] for pending in same]
    assert encoder.texts_seen == seen + 2
    assert all(answer == answers[0] for answer in answers)


def test_a_shared_flight_survives_one_of_its_waiters(
    serve: Serve, encoder: BlockingEncoder
) -> None:
    client = serve(encoder, cache_entries=0)
    with blocked(client, encoder), ThreadPoolExecutor(2) as pool:
        headers = {"X-Request-Timeout-Ms": "2000"}
        first = pool.submit(client.post, "/search", json=QUERY, headers=headers)
        wait_until(lambda: queued(client) == 2)
        second = pool.submit(client.post, "/search", json=QUERY)
        assert first.result().status_code == 504
        encoder.release.set()
        assert second.result().status_code == 200


async def ask_and_leave(app: Any, body: bytes, asked: threading.Event) -> list[Message]:
    """Sends a whole request and disconnects once it waits for the encoder."""
    sent: list[Message] = []
    first = True

    async def receive() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        while not asked.is_set():
            await asyncio.sleep(0.005)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/search",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await app(scope, receive, send)
    return sent


def test_the_query_of_a_disconnected_client_is_not_encoded(
    serve: Serve, encoder: BlockingEncoder
) -> None:
    client = serve(encoder)
    with blocked(client, encoder):
        seen = encoder.texts_seen
        asked = threading.Event()
        threading.Timer(0.1, asked.set).start()
        assert client.portal
        sent = client.portal.call(
            ask_and_leave, client.app, '{"query": "谁也不等"}'.encode(), asked
        )
        assert sent == []
        assert queued(client) == 1
    wait_until(lambda: queued(client) == 0)
    assert encoder.texts_seen == seen + 1
    assert sample(client, "care_rejections_total", reason="departed") == 1
    assert sample(client, "care_http_requests_total", route="/search", status="499") == 1


def test_a_request_beyond_max_requests_gets_503(serve: Serve, encoder: BlockingEncoder) -> None:
    client = serve(encoder, max_requests=1)
    with blocked(client, encoder):
        response = client.post("/search", json=QUERY)
        assert response.status_code == 503
        assert response.headers["Retry-After"] == "1"
        assert response.headers["content-type"] == "application/problem+json"
        assert response.headers["X-Request-ID"] == response.json()["request_id"]
        assert client.get("/health/live").status_code == 200
        assert sample(client, "care_rejections_total", reason="connections") == 1
    assert client.post("/search", json=QUERY).status_code == 200


async def send_half(app: Any) -> int:
    async def receive() -> Message:
        await asyncio.sleep(3600)
        raise AssertionError

    status = 0

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    scope = {"type": "http", "method": "POST", "path": "/search", "query_string": b""}
    await app(scope | {"headers": [(b"content-type", b"application/json")]}, receive, send)
    return status


def test_a_body_that_never_arrives_times_out(serve: Serve) -> None:
    client = serve(timeout_ms=50)
    assert client.portal
    assert client.portal.call(send_half, client.app) == 504


def test_each_query_of_a_failed_batch_gets_a_response(
    serve: Serve, encoder: BlockingEncoder
) -> None:
    client = serve(encoder)
    with blocked(client, encoder) as pending, ThreadPoolExecutor(3) as pool:
        waiting = [
            pool.submit(client.post, "/search", json={"query": f"第{i}个"}) for i in range(3)
        ]
        wait_until(lambda: queued(client) == 4)
        failing = encoder.encode_tokens
        encoder.encode_tokens = lambda tokens: 1 / 0  # type: ignore[assignment, method-assign]
        encoder.release.set()
        assert [w.result().status_code for w in waiting] == [500] * 3
        assert pending.result().status_code == 200
        encoder.encode_tokens = failing  # type: ignore[method-assign]
    assert client.post("/search", json=QUERY).status_code == 200
    assert queued(client) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_queries_of_a_batch_are_searched_together(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Those with a filter, or another number of hits, are not; if it fails, each is by itself."""
    sizes = []

    def together(index: FaissVectors, queries: FloatArray, k: int) -> list[ScoredRows]:
        sizes.append((len(queries), k))
        if fails:
            raise RuntimeError
        return [index.search(query, k) for query in queries]

    monkeypatch.setattr(FaissVectors, "search_together", together)
    questions = [{"query": f"高血压患者的护理{i}", "top_k": 5} for i in range(3)]
    others = [{"query": "高血压患者的护理", "top_k": 6}]
    others += [questions[0] | {"collapse": True}, questions[0] | {"filter": {"rare": False}}]
    every, client = [*questions, *others], serve(cache_entries=0)
    alone = [client.post("/search", json=each).json()["hits"] for each in every]
    assert not sizes
    answers = client.post("/search/batch", json={"queries": every}).json()["results"]
    assert [answer["hits"] for answer in answers] == alone
    assert all(answer["timings_ms"]["search"] > 0 for answer in answers)
    assert sizes == [(3, 5)]


def test_the_readiness_check_skips_the_queue(serve: Serve, encoder: BlockingEncoder) -> None:
    client = serve(encoder, queue_tokens=4)
    with blocked(client, encoder), ThreadPoolExecutor(1) as pool:
        ready = pool.submit(client.get, "/health/ready")
        wait_until(lambda: queued(client) == 2)
        encoder.release.set()
        assert ready.result().status_code == 200


def test_a_service_whose_search_fails_is_not_ready(serve: Serve, encoder: BlockingEncoder) -> None:
    client = serve(encoder)
    assert sample(client, "care_ready") == 1
    works = encoder.encode_tokens
    encoder.encode_tokens = lambda tokens: 1 / 0  # type: ignore[assignment, method-assign]
    response = client.get("/health/ready")
    assert response.status_code == 503
    assert response.json()["code"] == "self_test_failed"
    assert sample(client, "care_ready") == 0
    encoder.encode_tokens = works  # type: ignore[method-assign]
    assert client.get("/health/ready").status_code == 200
    assert sample(client, "care_ready") == 1
