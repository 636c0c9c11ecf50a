"""The order of hits: a shorter list is the beginning of a longer one, however many scores tie."""

from random import Random
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.conftest import Builder
from tests.service.conftest import Serve, post_search, sample

QUERY = "高血压患者的饮食"
TEXTS = [
    "高血压患者的饮食",
    "高血压患者的饮食。",
    "高血压患者少盐",
    "失眠怎么办",
    "患者的护理",
    "饮食",
]
DEPARTMENTS = ["内科", "外科", "儿科"]


def records(seed: int, count: int = 240) -> list[dict[str, Any]]:
    """Documents of six texts, in an order that depends on the seed; their ids do not."""
    random = Random(0)
    made = [
        {
            "_id": f"d{i:04d}",
            "text": random.choice(TEXTS),
            "metadata": {"department": random.choice(DEPARTMENTS), "year": 2000 + i % 7},
        }
        for i in random.sample(range(10_000), count)
    ]
    Random(seed).shuffle(made)
    return made


BODIES: list[dict[str, Any]] = [
    {"mode": mode} | more
    for mode in ("dense", "lexical", "hybrid")
    for more in (
        {},
        {"filter": {"department": ["内科", "儿科"]}},
        {"filter": {"year": {"gte": 2003}}},
        {"limit_per": {"field": "department", "hits": 9}},
        {"limit_per": {"field": "year", "hits": 3}, "filter": {"department": ["外科", "内科"]}},
        {"min_score": 0.3},
        {"explain": True},
        {"evidence": True},
    )
]


def hits(client: TestClient, body: dict[str, Any], top_k: int) -> list[tuple[float, str]]:
    found = post_search(client, query=QUERY, top_k=top_k, **body)["hits"]
    return [(hit["score"], hit["id"]) for hit in found]


@pytest.mark.parametrize("options", [{}, {"factory": "HNSW16"}], ids=["Flat", "HNSW"])
def test_a_shorter_list_is_the_beginning_of_a_longer_one(
    build_version: Builder, serve: Serve, options: dict[str, Any]
) -> None:
    build_version(records(1), fusion={"lexical": 0.1}, **options)
    client = serve(max_batch=64)
    for body in BODIES:
        longest = hits(client, body, 50)
        assert longest == sorted(longest, reverse=True)
        assert len({score for score, _ in longest}) < len(longest), "nothing ties"
        for top_k in (1, 2, 3, 7, 10, 20, 49, 50):
            assert hits(client, body, top_k) == longest[:top_k], body
            assert hits(client, body, top_k) == longest[:top_k], "another answer from the cache"
        queries = [{"query": QUERY, "top_k": k} | body for k in range(1, 20)]
        response = client.post("/search/batch", json={"queries": queries})
        for k, result in enumerate(response.json()["results"], start=1):
            assert [(hit["score"], hit["id"]) for hit in result["hits"]] == longest[:k]


def test_the_order_of_documents_in_the_corpus_does_not_matter(
    build_version: Builder, serve: Serve
) -> None:
    build_version(records(1), fusion={"lexical": 0.1})
    first = serve(cache_entries=0)
    found = [hits(first, body, 30) for body in BODIES]
    build_version(records(2), fusion={"lexical": 0.1})
    other = serve(cache_entries=0)
    assert [hits(other, body, 30) for body in BODIES] == found


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
def test_more_ties_than_are_compared_are_counted(
    build_version: Builder, serve: Serve, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stores.order.MOST_TIED", 256)
    same = [{"_id": f"{i}", "text": TEXTS[0]} for i in range(700)]
    build_version(same, fusion={"lexical": 0.1})
    client = serve(cache_entries=0)
    assert len(hits(client, {"mode": mode}, 5)) == 5
    assert sample(client, "care_cut_ties_total") == 1
