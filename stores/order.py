"""The order of hits: by score in steps of 1e-6, descending, then by id, descending.

A score varies in the seventh digit with the way it is computed, so scores are compared rounded.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from core.types import FloatArray, ScoredRows

# Decimals of a score.
DECIMALS = 6
# Lists of up to this many rows are taken from one list of candidates, so that a shorter list is the
# beginning of a longer one where a search is approximate.
DEPTH = 50
# Rows that a search compares, at most, to find all with the score of the last one.
MOST_TIED = 2048


def rounded(scores: FloatArray) -> NDArray[np.float64]:
    precise: NDArray[np.float64] = scores.astype(np.float64)
    return precise.round(DECIMALS)


def ordered(
    found: ScoredRows, ids_of: Callable[[list[int]], list[str]], most: int | None = None
) -> ScoredRows:
    """Returns the `most` first of scored rows, by default all, in the order of hits.

    `ids_of` returns the ids of rows; it is called once, for rows with equal scores only.
    """
    scores, rows = found
    values = rounded(scores)
    if not (values[1:] <= values[:-1]).all():
        order = np.argsort(-values, kind="stable")
        scores, rows, values = scores[order], rows[order], values[order]
    end = len(values)
    if most is not None and most < end:
        end = most
        while end and end < len(values) and values[end] == values[most - 1]:
            end += 1
    equal = values[1:end] == values[: max(end - 1, 0)]
    if equal.any():
        order = np.arange(end)
        tied = np.flatnonzero(np.append(False, equal) | np.append(equal, False))
        ids = dict(zip(tied.tolist(), ids_of(rows[tied].tolist()), strict=True))
        order[tied] = sorted(ids, key=lambda at: (values[at], ids[at]), reverse=True)
        scores, rows = scores[order], rows[order]
    return scores[:most], rows[:most]


def with_ties(
    search: Callable[[int], ScoredRows], k: int, fetch: int, available: int
) -> ScoredRows:
    """Returns the k best rows and all with the score of the last of them.

    If there may be more of these than the search returns, it is repeated for `MOST_TIED` rows;
    which of still more are returned is up to the search.

    Args:
        search: Returns this many of the best rows, best first, or fewer if it finds no more.
        fetch: How many rows to search for, more than k.
        available: How many rows there are, at most.
    """
    fetch = min(fetch, available)
    found = search(fetch)
    if k >= available:
        return found
    count = len(found[0])
    if count < k:
        return found
    tail = rounded(found[0][k - 1 :])
    last = tail[0]
    end = k - 1 + int(np.count_nonzero(tail == last))
    best = found[0][:end], found[1][:end]
    if end < count or count < fetch or fetch == available:
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
