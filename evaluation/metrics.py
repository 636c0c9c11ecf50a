"""Measures of a run: each query's value, and the mean over the judged queries."""

from collections.abc import Mapping

import ir_measures
from ir_measures import AP, RR, Measure, R, nDCG

from evaluation.beir import Qrels, Run

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
    """Returns the mean of each of `MEASURES` over all judged queries; see `score_queries`."""
    first_ten = {query: dict(ranked(scores)[:10]) for query, scores in run.items()}
    means = {}
    for name, measure in MEASURES.items():
        values = score_queries(measure, qrels, first_ten if measure == RR else run)
        means[name] = sum(values.values()) / len(values)
    return means


def score_queries(measure: Measure, qrels: Qrels, run: Run) -> dict[str, float]:
    """Returns a measure of each judged query, in the order of the qrels, as trec_eval computes it.

    nDCG takes graded gains; a document is relevant from grade 1. Ties in a run are broken by
    descending document id. Every judged query counts: one without results scores 0, and so
    does one without a relevant document.
    """
    values = dict.fromkeys(qrels, 0.0)
    for metric in ir_measures.iter_calc([measure], qrels, run):
        if metric.query_id in values:
            values[metric.query_id] = metric.value
    return values


def ranked(scores: Mapping[str, float]) -> list[tuple[str, float]]:
    """Returns ids with their scores, the best first; ties by descending id."""
    return sorted(scores.items(), key=lambda item: (item[1], item[0]), reverse=True)
