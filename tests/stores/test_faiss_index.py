import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest

from core.errors import CareError, IndexVersionError
from core.shards import ShardedVectors, write_shard
from core.types import FloatArray
from core.vectors import truncate_normalize
from core.versions import IndexFolder
from indexer.publication import IndexWriter, verify_version
from indexer.versions import prune
from stores.faiss import gpu
from stores.faiss import training as faiss_training
from stores.faiss.factory import check_factory, default_factory
from stores.faiss.parts import write_file
from stores.faiss.search import FaissVectors, read_index, search_parameters
from stores.faiss.store import build_index, choose_search
from stores.recall import crowded_rows
from tests.conftest import Builder, make_records, write_jsonl
from tests.errors import raises
from tests.indexer.builds import room_for
from tests.stores.gpus import fake_quantizers

ROOT = Path(__file__).parents[2]
COUNT, DIMENSION = 3000, 32
LARGE = 2**30
# One index type of each family; lists of about fifty rows.
GRAPHS = ["HNSW32", "HNSW32,Flat", "HNSW32,SQ8", "HNSW32,SQfp16"]
REDUCED = ["PCA24,HNSW32,SQ8,Refine(SQfp16)", "PCA24,HNSW32,SQ8,RFlat"]
LISTS = [
    "IVF64,Flat",
    "IVF64,SQ8",
    "IVF64,PQ16x4fs,Refine(SQ8)",
    "IVF64,PQ16x4fs,Refine(SQfp16)",
    "IVF64,PQ16x4fs,RFlat",
    "IVF64,PQ8x8,Refine(SQ8)",
    "IVF64,PQ8,Refine(Flat)",
]


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


def built(vectors: ShardedVectors, factory: str, folder: Path, memory: int = LARGE) -> faiss.Index:
    """Opens the index like the service."""
    path = folder / "vectors.faiss"
    build_index(vectors, factory, path, threads=1, memory=memory, progress=False)
    return read_index(path)


def oracle(raw: FloatArray, queries: FloatArray, k: int = 10) -> list[list[int]]:
    """Returns the k best rows of each query by brute force."""
    return np.argsort(-(queries @ raw.T), axis=1)[:, :k].tolist()


def recall(found: FloatArray, best: list[list[int]]) -> float:
    pairs = zip(found.tolist(), best, strict=True)
    return float(np.mean([len({*rows} & {*own}) / len(own) for rows, own in pairs]))


def test_flat_equals_brute_force(raw: FloatArray, vectors: ShardedVectors, tmp_path: Path) -> None:
    index = built(vectors, "Flat", tmp_path)
    scores, rows = index.search(QUERIES, 10)
    assert rows.tolist() == oracle(raw, QUERIES)
    np.testing.assert_allclose(scores, -np.sort(-(QUERIES @ raw.T))[:, :10], atol=1e-6)
    choice = choose_search(index, vectors, QUERIES, target=1)
    assert (choice.parameters, choice.recall, choice.tried) == ({}, 1, {})


@pytest.mark.e2e
@pytest.mark.parametrize("factory", [*GRAPHS, *REDUCED, *LISTS])
def test_every_index_type_reaches_the_target_recall(
    raw: FloatArray, vectors: ShardedVectors, tmp_path: Path, factory: str
) -> None:
    check_factory(factory, DIMENSION, COUNT)
    index = built(vectors, factory, tmp_path)
    choice = choose_search(index, vectors, QUERIES, target=0.95)
    _, rows = index.search(QUERIES, 10, params=search_parameters(choice.parameters))
    assert recall(rows, oracle(raw, QUERIES)) == pytest.approx(choice.recall, abs=0.002)
    assert choice.recall >= 0.95
    assert index.ntotal == COUNT


@pytest.mark.e2e
def test_texts_that_occur_many_times_reach_the_target_recall(tmp_path: Path) -> None:
    different, count, dimension = 200, 15_000, 128
    values = np.random.default_rng(0).normal(size=(different + 50, dimension)).astype(np.float32)
    own, queries = np.split(truncate_normalize(values + 0.5, dimension), [different])
    write_shard(tmp_path, 0, own, [""] * different, tokens=0, truncated=0)
    vector_of = np.random.default_rng(1).permutation(np.arange(count) % different)
    vectors = ShardedVectors(tmp_path, 1000, vector_of)
    index = built(vectors, default_factory(count, dimension, different), tmp_path)
    assert choose_search(index, vectors, queries, target=0.99).recall >= 0.99


@pytest.mark.e2e
def test_a_few_texts_that_occur_hundreds_of_times_reach_the_target_recall(tmp_path: Path) -> None:
    different, many, count, dimension = 4_100, 20, 12_000, 128
    values = np.random.default_rng(0).normal(size=(different + 50, dimension)).astype(np.float32)
    own, queries = np.split(truncate_normalize(values + 0.5, dimension), [different])
    queries[:20] = own[many : many + 20]
    write_shard(tmp_path, 0, own, [""] * different, tokens=0, truncated=0)
    rows = np.concatenate([np.arange(different), np.arange(count - different) % many])
    vector_of = np.random.default_rng(1).permutation(rows)
    vectors = ShardedVectors(tmp_path, different, vector_of)
    crowded = crowded_rows(np.bincount(vector_of))
    assert crowded == count - different + many
    factory = default_factory(count, dimension, different, crowded)
    assert factory == "IVF256,Flat"
    index = built(vectors, factory, tmp_path)
    assert choose_search(index, vectors, queries, target=0.99).recall >= 0.99


def test_copies_that_a_graph_can_link_change_no_index_type() -> None:
    assert crowded_rows(np.array([64, 1])) == 0
    assert default_factory(20_000, 384, 10_000, 1000) == "HNSW32,Flat"
    assert default_factory(20_000, 384, 10_000, 1001) == "IVF512,Flat"


@pytest.mark.parametrize("target", [0.5, 0.9, 0.97])
@pytest.mark.parametrize(
    ("factory", "first", "key"), [("HNSW6", 16, "efSearch"), ("IVF64,Flat", 1, "nprobe")]
)
def test_the_smallest_value_that_meets_the_target_is_chosen(
    vectors: ShardedVectors, tmp_path: Path, factory: str, first: int, key: str, target: float
) -> None:
    choice = choose_search(built(vectors, factory, tmp_path), vectors, QUERIES, target)
    *smaller, chosen = choice.tried.items()
    assert chosen[0] == f"{key}={choice.parameters[key]}"
    assert chosen[1] == choice.recall >= target
    assert all(value < target for _, value in smaller)
    assert list(choice.tried) == [f"{key}={first * 2**i}" for i in range(len(choice.tried))]


def test_the_cheapest_combination_that_meets_the_target_is_chosen(
    vectors: ShardedVectors, tmp_path: Path
) -> None:
    index = built(vectors, "IVF64,PQ4x8,Refine(SQ8)", tmp_path)
    choice = choose_search(index, vectors, QUERIES, target=0.9)
    *cheaper, chosen = choice.tried.items()
    pairs = [tuple(map(int, re.findall(r"\d+", name))) for name in choice.tried]
    assert set(choice.tried) <= {f"nprobe={n},k_factor={f}" for n, f in pairs}
    assert pairs[-1] == (choice.parameters["nprobe"], choice.parameters["k_factor"])
    assert chosen[1] == choice.recall >= 0.9 > max(value for _, value in cheaper)
    # The cost of scanning a list is about 47 rows, that of refining one more per hit about 200.
    costs = [probes * COUNT / 64 + 200 * factor for probes, factor in pairs]
    assert costs == sorted(costs)
    assert len({factor for _, factor in pairs}) > 1


@pytest.mark.parametrize("factory", ["HNSW4", "IVF64,SQ8", "IVF64,PQ16x4fs,Refine(SQ8)"])
def test_without_a_value_that_meets_the_target_the_best_is_chosen(
    vectors: ShardedVectors, tmp_path: Path, factory: str
) -> None:
    index = built(vectors, factory, tmp_path)
    choice = choose_search(index, vectors, QUERIES, target=1.0)
    assert 0.5 < choice.recall == max(choice.tried.values()) < 1
    assert choice.hint


@pytest.mark.parametrize(
    ("different", "count", "factory"),
    [
        pytest.param(2, 40, "Flat", id="equal vectors are hits of each other"),
        pytest.param(1, 1, "HNSW32", id="one vector"),
        pytest.param(3, 3, "HNSW32", id="fewer vectors than hits"),
    ],
)
def test_few_different_vectors_are_all_found(
    tmp_path: Path, different: int, count: int, factory: str
) -> None:
    own = random_vectors(different, seed=3)
    write_shard(tmp_path, 0, own, [""] * different, tokens=0, truncated=0)
    few = ShardedVectors(tmp_path, different, np.arange(count) % different)
    assert choose_search(built(few, factory, tmp_path), few, QUERIES, target=1).recall == 1


@pytest.mark.e2e
@pytest.mark.parametrize("factory", ["Flat", "HNSW4", "HNSW6,SQ8", *REDUCED, *LISTS])
def test_canaries_of_the_index_are_found_and_others_are_not(
    raw: FloatArray, vectors: ShardedVectors, tmp_path: Path, factory: str
) -> None:
    parameters = choose_search(built(vectors, factory, tmp_path), vectors, QUERIES, 0.5).parameters
    opened = FaissVectors(tmp_path / "vectors.faiss", parameters)
    assert min(opened.search(vector, 100)[0][0] for vector in raw[::100]) > 0.99
    assert max(opened.search(vector, 100)[0][0] for vector in QUERIES) < 0.99


@pytest.mark.parametrize("factory", ["Flat", "HNSW32,SQ8"])
def test_an_index_read_from_disk_gives_the_same_hits(
    tmp_path: Path, raw: FloatArray, factory: str
) -> None:
    index = faiss.index_factory(DIMENSION, factory, faiss.METRIC_INNER_PRODUCT)
    index.train(raw)
    index.add(raw)
    write_file(index, tmp_path / "i")
    for before, after in zip(
        index.search(QUERIES, 10), read_index(tmp_path / "i").search(QUERIES, 10), strict=True
    ):
        np.testing.assert_array_equal(before, after)


def parts_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the rows of each part that is written."""
    rows: list[int] = []
    write = faiss.write_index

    def spy(index: Any, *arguments: Any) -> None:
        rows.append(index.ntotal)
        write(index, *arguments)

    monkeypatch.setattr(faiss, "write_index", spy)
    return rows


# Memory for training, then for codes and ids [bytes].
TIGHT = 39 * 64 * DIMENSION * 4


@pytest.mark.e2e
@pytest.mark.parametrize("factory", LISTS)
def test_an_index_built_in_parts_equals_the_file_of_faiss(
    raw: FloatArray,
    vectors: ShardedVectors,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    factory: str,
) -> None:
    monkeypatch.setattr("stores.faiss.training._LIST_SAMPLE_ROWS", 39)
    path, whole = tmp_path / "vectors.faiss", tmp_path / "whole.faiss"
    index = faiss_training.trained_index(vectors, factory, threads=1, memory=TIGHT, progress=False)
    index.add(raw)
    faiss.write_index(index, str(whole))
    rows = parts_seen(monkeypatch)
    monkeypatch.setattr("stores.faiss.parts._SLACK", 20)
    build_index(vectors, factory, path, threads=1, memory=TIGHT, progress=False)
    assert path.read_bytes() == whole.read_bytes()
    assert sum(rows) == COUNT
    if "x4fs" not in factory:
        code_size = faiss.extract_index_ivf(index).code_size
        assert len(rows) > 1
        assert max(rows) * 20 * (code_size + 8) <= TIGHT
    assert sorted(p.name for p in tmp_path.iterdir()) == ["vectors.faiss", "whole.faiss"]


def test_too_little_memory_for_training_is_an_error(
    vectors: ShardedVectors, tmp_path: Path
) -> None:
    with raises(CareError, "too_little_memory"):
        built(vectors, "IVF64,SQ8", tmp_path, memory=TIGHT - 1)


def test_the_training_sample_fits_into_memory(
    vectors: ShardedVectors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = ShardedVectors.take

    def spy(self: ShardedVectors, rows: Any) -> FloatArray:
        taken.append(len(rows))
        return take(self, rows)

    monkeypatch.setattr(ShardedVectors, "take", spy)
    monkeypatch.setattr("stores.faiss.parts._CHUNK_ROWS", 500)
    built(vectors, "IVF64,Flat", tmp_path, memory=TIGHT)
    assert max(taken) == 39 * 64


def test_the_copy_on_gpus_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_quantizers(monkeypatch)
    with pytest.raises(RuntimeError):
        faiss.serialize_index(faiss.index_cpu_to_all_gpus(faiss.IndexFlatIP(DIMENSION)))


@pytest.mark.parametrize("factory", ["IVF64,Flat", "IVF64,SQ8", "IVF64,PQ16x4fs,Refine(SQ8)"])
def test_lists_built_in_parts_with_gpus_equal_those_without(
    vectors: ShardedVectors,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    factory: str,
) -> None:
    monkeypatch.setattr("stores.faiss.training._LIST_SAMPLE_ROWS", 39)
    monkeypatch.setattr("stores.faiss.parts._SLACK", 20)
    build_index(vectors, factory, tmp_path / "cpu", threads=1, memory=TIGHT, progress=False)
    copied = fake_quantizers(monkeypatch)
    assert gpu.gpus() == 2
    rows = parts_seen(monkeypatch)
    build_index(vectors, factory, tmp_path / "gpu", threads=1, memory=TIGHT, progress=False)
    assert len(rows) > 1 or "x4fs" in factory
    assert copied == [64]
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "gpu").read_bytes()


def test_faiss_without_gpu_functions_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "faiss", SimpleNamespace())
    assert gpu.gpus() == 0


@pytest.mark.e2e
def test_a_build_killed_during_a_merge_publishes_nothing(
    published: Path, indexes: Path, tmp_path: Path, build_version: Builder
) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", make_records(400))
    command = [sys.executable, "-m", "tests.stores.killed_merge", str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    assert IndexFolder(indexes, "test").versions() == [published.name]
    (left,) = indexes.glob("test/.*.tmp")
    assert (left / "vectors.faiss").is_file()
    assert len(list(left.glob("parts-*/part-*"))) == 2
    assert prune(IndexWriter(indexes, "test"), tmp_path / "builds", keep=3) == []
    assert list(indexes.glob("test/.*.tmp")) == []
    manifest = build_version(make_records(400), factory="IVF4,SQ8", recall=0.9)
    assert manifest.factory == "IVF4,SQ8"
    assert set(manifest.files) == {"vectors.faiss", "documents.arrow", "filters.arrow"}


def test_a_version_built_in_parts_is_one_file_and_can_be_moved(
    build_version: Builder, indexes: Path, tmp_path: Path
) -> None:
    memory_gib = 39 * 4 * 64 * 4 / 2**30
    manifest = build_version(
        make_records(400), factory="IVF4,SQ8", recall=0.9, memory_gib=memory_gib
    )
    assert set(manifest.files) == {"vectors.faiss", "documents.arrow", "filters.arrow"}
    assert manifest.recall.tried[f"nprobe={manifest.search_parameters['nprobe']}"] >= 0.9
    folder = indexes / "test" / manifest.version
    queries = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    before = read_index(folder / "vectors.faiss").search(queries, 10)[1].tolist()
    moved = indexes.rename(tmp_path / "elsewhere") / "test" / manifest.version
    assert verify_version(moved) == manifest
    assert read_index(moved / "vectors.faiss").search(queries, 10)[1].tolist() == before


@pytest.mark.parametrize("content", [None, b"", b"not an index"])
def test_an_invalid_index_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "i").write_bytes(content)
    for opened in (read_index, partial(FaissVectors, parameters={})):
        with raises(IndexVersionError, "unreadable_vectors", path=tmp_path / "i"):
            opened(tmp_path / "i")


@pytest.mark.parametrize(
    ("count", "dimension", "different", "factory"),
    [
        (1, 768, 1, "Flat"),
        (1953, 768, 1, "Flat"),
        (1954, 768, 1954, "HNSW32,Flat"),
        (3906, 384, 3906, "Flat"),
        (3907, 384, 3907, "HNSW32,Flat"),
        (3910, 384, 391, "HNSW32,Flat"),
        (3911, 384, 391, "IVF64,Flat"),
        (40_000, 384, 200, "IVF64,Flat"),
        (400, 4096, 39, "IVF10,Flat"),
        (2000, 768, 1, "IVF4,Flat"),
        (4_999_999, 768, 4_999_999, "HNSW32,Flat"),
        (5_000_000, 768, 4_500_000, "IVF8192,PQ384x4fs,Refine(SQfp16)"),
        (10_000_000, 768, 10_000_000, "IVF16384,PQ384x4fs,Refine(SQfp16)"),
        (100_000_000, 768, 100_000_000, "IVF32768,PQ384x4fs,Refine(SQfp16)"),
    ],
)
def test_the_default_index_type_depends_on_the_cost_of_a_scan_and_on_copies(
    count: int, dimension: int, different: int, factory: str
) -> None:
    assert default_factory(count, dimension, different) == factory
    check_factory(factory, dimension, count)


@pytest.mark.parametrize("dimension", [1, 7, 64, 1023])
def test_the_chosen_parts_divide_any_dimension(dimension: int) -> None:
    check_factory(default_factory(10**7, dimension, 10**7), dimension, 10**7)


@pytest.mark.parametrize(
    "factory",
    [
        *("Flat", "HNSW4", "HNSW32,Flat", "HNSW64,SQ8", "HNSW16,SQfp16", "IVF1,Flat"),
        *("IVF65536,SQ8", "IVF64,PQ4x4fs,Refine(SQ8)", "IVF64,PQ32x8,RFlat"),
        *("IVF9,PQ1,Refine(Flat)", f"PCA{DIMENSION - 1},HNSW8,SQ8,RFlat"),
    ],
)
def test_supported_factories_are_accepted(factory: str) -> None:
    check_factory(factory, DIMENSION)


@pytest.mark.parametrize(
    "factory",
    [
        *("", "flat", "Flat\n", "HNSW", "HNSW0", "HNSW1", "HNSW3", "HNSW1000", "HNSW32,PQ8"),
        *("IVF64", "IVF0,Flat", "IVF64,PQ8x8", "IVF64,PQ8x6,RFlat", "IVF64,SQ8,RFlat"),
        *("PCA8,HNSW8,SQ8", "PCA8,HNSW8,RFlat", "PCA0,HNSW8,SQ8,RFlat"),
    ],
)
def test_an_unsupported_factory_is_an_error_that_names_it(factory: str) -> None:
    with raises(CareError, "unsupported_factory", factory=factory):
        check_factory(factory, DIMENSION)


@pytest.mark.parametrize(
    ("factory", "code"),
    [
        ("IVF64,PQ5x8,RFlat", "factory_does_not_divide"),
        (f"PCA{DIMENSION},HNSW8,SQ8,RFlat", "factory_keeps_dimensions"),
    ],
)
def test_a_factory_that_does_not_fit_the_dimension_is_an_error(factory: str, code: str) -> None:
    with raises(CareError, code, factory=factory, dimension=DIMENSION):
        check_factory(factory, DIMENSION)


@pytest.mark.parametrize(
    ("factory", "needed"),
    [
        ("IVF64,SQ8", 2496),
        ("IVF1,Flat", 39),
        ("IVF1,PQ8x8,RFlat", 1024),
        ("IVF1,PQ8x4fs,RFlat", 64),
    ],
)
def test_too_few_vectors_for_training_are_an_error(factory: str, needed: int) -> None:
    check_factory(factory, DIMENSION, needed)
    with raises(CareError, "too_few_vectors", factory=factory, needed=needed, count=needed - 1):
        check_factory(factory, DIMENSION, needed - 1)


def test_a_full_disk_is_one_error_and_faiss_prints_nothing(
    tmp_path: Path, raw: FloatArray, capfd: pytest.CaptureFixture[str]
) -> None:
    index = faiss.IndexFlatIP(DIMENSION)
    index.add(raw)
    with room_for(raw.nbytes), raises(CareError, "input_output", path=tmp_path / "i"):
        write_file(index, tmp_path / "i")
    assert capfd.readouterr() == ("", "")
