"""Report of ablations and baselines: table, tests of the paper's orderings, and plot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from core.files import atomic, write_text
from evaluation.statistics import Difference, paired_difference

MEASURES = NDCG, MAP = "nDCG@10", "MAP@10"
# Scores of each question, by recipe, seed and metric.
Scores = Mapping[str, Mapping[int, Mapping[str, Sequence[float]]]]

CARE, LARGE, SMALL = "care", "symmetric-large", "symmetric-small"
BASELINES = (SMALL, LARGE, "kale", "wang-lyu", "scalingnote", "distillation", "hotelmatch")
ABLATIONS = (
    "without-query-initialisation",
    "without-retromae",
    "without-unsupervised",
    "without-document-initialisation",
    "without-alignment",
    "without-mse",
    "without-contrastive",
    "fine-tuning-data",
    "without-joint-fine-tuning",
)
# Rows of the table.
ORDER = (CARE, *BASELINES, *ABLATIONS)
# The paper's claims: the first recipe of each pair scores above the second. CARE above
# `symmetric-large` is not one of them: a large query encoder is the upper reference.
ORDERINGS = (*((CARE, name) for name in ORDER[1:] if name != LARGE), (LARGE, SMALL))


def write_report(
    out: Path, titles: Mapping[str, str], scores: Scores, facts: Mapping[str, Any]
) -> None:
    """Writes `table.md`, `scores.json` and `scores.png`.

    `titles` are the titles of rows by recipe; `facts` describe data, hardware and libraries.
    """
    rows = [name for name in ORDER if name in scores]
    rows += [name for name in scores if name not in ORDER]
    compared = compare(scores)
    write_text(out / "table.md", describe(rows, titles, scores, compared, facts))
    means = {
        name: {
            measure: {str(s): round(fmean(v[measure]), 5) for s, v in scores[name].items()}
            for measure in MEASURES
        }
        for name in rows
    }
    orderings = [
        {"above": above, "below": below, "measure": measure, "verdict": verdict(difference)}
        | {"difference": difference.value, "low": difference.low, "high": difference.high}
        for (above, below), found in compared.items()
        for measure, difference in found.items()
    ]
    summary = {"facts": dict(facts), "scores": means, "orderings": orderings}
    write_text(out / "scores.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")
    _draw({titles.get(name, name): scores[name] for name in rows}, out / "scores.png")


def compare(scores: Scores) -> dict[tuple[str, str], dict[str, Difference]]:
    """Compares the two recipes of each ordering over the seeds that both have.

    The value of a question is its mean over seeds; confidence intervals are bootstrapped over
    questions.
    """
    compared: dict[tuple[str, str], dict[str, Difference]] = {}
    for pair in ORDERINGS:
        first, second = (scores.get(name, {}) for name in pair)
        if seeds := first.keys() & second.keys():
            compared[pair] = {}
            for measure in MEASURES:
                means = (
                    np.mean([found[seed][measure] for seed in seeds], axis=0).tolist()
                    for found in (first, second)
                )
                compared[pair][measure] = paired_difference(*means)
    return compared


def verdict(difference: Difference) -> str:
    """Returns whether an ordering holds, does not hold or is undecided, by its interval."""
    if difference.low > 0:
        return "holds"
    return "does not hold" if difference.high < 0 else "is undecided"


def describe(
    rows: Sequence[str],
    titles: Mapping[str, str],
    scores: Scores,
    compared: Mapping[tuple[str, str], Mapping[str, Difference]],
    facts: Mapping[str, Any],
) -> str:
    """Returns the table and the results of the orderings as Markdown; scores are in percent."""
    lines = ["| | seeds | Retrieval nDCG@10 | Rerank MAP@10 |", "|---|---|---|---|"]
    for name in rows:
        cells = [titles.get(name, name), str(len(scores[name]))]
        for mean, deviation in (_statistics(scores[name], measure) for measure in MEASURES):
            cells.append(f"{mean:.1f}" + (f" ± {deviation:.1f}" if len(scores[name]) > 1 else ""))
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Mean ± standard deviation over seeds, in percent; {facts['questions']} questions, "
        f"{facts['documents']} documents to search, {facts['candidates']} to rerank.",
        "",
    ]
    for (above, below), found in compared.items():
        first, second = (titles.get(name, name) for name in (above, below))
        verdicts = ", ".join(
            f"{verdict(d)} in {measure} ({100 * d.value:+.1f}, "
            f"95 % interval {100 * d.low:+.1f} to {100 * d.high:+.1f})"
            for measure, d in found.items()
        )
        seeds = len(scores[above].keys() & scores[below].keys())
        lines.append(f"- {first} above {second}: {verdicts}; seeds: {seeds}.")
    if CARE in scores and LARGE in scores:
        care, large = (_statistics(scores[name], NDCG)[0] for name in (CARE, LARGE))
        reached = 100 * care / max(large, 1e-7)
        lines.append(
            f"- CARE reaches {reached:.0f} % of the nDCG@10 of the large encoder on both sides."
        )
    made_with = ", ".join(f"{name} {number}" for name, number in facts["libraries"].items())
    lines += [
        "",
        f"{facts['gpu'] or facts['processor']}, {facts['threads']} thread(s); "
        f"{facts['stages']} stages, {facts['stage_minutes']} minutes; "
        f"Python {facts['python']}, {made_with}.",
        "",
    ]
    return "\n".join(lines)


def _statistics(
    seeds: Mapping[int, Mapping[str, Sequence[float]]], measure: str
) -> tuple[float, float]:
    """Returns mean and standard deviation over seeds, in percent."""
    means = [100 * fmean(values[measure]) for values in seeds.values()]
    return fmean(means), stdev(means) if len(means) > 1 else 0.0


def _draw(scores: Scores, path: Path) -> None:
    figure = Figure(figsize=(11, 1 + 0.32 * len(scores)), layout="constrained")
    labels = list(scores)[::-1]
    panels = figure.subplots(1, 2, sharey=True)
    for axes, measure in zip(panels, MEASURES, strict=True):
        found = [_statistics(scores[label], measure) for label in labels]
        means, errors = zip(*found, strict=True)
        # Highlights the first row, CARE; labels are in reverse order.
        colors = ["#7aa6c2"] * (len(labels) - 1) + ["#c26a4a"]
        axes.barh(labels, means, xerr=errors, color=colors, ecolor="#333")
        axes.set_xlabel(f"{measure}, mean ± deviation over seeds")
        axes.grid(axis="x", alpha=0.3)
    with atomic(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
