"""The one file of this package that imports FAISS: search among vectors that come one by one."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import faiss
import numpy as np
from numpy.typing import NDArray

from core.types import FloatArray, RowArray

HNSW_LINKS = 32
EF_CONSTRUCTION = 64
EF_SEARCH = 64


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Rows and cosine similarities [n, k], nearest first; row -1 and -inf where there is none."""

    rows: RowArray
    scores: FloatArray


class GrowingIndex:
    """Unit vectors by inner product: Flat up to a size, HNSW from there on.

    Flat is exact. HNSW finds most neighbours, not all; its graph depends on the order of
    additions and on nothing else, since they run on one thread.

    Args:
        dimension: Of the vectors.
        flat_limit: The most vectors of Flat.
        threads: Of a search.
    """

    def __init__(self, dimension: int, flat_limit: int, threads: int = 1) -> None:
        self._dimension = dimension
        self._flat_limit = flat_limit
        self._threads = threads
        self._index: faiss.Index = faiss.IndexFlatIP(dimension)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def kind(self) -> str:
        """Flat or HNSW."""
        return "Flat" if isinstance(self._index, faiss.IndexFlatIP) else f"HNSW{HNSW_LINKS}"

    def add(self, vectors: FloatArray) -> None:
        """Adds unit vectors, float32 [n, dimension]; their rows follow those that are there."""
        if self.kind == "Flat" and len(self) + len(vectors) > self._flat_limit:
            flat = self._index
            self._index = faiss.IndexHNSWFlat(
                self._dimension, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT
            )
            self._index.hnsw.efConstruction = EF_CONSTRUCTION
            self._index.hnsw.efSearch = EF_SEARCH
            if flat.ntotal:
                self.add(flat.reconstruct_n(0, flat.ntotal))
        with _faiss_threads(1):
            self._index.add(np.ascontiguousarray(vectors, dtype=np.float32))

    def search(self, vectors: FloatArray, k: int) -> Neighbours:
        """Returns the k nearest of each vector, float32 [n, dimension]."""
        with _faiss_threads(self._threads):
            scores, rows = self._index.search(np.ascontiguousarray(vectors, dtype=np.float32), k)
        return Neighbours(rows, np.where(rows < 0, np.float32(-np.inf), scores))


def exact_search(
    documents: FloatArray, queries: FloatArray, k: int, threads: int = 1
) -> Neighbours:
    """Returns the k nearest documents of each query among unit vectors."""
    index = GrowingIndex(documents.shape[1], flat_limit=len(documents), threads=threads)
    index.add(documents)
    return index.search(queries, min(k, len(documents)))


@contextmanager
def _faiss_threads(count: int) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(count)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def pairs_above(vectors: FloatArray, threshold: float) -> NDArray[np.bool_]:
    """Returns bool [n, n], whether two of n unit vectors are closer than `threshold`."""
    closer: NDArray[np.bool_] = vectors @ vectors.T > threshold
    return closer
