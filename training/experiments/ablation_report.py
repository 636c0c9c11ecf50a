"""Report of ablations and baselines: scores, decided differences and tables."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from core.files import write_text
from evaluation.statistics import decide, paired_difference
from training.experiments.tables import MARGIN, Tables, render

MEASURES = NDCG, MAP = "nDCG@10", "MAP@10"
SCORES, TABLE = "scores.json", "table.md"
# Scores of each question, by recipe, seed and measure.
Scores = Mapping[str, Mapping[int, Mapping[str, Sequence[float]]]]


def write_report(out: Path, tables: Tables, scores: Scores, facts: Mapping[str, Any]) -> None:
    """Writes `scores.json` and `table.md` to the folder `out`.

    `tables` say which recipes are compared. `facts` are data, hardware and libraries; `questions`
    among them is the number of questions.
    """
    rows = [name for name in tables.recipes if name in scores]
    rows += [name for name in scores if name not in rows]
    summary = {
        "facts": dict(facts),
        "scores": {
            name: {
                measure: {str(s): round(fmean(v[measure]), 5) for s, v in scores[name].items()}
                for measure in MEASURES
            }
            for name in rows
        },
        "differences": compare(tables.pairs, scores, facts["questions"]),
    }
    write_text(out / SCORES, json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    write_text(out / TABLE, render(tables, summary))


def compare(
    pairs: Sequence[tuple[str, str]], scores: Scores, questions: int
) -> list[dict[str, Any]]:
    """Compares the two recipes of each pair over the seeds that both have.

    The value of a question is its mean over seeds; confidence intervals are bootstrapped over
    questions. Returns first minus second with interval and decision, per pair and measure.
    """
    compared = []
    for pair in pairs:
        first, second = (scores.get(name, {}) for name in pair)
        seeds = sorted(first.keys() & second.keys())
        for measure in MEASURES if seeds else ():
            means = (
                np.mean([found[seed][measure] for seed in seeds], axis=0).tolist()
                for found in (first, second)
            )
            difference = paired_difference(*means)
            decision = decide(difference, questions, MARGIN)
            bounds = {
                name: round(getattr(difference, name), 6) for name in ("value", "low", "high")
            }
            compared.append(
                {"first": pair[0], "second": pair[1], "measure": measure, "seeds": len(seeds)}
                | bounds
                | {"verdict": decision.verdict, "needed": decision.needed}
            )
    return compared
