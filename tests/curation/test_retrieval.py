from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient

from core.errors import CareError
from core.service_process import free_port
from core.types import Document
from curation import retrieval
from curation.benchmark import build_benchmark
from curation.config import BenchmarkConfig, RunRetriever, ServiceRetriever
from curation.retrieval import candidate_pools, search_run
from search.snapshot import Snapshot
from stores.lexical import LexicalIndex
from tests.conftest import make_records
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


@pytest.fixture
def _in_process(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests reach the application without a server."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        given = client.request(request.method, request.url.path, content=request.content)
        return httpx2.Response(given.status_code, stream=httpx2.ByteStream(given.content))

    transport = httpx2.MockTransport(answer)
    make = partial(httpx2.AsyncClient, transport=transport)
    monkeypatch.setattr(retrieval, "http_client", lambda *_, **__: make())


@pytest.mark.usefixtures("_in_process")
def test_a_run_has_the_scores_of_each_query() -> None:
    records = make_records(60)
    queries = {f"q{i}": records[i]["text"] for i in range(40)}
    run = search_run("http://test", queries, top_k=5)
    assert list(run) == list(queries)
    assert all(len(scores) == 5 for scores in run.values())
    best = [max(scores, key=lambda id_: scores[id_]) for scores in run.values()]
    assert best == [record["_id"] for record in records[:40]]


@pytest.mark.usefixtures("_in_process")
def test_a_failed_channel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError

    monkeypatch.setattr(LexicalIndex, "search", fail)
    monkeypatch.setattr(Snapshot, "modes", ("hybrid", "dense", "lexical"))
    with raises(CareError, code="search_failed", id="q", failed=["lexical"]):
        search_run("http://test", {"q": "高血压"}, 5)


@pytest.mark.usefixtures("_in_process")
def test_a_service_that_rejects_the_request() -> None:
    with raises(CareError, code="search_failed", status=422):
        search_run("http://test", {"q": ""}, top_k=5)


def test_an_invalid_address_is_an_error() -> None:
    for url in ("http://[", "search.example"):
        with raises(CareError, code="service_unreachable", url=url):
            search_run(url, {"q": "text"}, 1)
