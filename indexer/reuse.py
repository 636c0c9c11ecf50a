"""Vectors that an index version holds already, found by the checksum of their texts."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core import documents
from core.canaries import canary_vectors
from core.documents import DocumentReader
from core.errors import IndexVersionError
from core.files import sha256_file
from core.shards import ShardedVectors, whole_shards
from core.text import document_text
from core.types import FloatArray, IndexManifest, RowArray
from indexer.digests import DIGEST, digest
from indexer.refusals import layouts
from indexer.staging import vector_of_row
from indexer.stores import MilvusAddress, open_vectors

# Other types keep approximations, or know no vector by its row.
_EXACT = re.compile(r"Flat|HNSW\d+(,Flat)?")

_Take = Callable[[RowArray], FloatArray]


class KnownVectors:
    """Finds vectors by text; what is kept is a checksum and a row for each text.

    Args:
        texts: The text of each row, after the text rules.
        take: Returns the vectors of rows, float32 [rows, dimension].
    """

    def __init__(self, texts: Iterable[str], take: _Take) -> None:
        digests = np.fromiter(map(digest, texts), DIGEST)
        self._digests, self._rows = np.unique(digests, return_index=True)
        self._take = take

    def __call__(self, texts: Sequence[str]) -> tuple[NDArray[np.bool_], FloatArray]:
        """Returns bool [n], which texts are known, and float32 [known, dimension]."""
        digests = np.fromiter(map(digest, texts), DIGEST)
        at = np.searchsorted(self._digests, digests)
        at[at == len(self._digests)] = 0
        known: NDArray[np.bool_] = self._digests[at] == digests
        return known, self._take(self._rows[at[known]])


def known_vectors(
    folder: Path, manifest: IndexManifest, builds: Path, milvus: MilvusAddress | None = None
) -> KnownVectors:
    """Returns the vectors of a version: from its index or, if that is lossy, from its build.

    Args:
        folder: The version.
        manifest: Its manifest.
        builds: The build folders of its index.
        milvus: Where Milvus is, if the vectors are kept there.

    Raises:
        IndexVersionError: If they are gone, or its texts would be written otherwise today.
    """
    reader = DocumentReader(folder / documents.FILE_NAME)
    take = _index_vectors(folder, manifest, milvus) or _build_vectors(manifest, builds)
    if not take:
        raise IndexVersionError(
            f"the vectors of {manifest.version} are gone: {manifest.factory} does not give them "
            f"back and its shards are not in {builds}: build the index from its whole corpus, "
            "or encode all its documents again (--encode-all)"
        )
    texts = (document_text(document.title, document.text) for document in reader)
    vectors = KnownVectors(texts, take)
    known, found = vectors([canary.text for canary in manifest.canaries])
    if not known.all() or not np.array_equal(found, canary_vectors(manifest.canaries)):
        raise IndexVersionError(
            f"the texts of {manifest.version} are not those that its vectors were made from; the "
            "text rules have changed: encode all its documents again (--encode-all)"
        )
    return vectors


def _index_vectors(
    folder: Path, manifest: IndexManifest, milvus: MilvusAddress | None
) -> _Take | None:
    return open_vectors(folder, milvus).take if _EXACT.fullmatch(manifest.factory) else None


def _build_vectors(manifest: IndexManifest, builds: Path) -> _Take | None:
    # A version's id ends with the first digits of its build's key.
    for folder in builds.glob(f"{manifest.version.rpartition('-')[2]}*/"):
        for layout in layouts(folder):
            path = layout / documents.FILE_NAME
            if not path.is_file() or sha256_file(path) != manifest.files[path.name].sha256:
                continue
            vector_of = vector_of_row(layout)
            shards = whole_shards(folder)
            if sum(shard.rows for shard in shards) > vector_of.max():
                return ShardedVectors(folder, shards[0].rows, vector_of).take
    return None
