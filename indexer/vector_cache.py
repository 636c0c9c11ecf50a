"""Lookup of the vectors and token vectors of an index version by the digest of their text."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core import documents
from core.canaries import canary_vectors
from core.documents import DocumentReader
from core.errors import IndexVersionError
from core.manifest import IndexManifest
from core.shards import ShardedTokens, ShardedVectors, complete_shards
from core.types import FloatArray, RowArray
from indexer.digests import DIGEST, digest
from indexer.encoding import Known, VectorCache
from indexer.staging import read_staged, row_texts, unique_text_rows
from stores.registry import VectorStores
from stores.token_vectors import open_token_vectors

# Other index types store approximations, or cannot return the vector of a row.
_EXACT = re.compile(r"Flat|HNSW\d+(,Flat)?")


def vector_cache(
    texts: Iterable[str],
    take: Callable[[RowArray], FloatArray],
    tokens: Callable[[int], NDArray[np.uint8]] | None = None,
) -> VectorCache:
    """Returns a function that looks up vectors by text; it stores a digest and a row per text.

    Args:
        texts: Normalised text of each row.
        take: Returns the vectors of rows, float32 [rows, dimension].
        tokens: Returns the token vectors of a row, uint8 [tokens, bytes], if there are any.
    """
    known_digests, rows = np.unique(np.fromiter(map(digest, texts), DIGEST), return_index=True)

    def find(texts: Sequence[str]) -> Known:
        digests = np.fromiter(map(digest, texts), DIGEST)
        at = np.searchsorted(known_digests, digests)
        at[at == len(known_digests)] = 0
        known: NDArray[np.bool_] = known_digests[at] == digests
        found = rows[at[known]]
        return Known(known, take(found), [tokens(row) for row in found.tolist()] if tokens else ())

    return find


def version_vectors(
    folder: Path, manifest: IndexManifest, builds: Path, stores: VectorStores
) -> VectorCache:
    """Returns a lookup of the vectors of a version, and of its token vectors.

    Vectors are read from the index or, if its type is lossy, from the shards of its build in the
    folder `builds`.

    Raises:
        IndexVersionError: If the vectors cannot be read, or the text normalisation has changed.
    """
    if _EXACT.fullmatch(manifest.factory):
        reader = DocumentReader(folder / documents.FILE_NAME)
        vectors = stores.for_version(folder).open(folder, manifest)
        tokens = open_token_vectors(folder, manifest)
        texts = row_texts(reader, range(len(reader)))
        cache = vector_cache(texts, vectors.take, tokens.row if tokens else None)
    elif found := _build_vectors(manifest, builds):
        cache = found
    else:
        raise IndexVersionError(
            f"the vectors of version {manifest.version} are not available: its index type "
            f"{manifest.factory} is lossy and its shards are not in {builds}: build the index "
            "again from its whole corpus, or encode all documents again (--encode-all)",
            code="vectors_gone",
            version=manifest.version,
        )
    known = cache([canary.text for canary in manifest.canaries])
    same = np.array_equal(known.vectors, canary_vectors(manifest.canaries))
    if not (known.found.all() and same):
        raise IndexVersionError(
            f"the vectors of version {manifest.version} do not match its texts, because the text "
            "normalisation has changed: encode all documents again (--encode-all)",
            code="text_rules_changed",
            version=manifest.version,
        )
    return cache


def _build_vectors(manifest: IndexManifest, builds: Path) -> VectorCache | None:
    # The id of a version ends with the first digits of its build key.
    for folder in builds.glob(f"*/{manifest.version.rpartition('-')[2]}*/"):
        if not read_staged(folder):
            continue
        rows, records = unique_text_rows(folder), complete_shards(folder)
        if sum(record.rows for record in records) != len(rows):
            continue
        size = records[0].rows
        failed = {r.shard * size + row for r in records for row in r.failed}
        encoded = np.setdiff1d(np.arange(len(rows)), list(failed))
        reader = DocumentReader(folder / documents.FILE_NAME)
        vectors = ShardedVectors(folder, size, encoded)
        tokens = ShardedTokens(folder, size, encoded).row if records[0].tokens_sha256 else None
        return vector_cache(row_texts(reader, rows[encoded]), vectors.take, tokens)
    return None
