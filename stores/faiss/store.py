"""The store of FAISS files: builds and opens indexes and chooses search parameters."""

import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

import faiss

from core.choices import SearchDevice
from core.errors import IndexVersionError
from core.manifest import VECTORS_FILE, IndexManifest
from core.progress import progress_bar
from core.shards import ShardedVectors
from core.types import FloatArray, RowArray
from stores.base import NewVersion, SearchChoice, VectorStore, check_vectors
from stores.faiss.factory import reduced_graph
from stores.faiss.gpu import check_device
from stores.faiss.parts import write_file, write_in_parts
from stores.faiss.search import REFINED_TO_SCANNED, FaissVectors, read_index, search_parameters
from stores.faiss.training import trained_index
from stores.recall import RECALL_K, Parameters, choose_parameters

_LOG = logging.getLogger("care.stores")

_CHUNK_ROWS = 4096
_EF_SEARCH = (16, 32, 64, 128, 256, 512, 1024)
_PROBES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_REFINE_FACTORS = (4, 16, 64)
# Vectors of fewer bytes stay on the processor, which compares them in less than a millisecond.
_LEAST_ON_GPU = 16 << 20
# A segment with less than this share of the vectors on the GPU does not take their place: it is one
# of writes, and the base that it belongs to would leave.
_SHARE = 0.2


class FaissStore(VectorStore):
    """Stores vectors in `vectors.faiss` in the folder of the version.

    Versions are searched on `device` (see `FaissVectors`); ProviderError if FAISS cannot use it.
    """

    def __init__(self, device: SearchDevice = "cpu") -> None:
        check_device(device)
        self._device = device
        self._opened: WeakSet[FaissVectors] = WeakSet()

    def __reduce__(self) -> tuple[type["FaissStore"], tuple[SearchDevice]]:
        """Pickles the options: a copy in another process has opened no versions."""
        return FaissStore, (self._device,)

    def build(self, new: NewVersion) -> SearchChoice:
        path = new.folder / VECTORS_FILE
        build_index(
            new.vectors,
            new.factory,
            path,
            threads=new.threads,
            memory=new.memory,
            progress=new.progress,
        )
        return choose_search(read_index(path), new.vectors, new.queries, new.recall)

    def open(self, folder: Path, manifest: IndexManifest) -> FaissVectors:
        """Maps the file of a version into memory, and copies it to the GPU if one searches.

        If the GPU has no room for a second copy, versions that are open leave it and are searched
        on the processor; they return if the new version cannot be opened. Small segments stay on
        the processor: those of writes are searched beside a base that is on the GPU.
        """
        path = folder / VECTORS_FILE
        vectors = FaissVectors(path, manifest.search_parameters)
        moved: list[FaissVectors] = []
        try:
            if self._device != "cpu":
                self._copy_to_gpu(vectors, moved)
            # Also loads pages that the first searches need. Texts that are repeated are tied.
            check_vectors(vectors, manifest, path, vectors.nearest)
        except Exception:
            vectors.leave_gpu()
            for each in moved:
                with suppress(IndexVersionError):  # it stays on the processor
                    each.copy_to_gpu(self._device)
            raise
        self._opened.add(vectors)
        return vectors

    def _copy_to_gpu(self, vectors: FaissVectors, moved: list[FaissVectors]) -> None:
        """Copies vectors to the GPU; adds to `moved` the open versions that had to leave it."""
        if 4 * vectors.count * vectors.dimension < _LEAST_ON_GPU:
            return
        try:
            vectors.copy_to_gpu(self._device)
        except IndexVersionError as error:
            others = [each for each in self._opened if each.on_gpu]
            if not others:
                raise
            small = vectors.count < _SHARE * sum(each.count for each in others)
            which = "a new segment" if small else "the old version"
            message = f"the GPU has no room for more vectors: {which} is searched on the processor"
            _LOG.warning(message, extra={"fields": {"code": error.code, **error.fields}})
            if not small:
                moved += [each for each in others if each.leave_gpu()]
                vectors.copy_to_gpu(self._device)


def build_index(
    vectors: ShardedVectors, factory: str, path: Path, *, threads: int, memory: int, progress: bool
) -> None:
    """Writes an inner-product index of unit vectors; row i has id i.

    `memory` limits the training sample and the inverted lists [bytes]; Flat and HNSW indexes are
    built in memory regardless of it.

    Raises:
        CareError: If the memory limit is too low, or the file cannot be written.
    """
    faiss.omp_set_num_threads(threads)
    index = trained_index(vectors, factory, threads=threads, memory=memory, progress=progress)
    if faiss.try_extract_index_ivf(index) is not None:
        write_in_parts(index, vectors, path, memory=memory, progress=progress)
        return
    with progress_bar("index", show=progress, total=len(vectors)) as bar:
        for _, chunk in vectors.chunks(_CHUNK_ROWS):
            index.add(chunk)
            bar.update(len(chunk))
    write_file(index, path)


def write_flat(parts: Iterable[FloatArray], dimension: int, path: Path) -> None:
    """Writes an index of unit vectors, given in parts, that is searched exactly; row i has id i.

    Raises:
        CareError: If the file cannot be written.
    """
    index = faiss.index_factory(dimension, "Flat", faiss.METRIC_INNER_PRODUCT)
    for part in parts:
        index.add(part)
    write_file(index, path)


def choose_search(
    index: faiss.Index, vectors: ShardedVectors, queries: FloatArray, target: float
) -> SearchChoice:
    """Chooses the search parameters of an index; see `stores.recall.choose_parameters`."""

    def search(queries: FloatArray, k: int, parameters: Parameters) -> RowArray:
        rows: RowArray = index.search(queries, k, params=search_parameters(parameters))[1]
        return rows

    by_cost, hint = _choices(index)
    return choose_parameters(search, by_cost, vectors, queries, target, hint)


def _choices(index: faiss.Index) -> tuple[list[dict[str, int]], str]:
    """Returns parameter combinations, the cheapest first, and a hint for a higher recall."""
    if isinstance(index, faiss.IndexHNSW):
        hint = "a factory with more links or without quantisation"
        return [{"efSearch": width} for width in _EF_SEARCH], hint
    if reduced_graph(index) is not None:
        # A wider search compares some ten more vectors for each candidate, refinement one.
        choices = [
            {"efSearch": width, "k_factor": factor}
            for width in _EF_SEARCH
            for factor in _REFINE_FACTORS
            if width >= RECALL_K * factor or factor == _REFINE_FACTORS[0]
        ]
        return choices, "a factory with more links or dimensions, or Refine(SQfp16) or RFlat"
    lists = faiss.try_extract_index_ivf(index)
    if lists is None:
        return [{}], ""
    probes = sorted({min(number, lists.nlist) for number in _PROBES})
    if not isinstance(index, faiss.IndexRefine):
        hint = "fewer lists, or Flat instead of SQ8 in the inverted lists"
        return [{"nprobe": number} for number in probes], hint

    def cost(parameters: Parameters) -> float:
        scanned: float = parameters["nprobe"] * index.ntotal / lists.nlist
        return scanned + REFINED_TO_SCANNED * RECALL_K * parameters["k_factor"]

    hint = "fewer lists, more parts, or Refine(SQfp16) or RFlat instead of Refine(SQ8)"
    choices = [{"nprobe": n, "k_factor": factor} for n in probes for factor in _REFINE_FACTORS]
    return sorted(choices, key=cost), hint
