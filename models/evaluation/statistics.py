"""How sure a score is: intervals, and tests of the difference of two systems."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

RESAMPLES = 10_000
CONFIDENCE = 0.95
_SEED = 20260411
# Resamples at once: bounds the memory of large test sets.
_BATCH = 500


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two systems on the same items, first less second.

    Attributes:
        value: The difference.
        low: Lower end of its interval.
        high: Upper end.
        p: Two-sided p of the hypothesis that both are equal.
    """

    value: float
    low: float
    high: float
    p: float


def mean_interval(values: Sequence[float]) -> Interval:
    """Returns the mean over queries with its percentile bootstrap interval.

    Raises:
        ValueError: If there is no value.
    """
    array = _array(values)
    return Interval(float(array.mean()), *_bounds(array))


def pearson_interval(x: Sequence[float], y: Sequence[float]) -> Interval:
    """Returns Pearson's r of two lists with its bootstrap interval over pairs."""
    drawn = _drawn_correlations(_array(x), _array(y))
    low, high = np.nanquantile(drawn, _ends())
    return Interval(float(np.corrcoef(x, y)[0, 1]), float(low), float(high))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compares two systems by their values for the same queries.

    The interval is a bootstrap over queries; p is of the randomisation test, in which each
    query's two values are exchanged at random (Smucker et al., CIKM 2007).

    Raises:
        ValueError: If the lists differ in length or are empty.
    """
    delta = _array(first) - _array(second)
    rng = _rng()
    observed = abs(delta.mean())
    signs = (
        rng.integers(0, 2, (min(_BATCH, RESAMPLES - at), len(delta))) * 2 - 1
        for at in range(0, RESAMPLES, _BATCH)
    )
    # A hair of slack: sums in another order differ in the last bits.
    extreme = sum(int((abs((s * delta).mean(1)) >= observed - 1e-12).sum()) for s in signs)
    return Difference(float(delta.mean()), *_bounds(delta), (extreme + 1) / (RESAMPLES + 1))


def pearson_difference(
    truth: Sequence[float], first: Sequence[float], second: Sequence[float]
) -> Difference:
    """Compares the correlations of two systems with the truth, by a bootstrap over pairs.

    p is twice the share of resamples in which the difference has the other sign.
    """
    t, a, b = _array(truth), _array(first), _array(second)
    value = np.corrcoef(t, a)[0, 1] - np.corrcoef(t, b)[0, 1]
    drawn = _drawn_correlations(t, a) - _drawn_correlations(t, b)
    low, high = np.nanquantile(drawn, _ends())
    tail = 1 + min(np.sum(drawn <= 0), np.sum(drawn >= 0))
    return Difference(
        float(value), float(low), float(high), min(1.0, 2 * float(tail) / (RESAMPLES + 1))
    )


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Returns Spearman's coefficient of two lists and its two-sided p."""
    result = stats.spearmanr(x, y)
    return float(result.statistic), float(result.pvalue)


def _drawn_correlations(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Correlations of resampled pairs, the same pairs in each call; NaN where one is constant."""
    rng = _rng()
    drawn = []
    for at in range(0, RESAMPLES, _BATCH):
        rows = rng.integers(0, len(x), (min(_BATCH, RESAMPLES - at), len(x)))
        a = x[rows] - x[rows].mean(1, keepdims=True)
        b = y[rows] - y[rows].mean(1, keepdims=True)
        norms = np.sqrt((a * a).sum(1) * (b * b).sum(1))
        drawn.append(np.divide((a * b).sum(1), norms, np.full(len(rows), np.nan), where=norms > 0))
    return np.concatenate(drawn)


def _array(values: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError("there is nothing to average")
    return array


def _bounds(values: NDArray[np.float64]) -> tuple[float, float]:
    rng = _rng()
    means = np.concatenate(
        [
            values[rng.integers(0, len(values), (min(_BATCH, RESAMPLES - at), len(values)))].mean(1)
            for at in range(0, RESAMPLES, _BATCH)
        ]
    )
    low, high = np.quantile(means, _ends())
    return float(low), float(high)


def _ends() -> tuple[float, float]:
    return (1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2


def _rng() -> np.random.Generator:
    return np.random.default_rng(_SEED)
