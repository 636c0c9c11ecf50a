from contextlib import nullcontext

import pytest
from fastapi.testclient import TestClient

from core.errors import CareError
from evaluation import http
from evaluation.http import search_channels, search_run, search_times, served_index
from stores.lexical import LexicalIndex
from tests.conftest import make_records
from tests.errors import raises


@pytest.fixture(autouse=True)
def _in_process(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests reach the application without a server."""
    # The end of a `with` block of the test client would end the application.
    monkeypatch.setattr(http.httpx2, "Client", lambda **_: nullcontext(client))


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


def test_a_run_is_that_of_its_mode() -> None:
    queries = {"q": make_records(60)[3]["text"]}
    dense, lexical, default = (
        search_run("http://test", queries, 5, mode)["q"] for mode in ("dense", "lexical", None)
    )
    assert dense == default != lexical
    assert 0 < max(lexical.values()) <= 1


def test_channels_have_the_scores_of_both_modes() -> None:
    queries = {"q": make_records(60)[3]["text"]}
    (hits,) = search_channels("http://test", queries, 20).values()
    assert len(hits) == 20
    dense = search_run("http://test", queries, 60, "dense")["q"]
    assert {hit.document: hit.dense for hit in hits}.items() <= dense.items()
    assert max(hit.lexical for hit in hits) > 0


def test_a_failed_channel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError

    monkeypatch.setattr(LexicalIndex, "search", fail)
    with raises(CareError, code="search_failed", id="q", failed=["lexical"]):
        search_run("http://test", {"q": "高血压"}, 5, "hybrid")


def test_each_request_is_timed(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    systems = {"by words": {"mode": "lexical"}, "first": {"mode": "dense", "top_k": 1}}
    times = search_times("http://test", ["高血压", "咳嗽"], systems)
    assert {name: len(taken) for name, taken in times.items()} == {"by words": 2, "first": 2}
    assert min(min(taken) for taken in times.values()) > 0
    monkeypatch.setattr(http.httpx2, "get", lambda url, **_: client.get(url))
    assert served_index("http://test")["modes"][0] == "dense"


def test_a_service_that_rejects_the_request() -> None:
    with raises(CareError, code="search_failed", status=422):
        search_run("http://test", {"q": ""}, top_k=5)
