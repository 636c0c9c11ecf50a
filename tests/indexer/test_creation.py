"""Indexes that are created without documents, and deleted."""

import threading
from pathlib import Path
from typing import Any

import pytest

from core.errors import CareError, CorpusError, IndexVersionError
from core.files import sync
from core.manifest import FULL_TEXT, TERMS, Chunking, IndexManifest
from core.terms import TermList
from core.versions import IndexFolder, list_indexes, read_manifest
from core.writes import Write, Written
from indexer.live.creation import create_index, delete_index
from indexer.live.index import LiveIndex
from indexer.publication import IndexWriter, verify_version
from indexer.update import active_manifest, merge
from indexer.versions import prune
from search.snapshot import load_index
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.indexer.builds import build_options

ENCODER = BigramEncoder("document")


@pytest.fixture
def like(build_version: Builder) -> IndexManifest:
    return build_version(make_records(20))


@pytest.fixture
def new(indexes: Path) -> IndexWriter:
    return IndexWriter(indexes, "new")


def put(index: IndexWriter, *records: dict[str, Any]) -> Written:
    (written,) = LiveIndex(index, ENCODER).commit([Write(index.name, put=records)])
    assert isinstance(written, Written)
    return written


def ids(index: IndexFolder) -> list[str]:
    return [document.id for document in load_index(index, BigramEncoder()).segment.documents]


def test_an_index_without_documents_is_whole_and_takes_writes(
    like: IndexManifest, new: IndexWriter
) -> None:
    manifest, created = create_index(new, like, ENCODER, ["department"])
    assert created
    verified = verify_version(new.version(new.active()))
    assert verified == manifest == read_manifest(new.version(manifest.version))
    assert (manifest.count, manifest.corpus.documents, manifest.number) == (0, 0, 1)
    assert manifest.filter_fields == {"department": 0}
    assert manifest.encoder == like.encoder
    assert FULL_TEXT in manifest.components
    assert ids(new) == []
    assert put(new, *make_records(3)).added == 3
    assert ids(new) == ["d0000", "d0001", "d0002"]
    assert prune(new, new.root, keep=0) == [manifest.version]
    assert ids(new) == ["d0000", "d0001", "d0002"]
    encoders = ENCODER, BigramEncoder()
    options = build_options(new.root.parent, new.root, name="new")
    merged = merge(options, read_manifest(new.version(new.active())), *encoders)
    assert merged and not merged.segments
    assert ids(new) == ["d0000", "d0001", "d0002"]


def test_a_field_without_documents_can_be_in_filters_after_a_merge_too(
    like: IndexManifest, new: IndexWriter
) -> None:
    create_index(new, like, ENCODER, ["colour", "size"])
    put(new, *make_records(3))
    options = build_options(new.root.parent, new.root, name="new")
    merge(options, active_manifest(new), ENCODER, BigramEncoder())
    for _ in range(2):
        filters = load_index(new, BigramEncoder()).segment.filters
        for asked in ({"colour": "red"}, {"size": {"gte": 3}}):
            assert filters.rows(filters.check(asked)).tolist() == []
        assert not filters.frequent_values().keys() & {"colour", "size"}
        put(new, *make_records(4))
    put(new, {"_id": "red", "text": "红", "metadata": {"colour": "red", "size": 4}})
    filters = load_index(new, BigramEncoder()).segment.filters
    for asked in ({"colour": "red"}, {"size": {"gte": 3}}):
        assert len(filters.rows(filters.check(asked))) == 1


def test_queries_are_expanded_as_in_the_other_index(
    build_version: Builder, new: IndexWriter
) -> None:
    words = TermList({"拉肚子": ("腹泻",), "心口": ("胃脘",)})
    own = {"_id": "own", "text": "心口不适"}  # uses the second word as patients do
    like = build_version([*make_records(20), own], terms=words)
    create_index(new, like, ENCODER)
    put(new, {"_id": "a", "text": "腹泻"}, {"_id": "b", "text": "胃脘"})
    copy = IndexWriter(new.root, "copy")  # of one with segments
    create_index(copy, active_manifest(new), ENCODER)
    put(copy, {"_id": "a", "text": "腹泻"}, {"_id": "b", "text": "胃脘"})
    for index in (new, copy):
        manifest = verify_version(index.version(index.active()))
        assert manifest.components[TERMS] == like.components[TERMS]
        text = load_index(index, BigramEncoder()).segment.full_text
        assert text
        assert [len(text.search(query, 5)[1]) for query in words.terms] == [1, 0]
    (new.version(active_manifest(new).base) / TERMS / "used.tsv").write_text("x")
    with raises(IndexVersionError, "wrong_size"):
        create_index(IndexWriter(new.root, "other"), active_manifest(new), ENCODER)
    assert list_indexes(new.root) == ["copy", "new", "test"]


def test_settings_are_those_of_the_other_index(build_version: Builder, new: IndexWriter) -> None:
    chunking = Chunking(tokens=30, overlap=5)
    like = build_version(make_records(20), full_text=False, chunking=chunking)
    manifest, _ = create_index(new, like, ENCODER)
    assert (manifest.chunking, manifest.components) == (chunking, {})
    put(new, {"_id": "long", "text": "高血压患者要少吃盐。" * 20})
    assert len(ids(new)) > 1
    put(new, {"_id": "long", "text": "短"})
    assert ids(new) == ["long"]


def test_an_equal_index_is_left_as_it_is(like: IndexManifest, new: IndexWriter) -> None:
    create_index(new, like, ENCODER, ["year"])
    put(new, *make_records(2))
    for fields in ([], ["department"], ["year", "rare"]):
        manifest, created = create_index(new, like, ENCODER, fields)
        assert (created, manifest.version) == (False, new.active())
    other = like.model_copy(update={"components": {}})
    for wanted, fields in ((other, []), (like, ["unknown"])):
        with raises(IndexVersionError, "index_exists", index="new"):
            create_index(new, wanted, ENCODER, fields)
    with raises(IndexVersionError, "index_exists"):
        create_index(new, like, BigramEncoder("document", "another"))
    assert len(ids(new)) == 2


@pytest.mark.parametrize("fields", [["a" * 2000], [f"f{i}" for i in range(2000)]])
def test_a_field_that_no_document_can_have_is_refused(
    like: IndexManifest, new: IndexWriter, fields: list[str]
) -> None:
    with raises(CorpusError, "invalid_record"):
        create_index(new, like, ENCODER, fields)
    assert not new.path.exists()


def test_of_several_that_create_an_index_one_does(
    like: IndexManifest, new: IndexWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.publication.BUILD_WAIT", 30.0)  # a busy machine takes long
    made: list[bool] = []

    def create() -> None:
        made.append(create_index(new, like, ENCODER)[1])

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [False, False, False, True]


def test_a_deleted_index_is_gone_and_readers_keep_it(like: IndexManifest, new: IndexWriter) -> None:
    create_index(new, like, ENCODER)
    put(new, *make_records(3))
    snapshot = load_index(new, BigramEncoder())
    assert delete_index(new) == 3
    assert list_indexes(new.root) == ["test"]
    assert [path.name for path in new.root.iterdir()] == ["test"]
    assert [one.id for one in snapshot.segment.documents] == ["d0000", "d0001", "d0002"]
    with raises(IndexVersionError, "no_active_version"):
        delete_index(new)
    assert not new.path.exists()
    assert create_index(new, like, ENCODER)[1]
    assert ids(new) == []


def test_an_index_with_a_version_in_milvus_is_not_deleted_without_its_address(
    like: IndexManifest, new: IndexWriter
) -> None:
    create_index(new, like, ENCODER)
    (new.path / "old").mkdir()
    (new.path / "old" / "vectors.milvus").write_text("care_new__old")
    with raises(CareError, "milvus_address_missing"):
        delete_index(new)
    assert ids(new) == []


def test_a_damaged_index_is_deleted(like: IndexManifest, new: IndexWriter) -> None:
    manifest, _ = create_index(new, like, ENCODER)
    (new.version(manifest.version) / "manifest.json").write_text("{")
    assert delete_index(new) is None
    assert not new.path.exists()


def test_what_a_killed_deletion_left_is_removed_by_the_next(
    like: IndexManifest, new: IndexWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        if path == new.root:
            raise KeyboardInterrupt
        sync(path)

    create_index(new, like, ENCODER)
    with monkeypatch.context() as patched:
        patched.setattr("indexer.live.creation.sync", fail)
        with pytest.raises(KeyboardInterrupt):
            delete_index(new)
    assert list_indexes(new.root) == ["test"]
    assert len(list(new.root.iterdir())) == 2
    create_index(new, like, ENCODER)
    delete_index(new)
    assert [path.name for path in new.root.iterdir()] == ["test"]
