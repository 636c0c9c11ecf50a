"""Systems on tasks: mteb encodes and searches, ir-measures scores."""

import hashlib
import json
import logging
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import mteb

from core.errors import CareError
from models.evaluation.beir import Qrels, Run
from models.evaluation.cmedteb.results import TaskScore, run_path, write_score
from models.evaluation.cmedteb.systems import Bm25Model, PairModel
from models.evaluation.cmedteb.tasks import BenchmarkTask, RankingTask, StsTask, Task
from models.evaluation.scores import MAP, MAP_10, NDCG_10, score_queries
from models.evaluation.statistics import Interval, mean_interval, pearson_interval
from models.evaluation.trec import write_run

MEASURES = {"nDCG@10": NDCG_10, "MAP@10": MAP_10, "MAP": MAP}
_LIBRARIES = ("ir-measures", "mteb", "numpy", "onnxruntime", "scipy", "torch", "transformers")


def evaluate_task(
    system: PairModel | Bm25Model, known: Task, task: BenchmarkTask, out: Path
) -> TaskScore | None:
    """Runs a system on a task; writes the run file and the score.

    Args:
        system: The system.
        known: What the task is.
        task: Its data.
        out: Folder of results; those of the system lie in a folder of its name.

    Returns:
        The score, or None if the system has no answer to such a task (BM25 to STS).

    Raises:
        CareError: If the data are wrong, or the system finds all pairs of STS equally alike.
    """
    if isinstance(task, StsTask) and isinstance(system, Bm25Model):
        return None
    task.load_data()
    name = system.name
    predictions = _predict(system, task)
    if isinstance(task, StsTask):
        score = _score_sts(name, known, task, predictions["cosine_scores"])
    else:
        score = _score_ranking(name, known, task, predictions)
    if isinstance(task, RankingTask):
        write_run(run_path(out, name, known.name), predictions, name)
    write_score(out, score)
    return score


def _predict(system: PairModel | Bm25Model, task: BenchmarkTask) -> Any:
    logging.getLogger("mteb").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        mteb.evaluate(
            cast("Any", system),
            task,
            co2_tracker=False,
            cache=None,
            encode_kwargs={"batch_size": 256, "show_progress_bar": False},
            prediction_folder=folder,
            show_progress_bar=False,
        )
        file = Path(folder) / task.prediction_file_name
        return json.loads(file.read_text("utf-8"))["default"]["test"]


def _score_ranking(name: str, known: Task, task: RankingTask, run: Run) -> TaskScore:
    ranking = task.ranking
    qrels = _judged(ranking.qrels, known)
    items = score_queries(MEASURES[known.measure], qrels, run)
    data = [ranking.corpus, ranking.queries, ranking.qrels, ranking.candidates]
    return _score(name, known, mean_interval(list(items.values())), items, data)


def _judged(qrels: Qrels, known: Task) -> Qrels:
    """Leaves out queries without a relevant document, as mteb does."""
    judged = {query: grades for query, grades in qrels.items() if max(grades.values()) > 0}
    if not judged:
        raise CareError(f"no query of '{known.name}' has a relevant document")
    return judged


def _score_sts(name: str, known: Task, task: StsTask, similarities: list[float]) -> TaskScore:
    pairs = task.pairs
    if len(set(similarities)) < 2:
        raise CareError(f"'{name}' finds all pairs of '{known.name}' equally alike")
    interval = pearson_interval(pairs.label, similarities)
    items = {str(number): value for number, value in enumerate(similarities)}
    data = [pairs.first, pairs.second, pairs.label]
    return _score(name, known, interval, items, data, labels=pairs.label)


def _score(
    name: str,
    known: Task,
    interval: Interval,
    items: dict[str, float],
    data: list[Any],
    labels: list[float] | None = None,
) -> TaskScore:
    return TaskScore(
        system=name,
        task=known.name,
        measure=known.measure,
        value=interval.value,
        low=interval.low,
        high=interval.high,
        items=items,
        labels=labels,
        data_sha256=_checksum(data),
        libraries={library: version(library) for library in _LIBRARIES},
    )


def _checksum(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
