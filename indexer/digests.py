"""Checksums that tell texts and ids apart, and which of very many are equal.

Memory does not grow with their number: they are compared part by part, a part being those whose
first bits agree, and what is found lies in unnamed files.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core.scratch import allocate, scratch
from core.types import RowArray

# 128 bits: a hundred million texts collide with a probability below 1e-22.
DIGEST = np.dtype("S16")

# Digests that are read, and about as many as are compared, at a time.
_BLOCK = 1 << 18


def digest(text: str) -> bytes:
    """Returns 16 bytes that tell a text or an id from all others."""
    return hashlib.blake2b(text.encode(), digest_size=DIGEST.itemsize).digest()


def first_equal(digests: NDArray[np.bytes_], folder: Path) -> RowArray:
    """Returns int64 [n]: for each of n digests the place of the first that is equal to it.

    Args:
        digests: The digests [n].
        folder: Where the result takes its space, in a file without a name.
    """
    found: RowArray = allocate(folder, np.int64, len(digests))
    parts = 1 << (len(digests) // _BLOCK).bit_length()
    for part in range(parts):
        places = _part(digests, part, parts)
        _, first, equal = np.unique(digests[places], return_index=True, return_inverse=True)
        found[places] = places[first[equal]]
    return found


def first_places(found: RowArray, folder: Path) -> RowArray:
    """Returns int64 [different]: the places, ascending, of all that are the first of their like."""
    with scratch(folder, np.int64) as first:
        for block in _blocks(len(found)):
            places = np.arange(block.start, block.stop)
            first.append(places[found[block] == places].data)
        return first.array()


def numbers(found: RowArray, first: RowArray, folder: Path) -> RowArray:
    """Returns int64 [n]: which of the `first` places is that of each digest's first equal one."""
    with scratch(folder, np.int64) as which:
        for block in _blocks(len(found)):
            which.append(np.searchsorted(first, found[block]).data)
        return which.array()


def _part(digests: NDArray[np.bytes_], part: int, parts: int) -> RowArray:
    heads = digests.view(np.uint64)[::2]
    found = [
        block.start + np.flatnonzero(heads[block] % np.uint64(parts) == part)
        for block in _blocks(len(digests))
    ]
    return np.concatenate([np.empty(0, np.int64), *found])


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))
