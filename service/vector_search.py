"""Searching a memory-mapped FAISS index, with and without a filter."""

from pathlib import Path

import faiss
import numpy as np
from numpy.typing import NDArray

from core.errors import IndexVersionError
from core.types import FloatArray, IndexManifest, RowArray

Found = tuple[FloatArray, RowArray]

# Of the nearest documents a filter with share s lets s pass: asking for k/s of them yields k
# on average. Twice that makes a shortfall rare.
_OVERFETCH = 2
# Candidates that a graph search keeps for each neighbour that it returns. A filter that shuts
# out the query's own cluster leaves the last neighbours, which are found least surely: with 2
# candidates recall@10 is 0.990 there, with 4 it is 0.997 (80,000 × 64, 4,000 clusters).
_BEAM = 4


def limit_threads() -> None:
    """Keeps FAISS to one thread for the calling thread: requests are the parallelism."""
    faiss.omp_set_num_threads(1)


class VectorIndex:
    """The vectors of one index version.

    Args:
        path: The FAISS file, which stays mapped as long as this object lives.
        manifest: Its description.

    Raises:
        IndexVersionError: If the file cannot be read or is not what the manifest says.
    """

    def __init__(self, path: Path, manifest: IndexManifest) -> None:
        try:
            self._index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise IndexVersionError(f"{path} is not a readable FAISS index") from error
        if (self._index.ntotal, self._index.d) != (manifest.count, manifest.encoder.dimension):
            raise IndexVersionError(
                f"{path} holds {self._index.ntotal} × {self._index.d} vectors; the manifest "
                f"says {manifest.count} × {manifest.encoder.dimension}"
            )
        self._is_graph = isinstance(self._index, faiss.IndexHNSW)
        self._storage = faiss.downcast_index(self._index.storage) if self._is_graph else self._index
        self._ef_search = manifest.search_parameters.get("efSearch", 0)

    def search(self, query: FloatArray, k: int, rows: RowArray | None = None) -> Found:
        """Finds the nearest documents.

        A filter that few rows pass is answered by exact search over those rows. One that
        many pass is answered by the graph: its nearest neighbours are filtered, and if
        fewer than k remain, exact search is the answer after all. So k hits come back
        whenever k rows match.

        Args:
            query: float32 [dimension], of unit norm.
            k: Hits wanted, at most the number of documents.
            rows: The rows that may be found, ascending, or None for all.

        Returns:
            Cosine similarities, float32 [m], descending, and rows, int64 [m]; m is k, or
            the number of matching rows if that is less.
        """
        if rows is None:
            wanted, fetch = k, k
        else:
            wanted = min(k, len(rows))
            fetch = self._fetch(wanted, len(rows))
        if wanted == 0:
            return np.empty(0, np.float32), np.empty(0, np.int64)
        if not self._is_graph or self._exact_is_cheaper(fetch, rows):
            return self._exact(query, wanted, rows)
        scores, found = self._graph(query, fetch)
        if rows is not None:
            passes = _contains(rows, found)
            scores, found = scores[passes], found[passes]
        if len(found) < wanted:
            return self._exact(query, wanted, rows)
        return scores[:wanted], found[:wanted]

    def _fetch(self, wanted: int, matching: int) -> int:
        total: int = self._index.ntotal
        if matching == total:
            return wanted
        return min(total, -(-_OVERFETCH * wanted * total // max(matching, 1)))

    def _exact_is_cheaper(self, fetch: int, rows: RowArray | None) -> bool:
        """Compares the distances that either way computes."""
        in_graph = self._index.hnsw.nb_neighbors(0) * self._beam(fetch)
        exact = self._index.ntotal if rows is None else len(rows)
        return bool(exact <= in_graph)

    def _beam(self, fetch: int) -> int:
        # The depth that recall was measured at is 10; a deeper answer needs a wider search.
        return max(self._ef_search, _BEAM * fetch)

    def _graph(self, query: FloatArray, fetch: int) -> Found:
        parameters = faiss.SearchParametersHNSW(efSearch=self._beam(fetch))
        return _first(self._index.search(query[None], fetch, params=parameters))

    def _exact(self, query: FloatArray, k: int, rows: RowArray | None) -> Found:
        if rows is None:
            return _first(self._storage.search(query[None], k))
        mask = np.zeros(self._index.ntotal, dtype=bool)
        mask[rows] = True
        bitmap = np.packbits(mask, bitorder="little")
        parameters = faiss.SearchParameters(sel=faiss.IDSelectorBitmap(bitmap))
        return _first(self._storage.search(query[None], k, params=parameters))


def _first(result: tuple[FloatArray, RowArray]) -> Found:
    scores, rows = result[0][0], result[1][0]
    real = rows >= 0
    return scores[real], rows[real]


def _contains(rows: RowArray, found: RowArray) -> NDArray[np.bool_]:
    at = np.minimum(np.searchsorted(rows, found), len(rows) - 1)
    passes: NDArray[np.bool_] = rows[at] == found
    return passes
