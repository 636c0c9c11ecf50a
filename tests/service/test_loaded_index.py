import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from core.documents import DocumentWriter
from core.errors import EmbeddingSpaceError, IndexVersionError
from core.files import sha256_file
from core.filters import FilterWriter
from core.types import Document, IndexManifest
from service.loaded_index import load_index
from service.settings import Settings
from tests.encoders import DIMENSION, BigramEncoder

FILES = ("documents.arrow", "filters.arrow", "vectors.faiss")


def change_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(manifest), encoding="utf-8")


def accept_file(folder: Path, name: str) -> None:
    """Writes the size and checksum that a file has now into the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    path = folder / name
    record = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    change_manifest(folder, files=manifest["files"] | {name: record})


def assert_refused(
    settings: Settings,
    message: str,
    error: type[IndexVersionError] = IndexVersionError,
    encoder: BigramEncoder | None = None,
) -> None:
    with pytest.raises(IndexVersionError, match=message) as caught:
        load_index(settings.indexes, settings.index, encoder or BigramEncoder())
    assert caught.type is error
    assert "\n" not in str(caught.value)


def test_a_sound_version_is_loaded(settings: Settings, manifest: IndexManifest) -> None:
    index = load_index(settings.indexes, "test", BigramEncoder())
    assert index.manifest == manifest
    assert len(index.documents) == 60
    assert index.filters.fields == {"department": 3, "rare": 2, "tags": 6}


def test_without_an_active_version_the_command_to_build_one_is_named(settings: Settings) -> None:
    assert_refused(settings, "index 'test' has no active version in .*make build-index")


@pytest.mark.parametrize(
    ("current", "message"),
    [
        ("20200101T000000Z-0", r"manifest\.json is missing: .* is no index version"),
        ("../../etc", "CURRENT does not name a version"),
        ("\x00\x01", "CURRENT does not name a version"),
        ("", "CURRENT does not name a version"),
    ],
)
def test_a_current_file_that_names_no_version_is_refused(
    settings: Settings, folder: Path, current: str, message: str
) -> None:
    (folder.parent / "CURRENT").write_text(current)
    assert_refused(settings, message)


def test_a_current_file_that_is_not_text_is_refused(settings: Settings, folder: Path) -> None:
    (folder.parent / "CURRENT").write_bytes(b"\xff\xfe")
    assert_refused(settings, "CURRENT does not name a version")


def test_a_folder_without_manifest_is_refused(settings: Settings, folder: Path) -> None:
    (folder / "manifest.json").unlink()
    assert_refused(settings, "is no index version")


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_broken_manifest_is_refused(settings: Settings, folder: Path, content: str) -> None:
    (folder / "manifest.json").write_text(content)
    assert_refused(settings, r"manifest\.json is not valid: the file")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "has schema version 2; this program reads 1: build the index"),
        ({"count": "many"}, r"manifest\.json is not valid: count"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(
    settings: Settings, folder: Path, changes: dict[str, Any], message: str
) -> None:
    change_manifest(folder, **changes)
    assert_refused(settings, message)


def delete(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "message"),
    [(delete, "is missing"), (truncate, r"has \d+ bytes instead of \d+"), (flip, "is corrupt")],
)
def test_a_damaged_file_is_named(
    settings: Settings, folder: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder / name)
    assert_refused(settings, rf"{name} {message}")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_something_else_is_refused(
    settings: Settings, folder: Path, name: str
) -> None:
    (folder / name).write_bytes(b"something else")
    accept_file(folder, name)
    assert_refused(settings, rf"{name} is not a readable (Arrow file|FAISS index)")


@pytest.mark.parametrize(("count", "dimension"), [(60, 8), (59, DIMENSION)])
def test_foreign_vectors_are_refused(
    settings: Settings, folder: Path, count: int, dimension: int
) -> None:
    index = faiss.IndexFlatIP(dimension)
    index.add(np.ones((count, dimension), dtype=np.float32))
    faiss.write_index(index, str(folder / "vectors.faiss"))
    accept_file(folder, "vectors.faiss")
    assert_refused(
        settings, rf"holds {count} × {dimension} vectors; the manifest says 60 × {DIMENSION}"
    )


def test_foreign_documents_are_refused(settings: Settings, folder: Path) -> None:
    with DocumentWriter(folder / "documents.arrow") as writer:
        writer.write(Document(id="a", text="a"))
    accept_file(folder, "documents.arrow")
    assert_refused(settings, "holds 1 documents; the manifest counts 60")


def test_foreign_filters_are_refused(settings: Settings, folder: Path) -> None:
    with FilterWriter(folder / "filters.arrow") as writer:
        writer.add(0, {"ward": "a"})
    accept_file(folder, "filters.arrow")
    assert_refused(settings, "does not hold the values that the manifest counts")


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (
            BigramEncoder(space="other-9"),
            "index 'test' is of the embedding space 'bigrams-1', the query encoder of 'other-9'",
        ),
        (
            BigramEncoder(space="other-9", claims="bigrams-1"),
            "canaries are found by the query encoder bigrams: it does not share",
        ),
    ],
)
def test_another_embedding_space_is_refused_whatever_its_name(
    settings: Settings, manifest: IndexManifest, encoder: BigramEncoder, message: str
) -> None:
    assert_refused(settings, message, EmbeddingSpaceError, encoder)
