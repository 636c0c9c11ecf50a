from functools import partial

import httpx2
import pytest
from fastapi.testclient import TestClient

from core.errors import CareError
from curation import retrieval
from curation.retrieval import search_run
from search.snapshot import Snapshot
from stores.lexical import LexicalIndex
from tests.conftest import make_records
from tests.errors import raises


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
def test_top_k_above_the_number_of_documents() -> None:
    assert len(search_run("http://test", {"q": "高血压"}, top_k=100)["q"]) == 60


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
