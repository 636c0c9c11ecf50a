"""Report of ablations and baselines: scores, decided differences, tables and plot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from core.files import atomic, write_text
from evaluation.statistics import decide, paired_difference
from training.experiments.tables import MARGIN, Summary, Tables, render, statistics

MEASURES = NDCG, MAP = "nDCG@10", "MAP@10"
SCORES, TABLE, PLOT = "scores.json", "table.md", "scores.png"
# Scores of each question, by recipe, seed and measure.
Scores = Mapping[str, Mapping[int, Mapping[str, Sequence[float]]]]


def write_report(
    out: Path, tables: Tables, titles: Mapping[str, str], scores: Scores, facts: Mapping[str, Any]
) -> None:
    """Writes `scores.json`, `table.md` and `scores.png` to the folder `out`.

    `tables` say which recipes are compared; `titles` name recipes in the plot. `facts` are data,
    hardware and libraries; `questions` among them is the number of questions.
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
    labels = [(_label(name, titles), name) for name in rows]
    _draw(labels, tables.share.recipe if tables.share else "", summary, out / PLOT)


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


def _label(row: str, titles: Mapping[str, str]) -> str:
    name, _, dimension = row.partition("@")
    title = titles.get(name, name)
    return f"{title}, {dimension} dimensions" if dimension else title


def _draw(rows: Sequence[tuple[str, str]], highlighted: str, summary: Summary, path: Path) -> None:
    figure = Figure(figsize=(11, 1 + 0.32 * len(rows)), layout="constrained")
    for axes, measure in zip(figure.subplots(1, 2, sharey=True), MEASURES, strict=True):
        # The first row is drawn at the top.
        for title, name in rows[::-1]:
            if found := statistics(summary, name, measure):
                mean, deviation, _ = found
                color = "#c26a4a" if name == highlighted else "#7aa6c2"
                axes.barh(title, mean, xerr=deviation or 0.0, color=color, ecolor="#333")
        axes.set_xlabel(f"{measure} in percent, ± deviation over seeds")
        axes.margins(y=0.01)
        axes.grid(axis="x", alpha=0.3)
    with atomic(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
