from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from core.types import FloatArray, RowArray
from core.vectors import truncate_normalize
from stores.base import ScoredRows
from stores.faiss.scan import CodesScan, ListsScan, Scan
from stores.faiss.search import FaissVectors, limit_threads
from stores.order import DEPTH
from tests.stores.selections import only

pytestmark = pytest.mark.e2e

COUNT = 60_000
DIMENSION = 64
# Twenty documents each: a broad filter needs neighbours beyond one cluster.
CLUSTERS = 3000
QUERIES = 100
K = 10
# Tolerance for the order of summation in FAISS and numpy.
EQUAL = 1e-5

Mask = NDArray[np.bool_]


def save(folder: Path, vectors: FloatArray, factory: str) -> Path:
    index = faiss.index_factory(vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    if isinstance(index, faiss.IndexHNSW):
        index.hnsw.efConstruction = 100
    index.train(vectors)
    index.add(vectors)
    path = folder / "vectors.faiss"
    faiss.write_index(index, str(path))
    return path


@dataclass(frozen=True)
class Clusters:
    """An index of clusters of vectors, and the data for exact search.

    Attributes:
        index: The index under test.
        scores: float32 [queries, count], scores of all documents.
        queries: float32 [queries, dimension].
        cluster: The cluster of each document.
        own: The cluster of each query.
        uniform: A number in [0, 1) for each document, independent of its cluster.
    """

    index: FaissVectors
    scores: FloatArray
    queries: FloatArray
    cluster: RowArray
    own: RowArray
    uniform: NDArray[np.float64]

    def mask(self, kind: str, query: int) -> Mask:
        """Returns the documents that match a kind of filter for a query."""
        other_half = self.cluster % 2 != self.own[query] % 2
        masks: dict[str, Mask] = {
            "all": self.uniform < 1,
            "50 %": self.uniform < 0.5,
            "30 %": self.uniform < 0.3,
            "the query's half of the clusters": ~other_half,
            "the other half of the clusters": other_half,
            "all but the query's cluster": self.cluster != self.own[query],
            "one in a thousand": self.uniform < 0.001,
            "a single row": np.arange(COUNT) == query,
        }
        return masks[kind]

    def exact(self, query: int, mask: Mask, k: int) -> FloatArray:
        """Returns the k best scores of the documents that match a filter, descending."""
        return -np.sort(-self.scores[query, mask])[:k]


def clustered(folder: Path, factory: str, **search_parameters: int) -> Clusters:
    """Builds an index of documents in clusters."""
    limit_threads()
    random = np.random.default_rng(0)
    centers = random.normal(size=(CLUSTERS, DIMENSION))

    def around(cluster: RowArray) -> FloatArray:
        noise = 0.5 * random.normal(size=(len(cluster), DIMENSION))
        return truncate_normalize((centers[cluster] + noise).astype(np.float32), DIMENSION)

    cluster = random.integers(0, CLUSTERS, COUNT)
    own = random.integers(0, CLUSTERS, QUERIES)
    vectors, queries = around(cluster), around(own)
    path = save(folder, vectors, factory)
    return Clusters(
        index=FaissVectors(path, search_parameters),
        scores=queries @ vectors.T,
        queries=queries,
        cluster=cluster,
        own=own,
        uniform=random.random(COUNT),
    )


# Parameters with a recall@10 of 0.99 without a filter.
PARAMETERS = {
    "HNSW32,Flat": {"efSearch": 32},
    "IVF1024,Flat": {"nprobe": 64},
    "IVF1024,PQ32x4fs,RFlat": {"nprobe": 64, "k_factor": 16},
}
GRAPHS = pytest.mark.parametrize("clusters", ["HNSW32,Flat"], indirect=True)
LISTS = pytest.mark.parametrize(
    "clusters", ["IVF1024,Flat", "IVF1024,PQ32x4fs,RFlat"], indirect=True
)


@pytest.fixture(scope="module", params=PARAMETERS)
def clusters(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Clusters:
    """An index of each type, unless a test is marked with GRAPHS or LISTS."""
    factory: str = request.param
    return clustered(tmp_path_factory.mktemp("clusters"), factory, **PARAMETERS[factory])


@pytest.fixture
def exact_searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the depths of exact searches."""
    depths: list[int] = []

    def watch(kind: type[Scan]) -> None:
        search = kind.search

        def spy(self: Scan, query: FloatArray, k: int, *more: Any) -> ScoredRows:
            depths.append(k)
            return search(self, query, k, *more)

        monkeypatch.setattr(kind, "search", spy)

    watch(CodesScan)
    watch(ListsScan)
    return depths


def assert_sound(clusters: Clusters, query: int, found: ScoredRows, mask: Mask) -> None:
    scores, rows = found
    assert (scores.dtype, rows.dtype) == (np.float32, np.int64)
    assert len(set(rows.tolist())) == len(rows) == len(scores)
    assert mask[rows].all()
    assert (np.diff(scores) <= 0).all()
    np.testing.assert_allclose(scores, clusters.scores[query, rows], atol=EQUAL)


def recall(clusters: Clusters, kind: str, k: int = K) -> float:
    """Returns the mean recall@k of the queries; each result must have k hits."""
    hits = 0
    for query, vector in enumerate(clusters.queries):
        mask = clusters.mask(kind, query)
        rows = None if kind == "all" else np.flatnonzero(mask)
        found = clusters.index.search(vector, k, only(rows))
        assert_sound(clusters, query, found, mask)
        assert len(found[1]) >= k  # more if several are as near as the last one
        found = found[0][:k], found[1][:k]
        hits += int((found[0] >= clusters.exact(query, mask, k)[-1] - EQUAL).sum())
    return hits / (k * QUERIES)


@GRAPHS
@pytest.mark.parametrize(
    ("kind", "least", "fewest", "most"),
    [
        ("all", 0.99, 0, 0),
        ("50 %", 0.99, 0, 0),
        ("the query's half of the clusters", 0.99, 0, 0),
        # A few queries find too few documents in the graph, and are searched again exactly.
        ("the other half of the clusters", 0.99, 1, 9),
        ("all but the query's cluster", 0.99, 0, 9),
        ("30 %", 1, QUERIES, QUERIES),
        ("one in a thousand", 1, QUERIES, QUERIES),
    ],
)
def test_a_selective_filter_on_a_graph_is_searched_exactly(
    clusters: Clusters,
    exact_searches: list[int],
    kind: str,
    least: float,
    fewest: int,
    most: int,
) -> None:
    assert recall(clusters, kind) >= least
    assert fewest <= len(exact_searches) <= most


@LISTS
@pytest.mark.parametrize(
    ("kind", "least", "fewest", "most"),
    [
        ("all", 0.99, 0, 0),
        ("50 %", 0.99, 0, 0),
        ("30 %", 0.99, 0, QUERIES),
        ("the query's half of the clusters", 0.99, 0, QUERIES),
        # The lists with the last neighbours are beyond those of the excluded documents.
        ("all but the query's cluster", 0.98, 0, QUERIES),
        ("the other half of the clusters", 0.98, 0, QUERIES),
        ("one in a thousand", 1, QUERIES, QUERIES),
    ],
)
def test_a_selective_filter_on_inverted_lists_is_searched_exactly(
    clusters: Clusters,
    exact_searches: list[int],
    kind: str,
    least: float,
    fewest: int,
    most: int,
) -> None:
    assert recall(clusters, kind) >= least
    assert fewest <= len(exact_searches) <= most


@GRAPHS
@pytest.mark.parametrize("k", [1, 1000])
def test_a_broad_filter_keeps_its_recall_at_other_depths(clusters: Clusters, k: int) -> None:
    assert recall(clusters, "50 %", k) >= 0.99


@LISTS
@pytest.mark.parametrize("k", [1, 1000])
@pytest.mark.parametrize("kind", ["all", "50 %"])
def test_more_inverted_lists_are_scanned_for_more_hits(
    clusters: Clusters, kind: str, k: int
) -> None:
    # After the twenty documents of the query's cluster, the next ones are in distant lists.
    assert recall(clusters, kind, k) >= 0.96


@pytest.mark.parametrize("k", [1, 1000])
@pytest.mark.parametrize("kind", ["one in a thousand", "a single row"])
def test_few_matching_rows_are_searched_exactly(
    clusters: Clusters, exact_searches: list[int], kind: str, k: int
) -> None:
    for query in range(20):
        mask = clusters.mask(kind, query)
        found = clusters.index.search(clusters.queries[query], k, only(np.flatnonzero(mask)))
        assert_sound(clusters, query, found, mask)
        np.testing.assert_allclose(found[0], clusters.exact(query, mask, k), atol=EQUAL)
    assert len(exact_searches) == 20


@pytest.mark.parametrize("k", [1, COUNT])
def test_without_matching_rows_there_are_no_hits(clusters: Clusters, k: int) -> None:
    scores, rows = clusters.index.search(clusters.queries[0], k, only(np.empty(0, np.int64)))
    assert (len(scores), scores.dtype) == (0, np.float32)
    assert (len(rows), rows.dtype) == (0, np.int64)


def test_all_documents_can_be_requested(clusters: Clusters) -> None:
    _, rows = clusters.index.search(clusters.queries[0], COUNT)
    assert sorted(rows.tolist()) == list(range(COUNT))


def test_a_filter_that_matches_all_rows_changes_nothing(clusters: Clusters) -> None:
    free = clusters.index.search(clusters.queries[0], K)
    filtered = clusters.index.search(clusters.queries[0], K, only(np.arange(COUNT)))
    np.testing.assert_array_equal(free, filtered)


@pytest.mark.parametrize("kind", ["all", "one in a thousand"])
def test_concurrent_searches_give_the_same_hits(clusters: Clusters, kind: str) -> None:
    def search(query: int) -> list[list[float]]:
        # With different depths, to detect shared parameters.
        rows = None if kind == "all" else np.flatnonzero(clusters.mask(kind, query))
        k = 1 if query % 2 else 100
        return [
            part.tolist() for part in clusters.index.search(clusters.queries[query], k, only(rows))
        ]

    alone = [search(query) for query in range(QUERIES)]
    with ThreadPoolExecutor(8, initializer=limit_threads) as pool:
        assert list(pool.map(search, range(QUERIES))) == alone


SMALL = 500


@pytest.fixture(scope="module")
def small_vectors() -> FloatArray:
    random = np.random.default_rng(1)
    vectors = random.normal(size=(SMALL, DIMENSION)).astype(np.float32)
    return truncate_normalize(vectors, DIMENSION)


@pytest.mark.parametrize(
    ("factory", "parameters", "tolerance"),
    [
        ("Flat", {}, EQUAL),
        ("HNSW8,SQfp16", {"efSearch": SMALL}, 1e-3),
        ("HNSW8,SQ8", {"efSearch": SMALL}, 2e-2),
        ("PCA8,HNSW8,SQ8,RFlat", {"efSearch": SMALL, "k_factor": 50}, EQUAL),
        ("PCA8,HNSW8,SQ8,Refine(SQ8)", {"efSearch": SMALL, "k_factor": 50}, 2e-2),
        ("IVF8,Flat", {"nprobe": 8}, EQUAL),
        ("IVF8,SQ8", {"nprobe": 8}, 2e-2),
        ("IVF8,PQ16x4fs,Refine(SQ8)", {"nprobe": 8, "k_factor": 50}, 2e-2),
        ("IVF8,PQ16x4fs,Refine(SQfp16)", {"nprobe": 8, "k_factor": 50}, 1e-3),
        ("IVF8,PQ4x8np,RFlat", {"nprobe": 8, "k_factor": 50}, EQUAL),
    ],
)
def test_every_index_type_searches_with_and_without_a_filter(
    tmp_path: Path,
    small_vectors: FloatArray,
    factory: str,
    parameters: dict[str, int],
    tolerance: float,
) -> None:
    index = FaissVectors(save(tmp_path, small_vectors, factory), parameters)
    exact = small_vectors @ small_vectors[0]
    for rows in (None, np.arange(0, SMALL, 2), np.zeros(1, np.int64)):
        scores, found = index.search(small_vectors[0], 5, only(rows))
        best = -np.sort(-(exact if rows is None else exact[rows]))[:5]
        assert found[0] == 0
        np.testing.assert_allclose(scores, best, atol=tolerance)


@pytest.mark.parametrize("factory", ["Flat", "HNSW8,Flat", "IVF8,SQ8", "IVF8,PQ16x4fs,RFlat"])
def test_requesting_too_many_hits_returns_each_document_once(
    tmp_path: Path, small_vectors: FloatArray, factory: str
) -> None:
    index = FaissVectors(save(tmp_path, small_vectors, factory), {})
    for rows in (None, np.arange(SMALL)):
        _, found = index.search(small_vectors[0], 2 * SMALL, only(rows))
        assert sorted(found.tolist()) == list(range(SMALL))


# More lists are scanned for the one list of candidates than for ten hits.
@pytest.mark.parametrize(("probes", "scanned"), [(1, 4), (8, 8)])
@pytest.mark.parametrize("k_factor", [1, 50])
def test_the_search_uses_the_parameters_of_the_manifest(
    tmp_path: Path, small_vectors: FloatArray, probes: int, scanned: int, k_factor: int
) -> None:
    path = save(tmp_path, small_vectors, "IVF8,PQ4x4fs,RFlat")
    index = FaissVectors(path, {"nprobe": probes, "k_factor": k_factor})
    index._approximate.cost = lambda *_: 0
    same = faiss.IndexRefineSearchParameters(
        k_factor=k_factor, base_index_params=faiss.SearchParametersIVF(nprobe=scanned)
    )
    for query in small_vectors[:50]:
        _, expected = faiss.read_index(str(path)).search(query[None], DEPTH + 1, params=same)
        assert index.search(query, 2)[1].tolist() == expected[0, :2].tolist()


@GRAPHS
def test_queries_that_are_searched_together_have_the_hits_of_each(clusters: Clusters) -> None:
    found = clusters.index.search_together(clusters.queries, K)
    assert found is not None
    for query, (scores, rows) in zip(clusters.queries, found, strict=True):
        alone = clusters.index.search(query, K)
        assert (scores.tolist(), rows.tolist()) == (alone[0].tolist(), alone[1].tolist())
    # An exact search costs less.
    assert clusters.index.search_together(clusters.queries, COUNT) is None


@LISTS
def test_inverted_lists_are_searched_for_each_query_by_itself(clusters: Clusters) -> None:
    assert clusters.index.search_together(clusters.queries, K) is None


def test_a_graph_that_finds_too_few_vectors_is_searched_exactly(tmp_path: Path) -> None:
    vectors = truncate_normalize(np.random.default_rng(0).random((4000, 8), np.float32), 8)
    index = FaissVectors(save(tmp_path, vectors, "HNSW2,Flat"), {"efSearch": 1})
    for query, (_, rows) in zip(vectors, index.search_together(vectors, 5) or [], strict=True):
        assert rows.tolist() == index.search(query, 5)[1].tolist()
        assert len(set(rows.tolist())) == 5


@pytest.mark.parametrize("factory", ["Flat", "IVF2,Flat"])
def test_the_nearest_rows_do_not_include_all_that_are_tied(
    tmp_path: Path, small_vectors: FloatArray, factory: str
) -> None:
    equal = np.repeat(small_vectors[:1], 300, axis=0)
    index = FaissVectors(save(tmp_path, equal, factory), {"nprobe": 2} if "IVF" in factory else {})
    assert len(index.search(equal[0], 100)[0]) == 300
    scores, rows = index.nearest(equal[0], 100)
    assert len(set(rows.tolist())) == 100
    assert scores.tolist() == pytest.approx([1.0] * 100, abs=EQUAL)
