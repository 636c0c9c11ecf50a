from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError
from core.service_process import free_port
from core.types import Document
from curation.benchmark import build_benchmark
from curation.config import BenchmarkConfig, RunRetriever, ServiceRetriever
from curation.retrieval import candidate_pools
from tests.curation.judges import THREE, lines, run
from tests.errors import raises


def test_a_pool_from_a_run_file_and_a_pair(facts: dict[str, Any], data: Path) -> None:
    path = data / "other.trec"
    path.write_text("q1 Q0 d3 1 9.5 x\nq1 Q0 gone 2 9.0 x\nq1 Q0 d2 3 8.0 x\n", encoding="utf-8")
    retrievers = [
        {"kind": "run", "name": "other", "path": path},
        {"kind": "pair", "pair": "care-mini"},
    ]
    statistics, _ = run(
        BenchmarkConfig,
        build_benchmark,
        facts | {"retrievers": retrievers, "depth": 2, "pool": "union"},
        *THREE,
    )
    judged = lines(facts["output"] / "judgements.jsonl")
    assert {"d3", "d2", "d1"} <= {row["corpus-id"] for row in judged if row["query-id"] == "q1"}
    assert len({row["corpus-id"] for row in judged if row["query-id"] == "q2"}) == 2
    assert statistics["pool"]["queries"] == 2


def test_a_run_of_other_queries_is_an_error(facts: dict[str, Any], data: Path) -> None:
    path = data / "other.trec"
    path.write_text("q1 Q0 gone 1 9.5 x\nq7 Q0 d1 1 9.5 x\n", encoding="utf-8")
    retrievers = [{"kind": "run", "name": "other", "path": path}]
    with raises(CareError, code="run_of_other_data", path=path):
        run(BenchmarkConfig, build_benchmark, facts | {"retrievers": retrievers}, "first")


def test_a_fused_pool_has_as_many_documents_as_one_retriever(tmp_path: Path) -> None:
    documents = [Document(id_, "文") for id_ in "abcdef"]
    runs = {"one": "abc", "two": "dbe"}
    retrievers = []
    for name, ids in runs.items():
        path = tmp_path / f"{name}.trec"
        lines_ = (f"q Q0 {id_} {at} {9 - at} x" for at, id_ in enumerate(ids, start=1))
        path.write_text("\n".join(lines_) + "\n", encoding="utf-8")
        retrievers.append(RunRetriever(kind="run", name=name, path=path))
    pools = {
        pool: candidate_pools(retrievers, documents, {"q": "问"}, 3, tmp_path, pool)
        for pool in ("fused", "union")
    }
    # b is in both runs.
    assert pools["fused"]["q"][0] == "b"
    assert set(pools["fused"]["q"]) == {"a", "b", "d"}
    assert set(pools["union"]["q"]) == set("abcde")


def test_a_service_is_a_retriever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        "curation.retrieval.search_run", lambda url, queries, depth: {"q": {"a": 0.9, "gone": 0.8}}
    )
    service = ServiceRetriever(kind="service", name="s", url="http://127.0.0.1:8000")
    documents = [Document("a", "文")]
    assert candidate_pools([service], documents, {"q": "问"}, 2, tmp_path) == {"q": ["a"]}


def test_a_service_that_does_not_run(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    service = ServiceRetriever(kind="service", name="s", url=url)
    with raises(CareError, code="service_unreachable", url=url):
        candidate_pools([service], [Document("a", "文")], {"q": "问"}, 2, tmp_path)
