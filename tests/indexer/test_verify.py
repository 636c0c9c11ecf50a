import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.canaries import make_canaries
from core.errors import IndexVersionError
from core.files import sha256_file
from core.types import FloatArray
from core.versions import read_manifest
from indexer.publication import verify_version
from stores.faiss.search import FaissVectors
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.indexer.builds import edit_manifest


def adopt(folder: Path, foreign: Path, name: str) -> None:
    """Replaces a file by that of another index and corrects its record in the manifest."""
    path = folder / name
    shutil.copyfile(foreign / name, path)
    record = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    edit_manifest(folder, lambda manifest: manifest["files"].update({name: record}))


def test_a_link_beside_the_files_of_a_version_is_an_error(published: Path) -> None:
    path = published / "other"
    path.symlink_to("vectors.faiss")
    with raises(IndexVersionError, "linked_file", path=path):
        verify_version(published)


@pytest.mark.parametrize("field", ["files", "name", "version", "parent"])
def test_a_path_in_place_of_a_name_is_an_error(published: Path, field: str) -> None:
    for name in ("../secret", "a/b", "/etc/passwd", "..", ".", "", "a\n", ".x", "a/../b"):
        value: Any = {name: {"bytes": 0, "sha256": ""}} if field == "files" else name
        edit_manifest(published, lambda manifest: manifest.update({field: value}))  # noqa: B023
        with raises(IndexVersionError, "invalid_manifest"):
            read_manifest(published)


def canaries(vectors: FloatArray) -> dict[str, Any]:
    texts = ["a"] * len(vectors)
    return {"canaries": [canary.model_dump() for canary in make_canaries(texts, vectors)]}


OTHER_SPACE = BigramEncoder(space="other-9").encode(["甲", "乙"]).vectors


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param({"schema_version": 99}, "unsupported_schema", id="schema"),
        pytest.param({"count": 61}, "wrong_document_count", id="count"),
        pytest.param({"filter_fields": {"department": 3}}, "unreadable_filters", id="fields"),
        pytest.param(canaries(OTHER_SPACE), "foreign_vectors", id="canaries of another space"),
        pytest.param(canaries(OTHER_SPACE[:, :32]), "bad_canaries", id="dimension of canaries"),
    ],
)
def test_a_manifest_of_another_index_is_an_error(
    published: Path, change: dict[str, Any], code: str
) -> None:
    edit_manifest(published, lambda manifest: manifest.update(change))
    with raises(IndexVersionError, code):
        verify_version(published)


@pytest.fixture
def foreign(build_version: Builder, published: Path, indexes: Path) -> Callable[..., Path]:
    """Builds another version and returns its folder."""

    def make(count: int, **options: Any) -> Path:
        return indexes / "test" / build_version(make_records(count), **options).version

    return make


def test_vectors_of_another_index_with_valid_checksums_are_an_error(
    published: Path, foreign: Callable[..., Path]
) -> None:
    adopt(published, foreign(60, space="other-9"), "vectors.faiss")
    with raises(IndexVersionError, "foreign_vectors", path=published / "vectors.faiss"):
        verify_version(published)


def test_a_version_is_opened_without_a_search_for_tied_rows(
    published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each canary whose text is repeated takes a search of all vectors."""
    monkeypatch.setattr(FaissVectors, "search", None)
    verify_version(published)


@pytest.mark.parametrize("factory", ["Flat", "HNSW32", "HNSW4", "HNSW32,SQ8", "HNSW32,SQfp16"])
def test_an_intact_version_of_any_kind_passes(foreign: Callable[..., Path], factory: str) -> None:
    assert verify_version(foreign(300, factory=factory, recall=0.5)).factory == factory
