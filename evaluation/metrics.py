"""Metrics of a run, per query and averaged over the judged queries; files of runs."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import ir_measures
from ir_measures import AP, RR, Measure, R, nDCG

from core.errors import CareError
from core.files import write_text
from core.records import read_lines, record_error
from evaluation.beir import Qrels, Run

MEASURES: dict[str, Measure] = {
    "nDCG@10": nDCG @ 10,
    # Of the top 10: trec_eval has no cut-off for RR, and other tools break ties differently.
    "MRR@10": RR,
    "Recall@10": R @ 10,
    "Recall@100": R @ 100,
}

# As in trec_eval, MAP@10 divides by the number of relevant documents even if it exceeds ten.
MAP = AP
MAP_10 = AP @ 10
NDCG_10 = nDCG @ 10

# The grade of a document that is removed from the hits of its query before they are measured.
EXCLUDED = -1


def score(qrels: Qrels, run: Run) -> dict[str, float]:
    """Returns the mean of each of `MEASURES` over all judged queries; see `score_queries`."""
    return means(score_all(qrels, run))


def means(values: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean over queries of each measure that `score_all` returns."""
    return {name: fmean(by_query.values()) for name, by_query in values.items()}


def score_all(qrels: Qrels, run: Run) -> dict[str, dict[str, float]]:
    """Returns each of `MEASURES` of each judged query; see `score_queries`."""
    run = without_excluded(qrels, run)
    first_ten = {query: dict(ranked(scores)[:10]) for query, scores in run.items()}
    return {
        name: score_queries(measure, qrels, first_ten if measure == RR else run)
        for name, measure in MEASURES.items()
    }


def score_queries(measure: Measure, qrels: Qrels, run: Run) -> dict[str, float]:
    """Returns a measure of each judged query, in the order of the qrels, as trec_eval computes it.

    nDCG takes graded gains; a document is relevant from grade 1. Documents of the grade `EXCLUDED`
    are removed from the hits of their query. Ties in a run are broken by descending document id.
    Every judged query counts: a query without hits or without a relevant document scores 0.
    """
    values = dict.fromkeys(qrels, 0.0)
    judged = {
        query: {id_: grade for id_, grade in grades.items() if grade >= 0}
        for query, grades in qrels.items()
    }
    for metric in ir_measures.iter_calc([measure], judged, without_excluded(qrels, run)):
        if metric.query_id in values:
            values[metric.query_id] = metric.value
    return values


def without_excluded(qrels: Qrels, run: Run) -> Run:
    """Returns a run without the documents of the grade `EXCLUDED`."""
    excluded = {
        query: {id_ for id_, grade in grades.items() if grade == EXCLUDED}
        for query, grades in qrels.items()
    }
    if not any(excluded.values()):
        return run
    return {
        query: {id_: s for id_, s in scores.items() if id_ not in excluded.get(query, ())}
        for query, scores in run.items()
    }


def ranked(scores: Mapping[str, float]) -> list[tuple[str, float]]:
    """Returns ids with scores by descending score; ties by descending id."""
    return sorted(scores.items(), key=lambda item: (item[1], item[0]), reverse=True)


def write_run(path: Path, run: Run, system: str) -> None:
    """Writes a run in TREC's format: query-id Q0 document-id rank score system.

    The documents of a query are sorted by descending score, then by descending id.
    """
    lines = []
    for query, scores in run.items():
        for word in (query, *scores, system):
            if len(word.split()) != 1:
                message = f"'{word}' contains white space, which a TREC run cannot hold: rename it"
                raise CareError(message, code="white_space_in_id", id=word)
        lines += [
            f"{query} Q0 {id_} {rank} {score!r} {system}\n"
            for rank, (id_, score) in enumerate(ranked(scores), start=1)
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(lines))


def read_run(path: Path) -> Run:
    """Reads a run, also one that gzip compressed (`.gz`).

    Documents are ranked by their scores, not by the column of ranks, as trec_eval does. A line
    without six columns, with a score that is no finite number or with a document that the query
    has already is a DataError.
    """
    run: Run = {}
    for number, line in read_lines(path):
        try:
            query, _, document, _, text, _ = line.split()
            score = float(text)
            if not math.isfinite(score):
                raise ValueError(text)
        except ValueError as error:
            reason = "must be query-id Q0 document-id rank score system"
            raise record_error(path, number, reason, code="not_run") from error
        if document in run.setdefault(query, {}):
            reason = f"has document '{document}' for query '{query}' again: keep one of its scores"
            raise record_error(path, number, reason, code="contradiction")
        run[query][document] = score
    return run
