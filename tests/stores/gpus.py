"""A stand-in for the GPU functions of FAISS, with their limits, on the processor."""

from threading import Lock
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest

from core.types import FloatArray, RowArray
from stores.faiss.gpu import MOST_NEIGHBOURS, MOST_PROBES

# What FAISS can copy to a GPU: see `ToGpuCloner` in its source.
_COPIED = (faiss.IndexFlat, faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer)


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

    def copy(_: object, device: int, index: faiss.Index, options: Any) -> FakeGpuIndex:
        assert device == 0
        if not isinstance(index, _COPIED):
            raise RuntimeError("This index type is not implemented on GPU.\nsecond line")
        if isinstance(index, faiss.IndexFlat) and options.useFloat16:
            half = faiss.IndexScalarQuantizer(
                index.d, faiss.ScalarQuantizer.QT_fp16, index.metric_type
            )
            half.train(np.zeros((1, index.d), np.float32))
            copies.append(FakeGpuIndex(half))
        else:
            copies.append(FakeGpuIndex(faiss.clone_index(index)))
        return copies[-1]

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: count)
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "GpuClonerOptions", SimpleNamespace, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", copy, raising=False)
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
