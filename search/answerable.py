"""Whether an index seems to answer a query, judged by what the search has found."""

import math
from collections.abc import Mapping

import numpy as np

from core.encoders import Answerability
from core.types import Mode
from search.fusion import LEXICAL_CANDIDATES
from stores.base import ScoredRows

# The judge of each mode that has one.
Judges = Mapping[Mode, Answerability]
Features = dict[str, float]

# Nearest rows whose lexical score counts.
_NEAREST = 10


def suitable(judges: Judges, vectors: int) -> Judges:
    """Returns the judges that are for an index of this size."""

    def holds(judge: Answerability) -> bool:
        least, most = judge.vectors
        return least <= vectors <= most

    return {mode: judge for mode, judge in judges.items() if holds(judge)}


def measure(
    query: str, vectors: int, dense: ScoredRows, lexical: ScoredRows | None = None, idf: float = 0.0
) -> Features:
    """Returns the features of a query; they depend on neither `top_k` nor `min_score`.

    Args:
        query: Its text.
        vectors: Number of vectors of the index.
        dense: Cosine similarities and rows, at least one.
        lexical: Scores and rows of the lexical channel in descending order, if there is one.
        idf: Sum of the query's terms by their idf (`LexicalIndex.idf`).

    Returns:
        `cosine`, the similarity of the nearest row; `length`, ln of the characters of the query;
        `size`, ln of `vectors`. With full text also `idf`, ln(1 + idf), and how much of the query
        is said in what is near it: `lexical` and `overlap`, ln(1 + s), where s is the highest and
        the mean lexical score of the nearest rows in units of idf. The share itself would be low
        for long queries.
    """
    features = {"cosine": float(dense[0].max())}
    features |= {"length": math.log(len(query)), "size": math.log(vectors)}
    if lexical is not None:
        scores, rows = dense
        if len(rows) > _NEAREST:
            rows = rows[np.argpartition(scores, -_NEAREST)[-_NEAREST:]]
        # A deeper search has the same first candidates.
        found = (each[:LEXICAL_CANDIDATES].tolist() for each in reversed(lexical))
        by_row = dict(zip(*found, strict=True))
        said = [idf * by_row.get(row, 0.0) for row in rows.tolist()]
        features |= {"lexical": math.log1p(max(said)), "idf": math.log1p(idf)}
        features["overlap"] = math.log1p(sum(said) / len(said))
    return features


def answerable(judge: Answerability, features: Mapping[str, float]) -> float:
    """Returns a score from 0 to 1, by logistic regression."""
    logit = judge.intercept + sum(w * features[name] for name, w in judge.weights.items())
    # Beyond this range the score does not change any more.
    return 1 / (1 + math.exp(-min(max(logit, -30.0), 30.0)))


def is_unanswered(judges: Judges, mode: Mode | None, score: float | None) -> bool:
    """Returns whether nothing in the index seems to answer a query with this score."""
    return score is not None and mode is not None and score < judges[mode].threshold
