import pytest
from fastapi.testclient import TestClient

from core.errors import CareError
from evaluation import http
from evaluation.http import search_run
from tests.conftest import make_records
from tests.errors import raises


@pytest.fixture(autouse=True)
def _in_process(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests reach the application without a server."""
    monkeypatch.setattr(http.httpx2, "Client", lambda **_: client)


def test_a_run_has_the_scores_of_each_query() -> None:
    records = make_records(60)
    queries = {f"q{i}": records[i]["text"] for i in range(40)}
    run = search_run("http://test", queries, top_k=5)
    assert list(run) == list(queries)
    assert all(len(scores) == 5 for scores in run.values())
    best = [max(scores, key=lambda id_: scores[id_]) for scores in run.values()]
    assert best == [record["_id"] for record in records[:40]]


def test_top_k_above_the_number_of_documents() -> None:
    assert len(search_run("http://test", {"q": "高血压"}, top_k=100)["q"]) == 60


def test_a_service_that_rejects_the_request() -> None:
    with raises(CareError, code="search_failed", status=422):
        search_run("http://test", {"q": ""}, top_k=5)
