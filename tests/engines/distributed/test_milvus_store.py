"""Life cycle of versions in Milvus."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from care.cli.main import main
from core.analysis import terms
from core.errors import CareError, IndexVersionError
from core.versions import IndexFolder, read_manifest
from indexer.build import BuildOptions, build, up_to_date
from indexer.live.index import LiveIndex
from indexer.live.segment import file_record
from indexer.publication import IndexWriter, verify_version
from indexer.update import Changes, active_manifest, requested_factory, update
from indexer.versions import activate, prune, rollback
from search.snapshot import load_index
from stores.milvus.names import VERSIONS, collection_name, table_names
from stores.milvus.store import MilvusStore
from stores.registry import MilvusAddress, VectorStores
from tests.conftest import make_records, write_jsonl
from tests.encoders import DIMENSION, BigramEncoder, make_spec
from tests.engines.distributed.milvus_server import MilvusAt
from tests.errors import error_code, raises
from tests.indexer.builds import build_options, edit_manifest

ENCODERS = BigramEncoder("document"), BigramEncoder("query")


@pytest.fixture
def options(tmp_path: Path, milvus: MilvusAt) -> BuildOptions:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(60))
    return build_options(tmp_path, corpus, store="milvus", stores=milvus.stores)


def publish(options: BuildOptions) -> str:
    return build(options, *ENCODERS)[0].version


def folder_of(options: BuildOptions, version: str) -> Path:
    return options.index.path / version


def active(options: BuildOptions) -> str:
    """The version that services without files search."""
    return options.stores.get("milvus").active_version(options.index)


def collections(milvus: MilvusAt) -> set[str]:
    with milvus.client() as client:
        return set(client.list_collections()) - {VERSIONS}


def of_versions(*versions: str) -> set[str]:
    """The collections that versions have."""
    names = [collection_name("test", version) for version in versions]
    return {one for name in names for one in (name, *table_names(name))}


def test_a_version_is_in_collections(options: BuildOptions, milvus: MilvusAt) -> None:
    version = publish(options)
    folder = folder_of(options, version)
    manifest = verify_version(folder, milvus.stores)
    assert set(manifest.all_files) == {"vectors.milvus"}
    assert (manifest.store, manifest.factory, manifest.recall.recall) == ("milvus", "Flat", 1)
    assert "pymilvus" in manifest.libraries
    assert milvus.uri not in (folder / "manifest.json").read_text("utf-8")
    assert collections(milvus) == of_versions(version)
    assert active(options) == version
    assert up_to_date(options, make_spec("document")) == manifest
    assert (
        up_to_date(replace(options, store="faiss", stores=VectorStores()), make_spec("document"))
        is None
    )


def test_a_build_analyses_each_document_once(
    options: BuildOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def count(text: str) -> list[str]:
        seen.append(text)
        return terms(text)

    monkeypatch.setattr("stores.milvus.tables.terms", count)
    monkeypatch.setattr("stores.lexical.terms", None)  # full text in files
    publish(options)
    assert len(seen) == len(set(seen)) == 60


def test_stored_vectors_equal_those_of_the_encoder(options: BuildOptions) -> None:
    folder = folder_of(options, publish(options))
    records = make_records(60)
    rows = np.array([59, 0, 7, 7])
    texts = [f"{records[row]['title']}\n{records[row]['text']}" for row in rows]
    expected = BigramEncoder("document").encode(texts).vectors
    manifest = read_manifest(folder)
    vectors = options.stores.for_version(folder).open(folder, manifest)
    assert np.array_equal(vectors.take(rows), expected)


def test_the_beam_of_a_graph_is_chosen_by_recall(options: BuildOptions) -> None:
    wide = replace(options, factory="HNSW8", recall=0.95)
    write_jsonl(Path(options.corpus), make_records(1500))
    manifest, _ = build(wide, *ENCODERS)
    assert manifest.search_parameters["efSearch"] in (16, 32, 64, 128, 256, 512, 1024)
    assert manifest.recall.recall >= 0.95
    with raises(IndexVersionError, "recall_not_reached", target=1.1):
        build(replace(wide, recall=1.1), *ENCODERS)


def test_the_collections_of_a_pruned_version_are_dropped(
    options: BuildOptions, milvus: MilvusAt
) -> None:
    first, second, third = (publish(options) for _ in range(3))
    activate(options.index, second)
    assert prune(options.index, options.builds, keep=1) == [first]
    assert options.index.versions() == [second, third]
    assert collections(milvus) == of_versions(second, third)


def test_the_version_of_the_head_is_not_pruned(options: BuildOptions) -> None:
    first, second = publish(options), publish(options)
    options.stores.get("milvus").activate("test", folder_of(options, first))
    options.index.set_active(second)  # as before a kill between both
    assert prune(options.index, options.builds, keep=1) == []
    assert options.index.versions() == [first, second]


def test_without_an_address_nothing_is_changed(options: BuildOptions) -> None:
    first, second = publish(options), publish(options)
    index = IndexWriter(options.indexes, "test")
    for command in (
        lambda: rollback(index),
        lambda: activate(index, first),
        lambda: prune(index, options.builds, keep=0),
        lambda: verify_version(folder_of(options, first)),
    ):
        with raises(CareError, "milvus_address_missing"):
            command()
    assert options.index.versions() == [first, second]
    assert options.index.active() == second


def test_a_killed_build_keeps_the_head_and_is_removed_by_the_next_build(
    options: BuildOptions, milvus: MilvusAt, tmp_path: Path
) -> None:
    first = publish(options)
    write_jsonl(Path(options.corpus), make_records(61))
    command = [sys.executable, "-m", "tests.engines.distributed.killed_milvus_build", str(tmp_path)]
    assert subprocess.run([*command, milvus.uri], check=False).returncode == -9
    assert len(collections(milvus) - of_versions(first)) == 1
    assert active(options) == options.index.active() == first
    second = publish(options)
    assert collections(milvus) == of_versions(first, second)
    assert active(options) == second
    assert verify_version(folder_of(options, second), options.stores).count == 61
    assert not list(options.index.path.glob(".*.tmp"))


def test_prune_removes_a_killed_build(
    options: BuildOptions, milvus: MilvusAt, tmp_path: Path
) -> None:
    first = publish(options)
    command = [sys.executable, "-m", "tests.engines.distributed.killed_milvus_build", str(tmp_path)]
    assert subprocess.run([*command, milvus.uri], check=False).returncode == -9
    assert prune(options.index, options.builds, keep=1) == []
    assert collections(milvus) == of_versions(first)
    assert not list(options.index.path.glob(".*.tmp"))


def test_a_failed_build_leaves_no_collection(options: BuildOptions, milvus: MilvusAt) -> None:
    with raises(IndexVersionError, "recall_not_reached"):
        build(replace(options, factory="HNSW4", recall=1.5), *ENCODERS)
    assert collections(milvus) == set()
    assert options.index.versions() == []


def test_too_many_values_of_one_document_are_an_error(options: BuildOptions) -> None:
    (record,) = make_records(1)
    record["metadata"] = {f"codes{i}": list(range(820)) for i in range(5)}
    write_jsonl(Path(options.corpus), [record])
    with raises(CareError, "too_many_values", row=0, count=4100):
        publish(options)


@pytest.mark.parametrize("factory", [None, "HNSW8"])
def test_an_update_reuses_the_vectors_of_the_collection(
    options: BuildOptions, tmp_path: Path, factory: str | None
) -> None:
    build(replace(options, factory=factory, recall=0.5), *ENCODERS)
    shutil.rmtree(options.builds)
    records = make_records(61)
    records[3]["text"] = "改写过的一段文字。"
    add = write_jsonl(tmp_path / "new.jsonl", [records[3], records[60]])
    delete = tmp_path / "ids.txt"
    delete.write_text("d0005\n", encoding="utf-8")
    base = active_manifest(options.index)
    assert requested_factory(base) == factory
    options = replace(options, corpus="", factory=requested_factory(base), recall=0.5)
    encoder = BigramEncoder("document")
    updated = update(options, Changes(str(add), delete), base, encoder, BigramEncoder("query"))
    assert updated
    manifest, _ = updated
    assert encoder.texts_seen == 2
    assert (manifest.count, manifest.corpus.reused_texts) == (60, 58)
    assert verify_version(folder_of(options, manifest.version), options.stores) == manifest


def test_an_index_moves_between_the_stores_without_encoding(options: BuildOptions) -> None:
    files = replace(options, store="faiss", stores=VectorStores())
    first = publish(files)
    encoder = BigramEncoder("document")
    second = build(options, encoder, BigramEncoder("query"))[0].version
    assert encoder.texts_seen == 0
    assert rollback(options.index) == first
    assert active(options) == second
    options.index.set_active(first)
    assert prune(options.index, options.builds, keep=0) == []
    third = publish(files)
    assert prune(options.index, options.builds, keep=0) == [first]
    assert options.index.versions() == [second, third]


def test_a_changed_or_missing_collection_is_an_error(
    options: BuildOptions, milvus: MilvusAt
) -> None:
    version = publish(options)
    with milvus.client() as client:
        client.delete(collection_name("test", version), ids=[3])
        with raises(IndexVersionError, "wrong_vectors"):
            verify_version(folder_of(options, version), options.stores)
        rows = [{"row": row, "vector": [0.125] * 64, "labels": []} for row in range(60)]
        client.upsert(collection_name("test", version), rows)
        with raises(IndexVersionError, "foreign_vectors"):
            verify_version(folder_of(options, version), options.stores)
        client.drop_collection(collection_name("test", version))
    with raises(IndexVersionError, "vectors_missing"):
        verify_version(folder_of(options, version), options.stores)


def test_an_index_of_which_only_vectors_are_in_milvus_is_built_again(
    options: BuildOptions, milvus: MilvusAt
) -> None:
    """Release 0.1.0 wrote only vectors, and let an alias name the active collection."""
    old = publish(replace(options, store="faiss"))
    folder, collection = folder_of(options, old), collection_name("test", old)
    (folder / "vectors.faiss").rename(folder / "vectors.milvus")
    (folder / "vectors.milvus").write_text(f"{collection}\n")
    names = ("documents.arrow", "filters.arrow", "vectors.milvus")
    files = {name: file_record(folder / name).model_dump() for name in names}
    edit_manifest(folder, lambda manifest: manifest.update(store="milvus", files=files))
    with milvus.client() as client:
        client.create_collection(collection, dimension=DIMENSION)
        client.create_alias(collection, "care_test")
    for use in (
        lambda: load_index(options.index, BigramEncoder(), options.stores.get("milvus")),
        lambda: verify_version(folder, options.stores),
        lambda: active_manifest(options.index),
        lambda: LiveIndex(options.index, BigramEncoder("document")),
    ):
        with pytest.raises(IndexVersionError, match="care index --store milvus"):
            use()
    encoder = BigramEncoder("document")
    new = build(options, encoder, BigramEncoder())[0].version
    assert encoder.texts_seen == 0
    assert active(options) == new
    assert prune(options.index, options.builds, keep=0) == [old]
    assert collections(milvus) == of_versions(new)


def test_a_milvus_that_does_not_respond_is_an_error(options: BuildOptions) -> None:
    with raises(CareError, "store_unavailable", request="connect"):
        MilvusStore("http://127.0.0.1:1", "", 1)
    with raises(CareError, "store_unavailable", request="connect"):
        publish(replace(options, stores=VectorStores(MilvusAddress("nonsense"))))
    assert options.index.versions() == []


def test_the_commands(
    tmp_path: Path,
    milvus: MilvusAt,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus = write_jsonl(tmp_path / "corpus.jsonl", make_records(20))
    place = ["--index", "test", "--indexes", str(tmp_path / "indexes")]
    made = [*place, "--builds", str(tmp_path / "builds")]
    uri = ["--milvus-uri", milvus.uri]
    built = ["index", str(corpus), *made, "--store", "milvus", *uri]
    assert main(built) == 0
    assert "index   Flat in Milvus, 20 × 384" in capsys.readouterr().out
    assert main([*built, "--reuse"]) == 0
    assert "up to date" in capsys.readouterr().out
    add = write_jsonl(tmp_path / "new.jsonl", [make_records(21)[20]])
    assert main(["update", "--add", str(add), *made, *uri]) == 0
    assert "1 documents added, 0 replaced" in capsys.readouterr().out
    versions = IndexFolder(tmp_path / "indexes", "test").versions()
    folder = tmp_path / "indexes" / "test" / versions[1]
    assert read_manifest(folder).store == "milvus"
    assert json.loads((folder / "manifest.json").read_text("utf-8"))["count"] == 21
    assert main(["versions", "list", *place]) == 0
    assert capsys.readouterr().out.count("Flat in Milvus") == 2
    monkeypatch.setenv("CARE_MILVUS_URI", milvus.uri)
    for command, version in (("rollback", 0), ("activate", 1)):
        named = ["--version", versions[1]] if command == "activate" else []
        assert main(["versions", command, *place, *named]) == 0
        assert (tmp_path / "indexes" / "test" / "CURRENT").read_text().strip() == versions[version]
    assert main(["versions", "verify", *place]) == 0
    assert main(["versions", "prune", *place, "--keep", "1"]) == 0
    assert collections(milvus) == of_versions(versions[1])
    monkeypatch.delenv("CARE_MILVUS_URI")
    capsys.readouterr()
    assert main(["versions", "verify", *place]) == 1
    assert error_code(capsys.readouterr().err) == "milvus_address_missing"
