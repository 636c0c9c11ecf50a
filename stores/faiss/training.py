"""Training of empty FAISS indexes on a sample of the vectors."""

from collections.abc import Iterator
from contextlib import contextmanager

import faiss
import numpy as np

from core.errors import CareError
from core.progress import progress_bar
from core.shards import ShardedVectors
from core.types import FloatArray
from stores.faiss.factory import ROWS_PER_LIST

_EF_CONSTRUCTION = 200
_SAMPLE_ROWS = 100_000
# 100 training vectors for each of the at most 256 centroids of a product quantiser.
_PRODUCT_SAMPLE_ROWS = 25_600
_LIST_SAMPLE_ROWS = 50
_LIST_ROUNDS = 10


def gpus() -> int:
    """Returns the number of GPUs that FAISS can use, 0 for faiss-cpu."""
    return faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0


@contextmanager
def assigning_on_gpus(index: faiss.Index) -> Iterator[None]:
    """Assigns vectors that are added in the block to inverted lists on GPUs, if available."""
    if not gpus():
        yield
        return
    lists = faiss.extract_index_ivf(index)
    quantizer = lists.quantizer
    lists.quantizer = faiss.index_cpu_to_all_gpus(quantizer)
    try:
        yield
    finally:
        lists.quantizer = quantizer


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
