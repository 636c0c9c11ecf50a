from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import faiss
import numpy as np
import pytest

from core.choices import SearchDevice
from core.errors import IndexVersionError, ProviderError
from core.filters import Selection
from core.machine import Gpu
from core.types import FloatArray, no_check
from core.vectors import truncate_normalize
from core.versions import IndexFolder, read_manifest
from stores.base import ScoredRows
from stores.faiss import gpu
from stores.faiss.gpu import GpuCopy, needed_bytes
from stores.faiss.search import FaissVectors
from stores.faiss.store import FaissStore
from stores.registry import VectorStores
from tests.conftest import Builder, make_records
from tests.encoders import BigramEncoder
from tests.errors import raises
from tests.stores.gpus import FakeGpuIndex, FakeResources, fake_gpus

COUNT, DIMENSION, K = 4000, 32, 10
DEVICES: list[SearchDevice] = ["cuda", "cuda-fp16"]
# Parameters with which the processor finds the exact neighbours.
TYPES: dict[str, dict[str, int]] = {
    "Flat": {},
    "HNSW16,Flat": {"efSearch": 1000},
    "HNSW16,SQ8": {"efSearch": 1000},
    "IVF8,Flat": {"nprobe": 8},
    "IVF8,SQ8": {"nprobe": 8},
    "IVF8,PQ16x4fs,Refine(SQ8)": {"nprobe": 8, "k_factor": 64},
    "IVF8,PQ16x4fs,Refine(SQfp16)": {"nprobe": 8, "k_factor": 64},
}


@pytest.fixture(scope="module")
def vectors() -> FloatArray:
    values = np.random.default_rng(0).normal(size=(COUNT, DIMENSION)).astype(np.float32)
    return truncate_normalize(values, DIMENSION)


@pytest.fixture(scope="module")
def folder(vectors: FloatArray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    faiss.omp_set_num_threads(1)
    for factory in TYPES:
        index = faiss.index_factory(DIMENSION, factory, faiss.METRIC_INNER_PRODUCT)
        index.train(vectors)
        index.add(vectors)
        faiss.write_index(index, str(folder / factory))
    return folder


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[FakeGpuIndex]:
    monkeypatch.setattr(gpu, "_BLOCK_ROWS", 1500)
    return fake_gpus(monkeypatch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factory", TYPES)
def test_a_gpu_gives_the_exact_hits(
    folder: Path,
    vectors: FloatArray,
    copies: list[FakeGpuIndex],
    factory: str,
    device: SearchDevice,
) -> None:
    index = FaissVectors(folder / factory, TYPES[factory], device)
    # With all lists scanned, the hits are those of exact search in the stored vectors.
    for query in vectors[:20]:
        scores, rows = index.search(query, K)
        exact, expected = index._scan.search(query, K, None, no_check)
        np.testing.assert_allclose(scores, exact, atol=1e-5)
        assert set(rows) == set(expected)
    (copy,) = copies
    assert copy.ntotal == COUNT
    assert len(copy.searches) == 20


@pytest.mark.parametrize("factory", ["Flat", "HNSW16,SQ8", "IVF8,SQ8"])
@pytest.mark.parametrize(("share", "used"), [(1.0, True), (0.5, True), (0.1, True), (0.005, False)])
def test_a_filter_gives_the_exact_hits_on_gpu_or_processor(
    folder: Path,
    vectors: FloatArray,
    copies: list[FakeGpuIndex],
    factory: str,
    share: float,
    used: bool,
) -> None:
    index = FaissVectors(folder / factory, TYPES[factory], "cuda")
    rows = np.flatnonzero(np.random.default_rng(1).random(COUNT) < share)
    for query in vectors[:20]:
        scores, found = index.search(query, K, Selection.of_rows(rows))
        assert np.isin(found, rows).all()
        exact, _ = index._scan.search(query, K, rows, no_check)
        np.testing.assert_allclose(scores, exact, atol=1e-5)
    assert bool(copies[0].searches) == used


@pytest.mark.parametrize("factory", ["Flat", "HNSW16,Flat", "IVF8,SQ8"])
def test_searches_deeper_than_a_gpu_supports_run_on_the_processor(
    folder: Path, vectors: FloatArray, copies: list[FakeGpuIndex], factory: str
) -> None:
    index = FaissVectors(folder / factory, TYPES[factory], "cuda-fp16")
    assert sorted(index.search(vectors[0], COUNT)[1].tolist()) == list(range(COUNT))
    assert copies[0].searches == []
    most = gpu.MOST_NEIGHBOURS - 1  # one more shows whether the last ones are tied
    assert len(index.search(vectors[0], most)[1]) >= most
    assert copies[0].searches == [gpu.MOST_NEIGHBOURS]


def test_concurrent_searches_take_turns(
    folder: Path, vectors: FloatArray, copies: list[FakeGpuIndex]
) -> None:
    index = FaissVectors(folder / "Flat", {}, "cuda")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda query: index.search(query, 1)[1][0], vectors[:400]))
    assert found == list(range(400))
    assert len(copies[0].searches) == 400


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("installed", "code"), [(True, "faiss_finds_no_gpu"), (False, "faiss_without_gpu")]
)
def test_faiss_without_gpus_is_an_error_at_start(
    monkeypatch: pytest.MonkeyPatch, device: SearchDevice, installed: bool, code: str
) -> None:
    if installed:
        fake_gpus(monkeypatch, count=0)
    with raises(ProviderError, code, device=device):
        VectorStores(device=device)
    FaissStore("cpu")


def test_memory_is_checked_before_vectors_are_copied(
    folder: Path, copies: list[FakeGpuIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Gpu("small", 2**30, 2**28, "1.0")
    monkeypatch.setattr(gpu, "visible_gpus", lambda: [card])
    with raises(IndexVersionError, "too_little_gpu_memory", free_gib=0.25):
        FaissVectors(folder / "Flat", {}, "cuda")
    assert copies == []


def test_the_estimate_of_memory_depends_on_type_and_precision(folder: Path) -> None:
    flat = faiss.read_index(str(folder / "Flat"))
    rest = needed_bytes(flat, faiss.IndexFlatIP(DIMENSION), half=False)
    assert needed_bytes(flat, flat, half=False) - rest == 4 * COUNT * DIMENSION
    assert needed_bytes(flat, flat, half=True) - rest == 2 * COUNT * DIMENSION
    lists = faiss.read_index(str(folder / "IVF8,SQ8"))
    expected = COUNT * (DIMENSION + 8) + 8 * 4 * DIMENSION
    assert needed_bytes(lists, None, half=False) - rest == expected


def test_an_error_of_the_copy_is_one_line(
    folder: Path, copies: list[FakeGpuIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("cudaMalloc error out of memory\nin a file")

    monkeypatch.setattr(faiss, "GpuIndexIVFScalarQuantizer", fail)
    with raises(IndexVersionError, "gpu_copy_failed") as caught:
        FaissVectors(folder / "IVF8,SQ8", {"nprobe": 8}, "cuda")
    assert "\n" not in str(caught.value)


class Resources(FakeResources):
    """Stands for the memory of one copy, until it is released."""

    alive: ClassVar[WeakSet["Resources"]] = WeakSet()

    def __init__(self) -> None:
        super().__init__()
        self.alive.add(self)


@pytest.fixture
def room_for_one(copies: list[FakeGpuIndex], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has room for one copy."""

    def cards() -> list[Gpu]:
        return [Gpu("small", 2 << 30, (2 << 30) * (1 - len(Resources.alive)), "1.0")]

    monkeypatch.setattr(faiss, "StandardGpuResources", Resources)
    monkeypatch.setattr(gpu, "visible_gpus", cards)
    monkeypatch.setattr("stores.faiss.store._LEAST_ON_GPU", 0)


@pytest.fixture
def open_vectors(
    build_version: Builder, indexes: Path, copies: list[FakeGpuIndex]
) -> Callable[[int], FaissVectors]:
    """Opens the vectors of a new version of so many documents in one store."""
    store = FaissStore("cuda")

    def open_(count: int) -> FaissVectors:
        folder = IndexFolder(indexes, "test").path / build_version(make_records(count)).version
        return store.open(folder, read_manifest(folder))

    return open_


def test_a_new_version_takes_the_place_of_the_old_one_if_the_gpu_has_room_for_one(
    open_vectors: Callable[[int], FaissVectors], room_for_one: None
) -> None:
    query = BigramEncoder().encode([make_records(1)[0]["text"]]).vectors[0]
    old = open_vectors(20)
    hits = old.search(query, 5)
    new = open_vectors(21)
    assert (old.on_gpu, new.on_gpu, len(Resources.alive)) == (False, True, 1)
    assert old.search(query, 5)[1].tolist() == hits[1].tolist()


@pytest.mark.parametrize(("written", "leaves"), [(3, False), (4, True)])
def test_a_segment_of_writes_does_not_take_the_place_of_its_base(
    open_vectors: Callable[[int], FaissVectors], room_for_one: None, written: int, leaves: bool
) -> None:
    base = open_vectors(20)
    segment = open_vectors(written)
    assert (base.on_gpu, segment.on_gpu) == (not leaves, leaves)


def test_a_small_segment_stays_on_the_processor(
    open_vectors: Callable[[int], FaissVectors], copies: list[FakeGpuIndex]
) -> None:
    assert not open_vectors(20).on_gpu
    assert copies == []


def test_a_search_whose_version_leaves_the_gpu_ends_on_the_processor(
    folder: Path, vectors: FloatArray, copies: list[FakeGpuIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = FaissVectors(folder / "HNSW16,Flat", {"efSearch": 1000}, "cuda")
    expected = on_gpu.search(vectors[0], K)
    search = GpuCopy.search

    def leave(copy: GpuCopy, *args: Any) -> ScoredRows:
        assert on_gpu.leave_gpu()
        return search(copy, *args)

    monkeypatch.setattr(GpuCopy, "search", leave)
    assert on_gpu.search(vectors[0], K)[1].tolist() == expected[1].tolist()
    assert not on_gpu.leave_gpu()


def test_the_old_version_returns_to_the_gpu_if_the_new_one_cannot_be_opened(
    build_version: Builder,
    indexes: Path,
    room_for_one: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = FaissStore("cuda")
    folder = IndexFolder(indexes, "test").path / build_version(make_records(20)).version
    manifest = read_manifest(folder)
    old = store.open(folder, manifest)
    wrong = manifest.model_copy(update={"count": 21})
    with raises(IndexVersionError, "wrong_vectors"):
        store.open(folder, wrong)
    assert old.on_gpu
    assert len(Resources.alive) == 1
