from typing import Any

from fastapi.testclient import TestClient

from tests.encoders import BigramEncoder
from tests.service.conftest import Serve

QUERIES: list[dict[str, Any]] = [
    {"query": "高血压患者的护理"},
    {"query": "骨折", "top_k": 3, "filter": {"department": ["骨科"]}},
    {"query": "失眠", "top_k": 60, "min_score": 0.2, "include": []},
    {"query": "没有这样的科室", "filter": {"department": ["没有"]}},
]


def without_timings(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "timings_ms"}


def test_results_equal_those_of_single_requests_in_order(serve: Serve) -> None:
    client = serve(cache_entries=0)
    response = client.post("/search/batch", json={"queries": QUERIES})
    assert response.status_code == 200
    results = response.json()["results"]
    singles = [client.post("/search", json=query).json() for query in QUERIES]
    assert [without_timings(r) for r in results] == [without_timings(s) for s in singles]


def test_only_cache_misses_are_encoded(serve: Serve) -> None:
    encoder = BigramEncoder()
    client = serve(encoder)
    client.post("/search", json=QUERIES[1])
    seen = encoder.texts_seen
    results = client.post("/search/batch", json={"queries": QUERIES}).json()["results"]
    assert [result["cached"] for result in results] == [False, True, False, False]
    assert encoder.texts_seen == seen + 3


def test_a_batch_may_be_as_long_as_the_limit(serve: Serve) -> None:
    response = serve(max_batch=3).post("/search/batch", json={"queries": QUERIES[:3]})
    assert len(response.json()["results"]) == 3


def test_all_results_of_a_batch_name_the_same_version(client: TestClient) -> None:
    results = client.post("/search/batch", json={"queries": QUERIES}).json()["results"]
    assert len({result["index"]["version"] for result in results}) == 1
