"""What `load_index` checks of a version beyond its files, whose damage `test_served_index` has."""

from collections.abc import Callable
from pathlib import Path

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


@pytest.fixture
def load(settings: Settings) -> Callable[..., object]:
    return lambda encoder=None: load_index(
        IndexFolder(settings.indexes, settings.index), encoder or BigramEncoder()
    )


def vectors(count: int, dimension: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        index = faiss.IndexFlatIP(dimension)
        index.add(np.ones((count, dimension), dtype=np.float32))
        faiss.write_index(index, str(path))

    return write


def one_document(path: Path) -> None:
    with DocumentWriter(path) as writer:
        writer.write(Document(id="a", text="a"))


def other_filters(path: Path) -> None:
    with FilterWriter(path) as writer:
        writer.add(0, {"ward": "a"})


@pytest.mark.parametrize(
    ("name", "write", "code"),
    [
        ("vectors.faiss", vectors(60, 8), "wrong_vectors"),
        ("vectors.faiss", vectors(59, DIMENSION), "wrong_vectors"),
        ("documents.arrow", one_document, "wrong_document_count"),
        ("filters.arrow", other_filters, "unreadable_filters"),
    ],
)
def test_a_file_of_another_index_with_a_valid_checksum_is_rejected(
    folder: Path, load: Callable[..., object], name: str, write: Callable[[Path], None], code: str
) -> None:
    path = folder / name
    write(path)
    record = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    edit_manifest(folder, lambda manifest: manifest["files"].update({name: record}))
    with raises(IndexVersionError, code) as caught:
        load()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("claims", "code"), [("", "embedding_space_mismatch"), ("bigrams-1", "canaries_not_found")]
)
def test_another_embedding_space_is_rejected_even_under_the_same_name(
    load: Callable[..., object], manifest: IndexManifest, claims: str, code: str
) -> None:
    with raises(EmbeddingSpaceError, code):
        load(BigramEncoder(space="other-9", claims=claims))


def test_a_version_in_milvus_is_not_looked_for_in_files(
    folder: Path, load: Callable[..., object]
) -> None:
    edit_manifest(folder, lambda manifest: manifest.update(store="milvus"))
    with pytest.raises(IndexVersionError) as caught:
        load()
    assert "CARE_STORE" in str(caught.value) and "CARE_MILVUS_URI" in str(caught.value)
