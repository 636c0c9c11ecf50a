"""The weight of full text in a hybrid search, from judged queries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evaluation.beir import Qrels, Run
from evaluation.index_search import ChannelHit
from evaluation.metrics import NDCG_10, score_queries
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
