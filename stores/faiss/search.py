"""Search in a memory-mapped FAISS index, with and without a filter."""

import math
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np

from core.choices import SearchDevice
from core.errors import IndexVersionError
from core.filters import Selection
from core.types import Check, FloatArray, RowArray, no_check
from stores.base import ScoredRows
from stores.faiss.factory import reduced_graph
from stores.faiss.gpu import MOST_NEIGHBOURS, MOST_PROBES, SPEED, GpuCopy, ReleasedError
from stores.faiss.scan import CodesScan, ListsScan, Scan, first_hits
from stores.order import depth_for, with_ties
from stores.recall import RECALL_K, Parameters

# If a share s of the documents matches a filter, k / s candidates yield k hits on average. With
# twice as many, fewer than k hits are rare.
_OVERFETCH = 2
# Candidates of a graph search per returned neighbour. A filter that excludes the cluster of the
# query leaves the most distant neighbours, whose recall is lowest: with 2 candidates recall@10 is
# 0.990 in this case, with 4 it is 0.997 (80,000 × 64, 4,000 clusters).
_BEAM = 4
# Exponent of the growth of scanned lists with the depth. For 100,000 × 768 vectors in 1,024 lists,
# a recall of 0.97 needs 64 lists for the 10 nearest and 256 for the 1,000 nearest: an exponent of
# 0.3. Clusters with fewer documents than the depth need more lists: if one in five documents
# matches a filter, the recall is 0.97 with 0.4 and above 0.99 with 0.6 (60,000 × 64, 3,000
# clusters).
_PROBE_GROWTH = 0.6
# Cost of a row in a scan with a filter relative to one without, whose instructions compare several
# rows at once: 0.12 to 0.2 µs and 0.05 µs (100,000 × 384, half of the rows or more).
_FILTERED_TO_SCANNED = 3
# Cost of refining a candidate (random access) relative to scanning one (sequential access): 1 µs
# and 0.03 µs (PQ384x4fs) to 0.07 µs (PQ96x8) for 100,000 × 768 vectors.
REFINED_TO_SCANNED = 20


def limit_threads() -> None:
    """Limits FAISS to one thread in the calling thread: requests are processed in parallel."""
    faiss.omp_set_num_threads(1)


def read_index(path: Path) -> faiss.Index:
    """Opens a memory-mapped index; IndexVersionError if FAISS cannot read it."""
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        reason = "is not a readable FAISS index: build the index again"
        raise IndexVersionError.at(path, reason, "unreadable_vectors") from error


def flat(vectors: FloatArray) -> faiss.Index:
    """Returns vectors, float32 [n, dimension], as an index in memory."""
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return index


def search_parameters(parameters: Parameters) -> faiss.SearchParameters | None:
    """Converts parameters of a manifest for FAISS.

    These are `efSearch` of graphs or `nprobe` of inverted lists, with `k_factor` if the index
    refines its candidates. A graph whose candidates are refined has reduced vectors.
    """
    k_factor = parameters.get("k_factor", 0)
    base: faiss.SearchParameters
    if "efSearch" in parameters:
        base = faiss.SearchParametersHNSW(efSearch=parameters["efSearch"])
        if k_factor:
            base = faiss.SearchParametersPreTransform(index_params=base)
    elif "nprobe" in parameters:
        base = faiss.SearchParametersIVF(nprobe=parameters["nprobe"])
    else:
        return None
    if not k_factor:
        return base
    return faiss.IndexRefineSearchParameters(k_factor=k_factor, base_index_params=base)


class FaissVectors:
    """The vectors of one index version in a FAISS file, which stays mapped, or an index in memory.

    Exact search uses the stored vectors, for example 8-bit codes for `Refine(SQ8)` and
    `HNSW32,SQ8`. Product codes and reduced vectors only select candidates for refinement; their
    scores are not returned.

    Args:
        parameters: Search parameters for ten hits: `efSearch` or `nprobe`, and `k_factor`; empty
            for Flat.
        device: Where searches run that a GPU supports; the others run on the processor.

    Raises:
        IndexVersionError: If the file cannot be read, or the GPU has too little memory for it.
    """

    def __init__(
        self, source: Path | faiss.Index, parameters: Parameters, device: SearchDevice = "cpu"
    ) -> None:
        self._index = read_index(source) if isinstance(source, Path) else source
        self.count: int = self._index.ntotal
        self.dimension: int = self._index.d
        self._approximate: _Graph | _Lists | None = None
        # The vectors in the order of rows, or None if only the inverted lists have them.
        stored: faiss.IndexFlatCodes | None = self._index
        lists = faiss.try_extract_index_ivf(self._index)
        ef_search, k_factor = parameters.get("efSearch", 0), parameters.get("k_factor", 0)
        if isinstance(self._index, faiss.IndexHNSW):
            links = self._index.hnsw.nb_neighbors(0)
            self._approximate = _Graph(self._index, links, ef_search)
            stored = faiss.downcast_index(self._index.storage)
        elif (reduced := reduced_graph(self._index)) is not None:
            links = faiss.downcast_index(reduced.index).hnsw.nb_neighbors(0)
            self._approximate = _Graph(self._index, links, ef_search, max(1, k_factor))
            stored = faiss.downcast_index(self._index.refine_index)
        elif lists is not None:
            probes = parameters.get("nprobe", 1)
            self._approximate = _Lists(self._index, lists.nlist, probes, k_factor)
            refined = isinstance(self._index, faiss.IndexRefine)
            stored = faiss.downcast_index(self._index.refine_index) if refined else None
        self._stored = stored
        self._scan: Scan = ListsScan(self._index) if stored is None else CodesScan(stored)
        self._on_gpu: _OnGpu | None = None
        if device != "cpu":
            self.copy_to_gpu(device)

    def copy_to_gpu(self, device: SearchDevice) -> None:
        """Makes a copy on the GPU, in which searches run from now on; see `GpuCopy`."""
        copied = self._approximate if isinstance(self._approximate, _Lists) else None
        self._on_gpu = _OnGpu(
            GpuCopy(self._index, self._stored, device), copied if self._stored is None else None
        )

    @property
    def on_gpu(self) -> bool:
        """Whether there is a copy on the GPU."""
        return self._on_gpu is not None

    def leave_gpu(self) -> bool:
        """Releases the copy on the GPU, which searches do without; returns False without one."""
        on_gpu, self._on_gpu = self._on_gpu, None
        if on_gpu:
            on_gpu.copy.release()
        return on_gpu is not None

    def search(
        self,
        query: FloatArray,
        k: int,
        selection: Selection | None = None,
        check: Check = no_check,
    ) -> ScoredRows:
        """Finds the nearest vectors; see `stores.base.Vectors.search`.

        Up to 50 hits are taken from one list of candidates. If few rows match the filter, they are
        searched exactly. Otherwise the GPU, the graph or the inverted lists return candidates,
        which are filtered; if too few remain, the matching rows are searched exactly. The cheaper
        method is chosen by an estimate of its cost. An exact search is checked every 32 MiB of
        vectors. A search in the graph or the lists is not interrupted: it is chosen only if it
        compares fewer vectors than the filter matches.
        """
        return self._search(query, k, selection.rows(check) if selection else None, check)

    def nearest(self, query: FloatArray, k: int) -> ScoredRows:
        """Finds the k nearest vectors of all; of those with the score of the last, any."""
        return self._nearest(query, k, None, no_check)

    def _search(
        self,
        query: FloatArray,
        k: int,
        rows: RowArray | None = None,
        check: Check = no_check,
        first: ScoredRows | None = None,
    ) -> ScoredRows:
        """Searches for the `depth_for(k)` nearest rows, unless they are given as `first`."""
        matching = self.count if rows is None else len(rows)
        if matching == 0:
            return np.empty(0, np.float32), np.empty(0, np.int64)

        def find(wanted: int) -> ScoredRows:
            nonlocal first
            found, first = first, None
            return found or self._nearest(query, wanted, rows, check)

        return with_ties(find, min(k, matching), depth_for(k), matching)

    def _nearest(
        self, query: FloatArray, wanted: int, rows: RowArray | None, check: Check
    ) -> ScoredRows:
        check()
        matching = self.count if rows is None else len(rows)
        fetch, scanned = wanted, matching
        if matching < self.count:
            fetch = min(self.count, -(-_OVERFETCH * wanted * self.count // matching))
            scanned *= _FILTERED_TO_SCANNED
        source: _OnGpu | _Graph | _Lists | None = self._approximate
        if (on_gpu := self._on_gpu) and on_gpu.reaches(fetch):
            source = on_gpu
        if source is None or scanned <= source.cost(fetch):
            return self._scan.search(query, wanted, rows, check)
        try:
            scores, found = source.search(query, fetch)
        except ReleasedError:
            return self._nearest(query, wanted, rows, check)
        if rows is not None:
            at = np.minimum(np.searchsorted(rows, found), len(rows) - 1)
            passes = rows[at] == found
            scores, found = scores[passes], found[passes]
        if len(found) < wanted:
            return self._scan.search(query, wanted, rows, check)
        return scores[:wanted], found[:wanted]

    def search_together(self, queries: FloatArray, k: int) -> list[ScoredRows] | None:
        """Finds the nearest vectors to several queries in a graph on the processor.

        After each call of FAISS a thread waits for the interpreter, a millisecond if the event loop
        is busy. Other index types search a batch by other algorithms, whose scores may differ in
        the last digit.
        """
        graph, wanted = self._approximate, min(depth_for(k), self.count)
        if self._on_gpu or not isinstance(graph, _Graph) or self.count <= graph.cost(wanted):
            return None
        hits = graph.search_all(queries, wanted)
        complete = hits[1].min(axis=1, initial=0) >= 0
        return [
            self._search(query, k, first=(scores, rows) if whole else None)
            for query, scores, rows, whole in zip(queries, *hits, complete, strict=True)
        ]

    def take(self, rows: RowArray) -> FloatArray:
        """Returns the stored vectors of rows, int64 [n], as float32 [n, dimension].

        FAISS cannot read inverted lists without refinement by row.
        """
        vectors: FloatArray = self._index.reconstruct_batch(rows)
        return vectors


@dataclass
class _Graph:
    """Search in an HNSW graph."""

    index: faiss.Index
    links: int  # links of a vector on the lowest level
    ef_search: int  # beam width at the depth of the measured recall
    k_factor: int = 0  # candidates to refine per hit, in a graph of reduced vectors; else 0

    def cost(self, fetch: int) -> float:
        """Returns the estimated number of vectors that are compared to find `fetch` neighbours."""
        return float(self.links * self._beam(fetch) + self.k_factor * fetch)

    def search(self, query: FloatArray, fetch: int) -> ScoredRows:
        return first_hits(self.search_all(query[None], fetch))

    def search_all(self, queries: FloatArray, fetch: int) -> tuple[FloatArray, RowArray]:
        chosen = {"efSearch": self._beam(fetch), "k_factor": self.k_factor}
        scores, rows = self.index.search(queries, fetch, params=search_parameters(chosen))
        return scores, rows

    def _beam(self, fetch: int) -> int:
        # `ef_search` was chosen for 10 hits; more hits need a wider beam.
        return max(self.ef_search, max(_BEAM, self.k_factor) * fetch)


@dataclass
class _Lists:
    """Search in inverted lists."""

    index: faiss.Index
    n_lists: int
    probes: int  # lists to scan at the depth of the measured recall
    k_factor: int  # candidates to refine per hit; 0 without refinement

    def cost(self, fetch: int) -> float:
        scanned: float = self.probed(fetch) * self.index.ntotal / self.n_lists
        return self.n_lists + scanned + REFINED_TO_SCANNED * self.k_factor * fetch

    def search(self, query: FloatArray, fetch: int) -> ScoredRows:
        parameters = search_parameters({"nprobe": self.probed(fetch), "k_factor": self.k_factor})
        return first_hits(self.index.search(query[None], fetch, params=parameters))

    def probed(self, fetch: int) -> int:
        deeper = max(1.0, fetch / RECALL_K) ** _PROBE_GROWTH
        filled = _BEAM * fetch * self.n_lists / self.index.ntotal
        wanted: float = max(self.probes * deeper, filled)
        return min(self.n_lists, math.ceil(wanted))


@dataclass
class _OnGpu:
    """Search on a GPU: in inverted lists that were copied or, without `lists`, exact."""

    copy: GpuCopy
    lists: _Lists | None

    def reaches(self, fetch: int) -> bool:
        """Returns whether the GPU can find `fetch` neighbours."""
        probes = self.lists.probed(fetch) if self.lists else 0
        return fetch <= MOST_NEIGHBOURS and probes <= MOST_PROBES

    def cost(self, fetch: int) -> float:
        return (self.lists.cost(fetch) if self.lists else self.copy.ntotal) / SPEED

    def search(self, query: FloatArray, fetch: int) -> ScoredRows:
        parameters = None
        if self.lists:
            parameters = search_parameters({"nprobe": self.lists.probed(fetch)})
        return self.copy.search(query, fetch, parameters)
