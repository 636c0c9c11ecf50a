import gzip
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler

import httpx2
import pytest
from fastapi.testclient import TestClient

from core.errors import CareError
from core.service_process import free_port
from curation import service
from curation.service import search_run
from search.snapshot import Snapshot
from stores.lexical import LexicalIndex
from tests.conftest import make_records
from tests.curation.endpoints import scripted_server
from tests.errors import raises


@pytest.fixture
def _in_process(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests reach the application without a server."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        given = client.request(request.method, request.url.path, content=request.content)
        return httpx2.Response(given.status_code, stream=httpx2.ByteStream(given.content))

    transport = httpx2.MockTransport(answer)
    make = partial(httpx2.AsyncClient, transport=transport)
    monkeypatch.setattr(service, "http_client", lambda *_, **__: make())


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


def endless(handler: BaseHTTPRequestHandler) -> None:
    while True:
        handler.wfile.write(b" " * 2**16)


def drip(handler: BaseHTTPRequestHandler) -> None:
    while not threading.Event().wait(0.1):
        handler.wfile.write(b" ")
        handler.wfile.flush()


def drip_head(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    drip(handler)


def packed(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(gzip.compress(b'{"results": [{"hits": []}]}'))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("respond", "code"),
    [
        (endless, "search_failed"),
        (drip, "service_unreachable"),
        (drip_head, "service_unreachable"),
        (packed, "search_failed"),
        (lambda _: None, "search_failed"),
    ],
    ids=["endless", "drip", "drip head", "packed", "empty"],
)
def test_a_response_has_limits_of_time_and_size(
    respond: Callable[[BaseHTTPRequestHandler], None],
    code: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_SECONDS", 1.0)
    monkeypatch.setattr(service, "_BYTES", 2**20)

    def answer(_: object, handler: BaseHTTPRequestHandler) -> None:
        if respond is not drip_head:
            handler.send_response(200)
            handler.send_header("Content-Encoding", "gzip" if respond is packed else "identity")
            handler.end_headers()
        handler.close_connection = True
        with suppress(OSError):
            respond(handler)
            handler.wfile.flush()

    with scripted_server(answer) as url:  # type: ignore[arg-type]
        started = time.monotonic()
        with raises(CareError, code=code):
            search_run(url, {"q": "text"}, 1)
        assert time.monotonic() - started < 20


def test_a_service_that_does_not_run_is_an_error() -> None:
    for url in (f"http://127.0.0.1:{free_port()}", "http://[", "search.example"):
        with raises(CareError, code="service_unreachable", url=url):
            search_run(url, {"q": "text"}, 1)
