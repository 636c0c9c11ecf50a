"""Indexes that the writer process opens, and their encoders."""

from pathlib import Path

import numpy as np
import pytest
from pydantic import SecretStr

from care.live import LiveIndexes
from core.errors import CareError, EmbeddingSpaceError
from core.service_process import free_port
from core.text import document_text
from core.versions import IndexFolder
from core.writes import Write, Written
from indexer.state import IndexState
from service.settings import Settings
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.errors import raises

NEW = Write("test", put=({"_id": "new", "text": "流感患者居家隔离的要点。"},))
DELETE = Write("test", delete=("d0001",))

pytestmark = pytest.mark.usefixtures("test_encoders")


@pytest.fixture
def served(settings: Settings, pair_file: Path, build_version: Builder) -> Settings:
    """Settings of a service with the test pair and the index 'test'."""
    build_version(make_records(60))
    return settings.model_copy(update={"pair": str(pair_file)})


def test_an_index_is_written_with_the_encoder_of_its_pair(
    served: Settings, build_version: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_version(make_records(20), name="other")
    loaded: list[str] = []
    real = "care.live.document_encoder"
    from care.live import document_encoder

    def load(pair: object, options: object) -> object:
        loaded.append("")
        return document_encoder(pair, options)  # type: ignore[arg-type]

    monkeypatch.setattr(real, load)
    indexes = LiveIndexes(served)
    test, other = indexes.open("test"), indexes.open("other")
    assert not loaded
    for index in (test, other):
        (written,) = index.commit([NEW])
        assert isinstance(written, Written)
        assert written.added == 1
    assert len(loaded) == 1


def test_without_the_server_of_the_encoder_documents_are_deleted(served: Settings) -> None:
    url = SecretStr(f"http://127.0.0.1:{free_port()}/v1")
    index = LiveIndexes(served.model_copy(update={"document_url": url})).open("test")
    put, deleted = index.commit([NEW, DELETE])
    assert isinstance(put, CareError)
    assert isinstance(deleted, Written)
    assert deleted.deleted == 1


def test_an_index_needs_a_pair_of_its_space(served: Settings, build_version: Builder) -> None:
    build_version(make_records(20), name="other", space="another")
    with raises(EmbeddingSpaceError, "embedding_space_mismatch", embedding_space="another"):
        LiveIndexes(served).open("other")


def test_texts_that_several_calls_encode_keep_their_order(
    served: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("care.live.available_cpus", lambda: 3)
    records = make_records(68)[60:]
    (written,) = LiveIndexes(served).open("test").commit([Write("test", put=tuple(records))])
    assert isinstance(written, Written)
    state = IndexState.open(IndexFolder(served.indexes, "test"), written.version)
    rows = np.arange(60, 68)
    encoder = BigramEncoder("document")
    texts = [document_text(one.title, one.text) for one in (state.documents[row] for row in rows)]
    assert texts == [document_text(one.get("title", ""), one["text"]) for one in records]
    assert np.allclose(state.take(rows), encoder.encode(texts).vectors, atol=1e-6)
