"""Building and opening the FAISS index of a version."""

from pathlib import Path

import faiss

from core.errors import IndexVersionError
from core.files import sync
from core.shards import ShardedVectors
from indexer.faiss_parts import write_file, write_in_parts
from indexer.faiss_training import trained_index
from indexer.progress import progress_bar

_CHUNK_ROWS = 4096


def build_index(
    vectors: ShardedVectors,
    factory: str,
    path: Path,
    *,
    threads: int,
    memory: int,
    progress: bool,
) -> None:
    """Writes an inner-product index over unit vectors; row i has id i.

    Args:
        vectors: All document vectors, read in chunks.
        factory: A factory string that `check_factory` accepts for them.
        path: The file to write.
        threads: Threads to use.
        memory: What a sample to train on, and vectors in inverted lists, may take [bytes]. Flat
            and HNSW are built with all their vectors in memory.
        progress: Whether to show bars.

    Raises:
        CareError: If the memory is too small, or the file cannot be written whole.
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
    write_index(index, path)


def write_index(index: faiss.Index, path: Path) -> None:
    """Writes an index to disk, and waits until it is there.

    Raises:
        CareError: If it cannot be written whole, for instance because the disk is full.
    """
    write_file(index, path)
    sync(path)


def read_index(path: Path) -> faiss.Index:
    """Opens an index by memory mapping.

    Raises:
        IndexVersionError: If FAISS cannot read it.
    """
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise IndexVersionError(f"{path} is not a readable FAISS index") from error
