"""One way to build, load and search each kind of index, whatever library it comes from.

Libraries are imported by the engine that uses them: each engine is measured in a process
of its own, which must not hold the memory of another's library.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import faiss
import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
RowArray = NDArray[np.int64]
Parameters = dict[str, int]

K = 10

_TRAINING_ROWS = 100_000
# A product quantiser has 256 centroids a part; 100 vectors for each do.
_PRODUCT_TRAINING_ROWS = 25_600
# FAISS asks for at least 39 vectors for each centroid.
_ROWS_PER_CENTROID = 50
_ADD_ROWS = 50_000
_WIDTHS = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
_PROBES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_REFINE_FACTORS = (4, 10, 40)

_log = logging.getLogger(__name__)


class Engine(Protocol):
    """An index type of one library."""

    @property
    def library(self) -> str:
        """The distribution's name."""
        ...

    @property
    def name(self) -> str:
        """The name in reports; unique."""
        ...

    @property
    def sweep(self) -> list[Parameters]:
        """The search parameters to measure."""
        ...

    def build(self, vectors: FloatArray, threads: int, path: Path) -> float:
        """Builds the index of `vectors`, float32 [n, dimension], and writes it to `path`.

        Returns:
            Seconds of work that was done for another engine before and counts here too.
        """
        ...

    def load(self, path: Path) -> None:
        """Reads the index into memory."""
        ...

    def search(self, queries: FloatArray, parameters: Parameters, threads: int) -> RowArray:
        """Returns int64 [len(queries), 10], the rows found, the nearest first."""
        ...


class FaissEngine:
    """A FAISS factory string, with inner product as metric.

    Args:
        factory: The factory string.
        construction: efConstruction of a graph.
    """

    library = "faiss-cpu"

    def __init__(self, factory: str, construction: int) -> None:
        self.name = f"FAISS {factory}"
        self._factory = factory
        self._construction = construction
        self._index: Any = None
        self.sweep: list[Parameters] = [{}]
        if "HNSW" in factory:
            self.sweep = [{"efSearch": width} for width in _WIDTHS]
        elif "Refine" in factory:
            self.sweep = [
                {"nprobe": probes, "k_factor": factor}
                for factor in _REFINE_FACTORS
                for probes in _PROBES
            ]
        elif "IVF" in factory:
            self.sweep = [{"nprobe": probes} for probes in _PROBES]

    def build(self, vectors: FloatArray, threads: int, path: Path) -> float:
        """Builds and writes; indexes with as many inverted lists share their centroids."""
        faiss.omp_set_num_threads(threads)
        index = faiss.index_factory(vectors.shape[1], self._factory, faiss.METRIC_INNER_PRODUCT)
        shared = 0.0
        if isinstance(index, faiss.IndexHNSW):
            index.hnsw.efConstruction = self._construction
        elif "IVF" in self._factory:
            inverted = faiss.downcast_index(faiss.extract_index_ivf(index))
            centroids, shared = _centroids(vectors, inverted.nlist, path.parent)
            inverted.quantizer.add(centroids)
            inverted.quantizer_trains_alone = 0
            if isinstance(inverted, faiss.IndexIVFPQ):
                # As the indexer does: only searches by Hamming distance need it.
                inverted.do_polysemous_training = False
        if not index.is_trained:
            products = "PQ" in self._factory
            # Its many small steps: 5 s on one thread, 84 s on two (20,000 vectors).
            faiss.omp_set_num_threads(1 if products else threads)
            index.train(_sample(vectors, _PRODUCT_TRAINING_ROWS if products else _TRAINING_ROWS))
            faiss.omp_set_num_threads(threads)
        for _, part in _parts(vectors):
            index.add(part)
        faiss.write_index(index, str(path))
        return shared

    def load(self, path: Path) -> None:
        """Reads the index into memory."""
        self._index = faiss.read_index(str(path))

    def search(self, queries: FloatArray, parameters: Parameters, threads: int) -> RowArray:
        """Returns int64 [len(queries), 10], the rows found, the nearest first."""
        faiss.omp_set_num_threads(threads)
        rows: RowArray = self._index.search(queries, K, params=_faiss_parameters(parameters))[1]
        return rows


class HnswlibEngine:
    """hnswlib's graph of float32 vectors, by inner product."""

    library = "hnswlib"

    def __init__(self, links: int, construction: int) -> None:
        self.name = f"hnswlib M={links}"
        self._links = links
        self._construction = construction
        self._index: Any = None
        self.sweep = [{"ef": width} for width in _WIDTHS]

    def build(self, vectors: FloatArray, threads: int, path: Path) -> float:
        """Builds and writes."""
        import hnswlib

        index = hnswlib.Index(space="ip", dim=vectors.shape[1])
        index.init_index(len(vectors), ef_construction=self._construction, M=self._links)
        for start, part in _parts(vectors):
            index.add_items(part, np.arange(start, start + len(part)), num_threads=threads)
        index.save_index(str(path))
        (path.parent / f"{path.name}.dimension").write_text(str(vectors.shape[1]))
        return 0.0

    def load(self, path: Path) -> None:
        """Reads the index into memory."""
        import hnswlib

        dimension = int((path.parent / f"{path.name}.dimension").read_text())
        self._index = hnswlib.Index(space="ip", dim=dimension)
        self._index.load_index(str(path))

    def search(self, queries: FloatArray, parameters: Parameters, threads: int) -> RowArray:
        """Returns int64 [len(queries), 10], the rows found, the nearest first."""
        self._index.set_ef(parameters["ef"])
        rows, _ = self._index.knn_query(queries, K, num_threads=threads)
        return np.asarray(rows, dtype=np.int64)


class UsearchEngine:
    """USearch's graph, by inner product; `dtype` is how vectors are kept: f32 or bf16.

    Its i8 maps [-1, 1] to [-127, 127] whatever the vectors: a coordinate of a unit vector of
    768 dimensions is about 0.04, five steps, and recall ends at 0.89 (20,000 vectors).
    """

    library = "usearch"

    def __init__(self, links: int, construction: int, dtype: str) -> None:
        self.name = f"USearch M={links} {dtype}"
        self._links = links
        self._construction = construction
        self._dtype = dtype
        self._index: Any = None
        self.sweep = [{"expansion_search": width} for width in _WIDTHS]

    def build(self, vectors: FloatArray, threads: int, path: Path) -> float:
        """Builds and writes."""
        from usearch.index import Index

        index = Index(
            ndim=vectors.shape[1],
            metric="ip",
            dtype=self._dtype,
            connectivity=self._links,
            expansion_add=self._construction,
        )
        for start, part in _parts(vectors):
            index.add(np.arange(start, start + len(part)), part, threads=threads)
        index.save(str(path))
        return 0.0

    def load(self, path: Path) -> None:
        """Reads the index into memory."""
        from usearch.index import Index

        self._index = Index.restore(str(path), view=False)

    def search(self, queries: FloatArray, parameters: Parameters, threads: int) -> RowArray:
        """Returns int64 [len(queries), 10], the rows found, the nearest first."""
        self._index.expansion_search = parameters["expansion_search"]
        keys = self._index.search(queries, K, threads=threads).keys
        return np.asarray(keys).astype(np.int64).reshape(len(queries), K)


def engines(count: int, dimension: int, links: int, construction: int) -> Sequence[Engine]:
    """Returns all engines to compare over `count` vectors, the quickly built in front.

    The number of inverted lists is the power of two next to four times the root of `count`.
    """
    lists = 2 ** round(np.log2(4 * count**0.5))
    factories = (
        f"HNSW{links},SQ8",
        f"IVF{lists},SQ8",
        f"IVF{lists},PQ{dimension // 2}x4fs,Refine(SQ8)",
        "Flat",
        f"HNSW{links},Flat",
        f"IVF{lists},PQ{dimension // 8}x8,Refine(SQ8)",
    )
    return (
        *(FaissEngine(factory, construction) for factory in factories),
        HnswlibEngine(links, construction),
        UsearchEngine(links, construction, "bf16"),
        UsearchEngine(links, construction, "f32"),
    )


def exact_neighbours(vectors: FloatArray, queries: FloatArray, threads: int) -> RowArray:
    """Returns int64 [len(queries), 10], the true nearest rows, by FAISS Flat in blocks."""
    faiss.omp_set_num_threads(threads)
    scores = np.full((len(queries), K), -np.inf, dtype=np.float32)
    rows = np.full((len(queries), K), -1, dtype=np.int64)
    for start, part in _parts(vectors):
        block = faiss.IndexFlatIP(vectors.shape[1])
        block.add(part)
        found_scores, found = block.search(queries, K)
        scores = np.concatenate([scores, found_scores], axis=1)
        rows = np.concatenate([rows, np.where(found < 0, -1, found + start)], axis=1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :K]
        scores = np.take_along_axis(scores, best, axis=1)
        rows = np.take_along_axis(rows, best, axis=1)
    return rows


def _faiss_parameters(parameters: Parameters) -> faiss.SearchParameters | None:
    if "efSearch" in parameters:
        return faiss.SearchParametersHNSW(efSearch=parameters["efSearch"])
    if "nprobe" not in parameters:
        return None
    inverted = faiss.SearchParametersIVF(nprobe=parameters["nprobe"])
    if "k_factor" not in parameters:
        return inverted
    return faiss.IndexRefineSearchParameters(
        k_factor=parameters["k_factor"], base_index_params=inverted
    )


def _parts(vectors: FloatArray) -> Iterator[tuple[int, FloatArray]]:
    """Yields the first row and the vectors of successive parts, and logs how far it is."""
    started = time.perf_counter()
    for start in range(0, len(vectors), _ADD_ROWS):
        yield start, np.ascontiguousarray(vectors[start : start + _ADD_ROWS])
        done, seconds = min(start + _ADD_ROWS, len(vectors)), time.perf_counter() - started
        _log.info("           %d of %d vectors after %.0f s", done, len(vectors), seconds)


def _sample(vectors: FloatArray, number: int) -> FloatArray:
    rows = np.linspace(0, len(vectors) - 1, min(len(vectors), number)).astype(np.int64)
    return np.ascontiguousarray(vectors[np.unique(rows)])


def _centroids(vectors: FloatArray, lists: int, folder: Path) -> tuple[FloatArray, float]:
    """Returns the centroids, and the seconds that an earlier engine spent on them, else 0."""
    path = folder / f"centroids-{lists}.npz"
    if path.is_file():
        with np.load(path) as kept:
            return kept["centroids"], float(kept["seconds"])
    started = time.perf_counter()
    kmeans = faiss.Kmeans(
        vectors.shape[1], lists, niter=10, spherical=True, max_points_per_centroid=256
    )
    kmeans.train(_sample(vectors, _ROWS_PER_CENTROID * lists))
    seconds = time.perf_counter() - started
    np.savez(path, centroids=kmeans.centroids, seconds=seconds)
    return kmeans.centroids, 0.0
