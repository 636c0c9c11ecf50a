"""The tasks of CMedTEB and their data: local folders and files, or data sets of the hub.

A file that cannot be read, or a line that is wrong, is a DataError that names both.
"""

import hashlib
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from core.errors import CareError, DataError
from core.records import duplicate_error, field_error, read_jsonl, record_error, record_id, string
from core.text import document_text, normalize_text
from evaluation.beir import (
    Qrels,
    beir_paths,
    check_judged,
    document_texts,
    read_documents,
    read_qrels,
    read_queries,
)

HUB = "hub"


@dataclass(frozen=True, slots=True)
class Task:
    """One task of the benchmark; tasks.toml lists them and says what the fields are."""

    name: str
    column: str
    kind: Literal["retrieval", "reranking", "sts"]
    measure: Literal["nDCG@10", "MAP@10", "MAP", "Pearson"]
    instruction: str
    hub: str | None = None
    revision: str = "main"

    @property
    def local(self) -> str:
        """Its folder or file in a local folder of data."""
        return self.name if self.kind == "retrieval" else f"{self.name}.jsonl"


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
TASKS = tuple(Task(**row) for row in _TABLE["task"])
# The five of the paper's table; its asymmetric comparison averages two of them.
PAPER_COLUMNS = tuple(known.name for known in TASKS[:5])
ASYMMETRIC_COLUMNS = ("retrieval", "rerank")


def task(name: str) -> Task:
    """Returns a task by its name; an unknown one is a CareError."""
    known = {task.name: task for task in TASKS}
    if name not in known:
        message = f"unknown task '{name}': there are {', '.join(known)}"
        raise CareError(message, code="unknown_task", task=name)
    return known[name]


@dataclass(frozen=True, slots=True)
class RankingData:
    """Data of a retrieval or reranking task; all texts are under the text rules."""

    corpus: dict[str, str]  # by id
    queries: dict[str, str]  # by id
    qrels: Qrels
    # Of reranking, the ids of the documents to order, by query id.
    candidates: dict[str, list[str]] | None = None


@dataclass(frozen=True, slots=True)
class PairData:
    """Data of an STS task: two texts and how alike they are, for each pair."""

    first: list[str] = field(default_factory=list)
    second: list[str] = field(default_factory=list)
    label: list[float] = field(default_factory=list)


TaskData = RankingData | PairData


def find_tasks(
    source: str, split: str, repository: str | None = None
) -> dict[Task, Callable[[], TaskData]]:
    """Returns the tasks that a source holds, and what reads their data, once each.

    A folder holds a task if the task's `local` is in it, or NAME/SPLIT.jsonl. A folder with a
    corpus.jsonl of its own is the retrieval task, beside what else is in it.

    The source "hub" has the tasks with a data set of their own and, with a repository
    "owner/name", the others as OWNER/NAME-retrieval, -rerank and -sts.
    """
    if source == HUB:
        return {
            known: cache(partial(_read_hub, known, known.hub or f"{repository}-{known.name}"))
            for known in TASKS
            if known.hub or repository
        }
    root = Path(source)
    paths = {
        known: path
        for known in TASKS
        for path in (root / known.local, root / known.name / f"{split}.jsonl")
        if path.exists()
    }
    if (root / "corpus.jsonl").is_file():
        paths[task("retrieval")] = root
    if not paths:
        wanted = ", ".join(known.local for known in TASKS)
        reason = f"holds no task: it may hold {wanted}, or be a BEIR folder"
        raise CareError.at(root, reason, "no_tasks")
    readers: dict[str, Callable[[Path], TaskData]] = {
        "retrieval": partial(read_retrieval, split=split),
        "reranking": read_reranking,
        "sts": read_sts,
    }
    return {known: cache(partial(readers[known.kind], path)) for known, path in paths.items()}


def read_retrieval(folder: Path, split: str) -> RankingData:
    """Reads the judged queries and the corpus of a folder; see `evaluation.beir` for its layout."""
    paths = beir_paths(folder, split)
    corpus = document_texts(read_documents(paths.corpus))
    queries, qrels = read_queries(paths.queries), read_qrels(paths.qrels)
    check_judged(paths.qrels, qrels, queries, corpus)
    return RankingData(corpus, {id_: normalize_text(queries[id_]) for id_ in qrels}, qrels)


def read_reranking(path: Path) -> RankingData:
    """Reads JSONL with `query`, `positives`, at least one, and `negatives`, all texts."""
    data = RankingData({}, {}, {}, {})
    assert data.candidates is not None
    for number, record in read_jsonl(path):
        query = normalize_text(string(path, number, record, "query"))
        positives, negatives = (
            {hashlib.sha256(text.encode()).hexdigest()[:16]: text for text in texts}
            for texts in (_texts(path, number, record, side) for side in ("positives", "negatives"))
        )
        if not positives:
            raise field_error(path, number, "positives", "is empty", code="no_positives")
        if positives.keys() & negatives.keys():
            reason = "has a positive that is also a negative"
            raise record_error(path, number, reason, code="positive_is_negative")
        id_ = record_id(path, number, {"_id": f"q{number}"} | record)
        if id_ in data.queries:
            raise duplicate_error(path, number, id_)
        data.corpus.update(positives | negatives)
        data.queries[id_] = query
        data.qrels[id_] = dict.fromkeys(positives, 1) | dict.fromkeys(negatives, 0)
        data.candidates[id_] = list(data.qrels[id_])
    if not data.queries:
        raise DataError.at(path, "holds no query", "no_queries")
    return data


def read_sts(path: Path) -> PairData:
    """Reads JSONL with `text1`, `text2` and `label`, a number; not all labels may be equal."""
    data = PairData()
    for number, record in read_jsonl(path):
        data.first.append(normalize_text(string(path, number, record, "text1")))
        data.second.append(normalize_text(string(path, number, record, "text2")))
        label = record.get("label")
        if not isinstance(label, int | float) or not math.isfinite(label):
            raise field_error(path, number, "label", "is missing or not a number")
        data.label.append(float(label))
    if len(set(data.label)) < 2:
        reason = "has labels that are all equal: nothing correlates with them"
        raise DataError.at(path, reason, "equal_labels")
    return data


def _texts(path: Path, number: int, record: dict[str, Any], name: str) -> list[str]:
    texts = record.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise field_error(path, number, name, "is missing or not a list of strings")
    return [normalize_text(text) for text in texts]


def _read_hub(known: Task, repository: str) -> TaskData:
    """Reads a data set of the hub, in mteb's layout, split test."""
    read = _read_hub_sts if known.kind == "sts" else _read_hub_ranking
    try:
        return read(repository, known.revision)
    except Exception as error:  # the libraries raise nothing narrower
        message = f"download of {repository} from the hub failed ({type(error).__name__}): "
        message += "give a local folder as DATA"
        raise CareError(message, code="download_failed", repository=repository) from error


def _read_hub_ranking(repository: str, revision: str) -> RankingData:
    from mteb.abstasks.retrieval_dataset_loaders import RetrievalDatasetLoader

    split = RetrievalDatasetLoader(repository, revision, split="test").load()
    candidates = split["top_ranked"]
    return RankingData(
        {r["id"]: document_text(r.get("title") or "", r["text"]) for r in split["corpus"]},
        {row["id"]: normalize_text(row["text"]) for row in split["queries"]},
        {query: dict(grades) for query, grades in split["relevant_docs"].items()},
        {query: list(ids) for query, ids in candidates.items()} if candidates else None,
    )


def _read_hub_sts(repository: str, revision: str) -> PairData:
    from datasets import load_dataset

    rows = load_dataset(repository, split="test", revision=revision)
    return PairData(
        [normalize_text(text) for text in rows["sentence1"]],
        [normalize_text(text) for text in rows["sentence2"]],
        [float(score) for score in rows["score"]],
    )
