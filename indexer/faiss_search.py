"""Searching an index of FAISS while it is built: which parameters, and what it finds."""

import faiss

from core.shards import ShardedVectors
from core.types import FloatArray, RowArray
from indexer.recall import RECALL_K, Parameters, SearchChoice, choose_parameters

_EF_SEARCH = (16, 32, 64, 128, 256, 512, 1024)
_PROBES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_REFINE_FACTORS = (4, 16, 64)
# A row that is refined lies anywhere on disk, one that is scanned follows the last: 1 µs
# against 0.03 (PQ384x4fs) to 0.07 (PQ96x8), at 100,000 × 768.
_REFINED_TO_SCANNED = 20


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
        IndexVersionError: If no combination reaches it.
    """

    def search(queries: FloatArray, k: int, parameters: Parameters) -> RowArray:
        rows: RowArray = index.search(queries, k, params=_search_parameters(parameters))[1]
        return rows

    return choose_parameters(search, _by_cost(index), vectors, queries, target, _remedy(index))


def best_scores(index: faiss.Index, queries: FloatArray) -> FloatArray:
    """Returns float32 [q], the score of each query's best hit, searched for widely."""
    scores, _ = index.search(queries, 1, params=_search_parameters(_by_cost(index)[-1]))
    best: FloatArray = scores[:, 0]
    return best


def _by_cost(index: faiss.Index) -> list[dict[str, int]]:
    """Returns the combinations of parameters that an index can be searched with, cheapest first."""
    if isinstance(index, faiss.IndexHNSW):
        return [{"efSearch": width} for width in _EF_SEARCH]
    lists = faiss.try_extract_index_ivf(index)
    if lists is None:
        return [{}]
    probes = sorted({min(number, lists.nlist) for number in _PROBES})
    if not isinstance(index, faiss.IndexRefine):
        return [{"nprobe": number} for number in probes]

    def cost(parameters: Parameters) -> float:
        scanned: float = parameters["nprobe"] * index.ntotal / lists.nlist
        return scanned + _REFINED_TO_SCANNED * RECALL_K * parameters["k_factor"]

    return sorted(
        ({"nprobe": n, "k_factor": factor} for n in probes for factor in _REFINE_FACTORS), key=cost
    )


def _search_parameters(parameters: Parameters) -> faiss.SearchParameters | None:
    if "efSearch" in parameters:
        return faiss.SearchParametersHNSW(efSearch=parameters["efSearch"])
    if "nprobe" not in parameters:
        return None
    lists = faiss.SearchParametersIVF(nprobe=parameters["nprobe"])
    if "k_factor" not in parameters:
        return lists
    return faiss.IndexRefineSearchParameters(
        k_factor=parameters["k_factor"], base_index_params=lists
    )


def _remedy(index: faiss.Index) -> str:
    if isinstance(index, faiss.IndexHNSW):
        return "a factory with more links or without quantisation"
    if isinstance(index, faiss.IndexRefine):
        return "fewer lists, more parts, or Refine(SQfp16) or RFlat where it is Refine(SQ8)"
    return "fewer lists, or IVF with Flat where it is SQ8"
