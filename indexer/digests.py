"""Digests of texts and ids, and the detection of duplicates among them.

Memory is bounded: digests are partitioned by hash and compared partition by partition; results are
arrays in unnamed temporary files.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core.scratch import allocate, scratch
from core.types import RowArray

# With 128 bits, the collision probability of 100 million texts is below 1e-22.
DIGEST = np.dtype("S16")

# Digests that are read at a time, and the approximate size of a partition.
_BLOCK = 1 << 18


def digest(text: str) -> bytes:
    """Returns the 128-bit BLAKE2b digest of a text or an id."""
    return hashlib.blake2b(text.encode(), digest_size=DIGEST.itemsize).digest()


def first_occurrences(digests: NDArray[np.bytes_], folder: Path) -> RowArray:
    """Returns int64 [n]: for each of n digests the position of its first occurrence.

    The result is in an unnamed file in `folder`.
    """
    first: RowArray = allocate(folder, np.int64, len(digests))
    parts = 1 << (len(digests) // _BLOCK).bit_length()
    for part in range(parts):
        positions = _partition(digests, part, parts)
        _, index, inverse = np.unique(digests[positions], return_index=True, return_inverse=True)
        first[positions] = positions[index[inverse]]
    return first


def unique_positions(first: RowArray, folder: Path) -> RowArray:
    """Returns int64 [unique]: positions of the first occurrence of each digest, ascending.

    `first` is what `first_occurrences` returns; the result is in an unnamed file in `folder`.
    """
    with scratch(folder, np.int64) as unique:
        for block in _blocks(len(first)):
            positions = np.arange(block.start, block.stop)
            unique.append(positions[first[block] == positions].data)
        return unique.array()


def inverse_indices(first: RowArray, unique: RowArray, folder: Path) -> RowArray:
    """Returns int64 [n]: for each of n digests the index of its first occurrence in `unique`.

    `first` and `unique` are what `first_occurrences` and `unique_positions` return; the result is
    in an unnamed file in `folder`.
    """
    with scratch(folder, np.int64) as inverse:
        for block in _blocks(len(first)):
            inverse.append(np.searchsorted(unique, first[block]).data)
        return inverse.array()


def _partition(digests: NDArray[np.bytes_], part: int, parts: int) -> RowArray:
    heads = digests.view(np.uint64)[::2]
    found = [
        block.start + np.flatnonzero(heads[block] % np.uint64(parts) == part)
        for block in _blocks(len(digests))
    ]
    return np.concatenate([np.empty(0, np.int64), *found])


def _blocks(count: int) -> Iterator[slice]:
    for start in range(0, count, _BLOCK):
        yield slice(start, min(start + _BLOCK, count))
