"""Run files in TREC's format: query-id Q0 document-id rank score system."""

import math
from pathlib import Path

from core.errors import CareError
from core.files import write_text
from core.records import read_lines, record_error
from evaluation.beir import Run
from evaluation.metrics import ranked


def write_run(path: Path, run: Run, system: str) -> None:
    """Writes a run, each query's documents by descending score, then by descending id."""
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
