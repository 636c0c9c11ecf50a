import ir_measures
from ir_measures import AP, RR, Measure, R, nDCG

from models.evaluation.beir import Qrels, Run

MEASURES: dict[str, Measure] = {
    "nDCG@10": nDCG @ 10,
    # Of runs cut at 10: trec_eval has no cut of its own, and other tools break ties otherwise.
    "MRR@10": RR,
    "Recall@10": R @ 10,
    "Recall@100": R @ 100,
}

# As trec_eval: MAP@10 divides by all relevant documents of a query, not by the ten at most
# that could be found.
MAP = AP
MAP_10 = AP @ 10
NDCG_10 = nDCG @ 10


def score(qrels: Qrels, run: Run) -> dict[str, float]:
    """Returns the mean of each measure over all judged queries, as trec_eval computes it.

    nDCG takes graded gains; a document is relevant from grade 1. Ties in a run are broken
    by descending document id. A judged query without results scores zero and stays in the
    denominator.
    """
    first_ten = {query: _cut(scores, 10) for query, scores in run.items()}
    return {
        name: _mean(measure, qrels, first_ten if measure == RR else run)
        for name, measure in MEASURES.items()
    }


def score_queries(measure: Measure, qrels: Qrels, run: Run) -> dict[str, float]:
    """Returns a measure of each judged query, in the order of the qrels; 0 without results."""
    values = dict.fromkeys(qrels, 0.0)
    for metric in ir_measures.iter_calc([measure], qrels, run):
        if metric.query_id in values:
            values[metric.query_id] = metric.value
    return values


def _cut(scores: dict[str, float], depth: int) -> dict[str, float]:
    ranked = sorted(scores, key=lambda id_: (scores[id_], id_), reverse=True)
    return {id_: scores[id_] for id_ in ranked[:depth]}


def _mean(measure: Measure, qrels: Qrels, run: Run) -> float:
    return sum(score_queries(measure, qrels, run).values()) / len(qrels)
