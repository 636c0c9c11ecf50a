"""Building FAISS indexes and choosing their search parameters by measured recall."""

import re
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np

from core.errors import CareError, IndexVersionError
from core.files import sync
from core.types import FloatArray
from indexer.progress import progress_bar
from indexer.shards import ShardedVectors

RECALL_K = 10

# Below this an exact scan takes about a millisecond, and nothing can be missed.
_FLAT_BELOW = 50_000
# FAISS aborts the process on fewer than two links and computes infinite levels with one.
_FACTORY = re.compile(r"Flat|HNSW([4-9]|[1-9]\d{1,2})(,(Flat|SQ8|SQfp16))?")
_EF_CONSTRUCTION = 200
_EF_SEARCH = (16, 32, 64, 128, 256, 512, 1024)
_TRAINING_ROWS = 100_000
_CHUNK_ROWS = 4096
# Equal texts have equal vectors: whichever of them a search returns is right.
_TIE = 1e-5


@dataclass(frozen=True, slots=True)
class SearchChoice:
    """Search parameters, and recall@10 of each value that was tried."""

    parameters: dict[str, int]
    recall: float
    tried: dict[str, float]


def choose_factory(count: int) -> str:
    """Returns the FAISS factory string for `count` vectors."""
    return "Flat" if count < _FLAT_BELOW else "HNSW32,Flat"


def check_factory(factory: str) -> None:
    """Refuses a factory string before any work is done.

    Raises:
        CareError: If the index type is not one that this project builds and searches.
    """
    if not _FACTORY.fullmatch(factory):
        raise CareError(
            f"factory '{factory}' is not supported: use Flat, HNSW32 (or 4 to 999 links), "
            "HNSW32,SQ8 or HNSW32,SQfp16"
        )


def build_index(
    vectors: ShardedVectors, factory: str, threads: int, *, progress: bool
) -> faiss.Index:
    """Builds an inner-product index over unit vectors; row i has id i."""
    faiss.omp_set_num_threads(threads)
    index = faiss.index_factory(vectors.dimension, factory, faiss.METRIC_INNER_PRODUCT)
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efConstruction = _EF_CONSTRUCTION
    if not index.is_trained:
        rows = np.linspace(0, len(vectors) - 1, min(len(vectors), _TRAINING_ROWS)).astype(np.int64)
        index.train(vectors.take(np.unique(rows)))
    with progress_bar("index", show=progress, total=len(vectors)) as bar:
        for _, chunk in vectors.chunks(_CHUNK_ROWS):
            index.add(chunk)
            bar.update(len(chunk))
    return index


def choose_search(
    index: faiss.Index, vectors: ShardedVectors, queries: FloatArray, target: float
) -> SearchChoice:
    """Finds the cheapest search parameters whose recall@10 reaches the target.

    Args:
        index: The index over `vectors`.
        vectors: All document vectors, for the exact search that recall is measured against.
        queries: float32 [q, dimension], held-out query vectors.
        target: The mean recall@10 wanted.

    Raises:
        IndexVersionError: If no value reaches it.
    """
    exact = _exact_kth_score(vectors, queries, RECALL_K)
    if not isinstance(index, faiss.IndexHNSW):
        return SearchChoice({}, _recall(index, vectors, queries, exact, 0), {})
    tried: dict[str, float] = {}
    for ef_search in _EF_SEARCH:
        recall = _recall(index, vectors, queries, exact, ef_search)
        tried[str(ef_search)] = recall
        if recall >= target:
            return SearchChoice({"efSearch": ef_search}, recall, tried)
    raise IndexVersionError(
        f"recall@{RECALL_K} is {recall:.4f} with efSearch {ef_search}, below the target "
        f"{target}: choose a factory with more links or without quantisation, or Flat"
    )


def write_index(index: faiss.Index, path: Path) -> None:
    """Writes an index to disk.

    Raises:
        CareError: If it cannot be written whole, for instance because the disk is full.
    """
    try:
        faiss.write_index(index, str(path))
    except RuntimeError as error:
        raise CareError(f"{path} cannot be written: is the disk full?") from error
    sync(path)


def read_index(path: Path) -> faiss.Index:
    """Opens an index by memory mapping.

    Raises:
        IndexVersionError: If FAISS cannot read it.
    """
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise IndexVersionError(f"{path} is not a readable FAISS index") from error


def best_scores(index: faiss.Index, queries: FloatArray) -> FloatArray:
    """Returns float32 [q], the score of each query's best hit, searched for widely."""
    scores, _ = index.search(queries, 1, params=_parameters(index, _EF_SEARCH[-1]))
    best: FloatArray = scores[:, 0]
    return best


def _parameters(index: faiss.Index, ef_search: int) -> faiss.SearchParameters | None:
    if not isinstance(index, faiss.IndexHNSW):
        return None
    return faiss.SearchParametersHNSW(efSearch=ef_search)


def _exact_kth_score(vectors: ShardedVectors, queries: FloatArray, k: int) -> FloatArray:
    best = np.full((len(queries), k), -np.inf, dtype=np.float32)
    for _, chunk in vectors.chunks(_CHUNK_ROWS):
        scores = np.concatenate([best, queries @ chunk.T], axis=1)
        best = -np.partition(-scores, k - 1, axis=1)[:, :k]
    kth: FloatArray = best.min(axis=1)
    return kth


def _recall(
    index: faiss.Index,
    vectors: ShardedVectors,
    queries: FloatArray,
    kth_score: FloatArray,
    ef_search: int,
) -> float:
    k = min(RECALL_K, len(vectors))
    _, rows = index.search(queries, k, params=_parameters(index, ef_search))
    hits = 0
    for query, found, bound in zip(queries, rows, kth_score, strict=True):
        scores = vectors.take(found[found >= 0]) @ query
        hits += int((scores >= bound - _TIE).sum())
    return hits / (k * len(queries))
