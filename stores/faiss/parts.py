"""Builds inverted lists of more vectors than fit into memory, as one file in FAISS's format.

Vectors are added to the trained index up to the memory limit. The index is then written to a part,
which is an index file, and emptied. Finally the inverted lists of all parts are memory-mapped and
written list by list after the header that FAISS writes for the empty index. Codes for refinement
are written to disk row by row.

The file is identical, byte for byte, to the one that FAISS writes for an index in memory. FAISS can
memory-map it (`IO_FLAG_MMAP_IFC`): inverted lists and refinement codes are read on demand, and only
4-bit product codes (`x4fs`), which FAISS rearranges, are copied to memory with their ids.
`OnDiskInvertedLists` is not used, because it stores the path of a second file and does not support
refinement.
"""

import shutil
import struct
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

import faiss
import numpy as np

from core.errors import CareError
from core.progress import progress_bar
from core.shards import ShardedVectors
from stores.faiss.training import Assignment

_CHUNK_ROWS = 4096
_WRITE_BYTES = 1 << 20
_ID_BYTES = 8
# The buffers of inverted lists grow by doubling.
_SLACK = 2

# The end of the file of an empty index: empty inverted lists, or an empty array of codes. The
# number of vectors follows the type (four letters) and the dimension.
_LISTS = struct.Struct("<4sQQ4sQ")
_NO_CODES = struct.pack("<Q", 0)
_COUNT = slice(8, 16)


def write_in_parts(
    index: faiss.Index, vectors: ShardedVectors, path: Path, *, memory: int, progress: bool
) -> None:
    """Writes an index of all vectors; row i has id i.

    Parts are temporary files in the same folder, which need as much disk space as the lists. 4-bit
    product codes cannot be joined and are built as one part, regardless of the memory limit.

    Args:
        index: A trained, empty index with inverted lists, with or without refinement. It is empty
            again afterwards.
        memory: Maximum size of the vectors of a part [bytes].

    Raises:
        CareError: If a file cannot be written, for example because the disk is full.
    """
    refined = isinstance(index, faiss.IndexRefine)
    base = faiss.downcast_index(index.base_index) if refined else index
    refine = faiss.downcast_index(index.refine_index) if refined else None
    with TemporaryDirectory(dir=path.parent, prefix="parts-") as scratch:
        codes = Path(scratch, "refine.codes")
        parts = _Parts(base, Path(scratch), memory)
        with (
            codes.open("wb") as file,
            progress_bar("index", show=progress, total=len(vectors)) as bar,
        ):
            for start, chunk in vectors.chunks(_CHUNK_ROWS):
                parts.add(start, chunk)
                if refine is not None:
                    file.write(refine.sa_encode(chunk).data)
                bar.update(len(chunk))
        parts.end()
        with path.open("wb") as out:
            if refine is None:
                parts.write(out, len(vectors))
            else:
                head, tail = _around(index, base, refine)
                out.write(_with_count(head, len(vectors)))
                parts.write(out, len(vectors))
                _write_codes(out, refine, codes, len(vectors))
                out.write(tail)


class _Parts:
    """The inverted lists of an index, in files of as many rows as fit into memory."""

    def __init__(self, index: faiss.IndexIVF, folder: Path, memory: int) -> None:
        self._index = index
        self._assignment = Assignment(index)
        self._folder = folder
        self._files: list[Path] = []
        row_bytes = _SLACK * (index.code_size + _ID_BYTES)
        # 4-bit codes are stored in blocks of rows, which cannot be joined.
        one_part = isinstance(index, faiss.IndexIVFFastScan)
        self._rows = sys.maxsize if one_part else max(1, memory // row_bytes)

    def add(self, start: int, chunk: np.ndarray) -> None:
        """Adds consecutive rows, float32 [n, dimension], from row `start`."""
        for at in range(0, len(chunk), self._rows):
            piece = chunk[at : at + self._rows]
            if self._index.ntotal + len(piece) > self._rows:
                self.end()
            ids = np.arange(start + at, start + at + len(piece))
            self._assignment.add(piece, ids)

    def end(self) -> None:
        """Writes the content of the index to a part and empties the index."""
        path = self._folder / f"part-{len(self._files):05d}"
        write_file(self._index, path)
        self._files.append(path)
        self._index.reset()

    def write(self, out: BinaryIO, count: int) -> None:
        if len(self._files) == 1:
            with self._files[0].open("rb") as file:
                shutil.copyfileobj(file, out)
            return
        empty = faiss.serialize_index(self._index).tobytes()
        lists, code_size = self._index.nlist, self._index.code_size
        _check_end(empty, _LISTS.pack(b"ilar", lists, code_size, b"sprs", 0))
        indexes = [faiss.read_index(str(f), faiss.IO_FLAG_MMAP_IFC) for f in self._files]
        parts = [index.invlists for index in indexes]
        sizes = np.array([[part.list_size(i) for part in parts] for i in range(lists)], "<u8")
        out.write(_with_count(empty[: -_LISTS.size], count))
        out.write(_LISTS.pack(b"ilar", lists, code_size, b"full", lists))
        out.write(sizes.sum(axis=1).tobytes())
        for i in range(lists):
            rows = [(part, int(n)) for part, n in zip(parts, sizes[i], strict=True) if n]
            for part, n in rows:
                out.write(faiss.rev_swig_ptr(part.get_codes(i), n * code_size).data)
            for part, n in rows:
                out.write(faiss.rev_swig_ptr(part.get_ids(i), n).data)


def write_file(index: faiss.Index, path: Path) -> None:
    """Writes an index to disk; CareError if it cannot be written, for example on a full disk."""
    try:
        with path.open("wb") as file:
            # FAISS's own writer prints to standard error if the disk is full.
            faiss.write_index(index, faiss.PyCallbackIOWriter(file.write, _WRITE_BYTES))
    except OSError as error:
        reason = f"cannot be written ({error.strerror}): check that the disk has free space"
        raise CareError.at(path, reason, "input_output") from error


def _around(
    index: faiss.IndexRefine, base: faiss.Index, refine: faiss.Index
) -> tuple[bytes, bytes]:
    """Returns the bytes before and after the two inner indexes in the file of a refined index."""
    whole = faiss.serialize_index(index).tobytes()
    inside = faiss.serialize_index(base).tobytes() + faiss.serialize_index(refine).tobytes()
    head, found, tail = whole.partition(inside)
    if not found:
        raise RuntimeError("this version of FAISS writes refined indexes in an unknown format")
    return head, tail


def _write_codes(out: BinaryIO, refine: faiss.Index, codes: Path, count: int) -> None:
    empty = faiss.serialize_index(refine).tobytes()
    _check_end(empty, _NO_CODES)
    unit = 4 if isinstance(refine, faiss.IndexFlat) else 1  # the size counts floats or bytes
    out.write(_with_count(empty[: -len(_NO_CODES)], count))
    out.write(struct.pack("<Q", codes.stat().st_size // unit))
    with codes.open("rb") as file:
        shutil.copyfileobj(file, out)


def _with_count(header: bytes, count: int) -> bytes:
    return header[: _COUNT.start] + struct.pack("<q", count) + header[_COUNT.stop :]


def _check_end(header: bytes, end: bytes) -> None:
    if not header.endswith(end):
        raise RuntimeError("this version of FAISS writes empty indexes in an unknown format")
