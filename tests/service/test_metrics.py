import asyncio
import json
import threading
from collections import Counter
from typing import Any

import prometheus_client
import pytest
from fastapi.testclient import TestClient

from core.manifest import Chunking, IndexManifest
from service.observe.metrics import Metrics
from tests.conftest import Builder, make_records
from tests.service.conftest import (
    ADMIN,
    Serve,
    read_samples,
    sample,
)

QUERY = {"query": "高血压"}
STAGES = ("cache", "queue", "tokenize", "encode", "search", "fetch", "total")


@pytest.fixture
def client(serve: Serve) -> TestClient:
    """An application that has counted nothing."""
    return serve()


def requests(client: TestClient, route: str, status: int) -> float:
    return sample(client, "care_http_requests_total", route=route, status=str(status))


def stages(client: TestClient) -> list[float]:
    return [sample(client, "care_stage_seconds_count", stage=stage) for stage in STAGES]


def test_every_series_exists_before_the_first_request(client: TestClient) -> None:
    before = {key for key in read_samples(client) if key[0].startswith("care_")}
    for query in (QUERY, QUERY, {"query": ""}, {"query": "a" * 2_000_000}):
        client.post("/search", json=query)
        client.post("/search/batch", json={"queries": [query]})
    for headers in (ADMIN, {}):
        client.post("/index/reload", headers=headers)
    for path in ("/", "/index", "/health/live", "/health/ready", "/nowhere"):
        client.get(path)
    assert {key for key in read_samples(client) if key[0].startswith("care_")} == before


def test_requests_are_counted_and_timed_by_route_and_status(client: TestClient) -> None:
    sent: Counter[str] = Counter()
    bodies: list[tuple[str, int, Any]] = [
        ("/search", 200, QUERY),
        ("/search", 422, {"query": ""}),
        ("/search", 413, {"query": "a" * 5_000_000}),
        ("/search", 400, b"{"),
        ("/search/batch", 200, {"queries": [QUERY]}),
        ("/index/reload", 200, None),
    ]
    for route, status, body in bodies:
        for _ in range(3):
            client.post(route, content=body if isinstance(body, bytes) else json.dumps(body))
            sent[route] += 1
        assert requests(client, route, status) == 3
        assert sample(client, "care_http_request_seconds_count", route=route) == sent[route]
        assert sample(client, "care_http_request_seconds_sum", route=route) > 0


def test_unknown_paths_share_one_label(client: TestClient) -> None:
    client.get("/nowhere")
    series = read_samples(client).keys()
    for i in range(20):
        client.get(f"/nowhere/{i}")
    assert read_samples(client).keys() == series
    assert requests(client, "unmatched", 404) == 21


def test_stages_and_cache_lookups_are_counted_by_query(client: TestClient) -> None:
    client.post("/search", json=QUERY)
    assert stages(client) == [1] * 7
    client.post("/search", json=QUERY)
    assert stages(client) == [2, 1, 1, 1, 1, 2, 2]
    client.post("/search/batch", json={"queries": [QUERY, {"query": "发热"}, {"query": "骨折"}]})
    assert stages(client) == [5, 3, 3, 3, 3, 5, 5]
    assert sample(client, "care_cache_lookups_total", tier="memory", result="hit") == 2
    assert sample(client, "care_cache_lookups_total", tier="memory", result="miss") == 3
    assert sample(client, "care_stage_seconds_sum", stage="total") > 0


def test_rejected_queries_and_health_checks_are_not_counted_as_searches(client: TestClient) -> None:
    client.post("/search", json={"query": ""})
    client.get("/health/ready")
    assert stages(client) == [0] * 7


def test_only_the_active_version_has_a_series(serve: Serve, build_version: Builder) -> None:
    def shown() -> list[dict[str, str]]:
        series = read_samples(client)
        return [dict(labels) for name, labels in series if name == "care_index_info"]

    def described(manifest: IndexManifest) -> dict[str, str]:
        return {
            "index": "test",
            "version": manifest.version,
            "pair": "care-mini",
            "embedding_space": "bigrams-1",
        }

    old = build_version(make_records(20))
    client = serve()
    assert shown() == [described(old)]
    assert sample(client, "care_index_documents") == 20
    new = build_version(make_records(30))
    assert shown() == [described(old)]
    client.post("/index/reload", headers=ADMIN)
    assert shown() == [described(new)]
    assert sample(client, "care_index_documents") == 30
    assert sample(client, "care_index_reloads_total", result="success") == 1


def test_chunks_count_as_vectors_and_not_as_documents(serve: Serve, build_version: Builder) -> None:
    records = make_records(5)
    records[2]["text"] = "很长的一段话。" * 30
    manifest = build_version(records, chunking=Chunking(tokens=60))
    client = serve()
    assert sample(client, "care_index_documents") == 5
    assert sample(client, "care_index_vectors") == manifest.count > 5


def test_applications_do_not_share_series(serve: Serve) -> None:
    one, other = serve(), serve()
    one.post("/search", json=QUERY)
    assert (requests(one, "/search", 200), requests(other, "/search", 200)) == (1, 0)


async def _ask_at_once(metrics: Metrics, count: int) -> list[bytes]:
    asked = [asyncio.create_task(metrics.page()) for _ in range(count)]
    await asyncio.sleep(0)
    asked[0].cancel()
    return await asyncio.gather(*asked[1:])


def test_all_who_ask_within_a_second_get_one_page_that_a_thread_renders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []
    render = prometheus_client.generate_latest

    def counted(registry: prometheus_client.CollectorRegistry) -> bytes:
        threads.append(threading.get_ident())
        return render(registry)

    monkeypatch.setattr("service.observe.metrics.SHARED_SECONDS", 3600)
    monkeypatch.setattr(prometheus_client, "generate_latest", counted)

    async def ask() -> None:
        metrics = Metrics()
        pages = [*await _ask_at_once(metrics, 20), await metrics.page()]
        assert len(pages) == 20
        assert len(set(pages)) == 1

    asyncio.run(ask())
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
