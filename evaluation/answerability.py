"""Calibration of the score that says whether an index answers a query, and its measurement."""

import math
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from core.encoders import Answerability
from core.errors import CareError
from search.answerable import answerable

Numbers = NDArray[np.float64]

# Fewer questions of a kind say nothing about a share of 2 %.
MIN_QUERIES = 50
# Parts of the questions; each is judged by what was fitted on the others.
_FOLDS = 5
# Penalty of the squared weights of standardised features, as in scikit-learn's default.
_L2 = 1.0
_STEPS = 100
# Of older calibrations: beside `overlap` it tells nothing.
_NOT_FITTED = "lexical"
# In one set of answered questions they tell the manner of its writer: questions of the sample are
# long, and short ones would be refused.
_OF_MANNER = {"length", "idf"}
# A feature that varies less is the same for all.
_CONSTANT = 1e-6


class Case(NamedTuple):
    """A question that an index was asked."""

    name: str  # the set of questions that it is of
    question: str  # equal for a question in several indexes and, if they share its id, its rewrites
    vectors: int  # size of the index
    answered: bool | None  # whether the index answers it; None if that is not known
    features: Mapping[str, float]  # what the search found (search/answerable.py)


@dataclass(frozen=True, slots=True)
class Share:
    """The questions of one set in indexes of one size, by the score of one mode of search."""

    mode: str
    vectors: int
    name: str  # of the set
    queries: int  # number of questions with a score
    refused: float  # the share below the threshold
    before: float | None  # by the judge that the pair has had, also where it does not hold
    # Probability that a question that is answered scores higher than one of this set, ties
    # counted as half; None for the answered ones themselves.
    auroc: float | None


def fit(cases: Sequence[Case], vectors: tuple[int, int], refused_share: float) -> Answerability:
    """Fits a logistic regression to the cases of which it is known whether they are answered.

    Both classes have the same weight in total and, within each, so have the questions of each set
    in indexes of each size.

    Args:
        cases: Questions, with equal features.
        vectors: Sizes of the indexes that the result is for.
        refused_share: Share of the answered ones, by weight, that are to score below the threshold.
    """
    few = min(sum(case.answered is answered for case in cases) for answered in (True, False))
    if few < MIN_QUERIES:
        message = f"{few} questions are too few: calibrate with at least {MIN_QUERIES} of each kind"
        raise CareError(message, code="too_few_questions", queries=few, limit=MIN_QUERIES)
    return _fit(cases, vectors, refused_share)


def cross_validated(cases: Sequence[Case], refused_share: float) -> tuple[Numbers, Numbers]:
    """Judges each case by what is fitted on other questions.

    Returns:
        Scores of the cases, and their thresholds: float64 [n] each.
    """
    folds = np.array([zlib.crc32(case.question.encode()) % _FOLDS for case in cases])
    found = np.empty((2, len(cases)))
    for fold in range(_FOLDS):
        others = [case for case, own in zip(cases, folds, strict=True) if own != fold]
        judge = _fit(others, (1, 1), refused_share)
        for at in np.flatnonzero(folds == fold).tolist():
            found[:, at] = answerable(judge, cases[at].features), judge.threshold
    return found[0], found[1]


def shares(
    mode: str,
    cases: Sequence[Case],
    scores: Numbers,
    thresholds: Numbers,
    before: NDArray[np.bool_] | None,
) -> list[Share]:
    """Returns the share of each set in indexes of each size.

    `scores` and `thresholds` are float64 [n], and `before`, bool [n], says what was refused before.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for at, case in enumerate(cases):
        groups.setdefault((case.vectors, case.name), []).append(at)
    answered = {
        size: [s for s, c in zip(scores, cases, strict=True) if c.answered and c.vectors == size]
        for size, _ in groups
    }
    return [
        Share(
            *(mode, size, name, len(own)),
            float((scores[own] < thresholds[own]).mean()),
            None if before is None else float(before[own].mean()),
            None if cases[own[0]].answered else auroc(answered[size], scores[own]),
        )
        for (size, name), own in sorted(groups.items())
    ]


def _fit(cases: Sequence[Case], vectors: tuple[int, int], refused_share: float) -> Answerability:
    cases = [case for case in cases if case.answered is not None]
    labels = np.array([bool(case.answered) for case in cases])
    sets = Counter((case.answered, case.name, case.vectors) for case in cases)
    weights = np.array([1 / sets[case.answered, case.name, case.vectors] for case in cases])
    for own in (labels, ~labels):
        weights[own] *= len(cases) / 2 / weights[own].sum()
    one_manner = len({case.name for case in cases if case.answered}) == 1
    left_out = {_NOT_FITTED} | (_OF_MANNER if one_manner else set())
    names = [name for name in cases[0].features if name not in left_out]
    columns = {name: np.array([case.features[name] for case in cases]) for name in names}
    columns = {name: values for name, values in columns.items() if values.std() > _CONSTANT}
    values = np.column_stack([*columns.values()])
    coefficients = _regression(values, labels.astype(float), weights)
    logits = values[labels] @ coefficients[:-1] + coefficients[-1]
    order = np.argsort(logits)
    refused = np.cumsum(weights[labels][order]) / weights[labels].sum()
    lowest = logits[order[np.searchsorted(refused, refused_share, "right")]]
    return Answerability(
        vectors=vectors,
        # Rounded down, so that rounding refuses nothing.
        threshold=math.floor(1e6 / (1 + math.exp(-lowest))) / 1e6,
        intercept=round(float(coefficients[-1]), 3),
        weights={name: round(float(w), 3) for name, w in zip(columns, coefficients, strict=False)},
    )


def _regression(values: Numbers, labels: Numbers, weights: Numbers) -> Numbers:
    """Returns the coefficients of features, float64 [n, f], and the intercept: float64 [f + 1]."""
    mean, deviation = values.mean(0), values.std(0)
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


def auroc(higher: Sequence[float], lower: Sequence[float] | Numbers) -> float:
    """Returns the probability that a value of `higher` exceeds one of `lower`; ties count half."""
    others = np.sort(lower)
    below = np.searchsorted(others, higher, "left") + np.searchsorted(others, higher, "right")
    return float(below.mean() / 2 / len(others))
