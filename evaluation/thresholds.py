"""A threshold for `min_score`, from judged queries."""

import math
from dataclasses import dataclass

from evaluation.beir import Qrels, Run
from evaluation.metrics import ranked

DEPTH = 10
# The share of relevant hits that a threshold keeps.
KEPT_SHARE = 0.95
# Below 20 relevant hits no hit lies in the lowest 5 %: the threshold would be the minimum.
MIN_QUERIES = 20
_DECIMALS = 4


@dataclass(frozen=True, slots=True)
class MinScoreSuggestion:
    """A threshold and what it does to the first `DEPTH` hits of the judged queries."""

    min_score: float
    relevant_kept: float  # share of the relevant hits
    others_dropped: float  # share of the other hits, those without a judgement included
    empty_queries: int  # queries that have hits without the threshold and none with it
    queries: int  # queries with a relevant hit, which the threshold was computed from


def suggest_min_score(qrels: Qrels, run: Run) -> MinScoreSuggestion | None:
    """Suggests the highest `min_score` that keeps 95 % of the relevant hits of the top 10.

    The threshold is computed over the hits of all judged queries together, and rounded down to
    four decimals. A hit with grade 1 or above is relevant; documents without a judgement count as
    not relevant. The run is that of the service without `min_score`. None if fewer than 20 queries
    have a relevant hit in their top 10.
    """
    relevant: list[float] = []
    others: list[float] = []
    best: list[float] = []
    queries = 0
    for query, grades in qrels.items():
        hits = ranked(run.get(query, {}))[:DEPTH]
        scores = [score for id_, score in hits if grades.get(id_, 0) > 0]
        relevant += scores
        others += [score for id_, score in hits if grades.get(id_, 0) <= 0]
        best += [score for _, score in hits[:1]]
        queries += bool(scores)
    if queries < MIN_QUERIES:
        return None
    relevant.sort(reverse=True)
    lowest = relevant[math.ceil(KEPT_SHARE * len(relevant)) - 1]
    threshold = math.floor(lowest * 10**_DECIMALS) / 10**_DECIMALS
    dropped = sum(score < threshold for score in others)
    return MinScoreSuggestion(
        min_score=threshold,
        relevant_kept=sum(score >= threshold for score in relevant) / len(relevant),
        others_dropped=dropped / len(others) if others else 0.0,
        empty_queries=sum(score < threshold for score in best),
        queries=queries,
    )
