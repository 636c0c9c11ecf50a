"""The benchmark's table, in the paper's columns, as Markdown."""

from collections.abc import Mapping, Sequence

from core.errors import CareError
from models.evaluation.cmedteb.results import TaskScore
from models.evaluation.cmedteb.tasks import ASYMMETRIC_COLUMNS, PAPER_COLUMNS, TASKS, task
from models.evaluation.statistics import (
    Difference,
    Interval,
    paired_difference,
    pearson_difference,
    rank_correlation,
)

Scores = Mapping[str, Mapping[str, TaskScore]]

NOTES = """\
Scores × 100 with 95 % bootstrap intervals over queries (10,000 resamples). Avg is over the
five tasks of the paper and stands only where all five were scored; Asym. Avg is over Retrieval
and Rerank.
CMedQA v1 and v2: MAP over all candidates. Rerank: MAP@10 as trec_eval's map_cut_10 and mteb's
map_at_10, which divide by all relevant passages of a query, not by ten at most.
Retrieval: nDCG@10. STS: Pearson's r of the cosine similarity."""


def markdown_table(scores: Scores) -> str:
    """Returns the table of all systems, and how far old and new tasks agree."""
    columns = [t for t in TASKS if any(t.name in tasks for tasks in scores.values())]
    header = ["system", *(f"{t.column} ({t.measure})" for t in columns), "Avg", "Asym. Avg"]
    rows = [header, ["---"] + ["---:"] * (len(header) - 1)]
    for system, tasks in scores.items():
        cells = [percent(tasks[t.name]) if t.name in tasks else "–" for t in columns]
        averages = [_average(tasks, PAPER_COLUMNS), _average(tasks, ASYMMETRIC_COLUMNS)]
        rows.append([system, *cells, *averages])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + f"\n\n{NOTES}\n" + _agreement(scores)


def compare(first: Mapping[str, TaskScore], second: Mapping[str, TaskScore]) -> str:
    """Returns a Markdown table of the differences of two systems, first less second.

    Raises:
        CareError: If they share no task.
    """
    shared = [t.name for t in TASKS if t.name in first and t.name in second]
    if not shared:
        raise CareError("the two systems share no task")
    lines = ["| task | difference × 100 | 95 % interval | p |", "|---|---:|---|---:|"]
    for name in shared:
        d = difference(first[name], second[name])
        lines.append(
            f"| {task(name).column} | {100 * d.value:+.2f} "
            f"| {100 * d.low:+.2f} to {100 * d.high:+.2f} | {d.p:.4f} |"
        )
    return "\n".join(lines) + "\n"


def difference(first: TaskScore, second: TaskScore) -> Difference:
    """Returns the paired difference of two scores on the same task.

    Raises:
        CareError: If they were scored on different items.
    """
    if first.data_sha256 != second.data_sha256 or first.items.keys() != second.items.keys():
        raise CareError(f"'{first.task}' was scored on different data for the two systems")
    a = list(first.items.values())
    b = [second.items[item] for item in first.items]
    if first.labels is not None:
        return pearson_difference(first.labels, a, b)
    return paired_difference(a, b)


def percent(score: TaskScore | Interval) -> str:
    """Returns a score and its interval, × 100."""
    return f"{100 * score.value:.2f} ({100 * score.low:.1f}–{100 * score.high:.1f})"


def _average(tasks: Mapping[str, TaskScore], names: Sequence[str]) -> str:
    if not all(name in tasks for name in names):
        return "–"
    return f"{100 * sum(tasks[name].value for name in names) / len(names):.2f}"


def _agreement(scores: Scores) -> str:
    """How far CMedQA and the new tasks order the systems alike."""
    whole = [tasks for tasks in scores.values() if all(name in tasks for name in PAPER_COLUMNS)]
    if len(whole) < 3:
        return ""
    old, new = (
        [sum(tasks[name].value for name in names) / len(names) for tasks in whole]
        for names in (PAPER_COLUMNS[:2], PAPER_COLUMNS[2:])
    )
    rho, p = rank_correlation(old, new)
    return (
        f"\nSpearman's coefficient of the averages of CMedQA and of the new tasks over "
        f"{len(whole)} systems: {rho:.3f} (p = {p:.3f}).\n"
    )
