from pathlib import Path

from core import documents, filters
from core.canaries import MIN_FOUND, canary_vectors
from core.documents import DocumentReader
from core.errors import IndexVersionError
from core.filters import FilterReader
from core.types import IndexManifest
from core.versions import VECTORS, read_manifest, verify_files
from indexer.faiss_index import read_index
from indexer.faiss_search import best_scores

# SQ8 storage returns a canary with a cosine of about .9999 to itself.
_MIN_CANARY_SCORE = 0.99


def verify_version(folder: Path) -> IndexManifest:
    """Checks a version through and through: files, counts, dimensions, canaries.

    Raises:
        IndexVersionError: At the first thing that is wrong.
    """
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    reader = DocumentReader(folder / documents.FILE_NAME)
    FilterReader(folder / filters.FILE_NAME, manifest.filter_fields)
    index = read_index(folder / VECTORS)
    if not index.ntotal == len(reader) == manifest.count:
        raise IndexVersionError(
            f"{folder} holds {index.ntotal} vectors and {len(reader)} documents; "
            f"the manifest counts {manifest.count}"
        )
    if index.d != manifest.encoder.dimension:
        raise IndexVersionError(
            f"{folder} has {index.d} dimensions instead of {manifest.encoder.dimension}"
        )
    canaries = canary_vectors(manifest.canaries)
    if canaries.shape[1] != index.d:
        raise IndexVersionError(
            f"{folder}: its canaries have {canaries.shape[1]} dimensions instead of {index.d}"
        )
    # An approximate index may miss a vector that it holds.
    found = float((best_scores(index, canaries) >= _MIN_CANARY_SCORE).mean())
    if found < MIN_FOUND:
        raise IndexVersionError(f"{folder}: its canaries are not among its vectors")
    return manifest
