"""The order of hits: by score in steps of 1e-6, descending, then by id, descending.

A score varies in the seventh digit with the way it is computed, so scores are compared rounded.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from core.types import FloatArray
from stores.base import ScoredRows

# Decimals of a score.
DECIMALS = 6
# Lists of up to this many rows are taken from one list of candidates, so that a shorter list is the
# beginning of a longer one where a search is approximate.
DEPTH = 50
# Rows that a search compares, at most, to find all with the score of the last one.
MOST_TIED = 2048


def rounded(scores: FloatArray) -> NDArray[np.float64]:
    """Returns scores as they are compared."""
    precise: NDArray[np.float64] = scores.astype(np.float64)
    return precise.round(DECIMALS)


def ordered(found: ScoredRows, id_of: Callable[[int], str], most: int | None = None) -> ScoredRows:
    """Returns the `most` first rows (all by default) in the order of hits.

    Args:
        found: Scores and rows in any order.
        id_of: Returns the id of a row; called for rows with equal scores only.
        most: Number of rows.
    """
    scores = rounded(found[0])
    order = np.argsort(-scores, kind="stable")
    falling = -scores[order]
    if most is not None and most < len(order):
        end = np.searchsorted(falling, falling[most - 1], side="right") if most else 0
        order, falling = order[:end], falling[:end]
    starts = np.flatnonzero(np.diff(falling, prepend=-np.inf))
    ends = np.append(starts[1:], len(order))
    for at in np.flatnonzero(ends - starts > 1).tolist():
        tied = order[starts[at] : ends[at]]
        ids = {i: id_of(row) for i, row in zip(tied.tolist(), found[1][tied].tolist(), strict=True)}
        order[starts[at] : ends[at]] = sorted(ids, key=ids.__getitem__, reverse=True)
    return found[0][order[:most]], found[1][order[:most]]


def with_ties(
    search: Callable[[int], ScoredRows], k: int, fetch: int, available: int
) -> ScoredRows:
    """Returns the k best rows and all with the score of the last of them.

    If there may be more of these than the search returns, it is repeated for `MOST_TIED` rows;
    which of still more are returned is up to the search.

    Args:
        search: Returns this many of the best rows, best first, or fewer if it finds no more.
        k: Number of rows, at least 1.
        fetch: How many rows to search for, more than k.
        available: How many rows there are, at most.
    """
    fetch = min(fetch, available)
    found = search(fetch)
    if k >= available:
        return found
    scores = rounded(found[0])
    if len(scores) < k:
        return found
    last = scores[k - 1]
    within = scores >= last
    found_all = not within.all() or len(scores) < fetch or fetch == available
    best = found[0][within], found[1][within]
    if found_all:
        return best
    more = search(min(_widest(k), available))
    tied = (rounded(more[0]) == last) & ~np.isin(more[1], best[1])
    return np.concatenate([best[0], more[0][tied]]), np.concatenate([best[1], more[1][tied]])


def depth_for(k: int) -> int:
    """Returns how many rows are searched for k hits: one more shows whether the last are tied."""
    return max(k, DEPTH) + 1


def are_cut(found: ScoredRows, k: int, available: int) -> bool:
    """Returns whether `with_ties` may have left out rows with the score of the last ones."""
    count = len(found[0])
    if not _widest(k) <= count < available:
        return False
    last = rounded(found[0][[k - 1, -1]])
    return bool(last[0] == last[1])


def _widest(k: int) -> int:
    return MOST_TIED * (k // MOST_TIED + 1)
