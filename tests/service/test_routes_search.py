from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from core.encoders import Encoding
from core.manifest import IndexManifest
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.service.conftest import Serve, exact_scores, post_search, ranking

QUERY = "高血压患者的护理"
search = partial(post_search, query=QUERY)
DEPARTMENT = {d["_id"]: d["metadata"]["department"] for d in make_records(60)}


def assert_hits(answer: dict[str, Any], expected: list[tuple[str, float]]) -> None:
    assert [hit["rank"] for hit in answer["hits"]] == list(range(1, len(expected) + 1))
    scores = [hit["score"] for hit in answer["hits"]]
    assert scores == sorted(scores, reverse=True)
    assert scores == pytest.approx([score for _, score in expected], abs=1e-6)


@pytest.mark.parametrize("top_k", [1, 10, 60])
def test_hits_are_those_of_exact_search(client: TestClient, folder: Path, top_k: int) -> None:
    answer = search(client, top_k=top_k)
    scores = exact_scores(folder, QUERY)
    assert_hits(answer, ranking(scores)[:top_k])
    for hit in answer["hits"]:
        assert hit["score"] == pytest.approx(scores[hit["id"]], abs=1e-6)


def test_a_response_contains_hits_index_timings_and_cached(
    serve: Serve, manifest: IndexManifest
) -> None:
    answer = search(serve(), top_k=1)
    (hit,) = answer["hits"]
    record = next(r for r in make_records(60) if r["_id"] == hit["id"])
    assert hit.keys() == {"id", "score", "rank", "title", "text", "metadata"}
    assert {name: hit[name] for name in ("title", "text", "metadata")} == {
        name: record[name] for name in ("title", "text", "metadata")
    }
    assert answer["index"] == {"name": "test", "version": manifest.version}
    assert answer["cached"] is False
    timings = answer["timings_ms"]
    assert list(timings) == [
        *("cache", "queue", "tokenize", "encode", "search", "fetch", "total"),
    ]
    total = timings.pop("total")
    assert 0 < sum(timings.values()) <= total + 0.01


@pytest.mark.parametrize("include", [[], ["text"], ["metadata"], ["metadata", "text"]])
def test_include_selects_the_fields_of_hits(client: TestClient, include: list[str]) -> None:
    (hit,) = search(client, top_k=1, include=include)["hits"]
    assert hit.keys() == {"id", "score", "rank", "title", *include}


def test_min_score_is_inclusive(client: TestClient) -> None:
    scores = [hit["score"] for hit in search(client, top_k=20)["hits"]]
    limit = scores[7]
    kept = [hit["score"] for hit in search(client, top_k=20, min_score=limit)["hits"]]
    assert kept == [score for score in scores if score >= limit]
    assert len(kept) < len(scores)
    for lowest, count in ((-1, 60), (1, 0)):
        assert len(search(client, top_k=60, min_score=lowest)["hits"]) == count


class VaryingEncoder(BigramEncoder):
    """Changes vectors in their last digits, as different batches do."""

    def __init__(self) -> None:
        super().__init__()
        self.share = np.float32(1)

    def encode_tokens(self, tokens: Sequence[str]) -> Encoding:
        encoding = super().encode_tokens(tokens)
        return replace(encoding, vectors=encoding.vectors * self.share)


@pytest.mark.parametrize("collapse", [False, True])
def test_a_score_sent_as_min_score_keeps_its_hit_in_another_batch(
    serve: Serve, collapse: bool
) -> None:
    encoder = VaryingEncoder()
    client = serve(encoder, cache_entries=0)
    scores = [hit["score"] for hit in search(client, top_k=20, collapse=collapse)["hits"]]
    for share in (1 - 2**-22, 1 + 2**-22):
        encoder.share = np.float32(share)
        for score in sorted(set(scores)):
            kept = search(client, top_k=20, min_score=score, collapse=collapse)["hits"]
            assert len(kept) == sum(other >= score for other in scores)


@pytest.mark.parametrize(
    ("departments", "top_k"), [(["儿科"], 5), (["儿科"], 60), (["儿科", "骨科"], 30)]
)
def test_a_filter_returns_the_best_matching_documents(
    client: TestClient, folder: Path, departments: list[str], top_k: int
) -> None:
    answer = search(client, top_k=top_k, filter={"department": departments})
    scores = exact_scores(folder, QUERY)
    matching = {id_: s for id_, s in scores.items() if DEPARTMENT[id_] in departments}
    assert_hits(answer, ranking(matching)[:top_k])
    assert {hit["metadata"]["department"] for hit in answer["hits"]} == set(departments)


@pytest.mark.parametrize(
    ("filter_", "hits"),
    [
        ({}, 60),
        ({"rare": [True]}, 1),
        ({"rare": [True, False]}, 60),
        ({"rare": [1]}, 0),
        ({"tags": ["门诊"]}, 60),
        ({"tags": ["组0", "组1"]}, 24),
        ({"department": ["儿科"], "tags": ["组0"]}, 4),
        ({"department": ["没有"]}, 0),
        ({"rare": True}, 1),
        ({"rare": {"not": True}}, 59),
        ({"tags": {"not": ["组0", "组1"]}, "department": "儿科"}, 12),
        ({"tags": {"not": "没有"}}, 60),
    ],
)
def test_every_field_of_a_filter_must_match(
    client: TestClient, filter_: dict[str, Any], hits: int
) -> None:
    assert len(search(client, top_k=60, filter=filter_)["hits"]) == hits


def test_equal_scores_are_ordered_by_descending_id(serve: Serve, build_version: Builder) -> None:
    records = make_records(8)
    for record in records[:5]:
        record |= {"title": "高血压", "text": QUERY}
    build_version(records)
    hits = search(serve(), top_k=5)["hits"]
    assert len({hit["score"] for hit in hits}) == 1
    assert [hit["id"] for hit in hits] == ["d0004", "d0003", "d0002", "d0001", "d0000"]


def test_queries_are_normalized(client: TestClient) -> None:
    assert search(client)["hits"] == search(client, query=f" {QUERY}\u200b\n")["hits"]


def test_get_index_describes_the_active_version(
    client: TestClient, manifest: IndexManifest
) -> None:
    described = client.get("/index").json()
    assert described == {
        "name": "test",
        "version": manifest.version,
        "pair": "care-mini",
        "embedding_space": "bigrams-1",
        "dimension": 64,
        "count": 60,
        "documents": 60,
        "chunking": None,
        "active": True,
        "factory": "Flat",
        "search_parameters": {},
        "recall": manifest.recall.model_dump(mode="json"),
        "modes": ["dense", "hybrid", "lexical"],
        "reranker": None,
        "fusion": {},
        "answerable_thresholds": {},
        "filters": {
            "department": ["儿科", "心血管科", "骨科"],
            "rare": [False, True],
            "tags": ["门诊", "组0", "组1", "组2", "组3", "组4"],
        },
        "filter_counts": {
            "department": [20, 20, 20],
            "rare": [59, 1],
            "tags": [60, 12, 12, 12, 12, 12],
        },
        "filter_field_count": 3,
        "created_at": manifest.model_dump(mode="json")["created_at"],
    }


def test_get_index_lists_the_most_frequent_filter_values(
    serve: Serve, build_version: Builder
) -> None:
    records = make_records(150)
    for i, record in enumerate(records):
        record["metadata"] = {"number": max(0, i - 9)}
    build_version(records)
    values = serve().get("/index").json()["filters"]["number"]
    assert len(values) == 100
    assert values[0] == 0


def test_numbers_are_found_by_their_range(serve: Serve, build_version: Builder) -> None:
    records = make_records(40)
    for i, record in enumerate(records):
        record["metadata"] = {"year": 2000 + i, "grade": i / 4, "text": str(i)} if i % 2 else {}
    build_version(records)
    client = serve()

    def found(**filter_: Any) -> int:
        return len(search(client, top_k=40, filter=filter_)["hits"])

    assert found(year={"gte": 2019, "lt": 2024}) == 3
    assert found(year={"gt": 2018.5}) == 11
    assert found(grade={"lte": 0.25}) == found(grade=0.25) == 1
    assert found(year={"gte": 2019, "not": [2021, 2023]}) == 9
    assert found(year={"gt": 3000}) == 0
    # Documents without the field pass an exclusion, but no range.
    assert found(year={"not": 2001}) == 39
    problem = client.post("/search", json={"query": "a", "filter": {"text": {"gte": 3}}}).json()
    assert problem["code"] == "filter_not_numeric"
    assert [error["field"] for error in problem["errors"]] == ["filter.text"]


def test_names_of_filter_fields_are_listed_in_a_bounded_number(
    serve: Serve, build_version: Builder
) -> None:
    records = make_records(10)
    for i, record in enumerate(records):
        fields = range(i * 90, i * 90 + 90)
        record["metadata"] = {f"f{field:03}": "长" * 201 for field in fields} | {"f": ["a"]}
    build_version(records)
    client = serve()
    answer = client.get("/index")
    described = answer.json()
    assert described["filter_field_count"] == 901
    assert len(described["filters"]) == 100
    assert described["filters"]["f"] == ["a"]
    assert described["filters"]["f001"] == []
    problem = client.post("/search", json={"query": "a", "filter": {"g": ["a"]}})
    assert problem.json()["code"] == "unknown_filter_field"
    assert len(answer.content) + len(problem.content) < 10_000
    assert len(search(client, filter={"f899": "长" * 201})["hits"]) == 1


@pytest.mark.parametrize(
    ("path", "status", "media_type"),
    [
        ("/", 200, "text/html"),
        ("/docs", 200, "text/html"),
        ("/page/search.js", 200, "text/javascript"),
        ("/openapi.json", 200, "application/json"),
        ("/metrics", 200, "text/plain"),
        ("/health/live", 200, "application/json"),
        ("/health/ready", 200, "application/json"),
        ("/index", 200, "application/json"),
        ("/search", 405, "application/problem+json"),
        ("/nowhere", 404, "application/problem+json"),
    ],
)
def test_pages_and_answers_have_headers_against_scripts_caching_and_sniffing(
    client: TestClient, path: str, status: int, media_type: str
) -> None:
    response = client.get(path)
    headers = response.headers
    assert (response.status_code, headers["content-type"].split(";")[0]) == (status, media_type)
    assert response.text
    if path.startswith("/health"):
        assert response.json() == {"status": path.rpartition("/")[2]}
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
