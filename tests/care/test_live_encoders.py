"""Documents that a server with `/v1/embeddings` encodes, and encoders that do not return."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import SecretStr

from care.live import LiveIndexes
from core.errors import CareError
from core.versions import IndexFolder
from core.writes import Write, Written
from indexer.live.index import LiveIndex
from search.snapshot import load_index
from service.settings import Settings
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.models.encoders.embedding_server import FakeServer, Handler, item, status

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("test_encoders")]

NEW = Write("test", put=({"_id": "new", "title": "流感", "text": "患者居家隔离的要点。"},))
DELETE = Write("test", delete=("d0001",))
PATCH = Write("test", patch=(("d0002", {"x": 1}),))


def answer(handler: Handler, body: dict[str, Any]) -> None:
    """Answers as a server with the test encoder."""
    vectors = BigramEncoder("document").encode(body["input"]).vectors
    handler.send_items([item(i, vector) for i, vector in enumerate(vectors)])


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    server.answer = answer
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def live(
    server: FakeServer, settings: Settings, pair_file: Path, build_version: Builder
) -> LiveIndex:
    build_version(make_records(60))
    url = SecretStr(f"{server.url}/v1")
    changes = {"pair": str(pair_file), "document_url": url, "timeout_ms": 300}
    return LiveIndexes(settings.model_copy(update=changes)).open("test")


def test_a_server_encodes_what_is_written(
    live: LiveIndex, server: FakeServer, settings: Settings
) -> None:
    many = Write("test", put=tuple({"_id": f"m{i}", "text": f"第{i}段"} for i in range(100)))
    written, more = live.commit([NEW, many])
    assert isinstance(written, Written) and written.added == 1
    assert isinstance(more, Written) and more.added == 100
    assert sum(len(body["input"]) for body in server.requests) == 1 + 101
    segment = load_index(IndexFolder(settings.indexes, "test"), BigramEncoder()).segment
    vector = BigramEncoder().encode(["流感\n患者居家隔离的要点。"]).vectors[0]
    scores, rows = segment.vectors.search(vector, 1)
    assert segment.documents[int(rows[0])].id == "new"
    assert scores[0] == pytest.approx(1, abs=1e-5)


def hang(handler: Handler, body: dict[str, Any]) -> None:
    time.sleep(0.5)


def not_finite(handler: Handler, body: dict[str, Any]) -> None:
    vectors = [np.full(64, np.nan, np.float32) for _ in body["input"]]
    handler.send_items([item(i, vector) for i, vector in enumerate(vectors)])


def other_dimension(handler: Handler, body: dict[str, Any]) -> None:
    handler.send_items([item(i, np.ones(32)) for i, _ in enumerate(body["input"])])


def one_more(handler: Handler, body: dict[str, Any]) -> None:
    handler.send_items([item(i, np.ones(64)) for i in range(len(body["input"]) + 1)])


def not_json(handler: Handler, body: dict[str, Any]) -> None:
    handler.send(200, b"<html>")


@pytest.mark.parametrize(
    "fault", [hang, not_finite, other_dimension, one_more, not_json, status(500), status(401)]
)
def test_a_server_that_fails_stops_neither_deletes_nor_metadata(
    live: LiveIndex, server: FakeServer, fault: Callable[..., None]
) -> None:
    live.commit([Write("test", put=({"_id": "first", "text": "第一"},))])
    server.answer = fault
    began = time.monotonic()
    for number in range(3):
        put, deleted, patched = live.commit(
            [
                NEW,
                Write("test", delete=(f"d001{number}",)),
                Write("test", patch=((f"d002{number}", {"x": 1}),)),
            ]
        )
        assert isinstance(put, CareError)
        assert type(put).__name__ in service_knows()
        assert "流感" not in str(put)
        assert isinstance(deleted, Written) and deleted.deleted == 1
        assert isinstance(patched, Written) and patched.replaced == 1
    # At most three requests that fail, each sent twice, before the server is not asked any more.
    assert time.monotonic() - began < 15
    server.answer = answer

    def is_written() -> bool:
        (put,) = live.commit([NEW])
        return isinstance(put, Written)

    end = time.monotonic() + 120
    while not is_written():
        assert time.monotonic() < end
        time.sleep(0.1)


def service_knows() -> set[str]:
    from service.writes import _OF_ENCODERS

    return _OF_ENCODERS


def test_a_text_that_a_server_rejects_is_rejected_alone(
    live: LiveIndex, server: FakeServer
) -> None:
    def picky(handler: Handler, body: dict[str, Any]) -> None:
        poisoned = any("毒" in text for text in body["input"])
        (status(413) if poisoned else answer)(handler, body)

    server.answer = picky
    put = ({"_id": "a", "text": "毒"}, {"_id": "b", "text": "药"})
    (written,) = live.commit([Write("test", put=put)])
    assert isinstance(written, Written) and written.added == 1
    assert [(one.id, one.code) for one in written.rejected] == [("a", "not_encoded")]
    assert "毒" not in written.rejected[0].reason


def test_an_encoder_that_does_not_return_stops_neither_deletes_nor_metadata(
    settings: Settings, pair_file: Path, build_version: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_version(make_records(60))
    live = LiveIndexes(settings.model_copy(update={"pair": str(pair_file)})).open("test")
    ends = threading.Event()
    monkeypatch.setattr("care.live.HANGS", 0.2)
    with monkeypatch.context() as hangs:
        hangs.setattr(BigramEncoder, "encode", lambda *_: ends.wait(30))
        for write in (DELETE, PATCH):
            put, other = live.commit([NEW, write])
            assert isinstance(put, CareError)
            assert isinstance(other, Written)
    ends.set()
    end = time.monotonic() + 120
    while not isinstance(live.commit([NEW])[0], Written):
        assert time.monotonic() < end
        time.sleep(0.1)
