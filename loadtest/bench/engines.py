"""A common interface to build and search indexes of FAISS, hnswlib and USearch.

An engine has two functions: `build` writes an index to a file, `open` reads it and returns a
search function. These functions import the libraries, because each engine is measured in a
separate process, whose memory must not include other libraries.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import faiss
import numpy as np

from core.types import FloatArray, RowArray
from stores.faiss.factory import reduced_graph
from stores.faiss.training import train_reduced

Parameters = dict[str, int]
# Takes queries, float32 [q, dimension], parameters and the number of threads; returns the K nearest
# rows, int64 [q, K].
Search = Callable[[FloatArray, Parameters, int], RowArray]

K = 10

# A product quantiser has 256 centroids per subvector, for which 100 vectors each are enough. FAISS
# requires at least 39 vectors per inverted list.
_TRAINING_ROWS = 100_000
_PRODUCT_TRAINING_ROWS = 25_600
_ROWS_PER_LIST = 50
_ADD_ROWS = 50_000
_WIDTHS = (10, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 512, 1024)
_PROBES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_REFINE_FACTORS = (4, 10, 40)
# Names of search parameters in FAISS, where they differ.
_FAISS_NAMES = {"k_factor": "k_factor_rf"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """An index type of one library, with inner product as metric.

    Attributes:
        name: Name in results.
        library: Distribution of the library.
        sweep: Search parameters to measure, the fastest search first.
        build: Takes vectors, float32 [n, dimension], threads and the path to write.
        open: Takes the path and the dimension.
    """

    name: str
    library: str
    sweep: Sequence[Parameters]
    build: Callable[[FloatArray, int, Path], None]
    open: Callable[[Path, int], Search]

    @property
    def file_name(self) -> str:
        """Name of the index file in a cache folder."""
        return self.name.replace(" ", "-").replace(",", "-")


def engines(count: int, dimension: int, links: int, construction: int) -> list[Engine]:
    """Returns all engines to compare, those with the shortest build first.

    Args:
        count: Number of vectors. The number of inverted lists is the power of two nearest to four
            times its square root.
        dimension: Dimensions of the vectors.
        links: M of HNSW graphs.
        construction: efConstruction of HNSW graphs.
    """
    lists = 2 ** round(np.log2(4 * count**0.5))
    factories = (
        f"HNSW{links},SQ8",
        f"IVF{lists},SQ8",
        f"IVF{lists},PQ{dimension // 2}x4fs,Refine(SQ8)",
        f"PCA{dimension // 4},HNSW{links},SQ8,Refine(SQ8)",
        f"IVF{lists},RaBitQ,Refine(SQ8)",
        "Flat",
        f"HNSW{links},Flat",
        f"IVF{lists},PQ{dimension // 8}x8,Refine(SQ8)",
    )
    found = [faiss_engine(factory, construction) for factory in factories]
    build, sweep = partial(_build_hnswlib, links, construction), [{"ef": n} for n in _WIDTHS]
    found.append(Engine(f"hnswlib M={links}", "hnswlib", sweep, build, _open_hnswlib))
    # USearch's i8 always maps [-1, 1] to [-127, 127]: components of 768-dimensional unit vectors
    # are about 0.04, five steps, and recall does not exceed 0.89 (20,000 vectors).
    for dtype in ("bf16", "f32"):
        build = partial(_build_usearch, links, construction, dtype)
        sweep = [{"expansion_search": n} for n in _WIDTHS]
        found.append(Engine(f"USearch M={links} {dtype}", "usearch", sweep, build, _open_usearch))
    return found


def faiss_engine(factory: str, construction: int) -> Engine:
    """Returns the engine of a FAISS factory string; `construction` is efConstruction of HNSW."""
    sweep: list[Parameters] = [{}]
    if factory.startswith("PCA"):
        pairs = product(_REFINE_FACTORS[:2], _WIDTHS)
        sweep = [{"k_factor": k, "efSearch": width} for k, width in pairs if width >= K * k]
    elif "HNSW" in factory:
        sweep = [{"efSearch": width} for width in _WIDTHS]
    elif "IVF" in factory and "Refine" in factory:
        pairs = product(_REFINE_FACTORS, _PROBES)
        sweep = [{"nprobe": probes, "k_factor": factor} for factor, probes in pairs]
    elif "IVF" in factory:
        sweep = [{"nprobe": probes} for probes in _PROBES]
    build = partial(_build_faiss, factory, construction)
    return Engine(f"FAISS {factory}", "faiss-cpu", sweep, build, _open_faiss)


def _build_faiss(
    factory: str, construction: int, vectors: FloatArray, threads: int, path: Path
) -> None:
    faiss.omp_set_num_threads(threads)
    index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efConstruction = construction
    if reduced_graph(index):
        train_reduced(index, _sample(vectors, _TRAINING_ROWS))
    if (inverted := faiss.try_extract_index_ivf(index)) is not None:
        inverted = faiss.downcast_index(inverted)
        kmeans = faiss.Kmeans(vectors.shape[1], inverted.nlist, niter=10, spherical=True)
        kmeans.train(_sample(vectors, _ROWS_PER_LIST * inverted.nlist))
        inverted.quantizer.add(kmeans.centroids)
        inverted.quantizer_trains_alone = 0
        if isinstance(inverted, faiss.IndexIVFPQ):
            # Only searches by Hamming distance need it, and it takes most of the training time.
            inverted.do_polysemous_training = False
    if not index.is_trained:
        products = "PQ" in factory
        # Product quantisers train in many small steps: 5 s on one thread, 84 s on two (20,000
        # vectors).
        faiss.omp_set_num_threads(1 if products else threads)
        index.train(_sample(vectors, _PRODUCT_TRAINING_ROWS if products else _TRAINING_ROWS))
        faiss.omp_set_num_threads(threads)
    for _, part in _parts(vectors):
        index.add(part)
    faiss.write_index(index, str(path))


def _open_faiss(path: Path, _: int) -> Search:
    index = faiss.read_index(str(path))
    space = faiss.ParameterSpace()

    def search(queries: FloatArray, parameters: Parameters, threads: int) -> RowArray:
        faiss.omp_set_num_threads(threads)
        for name, value in parameters.items():
            space.set_index_parameter(index, _FAISS_NAMES.get(name, name), value)
        rows: RowArray = index.search(queries, K)[1]
        return rows

    return search


def _build_hnswlib(
    links: int, construction: int, vectors: FloatArray, threads: int, path: Path
) -> None:
    import hnswlib

    index = hnswlib.Index(space="ip", dim=vectors.shape[1])
    index.init_index(len(vectors), ef_construction=construction, M=links)
    for rows, part in _parts(vectors):
        index.add_items(part, rows, num_threads=threads)
    index.save_index(str(path))


def _open_hnswlib(path: Path, dimension: int) -> Search:
    import hnswlib

    index = hnswlib.Index(space="ip", dim=dimension)
    index.load_index(str(path))

    def search(queries: FloatArray, parameters: Parameters, threads: int) -> RowArray:
        index.set_ef(parameters["ef"])
        return np.asarray(index.knn_query(queries, K, num_threads=threads)[0], dtype=np.int64)

    return search


def _build_usearch(
    links: int, construction: int, dtype: str, vectors: FloatArray, threads: int, path: Path
) -> None:
    from usearch.index import Index

    shape = {"ndim": vectors.shape[1], "dtype": dtype, "connectivity": links}
    index = Index(metric="ip", expansion_add=construction, **shape)
    for rows, part in _parts(vectors):
        index.add(rows, part, threads=threads)
    index.save(str(path))


def _open_usearch(path: Path, _: int) -> Search:
    from usearch.index import Index

    index = Index.restore(str(path), view=False)

    def search(queries: FloatArray, parameters: Parameters, threads: int) -> RowArray:
        index.expansion_search = parameters["expansion_search"]
        keys = index.search(queries, K, threads=threads).keys
        return np.asarray(keys).astype(np.int64).reshape(len(queries), K)

    return search


def _parts(vectors: FloatArray) -> Iterator[tuple[RowArray, FloatArray]]:
    """Yields rows and vectors of successive parts, and logs progress."""
    for rows in np.array_split(np.arange(len(vectors)), -(-len(vectors) // _ADD_ROWS)):
        yield rows, np.ascontiguousarray(vectors[rows[0] : rows[-1] + 1])
        _log.info("           %d of %d vectors", rows[-1] + 1, len(vectors))


def _sample(vectors: FloatArray, number: int) -> FloatArray:
    rows = np.linspace(0, len(vectors) - 1, min(len(vectors), number)).astype(np.int64)
    return np.ascontiguousarray(vectors[np.unique(rows)])
