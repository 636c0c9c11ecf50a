"""Searching a memory-mapped FAISS index, with and without a filter."""

import math
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np

from core.errors import IndexVersionError
from core.types import Filter, FloatArray, RowArray
from stores.base import ScoredRows
from stores.recall import RECALL_K, Parameters

# Of the nearest documents a filter with share s lets s pass: asking for k/s of them yields k
# on average. Twice that makes a shortfall rare.
_OVERFETCH = 2
# Candidates that a search keeps for each neighbour that it returns. A filter that shuts
# out the query's own cluster leaves the last neighbours, which are found least surely: with 2
# candidates recall@10 is 0.990 there, with 4 it is 0.997 (80,000 × 64, 4,000 clusters).
_BEAM = 4
# How the lists to scan grow with the depth. Of the 1,024 lists of 100,000 × 768 vectors, 64 hold
# 0.97 of the 10 nearest and 256 of the 1,000 nearest: a power of 0.3. Where documents lie in
# clusters smaller than the depth it takes more: with 0.4 filters cost recall (0.97 where one in
# five documents passes), with 0.6 it stays above 0.99 (60,000 × 64, 3,000 clusters).
_PROBE_GROWTH = 0.6
# A candidate that is refined lies anywhere on disk, one that is scanned follows the last: 1 µs
# against 0.03 (PQ384x4fs) to 0.07 (PQ96x8), at 100,000 × 768.
REFINED_TO_SCANNED = 20


def limit_threads() -> None:
    """Keeps FAISS to one thread for the calling thread: requests are the parallelism."""
    faiss.omp_set_num_threads(1)


def read_index(path: Path) -> faiss.Index:
    """Opens an index by memory mapping.

    Raises:
        IndexVersionError: If FAISS cannot read it.
    """
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        reason = "is not a readable FAISS index"
        raise IndexVersionError.at(path, reason, "unreadable_vectors") from error


def search_parameters(parameters: Parameters) -> faiss.SearchParameters | None:
    """Returns parameters of a manifest (`efSearch`, or `nprobe` and `k_factor`) as FAISS's."""
    if "efSearch" in parameters:
        return faiss.SearchParametersHNSW(efSearch=parameters["efSearch"])
    if "nprobe" not in parameters:
        return None
    lists = faiss.SearchParametersIVF(nprobe=parameters["nprobe"])
    if not parameters.get("k_factor"):
        return lists
    return faiss.IndexRefineSearchParameters(
        k_factor=parameters["k_factor"], base_index_params=lists
    )


class FaissVectors:
    """The vectors of one index version.

    Exact search is over what vectors are kept as, which the factory says: after
    `Refine(SQ8)` or in `HNSW32,SQ8` the 8-bit codes. Product codes are never what is answered
    with: they only choose what is refined.

    The file stays mapped as long as this object lives. The parameters are `efSearch`, or `nprobe`
    and `k_factor`, for ten hits; empty for Flat.

    Raises:
        IndexVersionError: If the file cannot be read.
    """

    def __init__(self, path: Path, parameters: Parameters) -> None:
        self._index = read_index(path)
        self.count: int = self._index.ntotal
        self.dimension: int = self._index.d
        self._approximate: _Graph | _Lists | None = None
        self._storage = self._index
        self._storage_lists = 0
        lists = faiss.try_extract_index_ivf(self._index)
        if isinstance(self._index, faiss.IndexHNSW):
            self._approximate = _Graph(self._index, parameters.get("efSearch", 0))
            self._storage = faiss.downcast_index(self._index.storage)
        elif lists is not None:
            self._approximate = _Lists(
                self._index, lists.nlist, parameters.get("nprobe", 1), parameters.get("k_factor", 0)
            )
            if isinstance(self._index, faiss.IndexRefine):
                self._storage = faiss.downcast_index(self._index.refine_index)
            else:
                self._storage_lists = lists.nlist

    def search(
        self, query: FloatArray, k: int, rows: RowArray | None = None, filter_: Filter | None = None
    ) -> ScoredRows:
        """Finds the nearest vectors; see `stores.base.Vectors.search`.

        A filter that few rows pass is answered by exact search over those rows. One that
        many pass is answered by the graph or the inverted lists: the nearest neighbours of all
        are filtered, and if fewer than k remain, exact search is the answer after all. So k hits
        come back whenever k rows match.
        """
        matching = self.count if rows is None else len(rows)
        wanted = min(k, matching)
        if wanted == 0:
            return np.empty(0, np.float32), np.empty(0, np.int64)
        fetch = wanted
        if matching < self.count:
            fetch = min(self.count, -(-_OVERFETCH * wanted * self.count // matching))
        if self._approximate is None or matching <= self._approximate.cost(fetch):
            return self._exact(query, wanted, rows)
        scores, found = self._approximate.search(query, fetch)
        if rows is not None:
            at = np.minimum(np.searchsorted(rows, found), len(rows) - 1)
            passes = rows[at] == found
            scores, found = scores[passes], found[passes]
        if len(found) < wanted:
            return self._exact(query, wanted, rows)
        return scores[:wanted], found[:wanted]

    def take(self, rows: RowArray) -> FloatArray:
        """Returns float32 [rows, dimension], as they are kept."""
        vectors: FloatArray = self._index.reconstruct_batch(rows)
        return vectors

    def _exact(self, query: FloatArray, k: int, rows: RowArray | None) -> ScoredRows:
        selector = None
        if rows is not None:
            mask = np.zeros(self.count, dtype=bool)
            mask[rows] = True
            selector = faiss.IDSelectorBitmap(np.packbits(mask, bitorder="little"))
        parameters = faiss.SearchParameters(sel=selector)
        if self._storage_lists:
            parameters = faiss.SearchParametersIVF(sel=selector, nprobe=self._storage_lists)
        return _first(self._storage.search(query[None], k, params=parameters))


@dataclass
class _Graph:
    """A graph, searched with a beam; `ef_search` candidates at the depth of measured recall."""

    index: faiss.IndexHNSW
    ef_search: int

    def cost(self, fetch: int) -> float:
        """Returns how many documents a search for the `fetch` nearest looks at."""
        return float(self.index.hnsw.nb_neighbors(0) * self._beam(fetch))

    def search(self, query: FloatArray, fetch: int) -> ScoredRows:
        parameters = search_parameters({"efSearch": self._beam(fetch)})
        return _first(self.index.search(query[None], fetch, params=parameters))

    def _beam(self, fetch: int) -> int:
        # The depth that recall was measured at is 10; a deeper answer needs a wider search.
        return max(self.ef_search, _BEAM * fetch)


@dataclass
class _Lists:
    """Inverted lists, of which `probes` are scanned at the depth that recall was measured at.

    For each vector that is fetched, `k_factor` candidates are refined, or without refinement 0.
    """

    index: faiss.Index
    number: int
    probes: int
    k_factor: int

    def cost(self, fetch: int) -> float:
        scanned: float = self._probed(fetch) * self.index.ntotal / self.number
        return self.number + scanned + REFINED_TO_SCANNED * self.k_factor * fetch

    def search(self, query: FloatArray, fetch: int) -> ScoredRows:
        parameters = search_parameters({"nprobe": self._probed(fetch), "k_factor": self.k_factor})
        return _first(self.index.search(query[None], fetch, params=parameters))

    def _probed(self, fetch: int) -> int:
        deeper = max(1.0, fetch / RECALL_K) ** _PROBE_GROWTH
        filled = _BEAM * fetch * self.number / self.index.ntotal
        wanted: float = max(self.probes * deeper, filled)
        return min(self.number, math.ceil(wanted))


def _first(result: tuple[FloatArray, RowArray]) -> ScoredRows:
    scores, rows = result[0][0], result[1][0]
    real = rows >= 0
    return scores[real], rows[real]
