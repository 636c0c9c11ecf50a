"""Equal and nearly equal texts.

Texts and ids are compared by digests. Memory is bounded: digests are partitioned by hash and
compared partition by partition; results are arrays in unnamed temporary files.

Nearly equal texts are found by MinHash of their characters (Broder, 1997): the share of equal
hashes of two texts estimates the share of three-character sequences that they have in common
(Jaccard), without punctuation, spaces and case.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core.scratch import allocate, scratch
from core.text import normalize_text
from core.types import RowArray

# With 128 bits, the collision probability of 100 million texts is below 1e-22.
DIGEST = np.dtype("S16")

# Digests that are read at a time, and the approximate size of a partition.
_BLOCK = 1 << 18

_HASHES, _BANDS = 16, 4
# Two texts are nearly equal if as many of their hashes are: about 85 % of the sequences in common.
_EQUAL = 14
# The hashes of one text.
SIGNATURE = np.dtype((np.uint32, _HASHES))
# More texts are not compared: the comparison takes some 300 bytes of memory for each.
MOST_TEXTS = 2_000_000

_random = np.random.default_rng(0)
_FACTORS = _random.integers(1, 1 << 63, (3 + _HASHES), np.uint64) | np.uint64(1)

Signatures = NDArray[np.uint32]


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


def signature(text: str) -> Signatures:
    """Returns the hashes of a text: uint32 [16]."""
    letters = "".join(filter(str.isalnum, normalize_text(text).casefold())).ljust(3)
    codes = np.frombuffer(letters.encode("utf-32-le"), np.uint32).astype(np.uint64)
    sequences = sum(codes[i : len(codes) - 2 + i] * _FACTORS[i] for i in range(3))
    mixed = sequences ^ (sequences >> np.uint64(29))
    hashes = (mixed[:, None] * _FACTORS[3:]) >> np.uint64(32)
    smallest: Signatures = hashes.min(axis=0).astype(np.uint32)
    return smallest


def count_near_duplicates(signatures: Signatures) -> int:
    """Returns how many of n different texts are nearly equal to one before them.

    `signatures` are those of the texts, uint32 [n, 16]. Only texts with the same four hashes of a
    band are compared, each with the first of them, so few are missed and none is compared with all.
    """
    near = np.zeros(len(signatures), bool)
    width = _HASHES // _BANDS
    for first in range(0, _HASHES, width):
        keys = np.zeros(len(signatures), np.uint64)
        for hashes, factor in zip(signatures[:, first : first + width].T, _FACTORS, strict=False):
            keys = (keys ^ hashes) * factor
        order = np.argsort(keys, kind="stable")
        begins = np.flatnonzero(np.diff(keys[order], prepend=keys[order[:1]] + np.uint64(1)))
        leaders = np.repeat(order[begins], np.diff(begins, append=len(order)))
        equal = np.count_nonzero(signatures[order] == signatures[leaders], axis=1)
        near[order[(equal >= _EQUAL) & (order != leaders)]] = True
    return int(np.count_nonzero(near))
