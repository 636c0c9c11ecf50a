from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from core.manifest import Chunking
from core.types import HitLimit, Query, RowArray
from search.fusion import RankedList
from search.limits import HitLimits, search_limited, within
from search.snapshot import Snapshot
from search.task import SearchTask
from tests.conftest import Builder
from tests.encoders import BigramEncoder
from tests.service.conftest import Serve, by_row, post_search

QUERY = "高血压患者的护理"
DEPARTMENTS = [*["内科"] * 150, *["外科"] * 30, *["儿科"] * 8, *["眼科"] * 2]


def records() -> list[dict[str, Any]]:
    """190 documents; those of the largest department are nearest to the query."""
    made: list[dict[str, Any]] = []
    for i, department in enumerate(DEPARTMENTS):
        words = "高血压患者的护理" if department == "内科" else "患者"
        metadata: dict[str, Any] = {"department": department, "ward": i // 2}
        metadata["tags"] = ["甲", f"组{i % 3}"] if i % 2 else f"组{i % 3}"
        if i % 10 == 0:
            metadata["rare"] = 1
        made.append(
            {
                "_id": f"d{i:03}",
                "title": f"{department}第{i}讲",
                "text": f"{words}要点{i * 7 % 191}。",
                "metadata": metadata,
            }
        )
    return made


@pytest.fixture(scope="module")
def client(over: Callable[..., TestClient]) -> TestClient:
    return over(records())


def search(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    hits: list[dict[str, Any]] = post_search(client, query=QUERY, **body)["hits"]
    assert [hit["rank"] for hit in hits] == list(range(1, len(hits) + 1))
    scores = [hit["score"] for hit in hits]
    assert scores == sorted(scores, reverse=True)
    return hits


def values(hit: dict[str, Any], field: str) -> list[Any]:
    found = hit["metadata"].get(field, [])
    return found if isinstance(found, list) else [found]


def greedy(hits: Sequence[dict[str, Any]], field: str, limit: int) -> list[dict[str, Any]]:
    """The hits of a full ranking whose values have fewer than `limit` better ones."""
    counts: Counter[Any] = Counter()
    kept = []
    for hit in hits:
        own = values(hit, field)
        if all(counts[value] < limit for value in own):
            counts.update(own)
            kept.append(hit)
    return kept


def ids_and_scores(hits: Sequence[dict[str, Any]]) -> list[tuple[str, float]]:
    return [(hit["id"], pytest.approx(hit["score"], abs=1e-5)) for hit in hits]  # type: ignore[misc]


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
@pytest.mark.parametrize(
    "body",
    [
        {"top_k": 6, "limit_per": {"field": "department", "hits": 2}},
        {"top_k": 10, "limit_per": {"field": "department", "hits": 3}},
        {"top_k": 60, "limit_per": {"field": "department", "hits": 20}},
        {"top_k": 30, "limit_per": {"field": "ward", "hits": 1}},
        {"top_k": 9, "limit_per": {"field": "tags", "hits": 4}},
        {"top_k": 30, "limit_per": {"field": "rare", "hits": 1}},
        {
            "top_k": 8,
            "limit_per": {"field": "department", "hits": 2},
            "filter": {"department": {"not": "内科"}},
        },
        {
            "top_k": 8,
            "limit_per": {"field": "department", "hits": 2},
            "filter": {"department": ["内科", "眼科"], "ward": {"gte": 3}},
        },
    ],
)
def test_hits_are_those_of_the_full_ranking_within_the_limit(
    client: TestClient, mode: str, body: dict[str, Any]
) -> None:
    common = {"mode": mode, "filter": body.get("filter", {})}
    ranking = search(client, top_k=190, **common)
    limit = body["limit_per"]
    expected = greedy(ranking, limit["field"], limit["hits"])[: body["top_k"]]
    hits = search(client, **body, mode=mode)
    # Equal scores are in the order of rows while hits are counted, and of ids in an answer.
    assert [hit["score"] for hit in hits] == pytest.approx(
        [hit["score"] for hit in expected], abs=1e-5
    )
    counts = Counter(value for hit in hits for value in values(hit, limit["field"]))
    assert max(counts.values(), default=0) <= limit["hits"]
    assert len(hits) == len(expected) > 0


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
def test_min_score_holds_with_a_limit(client: TestClient, mode: str) -> None:
    limit = {"field": "department", "hits": 2}
    hits = search(client, mode=mode, limit_per=limit)
    assert Counter(hit["metadata"]["department"] for hit in hits) == dict.fromkeys(
        set(DEPARTMENTS), 2
    )
    for count in (1, 2, 5):
        lowest = (hits[count - 1]["score"] + hits[count]["score"]) / 2
        expected = [hit["score"] for hit in hits if hit["score"] >= lowest]
        found = search(client, mode=mode, limit_per=limit, min_score=lowest)
        assert [hit["score"] for hit in found] == pytest.approx(expected, abs=1e-5)


def test_explained_hits_have_an_explanation_after_a_wider_search(client: TestClient) -> None:
    limit = {"field": "department", "hits": 2}
    hits = search(client, mode="hybrid", explain=True, limit_per=limit)
    assert len(hits) == 8
    assert all(hit["explain"]["dense"]["rank"] for hit in hits)
    assert ids_and_scores(hits) == ids_and_scores(search(client, mode="hybrid", limit_per=limit))


@pytest.mark.parametrize("mode", ["dense", "lexical", "hybrid"])
def test_documents_have_at_most_n_chunks(serve: Serve, build_version: Builder, mode: str) -> None:
    flood = "".join(f"高血压患者的护理{i}。" for i in range(300))
    long = [{"_id": f"long{i}", "text": flood} for i in range(2)]
    build_version([*long, *records()[:20]], chunking=Chunking(tokens=40, overlap=0))
    client = serve()
    for body, each, total in (
        ({"limit_per": {"field": "_document", "hits": 2}}, 2, 10),
        ({"limit_per": {"field": "_document", "hits": 3}, "top_k": 30}, 3, 26),
        ({"limit_per": {"field": "_document", "hits": 3}, "collapse": True, "top_k": 30}, 1, 22),
        ({"collapse": True, "top_k": 30}, 1, 22),
        ({"collapse": True, "top_k": 9, "limit_per": {"field": "department", "hits": 2}}, 1, 4),
    ):
        hits = search(client, mode=mode, **body)
        counts = Counter(hit["parent"] for hit in hits)
        assert max(counts.values()) <= each
        assert len(hits) == total


def test_without_chunks_a_limit_per_document_changes_nothing(client: TestClient) -> None:
    plain = search(client)
    answer = client.post(
        "/search", json={"query": QUERY, "limit_per": {"field": "_document", "hits": 1}}
    ).json()
    assert (answer["hits"], answer["cached"]) == (plain, True)


@given(data=st.data())
def test_elements_are_within_the_limit_of_their_group(data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(0, 5), max_size=40))
    limit = data.draw(st.integers(1, 4))
    expected = [groups[:at].count(group) < limit for at, group in enumerate(groups)]
    assert within(np.array(groups, np.int64), limit).tolist() == expected


class _Metadata:
    """Documents with one value of the field `part`."""

    def __init__(self, parts: Sequence[int]) -> None:
        self._parts = parts

    def read(self, rows: Sequence[int]) -> list[SimpleNamespace]:
        return [SimpleNamespace(metadata={"part": self._parts[row]}) for row in rows]


def excluded_parts(query: Query) -> list[Any]:
    return [value for _, one in query.conditions.conditions for value in one.excluded]


@given(data=st.data())
def test_a_limited_search_finds_the_rows_of_a_full_search(data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=120))
    scores = data.draw(st.lists(st.integers(0, 9), min_size=len(parts), max_size=len(parts)))
    all_scores = np.array(scores, np.float32)
    top_k, hits = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    min_score = data.draw(st.none() | st.integers(0, 9))
    order: RowArray = np.argsort(-all_scores, kind="stable")

    def find(query: Query, depth: int) -> RankedList:
        excluded = excluded_parts(query)
        rows = order[~np.isin(np.array(parts)[order], excluded)][:depth]
        bound = float(all_scores[rows[-1]]) if len(rows) else -np.inf
        return RankedList(all_scores[rows], rows, bound=bound)

    query = Query("", top_k, min_score=min_score, limit_per=HitLimit("part", hits))
    expected = order[within(np.array(parts)[order], hits)][:top_k]
    if min_score is not None:
        expected = expected[all_scores[expected] >= min_score]
    for narrow in (False, True):
        documents: Any = _Metadata(parts)
        limits = HitLimits(query, documents)
        found = search_limited(find, query, limits, len(parts), min_score, by_row, narrow=narrow)
        rows = found.rows
        if min_score is not None:
            rows = rows[found.scores >= min_score]
        assert rows.tolist() == expected.tolist()


def test_full_values_are_left_out_of_further_searches() -> None:
    parts = [*[0] * 5000, *[1] * 3000, *range(2, 20)]
    depths: list[int] = []

    def find(query: Query, depth: int) -> RankedList:
        depths.append(depth)
        excluded = excluded_parts(query)
        rows = np.flatnonzero(~np.isin(parts, excluded))[:depth]
        return RankedList(-rows.astype(np.float32), rows, bound=-np.inf)

    query = Query("", 10, limit_per=HitLimit("part", 1))
    documents: Any = _Metadata(parts)
    limits = HitLimits(query, documents)
    found = search_limited(find, query, limits, len(parts), None, by_row, narrow=True)
    assert [parts[row] for row in found.rows.tolist()] == list(range(10))
    assert len(depths) == 3


@pytest.mark.parametrize("failed", ["dense", "lexical"])
def test_a_limit_holds_if_a_channel_fails(client: TestClient, failed: str) -> None:
    index: Snapshot = client.app.state.service.catalog.served.index  # type: ignore[attr-defined]
    query = Query(QUERY, mode="hybrid", limit_per=HitLimit("department", 2), min_score=-1.0)
    task = SearchTask(snapshot=index, query=query, lexical_timeout=0.01)
    vector: Any = BigramEncoder().encode([QUERY]).vectors[0]
    late: Future[Any] = Future()
    if failed == "dense":
        vector = RuntimeError()
        late.set_result(task.search_lexical())
    task.vector, task.lexical = vector, late
    result = task.search()
    assert result.failed == (failed,)
    departments = Counter(hit.metadata["department"] for hit in result.hits)
    assert departments == dict.fromkeys(set(DEPARTMENTS), 2)
