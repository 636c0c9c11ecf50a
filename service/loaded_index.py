"""An index version, opened, checked and ready to be searched."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from core import documents, filters
from core.canaries import check_canaries
from core.documents import DocumentReader
from core.errors import EmbeddingSpaceError, IndexVersionError
from core.filters import FilterReader
from core.types import Encoder, Hit, IndexManifest
from core.versions import index_folder, read_manifest, verify_files
from service.stores import FaissFiles, VectorSearch, VectorStore
from service.vector_search import Found


@dataclass(frozen=True, slots=True)
class LoadedIndex:
    """All that a search reads; released when the last request that uses it ends.

    Attributes:
        identity: A checksum that no other index version has, whatever its name.
    """

    identity: str
    manifest: IndexManifest
    documents: DocumentReader
    filters: FilterReader
    vectors: VectorSearch

    def hits(self, found: Found) -> list[Hit]:
        """Fetches the documents of found rows; equal scores are ordered by descending id."""
        pairs = [
            (float(score), self.documents[int(row)]) for score, row in zip(*found, strict=True)
        ]
        pairs.sort(key=lambda pair: (pair[0], pair[1].id), reverse=True)
        return [
            Hit(d.id, score, rank, d.title, d.text, d.metadata, d.parent, d.chunk, d.chunks)
            for rank, (score, d) in enumerate(pairs, start=1)
        ]


def load_index(
    root: Path, name: str, encoder: Encoder, store: VectorStore | None = None
) -> LoadedIndex:
    """Opens the active version of an index and checks all of it.

    Raises:
        EmbeddingSpaceError: If the index is of another space than the query encoder.
        IndexVersionError: If there is no active version or anything about it is wrong.
    """
    store = store or FaissFiles()
    folder = index_folder(root, name) / store.active_version(root, name)
    manifest = read_manifest(folder)
    spec, ours = manifest.encoder, encoder.spec
    if spec.embedding_space != ours.embedding_space:
        raise EmbeddingSpaceError(
            f"index '{name}' is of the embedding space '{spec.embedding_space}', the query encoder "
            f"of '{ours.embedding_space}': set CARE_PAIR to the pair that the index was built with"
        )
    with ThreadPoolExecutor(1) as pool:
        verified = pool.submit(verify_files, folder, manifest)
        try:
            check_canaries(encoder, manifest.canaries)
        finally:
            verified.result()
    reader = DocumentReader(folder / documents.FILE_NAME)
    if len(reader) != manifest.count:
        raise IndexVersionError(
            f"{folder} holds {len(reader)} documents; the manifest counts {manifest.count}"
        )
    filter_reader = FilterReader(folder / filters.FILE_NAME, manifest.filter_fields)
    vectors = store.open(folder, manifest, filter_reader)
    return LoadedIndex(
        identity=_identity(manifest),
        manifest=manifest,
        documents=reader,
        filters=filter_reader,
        vectors=vectors,
    )


def _identity(manifest: IndexManifest) -> str:
    files = sorted((name, record.sha256) for name, record in manifest.files.items())
    return hashlib.sha256(json.dumps([manifest.name, manifest.version, files]).encode()).hexdigest()
