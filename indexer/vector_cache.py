"""Lookup of the vectors and token vectors of an index version by the digest of their text."""

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
from indexer.duplicates import DIGEST, digest
from indexer.encoding import Known, VectorCache
from indexer.staging import read_staged, row_texts, unique_text_rows
from indexer.state import IndexState


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


def version_vectors(state: IndexState, builds: Path) -> VectorCache:
    """Returns a lookup of the vectors of a version, and of its token vectors.

    Vectors are read from its segments; those of a base whose index type is lossy, from the shards
    of its build in the folder `builds`.
    """
    manifest = state.manifest
    caches = []
    lossy = not state.stores_vectors(0)
    if lossy:
        if not (found := _build_vectors(state.parts[0].manifest, builds)):
            raise IndexVersionError(
                f"the vectors of version {manifest.version} are not available: its index type "
                f"{manifest.factory} is lossy and its shards are not in {builds}: build the index "
                "again from its whole corpus, or encode all documents again (--encode-all)",
                code="vectors_gone",
                version=manifest.version,
            )
        caches.append(found)
    first = int(state.rows.first[1]) if lossy else 0
    if first < state.rows.count:
        caches.append(rows_vectors(state, np.arange(first, state.rows.count)))
    cache = _either(caches)
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


def rows_vectors(state: IndexState, rows: RowArray) -> VectorCache:
    """Returns a lookup of the vectors, and token vectors, of rows whose segments store vectors."""
    tokens = (lambda at: state.tokens(int(rows[at]))) if state.has_tokens else None
    return vector_cache(
        row_texts(state.documents, rows.tolist()), lambda at: state.take(rows[at]), tokens
    )


def _either(caches: Sequence[VectorCache]) -> VectorCache:
    """Returns a lookup in several lookups, the first of which has priority."""
    if len(caches) == 1:
        return caches[0]

    def find(texts: Sequence[str]) -> Known:
        known = caches[0](texts)
        for cache in caches[1:]:
            lacking = np.flatnonzero(~known.found)
            more = cache([texts[i] for i in lacking.tolist()])
            found = known.found.copy()
            found[lacking[more.found]] = True
            order = np.argsort(
                np.concatenate([np.flatnonzero(known.found), lacking[more.found]]), kind="stable"
            )
            tokens = [*known.token_vectors, *more.token_vectors]
            known = Known(
                found,
                np.concatenate([known.vectors, more.vectors])[order],
                [tokens[i] for i in order.tolist()] if tokens else (),
            )
        return known

    return find


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
