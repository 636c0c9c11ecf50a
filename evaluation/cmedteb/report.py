"""The HTML report: tables, plots and the queries with low scores, in one file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from core.errors import CareError
from core.files import write_text
from evaluation.beir import Run
from evaluation.cmedteb.results import TaskScore, difference, read_scores, render, run_path
from evaluation.cmedteb.tasks import TASKS, RankingData, Task, TaskData
from evaluation.metrics import ranked
from evaluation.plots import score_bars
from evaluation.trec import read_run

REPORT = "report.html"
# Queries with a lower score are shown: their first relevant document is not in the top 2.
LOW = 0.5
_DEPTH = 10


@dataclass(frozen=True, slots=True)
class Passage:
    """A document in the report; rank counts from 1, None if it was not retrieved."""

    id: str
    rank: int | None
    grade: int | None
    text: str


@dataclass(frozen=True, slots=True)
class LowQuery:
    """A query with a low score, its first hits and its relevant documents."""

    query_id: str
    query: str
    score: float
    retrieved: list[Passage]
    relevant: list[Passage]


def write_report(out: Path, tasks: Mapping[Task, Callable[[], TaskData]], *, failures: int) -> Path:
    """Writes `html_report` to report.html in the folder of results and returns its path."""
    path = out / REPORT
    write_text(path, html_report(out, tasks, failures=failures))
    return path


def html_report(out: Path, tasks: Mapping[Task, Callable[[], TaskData]], *, failures: int) -> str:
    """Returns the report of all scores of the folder `out`, the best systems of each task first.

    `tasks` are those of `find_tasks`. At most `failures` queries are shown for each system and
    ranking task, worst first.
    """
    every = [score for scores in read_scores(out).values() for score in scores.values()]
    every.sort(key=lambda score: -score.value)
    sections = []
    for known in TASKS:
        scores = {score.system: score for score in every if score.task == known.name}
        if not scores:
            continue
        bars = {name: score.interval for name, score in scores.items()}
        data = tasks[known]() if known in tasks else None
        low = {}
        if isinstance(data, RankingData):
            for name, score in scores.items():
                run = read_run(run_path(out, name, known.name))
                low[name] = low_queries(score, run, data, failures)
        sections.append(
            {
                "task": known,
                "scores": scores,
                "plot": score_bars(bars, f"{known.column}, {known.measure} × 100"),
                "differences": [
                    (a, b, difference(scores[a], scores[b])) for a, b in combinations(scores, 2)
                ],
                "low": low,
            }
        )
    return render("report.html.j2", sections=sections, low=LOW)


def low_queries(score: TaskScore, run: Run, data: RankingData, count: int) -> list[LowQuery]:
    """Returns at most `count` queries with a score below `LOW`, the lowest first."""
    low = sorted((value, query) for query, value in score.items.items() if value < LOW)
    try:
        return [_low_query(query, value, run.get(query, {}), data) for value, query in low[:count]]
    except KeyError as error:
        message = (
            f"the run of '{score.system}' on '{score.task}' contains {error}, which is not in the "
            "data: score the system again on this data"
        )
        fields = {"system": score.system, "task": score.task, "id": error.args[0]}
        raise CareError(message, code="run_of_other_data", **fields) from error


def _low_query(query: str, value: float, scores: dict[str, float], data: RankingData) -> LowQuery:
    ranks = {id_: rank for rank, (id_, _) in enumerate(ranked(scores), start=1)}
    grades = data.qrels[query]
    return LowQuery(
        query,
        data.queries[query],
        value,
        [Passage(i, ranks[i], grades.get(i), data.corpus[i]) for i in list(ranks)[:_DEPTH]],
        [Passage(i, ranks.get(i), g, data.corpus[i]) for i, g in grades.items() if g > 0],
    )
