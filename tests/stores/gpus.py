"""A stand-in for the GPU functions of FAISS, with their limits, on the processor."""

from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest

from core.types import FloatArray, RowArray
from stores.faiss.gpu import MOST_NEIGHBOURS, MOST_PROBES

# Classes whose constructors copy inverted lists to a GPU.
_LISTS = ("IVFFlat", "IVFScalarQuantizer")


class FakeResources:
    """The memory that FAISS reserves beside a copy [bytes]."""

    def __init__(self) -> None:
        self.temporary, self.pinned = 3 << 29, 256 << 20

    def setTempMemory(self, size: int) -> None:  # noqa: N802 (FAISS's name)
        self.temporary = size

    def setPinnedMemory(self, size: int) -> None:  # noqa: N802
        self.pinned = size


class FakeGpuIndex:
    """An index that refuses what an index on a GPU does not support."""

    def __init__(self, index: faiss.Index) -> None:
        self._index = index
        self._busy = Lock()
        self.searches: list[int] = []

    @property
    def ntotal(self) -> int:
        return int(self._index.ntotal)

    def add(self, vectors: FloatArray) -> None:
        self._index.add(vectors)

    def search(self, queries: FloatArray, k: int, params: Any) -> tuple[FloatArray, RowArray]:
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("the resources of a GPU serve one thread at a time")
        try:
            assert k <= MOST_NEIGHBOURS
            assert params is None or (not params.sel and params.nprobe <= MOST_PROBES)
            self.searches.append(k)
            found: tuple[FloatArray, RowArray] = self._index.search(queries, k, params=params)
            return found
        finally:
            self._busy.release()


def fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int = 1) -> list[FakeGpuIndex]:
    """Makes FAISS claim GPUs; returns the list of the indexes that are copied to them."""
    copies: list[FakeGpuIndex] = []

    def copy(resources: FakeResources, index: faiss.Index) -> FakeGpuIndex:
        # A service has a copy of each large segment: none may reserve FAISS's default.
        assert (resources.temporary, resources.pinned) == (64 << 20, 0)
        copies.append(FakeGpuIndex(faiss.clone_index(index)))
        return copies[-1]

    def copy_flat(
        resources: FakeResources, device: int, index: faiss.Index, options: Any
    ) -> FakeGpuIndex:
        assert device == 0
        assert isinstance(index, faiss.IndexFlat)
        if options.useFloat16:
            dimension, metric = index.d, index.metric_type
            index = faiss.IndexScalarQuantizer(dimension, faiss.ScalarQuantizer.QT_fp16, metric)
            index.train(np.zeros((1, dimension), np.float32))
        return copy(resources, index)

    def copy_lists(kind: str, resources: FakeResources, index: faiss.Index, _: Any) -> FakeGpuIndex:
        assert isinstance(index, getattr(faiss, f"Index{kind}"))
        return copy(resources, index)

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: count)
    monkeypatch.setattr(faiss, "StandardGpuResources", FakeResources, raising=False)
    monkeypatch.setattr(faiss, "GpuClonerOptions", SimpleNamespace, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", copy_flat, raising=False)
    for kind in _LISTS:
        monkeypatch.setattr(faiss, f"GpuIndex{kind}", partial(copy_lists, kind), raising=False)
        monkeypatch.setattr(faiss, f"GpuIndex{kind}Config", SimpleNamespace, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return copies


def fake_quantizers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes FAISS copy quantisers to two GPUs, which cannot be written to a file.

    Returns:
        The number of centroids of each quantiser that is copied.
    """
    copied: list[int] = []
    kept: list[faiss.Index] = []
    kmeans = faiss.Kmeans

    def copy(quantizer: faiss.Index) -> faiss.Index:
        copied.append(quantizer.ntotal)
        replicas = faiss.IndexReplicas(quantizer.d)
        for _ in range(2):
            kept.append(faiss.clone_index(quantizer))
            replicas.addIndex(kept[-1])
        return replicas

    monkeypatch.setattr(faiss, "Kmeans", lambda *a, gpu, **k: kmeans(*a, gpu=0, **k))
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", copy)
    return copied
