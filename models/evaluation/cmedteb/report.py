"""The report: one HTML file with tables, plots and what went wrong, query by query."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from core.errors import CareError
from models.evaluation.beir import Run
from models.evaluation.cmedteb.data import RankingData
from models.evaluation.cmedteb.results import TaskScore, read_scores, run_path
from models.evaluation.cmedteb.table import NOTES, difference
from models.evaluation.cmedteb.tasks import TASKS, RankingTask, Task
from models.evaluation.plots import score_bars
from models.evaluation.statistics import Interval
from models.evaluation.trec import read_run

_DEPTH = 10


@dataclass(frozen=True, slots=True)
class Passage:
    """A document in the report; rank counts from 1, None if it was not found."""

    id: str
    rank: int | None
    grade: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Failure:
    """A query that scored low: what was retrieved beside what was judged relevant."""

    query_id: str
    query: str
    score: float
    retrieved: list[Passage]
    relevant: list[Passage]


def html_report(out: Path, tasks: Mapping[Task, Any], *, failures: int) -> str:
    """Returns the report of all scores of a folder.

    Args:
        out: Folder of results.
        tasks: The data that they were scored on.
        failures: Queries shown for each system and ranking task, the worst first.

    Raises:
        CareError: If there are no scores, or run files do not belong to the data.
    """
    scores = read_scores(out)
    sections = []
    for known in TASKS:
        of_task = {name: s[known.name] for name, s in scores.items() if known.name in s}
        if not of_task:
            continue
        bars = {n: Interval(s.value, s.low, s.high) for n, s in of_task.items()}
        shown = {}
        task = tasks.get(known)
        if isinstance(task, RankingTask):
            shown = {
                name: worst_queries(
                    score, read_run(run_path(out, name, known.name)), task.ranking, failures
                )
                for name, score in of_task.items()
            }
        sections.append(
            {
                "task": known,
                "scores": of_task,
                "plot": score_bars(bars, f"{known.column}, {known.measure} × 100"),
                "differences": _differences(of_task),
                "failures": shown,
            }
        )
    loader = PackageLoader("models.evaluation.cmedteb", ".")
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return template.get_template("report.html.j2").render(sections=sections, notes=NOTES)


def worst_queries(score: TaskScore, run: Run, data: RankingData, count: int) -> list[Failure]:
    """Returns the queries that score below 1, the lowest first, at most `count`.

    Raises:
        CareError: If a query or document of the run is not in the data.
    """
    worst = sorted((value, query) for query, value in score.items.items() if value < 1)
    try:
        return [_failure(query, value, run.get(query, {}), data) for value, query in worst[:count]]
    except KeyError as error:
        raise CareError(
            f"the run of '{score.system}' on '{score.task}' names {error}, which the data lack"
        ) from error


def _failure(query: str, value: float, scores: dict[str, float], data: RankingData) -> Failure:
    ranked = sorted(scores, key=lambda id_: (scores[id_], id_), reverse=True)
    ranks = {id_: rank for rank, id_ in enumerate(ranked, start=1)}
    grades = data.qrels[query]
    return Failure(
        query,
        data.queries[query],
        value,
        [Passage(i, ranks[i], grades.get(i), data.corpus[i]) for i in ranked[:_DEPTH]],
        [Passage(i, ranks.get(i), g, data.corpus[i]) for i, g in grades.items() if g > 0],
    )


def _differences(scores: Mapping[str, TaskScore]) -> list[tuple[str, str, Any]]:
    names = list(scores)
    return [
        (a, b, difference(scores[a], scores[b]))
        for at, a in enumerate(names)
        for b in names[at + 1 :]
    ]
