"""Search in a copy of an index on a GPU.

Inverted lists of vectors or of scalar codes are copied as they are. Of every other type of index
the stored vectors are copied and searched exactly: a GPU reads them faster than a processor follows
a graph. Filters and deep searches, which GPUs do not support, stay on the processor.
"""

from threading import Lock

import faiss
import numpy as np

from core.choices import SearchDevice
from core.errors import IndexVersionError, ProviderError
from core.machine import visible_gpus
from core.types import FloatArray
from stores.base import ScoredRows

# FAISS's limits of neighbours and of scanned lists on a GPU.
MOST_NEIGHBOURS = 2048
MOST_PROBES = 2048
# Vectors that a GPU compares while a thread of a processor compares one: memory is read at 2 to
# 3 TB/s and at some 20 GB/s.
SPEED = 100

# More candidates than hits, because half precision can exchange neighbours of nearly equal score.
_MORE = 32
_BLOCK_ROWS = 1 << 20
# Memory for temporary results: that of a query is far less, and FAISS's 1.5 GiB are for batches.
_TEMPORARY = 64 << 20
# What a copy needs beside its vectors while it is made: temporary results, pages of 256 MiB that
# are converted to half precision, the workspace of cuBLAS.
_COPYING = 512 << 20
_ID_BYTES = 8


def gpus() -> int:
    """Returns the number of GPUs that FAISS can use, 0 for faiss-cpu."""
    return faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0


def check_device(device: SearchDevice) -> None:
    """Checks that FAISS can search on a device.

    Raises:
        ProviderError: If the device is a GPU, and FAISS is its build for processors or finds none.
    """
    if device == "cpu" or gpus():
        return
    if hasattr(faiss, "StandardGpuResources"):
        code, fault = "faiss_finds_no_gpu", "finds no GPU"
        advice = "check that nvidia-smi lists one, the driver, CUDA_VISIBLE_DEVICES and, in a "
        advice += "container, that it may use GPUs"
    else:
        code, fault = "faiss_without_gpu", "is its build for processors"
        advice = "install its build for GPUs (python -m care.gpu_builds)"
    message = f"CARE_FAISS_DEVICE is '{device}', but FAISS {faiss.__version__} {fault}: {advice}; "
    raise ProviderError(f"{message}or set CARE_FAISS_DEVICE=cpu", code=code, device=device)


class ReleasedError(Exception):
    """The copy on the GPU was released: the search has to run on the processor."""


class GpuCopy:
    """A copy of an index on the first GPU; thread-safe.

    Args:
        index: The index on the processor; it must outlive this object.
        stored: Its vectors in the order of rows, or None for inverted lists that hold them.
        device: "cuda", or "cuda-fp16" to keep vectors in half precision.

    Raises:
        IndexVersionError: If the GPU has too little memory.
    """

    def __init__(
        self, index: faiss.Index, stored: faiss.IndexFlatCodes | None, device: SearchDevice
    ) -> None:
        half = device == "cuda-fp16"
        self.ntotal: int = index.ntotal
        self._rescored = stored if half else None
        # The resources of a GPU serve one thread at a time.
        self._lock = Lock()
        _check_memory(needed_bytes(index, stored, half=half))
        self._resources = faiss.StandardGpuResources()
        self._resources.setTempMemory(_TEMPORARY)
        self._resources.setPinnedMemory(0)  # 256 MiB by default, for batches of queries
        try:
            if stored is None:
                # Not `index_cpu_to_gpu`: where memory ends, it never frees what it has allocated.
                name = type(index).__name__.removeprefix("Index")
                config = getattr(faiss, f"GpuIndex{name}Config")()
                self._copy = getattr(faiss, f"GpuIndex{name}")(self._resources, index, config)
            else:
                options = faiss.GpuClonerOptions()
                options.useFloat16 = half
                empty = faiss.IndexFlat(index.d, index.metric_type)
                self._copy = faiss.index_cpu_to_gpu(self._resources, 0, empty, options)
                for first in range(0, stored.ntotal, _BLOCK_ROWS):
                    rows = min(_BLOCK_ROWS, stored.ntotal - first)
                    self._copy.add(stored.reconstruct_n(first, rows))
        except RuntimeError as error:
            self._copy = self._resources = None  # a part of a copy is of no use
            message = f"the index cannot be copied to the GPU: {str(error).splitlines()[0]}"
            raise IndexVersionError(message, code="gpu_copy_failed") from error

    def search(
        self, query: FloatArray, k: int, parameters: faiss.SearchParameters | None = None
    ) -> ScoredRows:
        """Returns the k nearest vectors of a query, float32 [dimension]; k ≤ `MOST_NEIGHBOURS`.

        Raises:
            ReleasedError: If the copy was released.
        """
        depth = k
        if self._rescored is not None:
            depth = min(k + _MORE, self.ntotal, MOST_NEIGHBOURS)
        with self._lock:
            if self._copy is None:
                raise ReleasedError
            found = self._copy.search(query[None], depth, params=parameters)
        scores, rows = found[0][0], found[1][0]
        scores, rows = scores[rows >= 0], rows[rows >= 0]
        if self._rescored is None:
            return scores, rows
        scores = self._rescored.reconstruct_batch(rows) @ query
        best = np.argsort(-scores, kind="stable")[:k]
        return scores[best], rows[best]

    def release(self) -> None:
        """Frees the memory of the GPU when the search in progress ends."""
        with self._lock:
            self._copy = self._resources = None


def needed_bytes(index: faiss.Index, stored: faiss.IndexFlatCodes | None, *, half: bool) -> int:
    """Returns the GPU memory that a copy needs while it is made [bytes]; see `GpuCopy`."""
    if stored is None:
        centroids = index.nlist * 4 * index.d
        return int(index.ntotal * (index.code_size + _ID_BYTES) + centroids + _COPYING)
    vectors = stored.ntotal * stored.d * (2 if half else 4)
    # Each block after the first moves the vectors before it.
    copies = 1 if stored.ntotal <= _BLOCK_ROWS else 2
    return int(copies * vectors + _COPYING)


def _check_memory(needed: int) -> None:
    found = visible_gpus()
    if found and found[0].free < needed:
        need, free = needed / 2**30, found[0].free / 2**30
        raise IndexVersionError(
            f"the index needs {need:.1f} GiB on the GPU, of which {free:.1f} GiB are free: set "
            "CARE_FAISS_DEVICE=cuda-fp16, build inverted lists with 8-bit codes (IVF…,SQ8), or set "
            "CARE_FAISS_DEVICE=cpu",
            code="too_little_gpu_memory",
            needed_gib=need,
            free_gib=free,
        )
