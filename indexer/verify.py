from pathlib import Path

from core import documents, filters
from core.canaries import MIN_FOUND, canary_vectors
from core.documents import DocumentReader
from core.errors import IndexVersionError
from core.filters import FilterReader
from core.types import IndexManifest
from core.versions import read_manifest, verify_files
from indexer.stores import MilvusAddress, open_vectors

# SQ8 storage returns a canary with a cosine of about .9999 to itself.
_MIN_CANARY_SCORE = 0.99


def verify_version(folder: Path, milvus: MilvusAddress | None = None) -> IndexManifest:
    """Checks a version through and through: files, counts, dimensions, canaries.

    Raises:
        CareError: If its vectors are in Milvus, which cannot be asked.
        IndexVersionError: At the first thing that is wrong.
    """
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    reader = DocumentReader(folder / documents.FILE_NAME)
    FilterReader(folder / filters.FILE_NAME, manifest.filter_fields)
    vectors = open_vectors(folder, milvus)
    count, dimension = vectors.count, vectors.dimension
    if not count == len(reader) == manifest.count:
        raise IndexVersionError(
            f"{folder} holds {count} vectors and {len(reader)} documents; "
            f"the manifest counts {manifest.count}"
        )
    if dimension != manifest.encoder.dimension:
        raise IndexVersionError(
            f"{folder} has {dimension} dimensions instead of {manifest.encoder.dimension}"
        )
    canaries = canary_vectors(manifest.canaries)
    if canaries.shape[1] != dimension:
        raise IndexVersionError(
            f"{folder}: its canaries have {canaries.shape[1]} dimensions instead of {dimension}"
        )
    # An approximate index may miss a vector that it holds.
    found = float((vectors.best_scores(canaries) >= _MIN_CANARY_SCORE).mean())
    if found < MIN_FOUND:
        raise IndexVersionError(f"{folder}: its canaries are not among its vectors")
    return manifest
