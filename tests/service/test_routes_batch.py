from typing import Any

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
