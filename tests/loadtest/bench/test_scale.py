import json
from pathlib import Path

import faiss
import numpy as np
import pytest

from loadtest.bench import scale
from loadtest.bench.engines import engines, faiss_engine
from loadtest.bench.options import ScaleOptions
from loadtest.bench.results import scale_results
from loadtest.bench.scale import defaults, frontier, plot
from loadtest.bench.vectors import SyntheticVectors, write_vectors
from stores.exact import exact_search


@pytest.fixture(scope="module")
def synthetic() -> SyntheticVectors:
    return SyntheticVectors(6000, 256, seed=3)


@pytest.fixture(scope="module")
def documents(synthetic: SyntheticVectors, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    path = tmp_path_factory.mktemp("vectors") / "documents.npy"
    write_vectors(synthetic, path)
    return np.load(path, mmap_mode="r")


@pytest.fixture(scope="module")
def queries(synthetic: SyntheticVectors) -> np.ndarray:
    return synthetic.queries(100)


@pytest.fixture(scope="module")
def truth(documents: np.ndarray, queries: np.ndarray) -> np.ndarray:
    return exact_search(queries, documents, 10)[1]


def test_vectors_are_deterministic_units_around_one_direction(
    documents: np.ndarray, queries: np.ndarray
) -> None:
    again = SyntheticVectors(6000, 256, seed=3)
    np.testing.assert_array_equal(np.concatenate([c for _, c in again.chunks()]), documents)
    np.testing.assert_array_equal(again.queries(100), queries)
    for vectors in (documents, queries):
        assert vectors.dtype == np.float32
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.linalg.norm(documents.mean(axis=0)) == pytest.approx(0.94, abs=0.01)
    other = SyntheticVectors(6000, 256, seed=4)
    assert not np.allclose(other.queries(100), queries, atol=0.1)


def test_too_few_dimensions_are_an_error() -> None:
    with pytest.raises(ValueError):
        SyntheticVectors(100, 64)


def test_queries_are_near_their_documents_but_not_equal(
    documents: np.ndarray, queries: np.ndarray, truth: np.ndarray
) -> None:
    nearest = np.einsum("qd,qd->q", queries, documents[truth[:, 0]])
    assert nearest.max() < 0.999
    assert np.median(nearest) > np.quantile(queries @ documents.T, 0.99)


@pytest.mark.e2e
@pytest.mark.parametrize("factory", ["HNSW32,SQ8", "IVF64,SQ8", "IVF64,RaBitQ,Refine(SQ8)", "Flat"])
def test_recall_rises_with_search_effort_and_is_not_trivial(
    factory: str, documents: np.ndarray, queries: np.ndarray, truth: np.ndarray, tmp_path: Path
) -> None:
    engine = faiss_engine(factory, construction=80)
    engine.build(documents, 1, tmp_path / "index")
    search = engine.open(tmp_path / "index", documents.shape[1])
    reached = [scale.recall(search(queries, parameters, 1), truth) for parameters in engine.sweep]
    if factory == "Flat":
        assert reached == [1.0]
    else:
        assert reached[0] < 0.95 < reached[-1]


def test_product_quantisers_skip_polysemous_training(
    documents: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    train = faiss.IndexIVFPQ.train

    def spy(index: faiss.IndexIVFPQ, vectors: np.ndarray) -> None:
        trained.append(index.do_polysemous_training)
        train(index, vectors)

    monkeypatch.setattr(faiss.IndexIVFPQ, "train", spy)
    faiss_engine("IVF16,PQ8x4", 80).build(documents[:1000], 1, tmp_path / "index")
    assert trained == [False]


def test_recall_counts_the_true_neighbours_found() -> None:
    truth = np.array([[1, 2], [3, 4]])
    assert scale.recall(np.array([[2, 1], [3, -1]]), truth) == 0.75


def test_frontier_drops_dominated_points() -> None:
    points = [
        {"recall": recall, "speed": speed}
        for recall, speed in [(0.9, 100), (0.8, 90), (0.95, 50), (0.99, 50), (0.7, 200)]
    ]
    assert [(p["recall"], p["speed"]) for p in frontier(points, "speed")] == [
        (0.7, 200),
        (0.9, 100),
        (0.99, 50),
    ]


def _engine(name: str, *points: tuple[float, float]) -> dict[str, object]:
    return {
        "engine": name,
        "bytes": 7,
        "build": {"seconds": 1.5},
        "points": [
            {"parameters": {"ef": i}, "recall": r, "alone_per_second": s, "batch_per_second": s}
            for i, (r, s) in enumerate(points)
        ],
    }


def test_defaults_rank_engines_by_speed_among_those_that_reach_the_recall() -> None:
    found = defaults([_engine("a", (0.96, 10), (0.97, 20)), _engine("b", (0.94, 90), (0.995, 15))])
    assert [(e["engine"], e["parameters"]) for e in found["0.95"]] == [
        ("a", {"ef": 1}),
        ("b", {"ef": 1}),
    ]
    assert [e["engine"] for e in found["0.99"]] == ["b"]
    assert found["0.99"][0]["build_seconds"] == 1.5


def test_engines_have_unique_names_and_a_sweep() -> None:
    chosen = engines(1_000_000, 768, 32, 200)
    assert len({engine.name for engine in chosen}) == len(chosen)
    assert all(engine.sweep for engine in chosen)
    assert "FAISS IVF4096,SQ8" in {engine.name for engine in chosen}


@pytest.mark.e2e
def test_a_run_writes_its_result_and_plot_and_reuses_its_builds(tmp_path: Path) -> None:
    options = ScaleOptions(
        vectors=2000,
        dimension=256,
        queries=20,
        threads=1,
        links=8,
        construction=20,
        engines=["FAISS HNSW8,SQ8"],
        cache=tmp_path / "cache",
        out=tmp_path / "out",
    )
    scale.run(options)
    first = json.loads((tmp_path / "out" / "scale-2000.json").read_text())
    assert (tmp_path / "out" / "scale.png").stat().st_size > 10_000
    (engine,) = first["engines"]
    assert engine["bytes"] > 2000 * 256
    assert engine["points"][-1]["recall"] > 0.9
    built = {p: p.stat().st_mtime_ns for p in options.folder.iterdir()}
    scale.run(options)
    second = json.loads((tmp_path / "out" / "scale-2000.json").read_text())
    assert second["engines"][0]["build"] == engine["build"]
    assert {p: p.stat().st_mtime_ns for p in options.folder.iterdir()} == built


@pytest.mark.e2e
def test_the_plot_has_a_row_for_each_size(tmp_path: Path) -> None:
    for size in (100, 20):
        result = {
            "options": {"vectors": size, "dimension": 4, "threads": 1},
            "k": 10,
            "engines": [_engine(f"FAISS IVF{size},SQ8", (0.9, 5), (0.95, 2))],
        }
        (tmp_path / f"scale-{size}.json").write_text(json.dumps(result))
    results = scale_results(tmp_path)
    assert [result["options"]["vectors"] for result in results] == [20, 100]
    plot(results, tmp_path / "two.png")
    plot(results[:1], tmp_path / "one.png")
    height = [
        int.from_bytes((tmp_path / name).read_bytes()[20:24]) for name in ("one.png", "two.png")
    ]
    assert height[1] == 2 * height[0]
