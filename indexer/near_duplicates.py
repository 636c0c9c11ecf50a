"""Texts that are nearly equal, by MinHash of their characters (Broder, 1997).

The share of equal hashes of two texts estimates the share of three-character sequences that they
have in common (Jaccard), without punctuation, spaces and case.
"""

import numpy as np
from numpy.typing import NDArray

from core.text import normalize_text

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
