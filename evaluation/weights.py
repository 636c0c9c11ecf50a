"""Settings of a search from judged queries: the weight of full text, and `min_score`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evaluation.beir import Qrels, Run
from evaluation.index_search import ChannelHit
from evaluation.metrics import NDCG_10, ranked, score_queries, without_excluded
from evaluation.statistics import Difference, paired_difference

# Hits of a query that are fused again. They are the first ones by the weight of the index; the
# first ten by another weight are among them unless it is many times as large.
DEPTH = 300


@dataclass(frozen=True, slots=True)
class WeightScore:
    """What a weight of full text scores on judged queries."""

    weight: float  # that of vectors is 1
    ndcg: float  # mean nDCG@10
    difference: Difference  # difference of nDCG@10 to the search by vectors alone


def fused_run(found: Mapping[str, Sequence[ChannelHit]], weight: float) -> Run:
    """Returns the run of a weight: cosine similarity plus the weighted lexical score.

    The score of a document that is indexed in chunks is the score of its best chunk.
    """
    run: Run = {}
    for id_, hits in found.items():
        best = run.setdefault(id_, {})
        for hit in hits:
            score = hit.dense + weight * hit.lexical
            best[hit.document] = max(score, best.get(hit.document, score))
    return run


def compare_weights(
    qrels: Qrels, found: Mapping[str, Sequence[ChannelHit]], weights: Sequence[float]
) -> list[WeightScore]:
    """Scores weights of full text on judged queries; `found` is from `Searcher.channels`."""

    def values(weight: float) -> list[float]:
        return list(score_queries(NDCG_10, qrels, fused_run(found, weight)).values())

    dense = values(0.0)
    scores = {weight: values(weight) for weight in weights}
    return [
        WeightScore(weight, sum(found) / len(found), paired_difference(found, dense))
        for weight, found in scores.items()
    ]


def best_weight(scores: Sequence[WeightScore]) -> float | None:
    """Returns the weight with the highest nDCG@10 of those better than vectors alone.

    A weight is better if the 95 % interval of its difference lies above 0. None if no weight is.
    """
    better = [score for score in scores if score.difference.low > 0]
    return max(better, key=lambda score: score.ndcg).weight if better else None


# Hits of a query from which a threshold is suggested.
SCORED_HITS = 10
# The share of relevant hits that a threshold keeps.
KEPT_SHARE = 0.95
# Below 20 relevant hits no hit lies in the lowest 5 %: the threshold would be the minimum.
MIN_QUERIES = 20
_DECIMALS = 4


@dataclass(frozen=True, slots=True)
class MinScoreSuggestion:
    """A threshold and what it does to the first `SCORED_HITS` hits of the judged queries."""

    min_score: float
    relevant_kept: float  # share of the relevant hits
    others_dropped: float  # share of the other hits, those without a judgement included
    empty_queries: int  # queries that have hits without the threshold and none with it
    queries: int  # queries with a relevant hit, which the threshold was computed from


def suggest_min_score(qrels: Qrels, run: Run) -> MinScoreSuggestion | None:
    """Suggests the highest `min_score` that keeps 95 % of the relevant hits of the top 10.

    The threshold is computed over the hits of all judged queries together, and rounded down to
    four decimals. A hit with grade 1 or above is relevant; documents without a judgement count as
    not relevant, and those of the grade -1 do not count. The run is that of the service without
    `min_score`. None if fewer than 20 queries have a relevant hit in their top 10.
    """
    relevant: list[float] = []
    others: list[float] = []
    best: list[float] = []
    queries = 0
    run = without_excluded(qrels, run)
    for query, grades in qrels.items():
        hits = ranked(run.get(query, {}))[:SCORED_HITS]
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
