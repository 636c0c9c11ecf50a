"""Training of empty FAISS indexes on a sample of the vectors."""

import faiss
import numpy as np

from core.errors import CareError
from core.progress import progress_bar
from core.shards import ShardedVectors
from core.types import FloatArray, RowArray
from stores.faiss.factory import ROWS_PER_LIST, reduced_graph
from stores.faiss.gpu import gpus

_EF_CONSTRUCTION = 200
# Of graphs of reduced vectors, whose recall is limited by the refinement: with 200 the build takes
# twice as long.
_EF_CONSTRUCTION_REDUCED = 100
_SAMPLE_ROWS = 100_000
# 100 training vectors for each of the at most 256 centroids of a product quantiser.
_PRODUCT_SAMPLE_ROWS = 25_600
_LIST_SAMPLE_ROWS = 50
_LIST_ROUNDS = 10


class Assignment:
    """Assigns vectors that are added to inverted lists on all GPUs, if there are any.

    The quantiser of the index must have all centroids.
    """

    def __init__(self, lists: faiss.IndexIVF) -> None:
        self._lists = lists
        self._on_gpus: faiss.Index | None = None
        if gpus():
            # GPUs find the nearest centroids of a batch. Residuals are computed row by row and in
            # several threads, which only the centroids on the processor support.
            clone = faiss.index_cpu_to_all_gpus(lists.quantizer)
            self._on_gpus = faiss.IndexRefine(clone, lists.quantizer)

    def add(self, vectors: FloatArray, ids: RowArray) -> None:
        """Adds vectors, float32 [n, dimension], with ids, int64 [n].

        Afterwards the index has its own quantiser again, so that it can be written.
        """
        if self._on_gpus is None:
            self._lists.add_with_ids(vectors, ids)
            return
        quantizer = self._lists.quantizer
        self._lists.quantizer = self._on_gpus
        try:
            self._lists.add_with_ids(vectors, ids)
        finally:
            self._lists.quantizer = quantizer


def trained_index(
    vectors: ShardedVectors, factory: str, *, threads: int, memory: int, progress: bool
) -> faiss.Index:
    """Returns an empty inner-product index, trained on a sample of at most `memory` bytes.

    Raises:
        CareError: If the sample that fits into memory is too small.
    """
    index = faiss.index_factory(vectors.dimension, factory, faiss.METRIC_INNER_PRODUCT)
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efConstruction = _EF_CONSTRUCTION
    if reduced_graph(index) is not None:
        train_reduced(index, _sample(vectors, _SAMPLE_ROWS, memory))
        return index
    lists = faiss.try_extract_index_ivf(index)
    if lists is not None:
        lists.quantizer.add(_centroids(vectors, lists.nlist, memory=memory, progress=progress))
        lists.quantizer_trains_alone = 0
    if index.is_trained:
        return index
    if not isinstance(index, faiss.IndexRefine):
        index.train(_sample(vectors, _SAMPLE_ROWS, memory))
        return index
    base = faiss.downcast_index(index.base_index)
    base.pq.cp.min_points_per_centroid = 1  # check_factory enforces a minimum
    if isinstance(base, faiss.IndexIVFPQ):
        # Only search by Hamming distance needs it, and it takes most of the training time.
        base.do_polysemous_training = False
    # Training has many small steps: 5 s with one thread, 84 s with two (20,000 vectors).
    faiss.omp_set_num_threads(1)
    base.train(_sample(vectors, _PRODUCT_SAMPLE_ROWS, memory))
    faiss.omp_set_num_threads(threads)
    index.refine_index.train(_sample(vectors, _SAMPLE_ROWS, memory))
    index.is_trained = True
    return index


def train_reduced(index: faiss.IndexRefine, sample: FloatArray) -> None:
    """Trains an index with a `reduced_graph` on a sample, float32 [n, dimension].

    Its graph has vectors that are reduced to their principal components. The mean is not
    subtracted, as FAISS does, because that would change the order of inner products.
    """
    reduced = faiss.downcast_index(index.base_index)
    matrix = faiss.downcast_VectorTransform(reduced.chain.at(0))
    _, components = np.linalg.eigh(sample.T @ sample)
    kept = components[:, ::-1][:, : matrix.d_out].T
    faiss.copy_array_to_vector(np.ascontiguousarray(kept, np.float32).ravel(), matrix.A)
    matrix.have_bias, matrix.is_orthonormal, matrix.is_trained = False, True, True
    graph = faiss.downcast_index(reduced.index)
    graph.hnsw.efConstruction = _EF_CONSTRUCTION_REDUCED
    graph.train(matrix.apply(sample))
    index.refine_index.train(sample)
    reduced.is_trained = index.is_trained = True


def _centroids(vectors: ShardedVectors, lists: int, *, memory: int, progress: bool) -> FloatArray:
    """Returns float32 [lists, dimension] of unit norm, by spherical k-means."""
    row_bytes = 4 * vectors.dimension
    if memory < ROWS_PER_LIST * lists * row_bytes:
        needed = ROWS_PER_LIST * lists * row_bytes / 2**30
        raise CareError(
            f"training {lists} inverted lists needs {needed:.2f} GiB, but --memory-gib is "
            f"{memory / 2**30:.2f}: increase it, or use fewer lists",
            code="too_little_memory",
            needed_gib=needed,
        )
    sample = _sample(vectors, _LIST_SAMPLE_ROWS * lists, memory)
    kmeans = faiss.Kmeans(vectors.dimension, lists, niter=1, spherical=True, gpu=gpus())
    with progress_bar("train", show=progress, total=_LIST_ROUNDS * len(sample)) as bar:
        for _ in range(_LIST_ROUNDS):
            kmeans.train(sample, init_centroids=kmeans.centroids)
            bar.update(len(sample))
    centroids: FloatArray = kmeans.centroids
    return centroids


def _sample(vectors: ShardedVectors, number: int, memory: int) -> FloatArray:
    number = min(number, len(vectors), max(1, memory // (4 * vectors.dimension)))
    rows = np.linspace(0, len(vectors) - 1, number).astype(np.int64)
    return vectors.take(np.unique(rows))
