"""Calibration of the score that says whether an index answers a query, and its measurement."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from core.encoders import Answerability
from core.errors import CareError

Features = Sequence[Mapping[str, float]]
Numbers = NDArray[np.float64]

# Fewer questions of a kind say nothing about a share of 2 %.
MIN_QUERIES = 50
# Penalty of the squared weights of standardised features, as in scikit-learn's default.
_L2 = 1.0
_STEPS = 100


@dataclass(frozen=True, slots=True)
class Share:
    """The questions of one set, by the score of one mode of search."""

    mode: str
    name: str  # of the set
    queries: int  # number of questions with a score
    refused: float  # the share below the threshold
    # Probability that a question that is answered scores higher than one of this set, ties
    # counted as half; None for the answered ones themselves.
    auroc: float | None


def fit(
    answered: Features, unanswered: Features, vectors: int, refused_share: float
) -> Answerability:
    """Fits a logistic regression in which both classes have the same weight in total.

    Args:
        answered: Features of questions that the index answers.
        unanswered: Features of questions that it does not answer.
        vectors: Number of vectors of the index.
        refused_share: Share of `answered` that are to score below the threshold.

    Raises:
        CareError: If there are too few questions.
    """
    few = min(len(answered), len(unanswered))
    if few < MIN_QUERIES:
        message = f"{few} questions are too few: calibrate with at least {MIN_QUERIES} of each kind"
        raise CareError(message, code="too_few_questions", queries=few, limit=MIN_QUERIES)
    names = list(answered[0])
    values = np.array([[each[name] for name in names] for each in (*answered, *unanswered)])
    labels = np.repeat([1.0, 0.0], [len(answered), len(unanswered)])
    counts = np.repeat([len(answered), len(unanswered)], [len(answered), len(unanswered)])
    coefficients = _regression(values, labels, len(labels) / 2 / counts)
    logits = values[: len(answered)] @ coefficients[:-1] + coefficients[-1]
    lowest = np.quantile(logits, refused_share)
    return Answerability(
        vectors=vectors,
        # Rounded down, so that rounding refuses nothing.
        threshold=math.floor(1e6 / (1 + math.exp(-lowest))) / 1e6,
        intercept=round(float(coefficients[-1]), 3),
        weights={name: round(float(w), 3) for name, w in zip(names, coefficients, strict=False)},
    )


def _regression(values: Numbers, labels: Numbers, weights: Numbers) -> Numbers:
    """Returns the coefficients of features, float64 [n, f], and the intercept: float64 [f + 1]."""
    mean, deviation = values.mean(0), values.std(0) + 1e-9
    inputs = np.column_stack([(values - mean) / deviation, np.ones(len(values))])
    penalty = np.diag([_L2] * values.shape[1] + [0.0])
    found = np.zeros(inputs.shape[1])
    for _ in range(_STEPS):  # Newton's method
        chance = 1 / (1 + np.exp(-inputs @ found))
        slope = inputs.T @ (weights * (chance - labels)) + penalty @ found
        curve = (inputs.T * (weights * chance * (1 - chance))) @ inputs + penalty
        step = np.linalg.solve(curve, slope)
        found -= step
        if np.abs(step).max() < 1e-9:
            break
    scaled = found[:-1] / deviation
    return np.append(scaled, found[-1] - scaled @ mean)


def auroc(higher: Sequence[float], lower: Sequence[float]) -> float:
    """Returns the probability that a value of `higher` exceeds one of `lower`; ties count half."""
    others = np.sort(lower)
    below = np.searchsorted(others, higher, "left") + np.searchsorted(others, higher, "right")
    return float(below.mean() / 2 / len(others))
