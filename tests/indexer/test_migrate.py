"""Stored versions of the previous schema, as release 0.1.0 wrote them, remain readable."""

import shutil
from pathlib import Path

import pytest

from core.manifest import OLDEST_SCHEMA_VERSION, SCHEMA_VERSION
from core.types import Query
from core.versions import (
    IndexFolder,
    has_checksum,
    read_manifest,
    schema_of,
)
from indexer.publication import IndexWriter, verify_version
from indexer.update import Changes, active_manifest, update
from indexer.versions import migrate
from search.snapshot import load_index
from search.task import SearchTask
from tests.conftest import make_records, write_jsonl
from tests.encoders import BigramEncoder
from tests.indexer.builds import build_options

DATA = Path(__file__).parents[1] / "data"
SCHEMAS = range(OLDEST_SCHEMA_VERSION, SCHEMA_VERSION)


@pytest.fixture(params=SCHEMAS)
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of indexes with index 'test': one version with 12 documents."""
    shutil.copytree(DATA / f"index-schema-{request.param}", tmp_path / "indexes")
    return tmp_path / "indexes"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def folder_of(index: Path) -> Path:
    return index / "test" / IndexFolder(index, "test").active()


def test_a_version_of_each_schema_is_verified_searched_and_updated(
    index: Path, tmp_path: Path
) -> None:
    manifest = verify_version(folder_of(index))
    assert (manifest.count, manifest.store, manifest.parent) == (12, "faiss", None)
    snapshot = load_index(IndexFolder(index, "test"), BigramEncoder())
    record = make_records(12)[7]
    vector = BigramEncoder().encode([f"{record['title']}\n{record['text']}"]).vectors[0]
    task = SearchTask(snapshot=snapshot, query=Query("", top_k=1), vector=vector)
    assert task.search().hits[0].id == "d0007"
    add = write_jsonl(tmp_path / "new.jsonl", make_records(13)[12:])
    encoder = BigramEncoder("document")
    updated = update(
        build_options(tmp_path, Path("unread")),
        Changes(str(add)),
        active_manifest(IndexWriter(index, "test")),
        encoder,
        BigramEncoder("query"),
    )
    assert updated
    assert (updated[0].count, updated[0].parent, encoder.texts_seen) == (13, manifest.version, 1)


def test_migration_writes_only_the_manifest_and_its_checksum(index: Path) -> None:
    folder = folder_of(index)
    before = read_manifest(folder)
    files = contents(folder)
    assert migrate(IndexWriter(index, "test")) == [folder.name]
    assert schema_of(folder) == SCHEMA_VERSION
    after = verify_version(folder)
    assert after == before
    assert after.identity == before.identity  # entries of caches stay valid
    assert has_checksum(folder)
    changed = {path.name for path, _ in contents(folder).items() ^ files.items()}
    assert changed == {"manifest.json", "manifest.sha256"}
    assert IndexFolder(index, "test").versions() == [folder.name]
    assert migrate(IndexWriter(index, "test")) == []
