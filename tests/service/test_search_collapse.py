from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from core.documents import DocumentReader
from core.manifest import Chunking
from core.types import Query, RowArray
from core.versions import read_manifest
from search.fusion import RankedList
from search.limits import HitLimits, search_limited
from search.snapshot import Snapshot
from tests.conftest import SUBJECTS, Builder
from tests.service.conftest import Serve, by_row, exact_scores, post_search, ranking

CHUNKING = Chunking(tokens=40, overlap=10)
QUERY = "高血压患者第3号的护理"
search = partial(post_search, query=QUERY)


def long_records(count: int, sentences: int = 12) -> list[dict[str, Any]]:
    """Documents of different lengths; the first one repeats the query."""
    records: list[dict[str, Any]] = [
        {
            "_id": f"d{i:03d}",
            "title": f"第{i}讲",
            "text": "".join(
                f"{SUBJECTS[(i + j // 3) % len(SUBJECTS)]}患者第{i}号的护理要点{i * j % 97}。"
                for j in range(i % sentences + 1)
            ),
            "metadata": {"department": "儿科" if i % 3 else "骨科"},
        }
        for i in range(count)
    ]
    flood = "".join(f"高血压患者第3号的护理{i}。" for i in range(150))
    records[0] |= {"title": "", "text": flood}
    return records


@pytest.fixture(scope="module")
def client(over: Callable[..., TestClient]) -> TestClient:
    """An application over chunks; those of one document are nearest to the query."""
    return over(long_records(40), chunking=CHUNKING)


@pytest.fixture
def folder(client: TestClient) -> Path:
    index: Snapshot = client.app.state.service.catalog.served.index  # type: ignore[attr-defined]
    return index.segment.folder


def best_chunks(folder: Path, **metadata: str) -> dict[str, float]:
    """The best score of each document with this metadata, best first."""
    scores = exact_scores(folder, QUERY)
    best: dict[str, float] = {}
    for chunk in DocumentReader(folder / "documents.arrow"):
        assert chunk.parent is not None
        if chunk.metadata.items() >= metadata.items():
            best[chunk.parent] = max(best.get(chunk.parent, -1.0), scores[chunk.id])
    return dict(ranking(best))


def test_hits_are_chunks_that_name_their_document_and_place(
    client: TestClient, folder: Path
) -> None:
    chunks = {chunk.id: chunk for chunk in DocumentReader(folder / "documents.arrow")}
    hits = search(client, top_k=10)["hits"]
    assert {hit["parent"] for hit in hits} == {"d000"}
    for hit in hits:
        chunk = chunks[hit["id"]]
        assert (hit["parent"], hit["chunk"], hit["chunks"], hit["text"]) == (
            *(chunk.parent, chunk.chunk, chunk.chunks, chunk.text),
        )
    (hit,) = search(client, top_k=1, include=[])["hits"]
    assert hit.keys() == {"id", "score", "rank", "title", "parent", "chunk", "chunks"}


@pytest.mark.parametrize("top_k", [1, 10, 40, 41])
def test_collapse_returns_each_document_once_by_its_best_chunk(
    client: TestClient, folder: Path, top_k: int
) -> None:
    hits = search(client, top_k=top_k, collapse=True)["hits"]
    best = best_chunks(folder)
    assert [hit["rank"] for hit in hits] == list(range(1, min(top_k, 40) + 1))
    assert [hit["score"] for hit in hits] == pytest.approx(list(best.values())[:top_k], abs=1e-6)
    assert len({hit["parent"] for hit in hits}) == len(hits)
    for hit in hits:
        assert hit["score"] == pytest.approx(best[hit["parent"]], abs=1e-6)


def test_collapse_works_with_filters_and_min_score(client: TestClient, folder: Path) -> None:
    best = best_chunks(folder, department="骨科")
    assert len(best) == 14
    limit = (list(best.values())[8] + list(best.values())[9]) / 2
    body: dict[str, Any] = {"filter": {"department": ["骨科"]}, "collapse": True}
    for changes, expected in (
        ({"top_k": 14}, 14),
        ({"top_k": 30}, 14),
        ({"top_k": 14, "min_score": limit}, 9),
        ({"top_k": 5, "min_score": limit}, 5),
        ({"min_score": 1.0}, 0),
    ):
        hits = search(client, **body | changes)["hits"]
        scores = list(best.values())[:expected]
        assert [hit["score"] for hit in hits] == pytest.approx(scores, abs=1e-6)
        assert {hit["metadata"]["department"] for hit in hits} <= {"骨科"}


def test_collapse_is_set_for_each_query_of_a_batch(client: TestClient) -> None:
    queries = [{"query": QUERY}, {"query": QUERY, "collapse": True}]
    results = client.post("/search/batch", json={"queries": queries}).json()["results"]
    assert [len({hit["parent"] for hit in result["hits"]}) for result in results] == [1, 10]


def test_without_chunks_collapse_changes_nothing(serve: Serve, build_version: Builder) -> None:
    build_version(long_records(40))
    client = serve()
    plain = search(client)
    collapsed = search(client, collapse=True)
    assert (collapsed["hits"], collapsed["cached"]) == (plain["hits"], True)
    assert plain["hits"][0].keys() == {"id", "score", "rank", "title", "text", "metadata"}


@pytest.mark.e2e
def test_collapse_finds_all_documents_in_a_graph(serve: Serve, build_version: Builder) -> None:
    build_version(long_records(400), chunking=CHUNKING, factory="HNSW16", recall=0.9)
    for top_k in (10, 400):
        hits = search(serve(), top_k=top_k, collapse=True)["hits"]
        assert len({hit["parent"] for hit in hits}) == len(hits) == top_k


def test_get_index_describes_the_chunking(client: TestClient, folder: Path) -> None:
    index = client.get("/index").json()
    assert index["chunking"] == {"tokens": 40, "overlap": 10}
    assert (index["documents"], index["count"]) == (40, read_manifest(folder).count)


class _Chunks:
    """Documents with the first chunk of each row."""

    def __init__(self, firsts: RowArray) -> None:
        self._firsts = firsts

    def first_chunks(self, rows: RowArray) -> RowArray:
        return self._firsts[rows]


def search_documents(
    search: Any, firsts: RowArray, top_k: int, min_score: float | None = None
) -> RankedList:
    query = Query("", top_k, min_score=min_score, collapse=True)
    documents: Any = _Chunks(firsts)
    limits = HitLimits(query, documents)
    return search_limited(search, query, limits, len(firsts), min_score, by_row, narrow=True)


@given(data=st.data())
def test_collapse_finds_the_documents_of_a_full_search(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=20))
    firsts = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)
    all_scores = np.array(
        data.draw(st.lists(st.integers(0, 9), min_size=len(firsts), max_size=len(firsts))),
        dtype=np.float32,
    )
    passing = np.array(sorted(data.draw(st.sets(st.integers(0, len(firsts) - 1)))), dtype=np.int64)
    k = data.draw(st.integers(1, 25))
    min_score = data.draw(st.none() | st.integers(0, 9))
    order = passing[np.argsort(-all_scores[passing], kind="stable")]
    fetched: list[int] = []

    def search(_: Query, fetch: int) -> RankedList:
        fetched.append(fetch)
        rows = order[:fetch]
        bound = float(all_scores[rows[-1]]) if len(rows) else -np.inf
        return RankedList(all_scores[rows], rows, bound=bound)

    found = search_documents(search, firsts, k, min_score)
    scores, rows = found.scores, found.rows
    assert max(fetched) <= len(firsts)
    best: dict[int, float] = {}
    for row in order:
        best.setdefault(int(firsts[row]), float(all_scores[row]))
    wanted = [s for s in sorted(best.values(), reverse=True) if min_score is None or s >= min_score]
    good = scores if min_score is None else scores[scores >= min_score]
    assert good.tolist() == wanted[:k]
    assert len(set(firsts[rows].tolist())) == len(rows) <= k
    assert all(best[int(firsts[row])] == all_scores[row] for row in rows)


def test_one_search_suffices_if_the_nearest_chunks_cover_enough_documents() -> None:
    fetched: list[int] = []

    def search(_: Query, fetch: int) -> RankedList:
        fetched.append(fetch)
        return RankedList(np.linspace(1, 0, fetch, dtype=np.float32), np.arange(fetch))

    found = search_documents(search, np.arange(10_000) // 2 * 2, 10)
    assert found.rows.tolist() == list(range(0, 20, 2))
    assert fetched == [40]
    assert len(found.scores) == 10
