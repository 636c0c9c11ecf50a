"""Scores of systems on tasks: files, the table of the benchmark, paired differences, the report."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import ValidationError

from core.encoders import FrozenModel
from core.errors import CareError
from core.files import write_text
from core.records import read_text
from evaluation.beir import Run
from evaluation.cmedteb.tasks import (
    ASYMMETRIC_COLUMNS,
    PAPER_COLUMNS,
    TASKS,
    RankingData,
    Task,
    TaskData,
)
from evaluation.metrics import ranked, read_run
from evaluation.plots import score_bars
from evaluation.statistics import (
    Difference,
    Interval,
    paired_difference,
    pearson_difference,
    rank_correlation,
)

_TEMPLATES = Environment(
    loader=PackageLoader("evaluation.cmedteb", "."),
    autoescape=lambda name: name == "report.html.j2",
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)


def render(template: str, **facts: object) -> str:
    """Renders a template of this folder."""
    return _TEMPLATES.get_template(template).render(facts)


class TaskScore(FrozenModel):
    """A system's score on a task."""

    system: str
    task: str
    measure: str
    value: float  # 0 to 1; Pearson: -1 to 1
    low: float  # of its 95 % bootstrap interval
    high: float
    items: dict[str, float]  # the score of each query; of STS, the similarity of each pair
    labels: list[float] | None = None  # of STS, of each pair
    data_sha256: str  # of the texts and judgements
    libraries: dict[str, str]  # versions, by distribution

    @property
    def interval(self) -> Interval:
        """The score with its interval."""
        return Interval(self.value, self.low, self.high)


Scores = Mapping[str, Mapping[str, TaskScore]]


def run_path(out: Path, system: str, task: str) -> Path:
    """Returns the path of the TREC run file of a score."""
    return out / system / f"{task}.trec"


def write_score(out: Path, score: TaskScore) -> None:
    """Writes a score as SYSTEM/TASK.json."""
    path = out / score.system / f"{score.task}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, score.model_dump_json(indent=1) + "\n")


def read_score(path: Path) -> TaskScore:
    """Reads a score; a file with other content is a CareError."""
    try:
        return TaskScore.model_validate_json(read_text(path))
    except ValidationError as error:
        raise CareError.at(path, "is not a score of this benchmark", "not_score") from error


def read_scores(out: Path) -> Scores:
    """Returns all scores of a folder, by task, by system.

    Systems are sorted by the number of their tasks, then by their mean over tasks, descending.
    """
    scores: dict[str, dict[str, TaskScore]] = {}
    for path in sorted(out.glob("*/*.json")):
        score = read_score(path)
        scores.setdefault(score.system, {})[score.task] = score
    if not scores:
        raise CareError.at(out, "has no scores: run care cmedteb run first", "no_scores")
    for known in TASKS:
        checksums = {s[known.name].data_sha256 for s in scores.values() if known.name in s}
        if len(checksums) > 1:
            raise _different_data(known.name)
    order = sorted(scores.items(), key=lambda item: (-len(item[1]), -_mean(item[1], item[1])))
    return dict(order)


def markdown_table(scores: Scores) -> str:
    """Returns the table of all systems in the paper's columns, with the tasks' rank correlation."""
    columns = [t for t in TASKS if any(t.name in tasks for tasks in scores.values())]
    rows = {}
    for system, tasks in scores.items():
        cells = [percent(tasks[t.name].interval) if t.name in tasks else "–" for t in columns]
        averages = [
            f"{100 * _mean(tasks, names):.2f}" if tasks.keys() >= set(names) else "–"
            for names in (PAPER_COLUMNS, ASYMMETRIC_COLUMNS)
        ]
        rows[system] = cells + averages
    return render("table.md.j2", columns=columns, rows=rows, agreement=_agreement(scores))


def compare_systems(out: Path, first: str, second: str) -> str:
    """Returns the table of `compare` for two systems with scores in the folder `out`."""
    scores = read_scores(out)
    for name in (first, second):
        if name not in scores:
            reason = f"has no scores of '{name}': it has scores of {', '.join(scores)}"
            raise CareError.at(out, reason, "unknown_system", system=name)
    return compare(scores[first], scores[second])


def compare(first: Mapping[str, TaskScore], second: Mapping[str, TaskScore]) -> str:
    """Returns a Markdown table of the differences of two systems, first minus second."""
    shared = [t for t in TASKS if t.name in first and t.name in second]
    if not shared:
        raise CareError(
            "the two systems have no task in common: score both on the same task",
            code="no_shared_task",
        )
    differences = [(t.column, difference(first[t.name], second[t.name])) for t in shared]
    return render("compare.md.j2", differences=differences)


def difference(first: TaskScore, second: TaskScore) -> Difference:
    """Returns the paired difference of two scores on the same task and the same items."""
    if first.data_sha256 != second.data_sha256 or first.items.keys() != second.items.keys():
        raise _different_data(first.task)
    a = list(first.items.values())
    b = [second.items[item] for item in first.items]
    if first.labels is not None:
        return pearson_difference(first.labels, a, b)
    return paired_difference(a, b)


def percent(score: Interval) -> str:
    """Returns a score and its interval, × 100."""
    return f"{100 * score.value:.2f} ({100 * score.low:.1f}–{100 * score.high:.1f})"


def _mean(tasks: Mapping[str, TaskScore], names: Collection[str]) -> float:
    return sum(tasks[name].value for name in names) / len(names)


def _agreement(scores: Scores) -> dict[str, float] | None:
    """Returns the rank correlation of the systems' averages over CMedQA and over the new tasks."""
    complete = [tasks for tasks in scores.values() if tasks.keys() >= set(PAPER_COLUMNS)]
    if len(complete) < 3:
        return None
    old, new = (
        [_mean(tasks, names) for tasks in complete]
        for names in (PAPER_COLUMNS[:2], PAPER_COLUMNS[2:])
    )
    rho, p = rank_correlation(old, new)
    return {"systems": len(complete), "rho": rho, "p": p}


def _different_data(task: str) -> CareError:
    message = f"systems were scored on different data of '{task}': score them again on the same"
    return CareError(message, code="different_data", task=task)


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
