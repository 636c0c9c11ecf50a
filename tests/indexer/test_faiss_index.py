from pathlib import Path

import numpy as np
import pytest

from core.errors import CareError, IndexVersionError
from core.types import FloatArray
from core.vectors import truncate_normalize
from indexer.faiss_index import (
    best_scores,
    build_index,
    check_factory,
    choose_factory,
    choose_search,
    read_index,
    write_index,
)
from indexer.shards import ShardedVectors, write_shard

COUNT, DIMENSION = 3000, 32


def random_vectors(count: int, seed: int) -> FloatArray:
    values = np.random.default_rng(seed).normal(size=(count, DIMENSION))
    return truncate_normalize(values.astype(np.float32), DIMENSION)


QUERIES = random_vectors(50, seed=2)


@pytest.fixture(scope="module")
def raw() -> FloatArray:
    return random_vectors(COUNT, seed=1)


@pytest.fixture(scope="module")
def vectors(raw: FloatArray, tmp_path_factory: pytest.TempPathFactory) -> ShardedVectors:
    folder = tmp_path_factory.mktemp("shards")
    for shard, start in enumerate(range(0, COUNT, 1000)):
        part = raw[start : start + 1000]
        write_shard(folder, shard, part, [""] * len(part), tokens=0, truncated=0)
    return ShardedVectors(folder, 1000, np.arange(COUNT))


def oracle(raw: FloatArray, queries: FloatArray, k: int = 10) -> list[list[int]]:
    """The k best rows of each query, by brute force."""
    return np.argsort(-(queries @ raw.T), axis=1)[:, :k].tolist()


def recall(found: FloatArray, best: list[list[int]]) -> float:
    pairs = zip(found.tolist(), best, strict=True)
    return float(np.mean([len({*rows} & {*own}) / len(own) for rows, own in pairs]))


def test_flat_finds_what_brute_force_finds(raw: FloatArray, vectors: ShardedVectors) -> None:
    index = build_index(vectors, "Flat", threads=1, progress=False)
    scores, rows = index.search(QUERIES, 10)
    assert rows.tolist() == oracle(raw, QUERIES)
    np.testing.assert_allclose(scores, -np.sort(-(QUERIES @ raw.T))[:, :10], atol=1e-6)
    choice = choose_search(index, vectors, QUERIES, target=1)
    assert (choice.parameters, choice.recall, choice.tried) == ({}, 1, {})


@pytest.mark.parametrize("factory", ["HNSW32", "HNSW32,Flat", "HNSW32,SQ8", "HNSW32,SQfp16"])
def test_hnsw_reaches_the_target_by_brute_force_too(
    raw: FloatArray, vectors: ShardedVectors, factory: str
) -> None:
    index = build_index(vectors, factory, threads=1, progress=False)
    choice = choose_search(index, vectors, QUERIES, target=0.95)
    index.hnsw.efSearch = choice.parameters["efSearch"]
    _, rows = index.search(QUERIES, 10)
    assert recall(rows, oracle(raw, QUERIES)) == pytest.approx(choice.recall, abs=0.002)
    assert choice.recall >= 0.95


@pytest.mark.parametrize("target", [0.5, 0.9, 0.97])
def test_the_smallest_value_that_meets_the_target_is_chosen(
    vectors: ShardedVectors, target: float
) -> None:
    index = build_index(vectors, "HNSW6", threads=1, progress=False)
    choice = choose_search(index, vectors, QUERIES, target)
    *smaller, chosen = choice.tried.items()
    assert choice.parameters == {"efSearch": int(chosen[0])}
    assert chosen[1] == choice.recall >= target
    assert all(value < target for _, value in smaller)
    assert list(choice.tried) == [str(16 * 2**i) for i in range(len(choice.tried))]


def test_a_target_that_no_value_meets_is_an_error_that_says_what_to_do(
    vectors: ShardedVectors,
) -> None:
    index = build_index(vectors, "HNSW4", threads=1, progress=False)
    with pytest.raises(
        IndexVersionError, match=r"with efSearch 1024, below the target 1\.0: choose"
    ):
        choose_search(index, vectors, QUERIES, target=1.0)


def test_vectors_of_equal_texts_stand_for_each_other(tmp_path: Path) -> None:
    write_shard(tmp_path, 0, random_vectors(2, seed=3), ["a", "b"], tokens=0, truncated=0)
    same = ShardedVectors(tmp_path, 2, np.arange(40) % 2)
    index = build_index(same, "Flat", threads=1, progress=False)
    assert choose_search(index, same, QUERIES, target=1).recall == 1


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_vectors_than_hits_are_all_found(tmp_path: Path, count: int) -> None:
    write_shard(tmp_path, 0, random_vectors(count, 3), ["a"] * count, tokens=0, truncated=0)
    few = ShardedVectors(tmp_path, count, np.arange(count))
    index = build_index(few, "HNSW32", threads=1, progress=False)
    assert choose_search(index, few, QUERIES, target=1).recall == 1


@pytest.mark.parametrize("factory", ["Flat", "HNSW4", "HNSW6,SQ8"])
def test_an_index_finds_its_own_vectors_and_no_foreign_ones(
    raw: FloatArray, vectors: ShardedVectors, factory: str
) -> None:
    index = build_index(vectors, factory, threads=1, progress=False)
    assert best_scores(index, raw[::100]).min() > 0.99
    assert best_scores(index, QUERIES).max() < 0.99


@pytest.mark.parametrize("factory", ["Flat", "HNSW32,SQ8"])
def test_an_index_read_from_disk_answers_as_before(
    tmp_path: Path, vectors: ShardedVectors, factory: str
) -> None:
    index = build_index(vectors, factory, threads=1, progress=False)
    write_index(index, tmp_path / "i")
    for before, after in zip(
        index.search(QUERIES, 10), read_index(tmp_path / "i").search(QUERIES, 10), strict=True
    ):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("content", [None, b"", b"not an index"])
def test_a_file_that_is_no_index_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "i").write_bytes(content)
    with pytest.raises(IndexVersionError, match="i is not a readable FAISS index"):
        read_index(tmp_path / "i")


@pytest.mark.parametrize(
    ("count", "factory"), [(1, "Flat"), (49_999, "Flat"), (50_000, "HNSW32,Flat")]
)
def test_small_indexes_are_exact(count: int, factory: str) -> None:
    assert choose_factory(count) == factory
    check_factory(factory)


@pytest.mark.parametrize("factory", ["Flat", "HNSW4", "HNSW32,Flat", "HNSW64,SQ8", "HNSW16,SQfp16"])
def test_supported_factories_pass(factory: str) -> None:
    check_factory(factory)


@pytest.mark.parametrize(
    "factory",
    [
        "",
        "flat",
        "HNSW",
        "HNSW0",
        "HNSW1",
        "HNSW3",
        "HNSW1000",
        "HNSW32,PQ8",
        "IVF64,Flat",
        "Flat\n",
    ],
)
def test_an_unsupported_factory_is_refused_and_the_supported_are_named(factory: str) -> None:
    with pytest.raises(CareError, match="is not supported: use Flat, HNSW32"):
        check_factory(factory)
