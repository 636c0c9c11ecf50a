"""Whether an index seems to answer a query, judged by what the search has found."""

import math
from collections.abc import Mapping

import numpy as np

from core.encoders import Answerability
from core.types import Mode
from stores.base import ScoredRows

# The judge of each mode that has one.
Judges = Mapping[Mode, Answerability]
Features = dict[str, float]

# A judge is used for indexes of up to this many times as few or as many vectors as its own.
_OTHER_SIZE = 10
# Nearest rows whose lexical score counts.
_NEAREST = 10


def suitable(judges: Judges, vectors: int) -> Judges:
    """Returns the judges that were fitted on an index of about the size of this one."""
    return {
        mode: judge
        for mode, judge in judges.items()
        if judge.vectors <= _OTHER_SIZE * vectors and vectors <= _OTHER_SIZE * judge.vectors
    }


def measure(dense: ScoredRows, lexical: ScoredRows | None = None, idf: float = 0.0) -> Features:
    """Returns the features of a query; they depend on neither `top_k` nor `min_score`.

    Args:
        dense: Cosine similarities and rows, at least one.
        lexical: Scores and rows of the lexical channel in descending order, if there is one.
        idf: Sum of the query's terms by their idf (`LexicalIndex.idf`).

    Returns:
        `cosine`, the similarity of the nearest row. With full text also `lexical`, ln(1 + s), where
        s is the highest lexical score of the nearest rows in units of idf: how much of the query
        is said in what is near it. The share itself would be low for long queries.
    """
    features = {"cosine": float(dense[0].max())}
    if lexical is not None:
        scores, rows = dense
        if len(rows) > _NEAREST:
            rows = rows[np.argpartition(scores, -_NEAREST)[-_NEAREST:]]
        nearest = set(rows.tolist())
        found = zip(lexical[0].tolist(), lexical[1].tolist(), strict=True)
        highest = next((score for score, row in found if row in nearest), 0.0)
        features["lexical"] = math.log1p(idf * highest)
    return features


def answerable(judge: Answerability, features: Features) -> float:
    """Returns a score from 0 to 1, by logistic regression."""
    logit = judge.intercept + sum(w * features[name] for name, w in judge.weights.items())
    # Beyond this range the score does not change any more.
    return 1 / (1 + math.exp(-min(max(logit, -30.0), 30.0)))


def is_unanswered(judges: Judges, mode: Mode | None, score: float | None) -> bool:
    """Returns whether nothing in the index seems to answer a query with this score."""
    return score is not None and mode is not None and score < judges[mode].threshold
