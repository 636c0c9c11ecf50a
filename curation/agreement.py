"""Agreement between judges."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import krippendorff
import numpy as np
from numpy.typing import NDArray
from statsmodels.stats.inter_rater import aggregate_raters, cohens_kappa, fleiss_kappa

from curation.judging import LABELS, POSITIVE, VERDICTS, Judgement


def agreement(judgements: Sequence[Judgement], method: str = "grade") -> dict[str, Any]:
    """Returns counts of verdicts and of each judge's grades, and measures of agreement.

    Fleiss' kappa is computed on the labels of the method, five grades or two classes, and on the
    two sides (positive or not), over the pairs that all judges labelled. Krippendorff's alpha is
    ordinal over the labels, over all pairs. Measures that are not defined, for one judge or for
    constant labels, are None.
    """
    labels = LABELS[method]
    verdicts = Counter(judgement.verdict for judgement in judgements)
    judges = list(judgements[0].grades) if judgements else []
    # int64 [judges, pairs]; -1 where a grade is missing
    places = {None: -1} | {grade: place for place, grade in enumerate(labels)}
    codes = np.array(
        [[places[judgement.grades[name]] for judgement in judgements] for name in judges],
        dtype=np.int64,
    ).reshape(len(judges), len(judgements))
    whole = codes[:, (codes >= 0).all(axis=0)]
    sides = np.isin(whole, [labels.index(label) for label in labels if label in POSITIVE]).astype(
        np.int64
    )
    return {
        "pairs": len(judgements),
        "verdicts": {verdict: verdicts[verdict] for verdict in VERDICTS},
        "dropped": verdicts["disputed"] + verdicts["incomplete"],
        "grades": {
            name: {grade: int((row == at).sum()) for at, grade in enumerate(labels)}
            for name, row in zip(judges, codes, strict=True)
        },
        "judge_pairs": {
            f"{judges[i]} - {judges[j]}": {
                "same_grade": _share(whole[i] == whole[j]),
                "same_side": _share(sides[i] == sides[j]),
                "cohen_kappa_side": kappa(sides[i], sides[j]),
            }
            for i, j in combinations(range(len(judges)), 2)
        },
        "fleiss_kappa_grades": _fleiss(whole, len(labels)),
        "fleiss_kappa_sides": _fleiss(sides, 2),
        "krippendorff_alpha_ordinal": _alpha(codes),
    }


def kappa(first: NDArray[np.int64], second: NDArray[np.int64]) -> float | None:
    """Returns Cohen's kappa of two raters' binary labels, int [n]."""
    table = np.zeros((2, 2))
    np.add.at(table, (first, second), 1)
    with np.errstate(all="ignore"):
        return _defined(cohens_kappa(table, return_results=False)) if len(first) else None


def _share(equal: NDArray[np.bool_]) -> float | None:
    return float(equal.mean()) if len(equal) else None


def _fleiss(codes: NDArray[np.int64], categories: int) -> float | None:
    if len(codes) < 2 or not codes.size:
        return None
    with np.errstate(all="ignore"):
        return _defined(fleiss_kappa(aggregate_raters(codes.T, n_cat=categories)[0]))


def _alpha(codes: NDArray[np.int64]) -> float | None:
    pairable = codes[:, (codes >= 0).sum(axis=0) > 1]
    if len(np.unique(pairable[pairable >= 0])) < 2:
        return None
    data = np.where(pairable < 0, np.nan, pairable)
    return _defined(krippendorff.alpha(reliability_data=data, level_of_measurement="ordinal"))


def _defined(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def summary(statistics: Mapping[str, Any]) -> dict[str, object]:
    """Returns the statistics that commands print, by name."""
    measures = ("fleiss_kappa_grades", "fleiss_kappa_sides", "krippendorff_alpha_ordinal")
    pairs: Mapping[str, Any] = statistics["judge_pairs"]
    return {
        "pairs": statistics["pairs"],
        **statistics["verdicts"],
        **{f"{pair}: same side": row["same_side"] for pair, row in pairs.items()},
        **{name: statistics[name] for name in measures},
    }
