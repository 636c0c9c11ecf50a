from pathlib import Path

import faiss
import numpy as np
import pytest

from core.types import FloatArray, RowArray
from stores.faiss import scan
from stores.faiss.search import FaissVectors
from tests.stores.selections import only

COUNT, DIMENSION = 1000, 16
FACTORIES = [
    *("Flat", "HNSW8,SQ8", "HNSW8,SQfp16", "IVF8,Flat", "IVF8,SQ8"),
    *("IVF8,PQ4x4fs,RFlat", "IVF8,PQ4x4fs,Refine(SQ8)"),
]


class StoppedError(Exception):
    pass


class Check:
    """Counts its calls; raises an error at the last one, if that is given."""

    def __init__(self, last: int | None = None) -> None:
        self.calls = 0
        self._last = last

    def __call__(self) -> None:
        self.calls += 1
        if self.calls == self._last:
            raise StoppedError


@pytest.fixture(scope="module")
def vectors() -> FloatArray:
    random = np.random.default_rng(0).normal(size=(COUNT, DIMENSION))
    return (random / np.linalg.norm(random, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module", params=FACTORIES)
def path(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, vectors: FloatArray
) -> Path:
    index = faiss.index_factory(DIMENSION, request.param, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    file = tmp_path_factory.mktemp("scan") / "vectors.faiss"
    faiss.write_index(index, str(file))
    return file


def open_exact(path: Path) -> FaissVectors:
    """Opens an index all of whose searches are exact."""
    index = FaissVectors(path, {})
    index._approximate = None
    return index


@pytest.mark.parametrize("rows", [None, np.arange(COUNT), np.arange(7, COUNT, 9)])
@pytest.mark.parametrize("k", [1, 50, COUNT])
def test_an_exact_search_in_parts_finds_what_one_scan_finds(
    path: Path, vectors: FloatArray, rows: RowArray | None, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, check = open_exact(path), Check()
    expected = [whole.search(query, k, only(rows), check=check) for query in vectors[:5]]
    assert check.calls == 2 * len(expected)
    monkeypatch.setattr(scan, "PART_BYTES", 2048)
    in_parts, check = open_exact(path), Check()
    found = [in_parts.search(query, k, only(rows), check=check) for query in vectors[:5]]
    assert check.calls > 7 * len(found)
    for (scores, own), (expected_scores, expected_rows) in zip(found, expected, strict=True):
        np.testing.assert_array_equal(scores, expected_scores)
        assert set(own.tolist()) == set(expected_rows.tolist())
        assert len(own) == min(k, COUNT if rows is None else len(rows))


@pytest.mark.parametrize("rows", [np.array([990]), np.arange(7, COUNT, 60)])
@pytest.mark.parametrize("part", [1 << 25, 128])
def test_few_rows_have_the_scores_of_a_scan_with_a_mask(
    path: Path, vectors: FloatArray, rows: RowArray, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "PART_BYTES", part)
    index = open_exact(path)
    few = [index.search(query, 5, only(rows)) for query in vectors[:5]]
    monkeypatch.setattr(scan, "_COPIED", COUNT + 1)
    with_mask = [index.search(query, 5, only(rows)) for query in vectors[:5]]
    for (scores, own), (expected_scores, expected_rows) in zip(few, with_mask, strict=True):
        np.testing.assert_array_equal(scores, expected_scores)
        np.testing.assert_array_equal(own, expected_rows)


def test_an_exact_search_ends_at_the_check(
    path: Path, vectors: FloatArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "PART_BYTES", 2048)
    index, check = open_exact(path), Check(4)
    with pytest.raises(StoppedError):
        index.search(vectors[0], 5, check=check)
    assert check.calls == 4
    with pytest.raises(StoppedError):
        index.search(vectors[0], 5, only(np.arange(COUNT)), check=Check(4))


def test_a_search_in_graph_or_lists_is_checked_before_it_starts(
    path: Path, vectors: FloatArray
) -> None:
    with pytest.raises(StoppedError):
        FaissVectors(path, {}).search(vectors[0], 5, check=Check(1))
