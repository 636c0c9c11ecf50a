"""Searches of judged queries in this process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.choices import DEFAULT_QUERY_CHARS
from core.errors import CareError
from core.types import Query
from core.versions import IndexFolder
from evaluation.index_search import Searcher
from search.snapshot import Snapshot, load_index
from stores.lexical import LexicalIndex
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.errors import raises

RECORDS = make_records(60)


@pytest.fixture
def snapshot(build_version: Builder, indexes: Path) -> Snapshot:
    build_version(RECORDS)
    return load_index(IndexFolder(indexes, "test"), BigramEncoder())


def searcher(snapshot: Snapshot, reranker: Any = None) -> Searcher:
    return Searcher(snapshot, BigramEncoder(), reranker, DEFAULT_QUERY_CHARS)


def test_a_run_has_the_scores_of_each_query(snapshot: Snapshot) -> None:
    queries = {f"q{i}": RECORDS[i]["text"] for i in range(40)}
    run = searcher(snapshot).run(queries, Query("", 5, mode="dense"), "dense")
    assert list(run) == list(queries)
    assert all(len(scores) == 5 for scores in run.values())
    best = [max(scores, key=lambda id_: scores[id_]) for scores in run.values()]
    assert best == [record["_id"] for record in RECORDS[:40]]


def test_top_k_above_the_number_of_documents(snapshot: Snapshot) -> None:
    run = searcher(snapshot).run({"q": "高血压"}, Query("", 100, mode="dense"), "dense")
    assert len(run["q"]) == 60


def test_channels_have_the_scores_of_both_modes(snapshot: Snapshot) -> None:
    queries = {"q": RECORDS[3]["text"]}
    (hits,) = searcher(snapshot).channels(queries, 20).values()
    assert len(hits) == 20
    dense = searcher(snapshot).run(queries, Query("", 60, mode="dense"), "dense")["q"]
    assert {hit.document: hit.dense for hit in hits}.items() <= dense.items()
    assert max(hit.lexical for hit in hits) > 0


def test_a_failed_channel_is_an_error(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError

    monkeypatch.setattr(LexicalIndex, "search", fail)
    with raises(CareError, code="search_failed", id="q", failed=["lexical"]):
        searcher(snapshot).run({"q": "高血压"}, Query("", 5, mode="hybrid"), "hybrid")


def test_a_server_ranks_the_hits(snapshot: Snapshot) -> None:
    asked = []

    def reversed_order(query: str, texts: list[str]) -> Any:
        asked.append((query, len(texts)))
        return np.arange(len(texts), dtype=np.float32)

    queries, how = {"q": "高血压"}, Query("", 10, mode="dense")
    plain = searcher(snapshot).run(queries, how, "dense")["q"]
    run = searcher(snapshot, reversed_order).run(
        queries, Query("", 10, mode="dense", rerank=10), "dense + server"
    )["q"]
    assert list(run) == list(plain)[::-1]
    assert asked == [("高血压", 10)]


def test_each_search_is_timed(snapshot: Snapshot) -> None:
    systems = {"by words": Query("", mode="lexical"), "first": Query("", 1, mode="dense")}
    times = searcher(snapshot).times(["高血压", "咳嗽"], systems)
    assert {name: len(taken) for name, taken in times.items()} == {"by words": 2, "first": 2}
    assert min(min(taken) for taken in times.values()) > 0
