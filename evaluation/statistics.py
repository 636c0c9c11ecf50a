"""Confidence intervals of scores, and significance tests of the difference of two systems.

Resampling is seeded: equal scores give equal intervals and p-values. Empty lists and lists of
different lengths are a ValueError.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

RESAMPLES = 10_000
CONFIDENCE = 0.95
_SEED = 20260411
# Resamples per batch: bounds the memory for large test sets.
_BATCH = 500


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference(Interval):
    """The difference of two systems on the same items, first minus second; p is two-sided."""

    p: float


Verdict = Literal["higher", "lower", "equal", "undecided"]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the interval of a difference says."""

    # `higher` or `lower` if the interval is above or below 0; else `equal` if it is within
    # the margin around 0; else `undecided`.
    verdict: Verdict
    # For an undecided difference, the number of items with which the interval would be narrow
    # enough for one of the other verdicts, if the observed difference is the true one.
    needed: int | None = None


def decide(difference: Interval, items: int, margin: float) -> Decision:
    """Decides a difference of means over `items` items by its interval.

    Differences up to `margin` count as equal. The width of an interval is proportional to
    1 / √items, so the number of items that an undecided difference needs follows from its width.
    """
    if difference.low > 0:
        return Decision("higher")
    if difference.high < 0:
        return Decision("lower")
    if max(-difference.low, difference.high) <= margin:
        return Decision("equal")
    width = (difference.high - difference.low) / 2
    observed = abs(difference.value)
    narrow_enough = max(observed, margin - observed)
    return Decision("undecided", math.ceil(items * (width / narrow_enough) ** 2))


def mean_interval(values: Sequence[float]) -> Interval:
    """Returns the mean over queries with its percentile bootstrap interval."""
    array = _array(values)
    return Interval(float(array.mean()), *_bounds(_resampled_means(array)))


def pearson_interval(x: Sequence[float], y: Sequence[float]) -> Interval:
    """Returns Pearson's r of two lists with its bootstrap interval over pairs."""
    bounds = _bounds(_resampled_correlations(_array(x), _array(y)))
    return Interval(float(np.corrcoef(x, y)[0, 1]), *bounds)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compares two systems by their values for the same queries.

    The interval is a bootstrap over queries. p is from the paired randomisation test, which swaps
    the two values of a query at random (Smucker et al., CIKM 2007).
    """
    delta = _array(first) - _array(second)
    # Tolerance for rounding: sums in a different order differ in the last bits.
    observed = abs(delta.mean()) - 1e-12
    extreme = sum(
        int((abs(((2 * draws - 1) * delta).mean(1)) >= observed).sum())
        for draws in _draws(2, len(delta))
    )
    p = (extreme + 1) / (RESAMPLES + 1)
    return Difference(float(delta.mean()), *_bounds(_resampled_means(delta)), p)


def pearson_difference(
    truth: Sequence[float], first: Sequence[float], second: Sequence[float]
) -> Difference:
    """Compares the correlations of two systems with the truth, by a bootstrap over pairs.

    p is twice the share of resamples in which the difference has the opposite sign.
    """
    t, a, b = _array(truth), _array(first), _array(second)
    value = np.corrcoef(t, a)[0, 1] - np.corrcoef(t, b)[0, 1]
    differences = _resampled_correlations(t, a) - _resampled_correlations(t, b)
    tail = 1 + min(np.sum(differences <= 0), np.sum(differences >= 0))
    p = min(1.0, 2 * float(tail) / (RESAMPLES + 1))
    return Difference(float(value), *_bounds(differences), p)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Returns Spearman's rank correlation of two lists and its two-sided p."""
    result = stats.spearmanr(x, y)
    return float(result.statistic), float(result.pvalue)


def _array(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError("the list of values is empty")
    return array


def _draws(high: int, size: int) -> Iterator[NDArray[np.int64]]:
    """Yields whole numbers below `high`, int64 [_BATCH, size], for all resamples."""
    rng = np.random.default_rng(_SEED)
    for _ in range(RESAMPLES // _BATCH):
        yield rng.integers(0, high, (_BATCH, size))


def _bounds(resampled: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.nanquantile(resampled, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(low), float(high)


def _resampled_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([values[rows].mean(1) for rows in _draws(len(values), len(values))])


def _resampled_correlations(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Correlations of resampled pairs, the same pairs in each call; NaN where one is constant."""
    correlations = []
    for rows in _draws(len(x), len(x)):
        a = x[rows] - x[rows].mean(1, keepdims=True)
        b = y[rows] - y[rows].mean(1, keepdims=True)
        norms = np.sqrt((a * a).sum(1) * (b * b).sum(1))
        correlations.append(
            np.divide((a * b).sum(1), norms, np.full(len(rows), np.nan), where=norms > 0)
        )
    return np.concatenate(correlations)
