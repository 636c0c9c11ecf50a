import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.documents import DocumentReader
from core.encoders import Encoding
from core.errors import CareError, CorpusError, EmbeddingSpaceError, IndexVersionError, VectorError
from core.manifest import Chunking
from core.shards import complete_shards
from core.vectors import truncate_normalize
from core.versions import IndexFolder, read_manifest
from indexer.build import build, encode, up_to_date
from indexer.publication import verify_version
from stores.faiss.search import read_index
from tests.conftest import Builder, make_records, write_jsonl
from tests.encoders import BigramEncoder, make_spec
from tests.errors import raises
from tests.indexer.builds import (
    edit_manifest,
    open_files,
    state,
)
from tests.indexer.conftest import OptionsMaker

ROOT = Path(__file__).parents[2]


def found(folder: Path, text: str, k: int = 1) -> set[str]:
    """Returns the ids of the k nearest documents of a text."""
    _, rows = read_index(folder / "vectors.faiss").search(BigramEncoder().encode([text]).vectors, k)
    reader = DocumentReader(folder / "documents.arrow")
    return {stored.id for stored in reader.read(rows[0].tolist())}


def test_the_published_version_is_active_and_complete(published: Path, indexes: Path) -> None:
    assert IndexFolder(indexes, "test").active() == published.name
    assert IndexFolder(indexes, "test").versions() == [published.name]
    assert verify_version(published) == read_manifest(published)
    assert {path.name for path in published.iterdir()} == {
        "manifest.json",
        "manifest.sha256",
        "vectors.faiss",
        "documents.arrow",
        "filters.arrow",
        "lexical",
    }


def test_the_manifest_describes_the_index(published: Path) -> None:
    manifest = read_manifest(published)
    expected: dict[str, Any] = {
        "schema_version": 3,
        "name": "test",
        "version": published.name,
        "parent": None,
        "store": "faiss",
        "backend": "onnx",
        "dtype": "auto",
        "metric": "cosine",
        "factory": "Flat",
        "search_parameters": {},
        "count": 60,
        "filter_fields": {"department": 3, "rare": 2, "tags": 6},
        "recall": {
            "k": 10,
            "queries": 60,
            "source": "first sentences of documents",
            "target": 0.99,
            "recall": 1.0,
            "tried": {},
        },
    }
    assert manifest.model_dump(include=expected.keys()) == expected
    assert manifest.encoder == make_spec("document")
    assert set(manifest.files) == {"vectors.faiss", "documents.arrow", "filters.arrow"}
    corpus = manifest.corpus
    assert corpus.files == ["corpus.jsonl"]
    assert (corpus.documents, corpus.unique_texts, corpus.rejected) == (60, 60, 0)
    assert min(corpus.tokens, manifest.build_seconds) > 0
    assert len(manifest.canaries) == 16
    assert "faiss-cpu" in manifest.libraries


def test_document_row_i_has_vector_i(published: Path) -> None:
    for record in make_records(60):
        assert found(published, f"{record['title']}\n{record['text']}") == {record["_id"]}


def test_the_manifest_counts_documents_and_chunks(build_version: Builder, indexes: Path) -> None:
    records = [{"_id": f"d{i}", "text": f"第{i}篇说明。" * 2 * i} for i in range(1, 11)]
    chunking = Chunking(tokens=30, overlap=8)
    manifest = build_version(records, chunking=chunking)
    rows = list(DocumentReader(indexes / "test" / manifest.version / "documents.arrow"))
    assert manifest.chunking == chunking
    assert (manifest.corpus.documents, manifest.corpus.truncated) == (10, 0)
    assert manifest.count == manifest.corpus.chunks == len(rows) > 10
    assert len({row.parent for row in rows}) == 10
    assert max(len(row.text) for row in rows) <= 30
    for row in rows:
        assert row.id in found(indexes / "test" / manifest.version, row.text, k=len(rows))


def test_all_documents_with_the_same_text_are_found(build_version: Builder, indexes: Path) -> None:
    records = make_records(20)
    records.append(records[7] | {"_id": "copy"})
    manifest = build_version(records)
    assert (manifest.corpus.documents, manifest.corpus.unique_texts) == (21, 20)
    text = f"{records[7]['title']}\n{records[7]['text']}"
    assert found(indexes / "test" / manifest.version, text, k=2) == {"d0007", "copy"}


def test_an_index_can_have_one_document(build_version: Builder) -> None:
    manifest = build_version(make_records(1))
    assert (manifest.count, len(manifest.canaries), manifest.recall.recall) == (1, 1, 1)


@pytest.mark.parametrize("factory", ["HNSW32", "HNSW16,SQ8"])
def test_the_recall_report_of_hnsw_is_in_the_manifest(build_version: Builder, factory: str) -> None:
    manifest = build_version(make_records(400), factory=factory, recall=0.9)
    assert manifest.factory == factory
    chosen = f"efSearch={manifest.search_parameters['efSearch']}"
    assert list(manifest.recall.tried)[-1] == chosen
    assert manifest.recall.tried[chosen] == manifest.recall.recall >= 0.9
    assert (manifest.recall.target, manifest.recall.queries) == (0.9, 200)


def test_held_out_queries_can_be_read_from_a_file(build_version: Builder, tmp_path: Path) -> None:
    queries = write_jsonl(
        tmp_path / "queries.jsonl", [{"_id": i, "text": "咳嗽"} for i in range(3)]
    )
    manifest = build_version(make_records(20), queries=queries)
    assert manifest.recall.source.startswith("queries.jsonl")
    assert manifest.recall.queries == 3


@pytest.mark.parametrize(
    ("content", "code"),
    [("", "no_queries"), ('{"_id": 1, "text": "a"}\n{"_id": 2}\n', "bad_query")],
)
def test_invalid_queries_are_an_error_before_anything_is_encoded(
    options: OptionsMaker, tmp_path: Path, indexes: Path, content: str, code: str
) -> None:
    queries = tmp_path / "queries.jsonl"
    queries.write_text(content)
    encoder = BigramEncoder("document")
    with raises(CorpusError, code, path=queries):
        build(options(make_records(20), queries=queries), encoder, BigramEncoder("query"))
    assert encoder.texts_seen == 0
    assert IndexFolder(indexes, "test").versions() == []


class NanEncoder(BigramEncoder):
    def encode(self, texts: Sequence[str]) -> Encoding:
        encoding = super().encode(texts)
        encoding.vectors[["第7号" in text for text in texts]] = np.nan
        return encoding


class ShortEncoder(BigramEncoder):
    """A query encoder with fewer dimensions than the documents."""

    def __init__(self) -> None:
        super().__init__()
        self.spec = self.spec.model_copy(update={"dimension": 32})

    def encode(self, texts: Sequence[str]) -> Encoding:
        encoding = super().encode(texts)
        return replace(encoding, vectors=truncate_normalize(encoding.vectors, 32))


class Stranger(BigramEncoder):
    """A query encoder of another space that claims to be of the same."""

    def __init__(self) -> None:
        super().__init__(space="other-9", claims="bigrams-1")


@pytest.mark.parametrize(
    ("changes", "document", "query", "error", "code"),
    [
        ({"factory": "PQ8"}, None, None, CareError, "unsupported_factory"),
        ({"factory": "HNSW4", "recall": 0.99}, None, None, IndexVersionError, "recall_not_reached"),
        ({}, NanEncoder, None, VectorError, "not_unit_norm"),
        ({}, None, ShortEncoder, EmbeddingSpaceError, "dimension_mismatch"),
    ],
    ids=["factory", "recall", "nan", "dimensions"],
)
def test_a_failed_build_does_not_change_the_active_version(
    published: Path,
    indexes: Path,
    options: OptionsMaker,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    document: type[BigramEncoder] | None,
    query: type[BigramEncoder] | None,
    error: type[CareError],
    code: str,
) -> None:
    # With one visited link per query, the target cannot be reached.
    monkeypatch.setattr("stores.faiss.store._EF_SEARCH", (1,))
    before = state(indexes)
    encoders = (document or BigramEncoder)("document"), (query or BigramEncoder)()
    with raises(error, code):
        build(options(make_records(300), **changes), *encoders)
    assert state(indexes) == before
    verify_version(published)


CHUNKS, LAPPED = Chunking(tokens=25), Chunking(tokens=25, overlap=5)
PRECISE = {"backend": "transformers", "dtype": "float32"}


@pytest.mark.parametrize(
    ("built", "other"),
    [
        ({}, {"factory": "HNSW32"}),
        ({}, {"recall": 0.5}),
        ({}, {"chunking": CHUNKS}),
        ({"chunking": CHUNKS}, {"chunking": None}),
        ({"chunking": CHUNKS}, {"chunking": LAPPED}),
        (PRECISE, {"dtype": "bfloat16"}),
        (PRECISE, {"backend": "vllm"}),
    ],
)
def test_an_index_is_up_to_date_unless_corpus_encoder_or_options_change(
    options: OptionsMaker, built: dict[str, Any], other: dict[str, Any]
) -> None:
    spec = make_spec("document")
    settings = options(make_records(20), **built)
    assert up_to_date(settings, spec) is None
    manifest, _ = build(settings, BigramEncoder("document"), BigramEncoder("query"))
    assert up_to_date(settings, spec) == manifest
    assert up_to_date(replace(settings, **other), spec) is None
    assert up_to_date(settings, make_spec("document", "other-9")) is None
    assert up_to_date(options(make_records(21), **built), spec) is None


def test_an_index_with_other_held_out_queries_is_not_up_to_date(
    options: OptionsMaker, tmp_path: Path
) -> None:
    spec = make_spec("document")
    settings = options(make_records(20))
    build(settings, BigramEncoder("document"), BigramEncoder("query"))
    path = tmp_path / "queries.jsonl"
    asked = replace(settings, queries=path)
    for text in ("咳嗽", "头痛"):  # other queries in a file of the same name
        write_jsonl(path, [{"_id": "q", "text": text}])
        assert up_to_date(asked, spec) is None
        manifest, _ = build(asked, BigramEncoder("document"), BigramEncoder("query"))
        assert up_to_date(asked, spec) == manifest
    assert up_to_date(settings, spec) is None


def test_a_damaged_index_is_not_up_to_date(published: Path, options: OptionsMaker) -> None:
    edit_manifest(published, lambda manifest: manifest.update(count=61))
    assert up_to_date(options(make_records(60)), make_spec("document")) is None


@pytest.mark.parametrize("name", ["../escape", "a b", ""])
def test_an_invalid_name_is_an_error_before_anything_is_written(
    options: OptionsMaker, tmp_path: Path, name: str
) -> None:
    with raises(IndexVersionError, "bad_index_name"):
        encode(options(make_records(2), name=name), BigramEncoder("document"))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.jsonl"]


def test_missing_the_default_recall_is_a_warning(
    options: OptionsMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stores.faiss.store._EF_SEARCH", (1,))
    settings = options(make_records(300), factory="HNSW4")
    manifest, _ = build(settings, BigramEncoder("document"), BigramEncoder("query"))
    assert manifest.recall.recall < manifest.recall.target == 0.99
    assert manifest.search_parameters == {"efSearch": 1}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert up_to_date(settings, make_spec("document")) == manifest


def test_a_query_encoder_of_another_space_is_an_error_before_the_corpus_is_encoded(
    options: OptionsMaker, indexes: Path
) -> None:
    encoder = BigramEncoder("document")
    with raises(EmbeddingSpaceError, "canaries_not_found"):
        build(options(make_records(300)), encoder, Stranger())
    assert encoder.texts_seen == 16
    assert IndexFolder(indexes, "test").versions() == []


def test_vectors_of_a_build_are_reused_under_another_index_name(
    options: OptionsMaker, tmp_path: Path
) -> None:
    settings = options(make_records(40))
    first, _ = build(settings, BigramEncoder("document"), BigramEncoder("query"))
    encoder = BigramEncoder("document")
    second, encoded = build(replace(settings, name="other"), encoder, BigramEncoder("query"))
    assert encoder.texts_seen == 0
    assert (encoded.summary.new_texts, encoded.summary.resumed_texts) == (0, 40)
    assert second.files == first.files
    # Shards that are pruned for one index are kept for the other.
    shutil.rmtree(tmp_path / "builds" / "test")
    assert complete_shards(encoded.folder)[-1].shard == 2


def test_an_index_of_more_shards_than_a_process_may_open_is_built(build_version: Builder) -> None:
    with open_files(90):
        assert build_version(make_records(120), shard_size=1, factory="Flat").count == 120
