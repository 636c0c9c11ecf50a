"""Indexes that the writer process opens, and their encoders."""

from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from care.live import LiveIndexes
from core.errors import EmbeddingSpaceError
from core.locks import exclusive
from core.text import document_text
from core.versions import IndexFolder, read_manifest
from core.writes import Write, Written
from indexer.live import index as live_index
from indexer.publication import BUILD_LOCK, IndexWriter, is_live
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


def test_an_index_needs_a_pair_of_its_space(served: Settings, build_version: Builder) -> None:
    build_version(make_records(20), name="other", space="another")
    with raises(EmbeddingSpaceError, "embedding_space_mismatch", embedding_space="another"):
        LiveIndexes(served).open("other")


def test_a_base_is_built_anew_and_deleted_like_a_write(
    served: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexes, index = LiveIndexes(served), IndexWriter(served.indexes, "test")
    live = indexes.open("test")
    built = index.active()
    live.commit([NEW, DELETE])
    assert not live.is_large
    monkeypatch.setattr(live_index, "LEAST_CHANGED", 1)
    monkeypatch.setattr(live_index, "MOST_CHANGED", 1 / 60)
    assert live.is_large
    with exclusive(index.path, "build", BUILD_LOCK):
        assert not live.is_large
    before = {one.id for one in IndexState.open(index, index.active()).documents}
    rebuilt = indexes.rebuild("test")
    assert rebuilt and rebuilt.version == index.active() and is_live(rebuilt.version)
    assert rebuilt.segments == () and not live.is_large
    assert indexes.rebuild("test") is None
    assert {one.id for one in IndexState.open(index, rebuilt.version).documents} == before
    live.commit([Write("test", delete=("d0002",))])
    monkeypatch.setattr(live_index, "KEPT", timedelta(0))
    live.merge()
    assert index.versions() == [built, index.active()]
    (base,) = read_manifest(index.version(index.active())).segments
    assert base.folder == rebuilt.version
    assert {one.id for one in IndexState.open(index, index.active()).documents} == before - {
        "d0002"
    }
    assert sorted(path.name for path in served.indexes.iterdir()) == ["test"]


def test_a_base_whose_vectors_are_not_stored_is_not_built_anew(
    served: Settings, build_version: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_index, "LEAST_CHANGED", 0)
    monkeypatch.setattr(live_index, "MOST_CHANGED", 0.0)
    build_version(make_records(60), factory="HNSW32,SQ8")
    live = LiveIndexes(served).open("test")
    live.commit([NEW])
    assert not live.is_large


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
