import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from core.documents import DocumentWriter
from core.errors import EmbeddingSpaceError, IndexVersionError
from core.files import sha256_file
from core.filters import FilterWriter
from core.manifest import IndexManifest
from core.types import Document
from core.versions import IndexFolder
from search.snapshot import load_index
from service.settings import Settings
from tests.encoders import DIMENSION, BigramEncoder
from tests.errors import raises
from tests.indexer.builds import edit_manifest


def change_manifest(folder: Path, **changes: Any) -> None:
    edit_manifest(folder, lambda manifest: manifest.update(changes))


def accept_file(folder: Path, name: str) -> None:
    """Updates size and checksum of a file in the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    path = folder / name
    record = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    change_manifest(folder, files=manifest["files"] | {name: record})


def assert_refused(
    settings: Settings,
    *named: object,
    error: type[IndexVersionError] = IndexVersionError,
    encoder: BigramEncoder | None = None,
) -> None:
    """The version is not loaded; the message is one line and contains these names."""
    with pytest.raises(IndexVersionError) as caught:
        load_index(IndexFolder(settings.indexes, settings.index), encoder or BigramEncoder())
    assert caught.type is error
    message = str(caught.value)
    assert "\n" not in message
    assert [name for name in named if str(name) not in message] == []


def test_a_valid_version_is_loaded(settings: Settings, manifest: IndexManifest) -> None:
    index = load_index(IndexFolder(settings.indexes, "test"), BigramEncoder())
    assert index.manifest == manifest
    assert len(index.segment.documents) == 60
    assert index.segment.filters.fields == {"department": 3, "rare": 2, "tags": 6}


def test_an_index_without_an_active_version_is_rejected(settings: Settings) -> None:
    with raises(IndexVersionError, "no_active_version", index="test"):
        load_index(IndexFolder(settings.indexes, settings.index), BigramEncoder())


@pytest.mark.parametrize(
    ("current", "named"),
    [
        (b"20200101T000000Z-0", "manifest.json"),
        (b"../../etc", "CURRENT"),
        (b"\x00\x01", "CURRENT"),
        (b"", "CURRENT"),
        (b"\xff\xfe", "CURRENT"),
    ],
)
def test_a_current_file_that_names_no_version_is_rejected(
    settings: Settings, folder: Path, current: bytes, named: str
) -> None:
    (folder.parent / "CURRENT").write_bytes(current)
    assert_refused(settings, named)


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_manifest_is_rejected(settings: Settings, folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    assert_refused(settings, "manifest.json")


@pytest.mark.parametrize(
    ("changes", "named"), [({"schema_version": 99}, "99"), ({"count": "many"}, "count")]
)
def test_a_manifest_of_another_schema_is_rejected(
    settings: Settings, folder: Path, changes: dict[str, Any], named: str
) -> None:
    change_manifest(folder, **changes)
    assert_refused(settings, "manifest.json", named)


@pytest.mark.parametrize(("count", "dimension"), [(60, 8), (59, DIMENSION)])
def test_vectors_of_another_index_are_rejected(
    settings: Settings, folder: Path, count: int, dimension: int
) -> None:
    index = faiss.IndexFlatIP(dimension)
    index.add(np.ones((count, dimension), dtype=np.float32))
    faiss.write_index(index, str(folder / "vectors.faiss"))
    accept_file(folder, "vectors.faiss")
    assert_refused(settings, "vectors.faiss", count, dimension, 60, DIMENSION)


def test_documents_of_another_index_are_rejected(settings: Settings, folder: Path) -> None:
    with DocumentWriter(folder / "documents.arrow") as writer:
        writer.write(Document(id="a", text="a"))
    accept_file(folder, "documents.arrow")
    with raises(IndexVersionError, "wrong_document_count", documents=1, expected=60):
        load_index(IndexFolder(settings.indexes, settings.index), BigramEncoder())


def test_filters_of_another_index_are_rejected(settings: Settings, folder: Path) -> None:
    with FilterWriter(folder / "filters.arrow") as writer:
        writer.add(0, {"ward": "a"})
    accept_file(folder, "filters.arrow")
    assert_refused(settings, folder / "filters.arrow")


@pytest.mark.parametrize("claims", ["", "bigrams-1"])
def test_another_embedding_space_is_rejected_even_under_the_same_name(
    settings: Settings, manifest: IndexManifest, claims: str
) -> None:
    encoder = BigramEncoder(space="other-9", claims=claims)
    named = ["'test'", "bigrams-1", "other-9", "CARE_PAIR"] if not claims else ["bigrams"]
    assert_refused(settings, *named, error=EmbeddingSpaceError, encoder=encoder)


def test_a_version_in_milvus_is_not_looked_for_in_files(
    settings: Settings, folder: Path, manifest: IndexManifest
) -> None:
    (folder / "vectors.milvus").write_text("care_test__1\n", encoding="ascii")
    assert_refused(settings, "CARE_STORE", "CARE_MILVUS_URI")
