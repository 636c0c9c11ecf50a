"""Vectors that an index version holds already, found by the checksum of their texts."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core import documents, filters
from core.canaries import canary_vectors
from core.documents import DocumentReader
from core.errors import IndexVersionError
from core.filters import FilterReader
from core.manifest import IndexManifest
from core.shards import ShardedVectors, whole_shards
from core.types import FloatArray, RowArray
from indexer.digests import DIGEST, digest
from indexer.encoding import Reuse
from indexer.staging import read_staged, row_texts, unique_text_rows
from stores.registry import VectorStores

# Other types keep approximations, or know no vector by its row.
_EXACT = re.compile(r"Flat|HNSW\d+(,Flat)?")


def vector_cache(texts: Iterable[str], take: Callable[[RowArray], FloatArray]) -> Reuse:
    """Returns what finds vectors by text; it keeps a checksum and a row for each text.

    Args:
        texts: The text of each row, after the text rules.
        take: Returns the vectors of rows, float32 [rows, dimension].
    """
    known_digests, rows = np.unique(np.fromiter(map(digest, texts), DIGEST), return_index=True)

    def find(texts: Sequence[str]) -> tuple[NDArray[np.bool_], FloatArray]:
        digests = np.fromiter(map(digest, texts), DIGEST)
        at = np.searchsorted(known_digests, digests)
        at[at == len(known_digests)] = 0
        known: NDArray[np.bool_] = known_digests[at] == digests
        return known, take(rows[at[known]])

    return find


def version_vectors(
    folder: Path, manifest: IndexManifest, builds: Path, stores: VectorStores
) -> Reuse:
    """Returns the vectors of the version in `folder`: from its index, or from its build if lossy.

    Raises:
        IndexVersionError: If they are gone, or the text rules have changed since.
    """
    if _EXACT.fullmatch(manifest.factory):
        reader = DocumentReader(folder / documents.FILE_NAME)
        filter_reader = FilterReader(folder / filters.FILE_NAME, manifest.filter_fields)
        vectors = stores.of(folder).open(folder, manifest, filter_reader)
        cache = vector_cache(row_texts(reader, range(len(reader))), vectors.take)
    elif found := _build_vectors(manifest, builds):
        cache = found
    else:
        raise IndexVersionError(
            f"the vectors of {manifest.version} are gone: {manifest.factory} does not give them "
            f"back and its shards are not in {builds}: build the index from its whole corpus, "
            "or encode all its documents again (--encode-all)",
            code="vectors_gone",
            version=manifest.version,
        )
    known, vectors_found = cache([canary.text for canary in manifest.canaries])
    if not known.all() or not np.array_equal(vectors_found, canary_vectors(manifest.canaries)):
        raise IndexVersionError(
            f"the texts of {manifest.version} are not those that its vectors were made from; the "
            "text rules have changed: encode all its documents again (--encode-all)",
            code="text_rules_changed",
            version=manifest.version,
        )
    return cache


def _build_vectors(manifest: IndexManifest, builds: Path) -> Reuse | None:
    # A version's id ends with the first digits of its build's key.
    for folder in builds.glob(f"*/{manifest.version.rpartition('-')[2]}*/"):
        if not read_staged(folder):
            continue
        rows, records = unique_text_rows(folder), whole_shards(folder)
        if sum(record.rows for record in records) != len(rows):
            continue
        size = records[0].rows
        failed = {r.shard * size + row for r in records for row in r.failed}
        encoded = np.setdiff1d(np.arange(len(rows)), list(failed))
        reader = DocumentReader(folder / documents.FILE_NAME)
        vectors = ShardedVectors(folder, size, encoded)
        return vector_cache(row_texts(reader, rows[encoded]), vectors.take)
    return None
