"""The tasks of CMedTEB and their data: local folders and files, or data sets of the hub."""

import hashlib
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from core.errors import CareError, DataError
from core.records import (
    duplicate_error,
    field_error,
    read_jsonl,
    record_error,
    record_id,
    string,
)
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


def _known_tasks() -> tuple[Task, ...]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    return tuple(Task(**row) for row in table["task"])


TASKS = _known_tasks()
# The five of the paper's table; its asymmetric comparison averages two of them.
PAPER_COLUMNS = tuple(known.name for known in TASKS[:5])
ASYMMETRIC_COLUMNS = ("retrieval", "rerank")


def task(name: str) -> Task:
    """Returns a task by its name.

    Raises:
        CareError: If there is none.
    """
    for known in TASKS:
        if known.name == name:
            return known
    names = ", ".join(known.name for known in TASKS)
    raise CareError(f"unknown task '{name}': there are {names}", code="unknown_task", task=name)


@dataclass(frozen=True, slots=True)
class RankingData:
    """Data of a retrieval or reranking task; all texts are under the text rules.

    Attributes:
        corpus: Document text by id.
        queries: Query text by id.
        qrels: Grades by document id, by query id.
        candidates: Of reranking, the ids of the documents to order, by query id.
    """

    corpus: dict[str, str]
    queries: dict[str, str]
    qrels: Qrels
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

    Args:
        source: A local folder, or "hub".
        split: Split of local retrieval data.
        repository: On the hub, "owner/name" of CMedTEB's own data: the tasks without a data set of
            their own are OWNER/NAME-retrieval, -rerank and -sts. They are left out without it.

    Raises:
        CareError: If there is no task.
    """
    if source == HUB:
        places = {known: known.hub or f"{repository}-{known.name}" for known in TASKS}
        return {
            known: cache(partial(_read_hub, known, place))
            for known, place in places.items()
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
        raise CareError(
            f"{root} holds no task: it may hold {wanted}, or be a BEIR folder",
            code="no_tasks",
            path=root,
        )
    return {known: cache(partial(_read_local, known, path, split)) for known, path in paths.items()}


def _read_local(known: Task, path: Path, split: str) -> TaskData:
    if known.kind == "retrieval":
        return read_retrieval(path, split)
    return read_sts(path) if known.kind == "sts" else read_reranking(path)


def read_retrieval(folder: Path, split: str) -> RankingData:
    """Reads a BEIR folder: corpus.jsonl, queries and qrels of a split.

    Only judged queries are kept. See `evaluation.beir` for the layout.

    Raises:
        DataError: If a file is missing, a line is wrong, nothing is judged, or a judged id does
            not exist.
    """
    paths = beir_paths(folder, split)
    corpus = document_texts(read_documents(paths.corpus))
    queries, qrels = read_queries(paths.queries), read_qrels(paths.qrels)
    check_judged(paths.qrels, qrels, queries, corpus)
    return RankingData(corpus, {id_: normalize_text(queries[id_]) for id_ in qrels}, qrels)


def read_reranking(path: Path) -> RankingData:
    """Reads JSONL with `query`, `positives` and `negatives`, all texts.

    Raises:
        DataError: If there is no line, or one is wrong, has no positive, or gives a text as both.
    """
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
            raise record_error(
                path, number, "has a positive that is also a negative", code="positive_is_negative"
            )
        id_ = record_id(path, number, {"_id": f"q{number}"} | record)
        if id_ in data.queries:
            raise duplicate_error(path, number, id_)
        data.corpus.update(positives | negatives)
        data.queries[id_] = query
        data.qrels[id_] = dict.fromkeys(positives, 1) | dict.fromkeys(negatives, 0)
        data.candidates[id_] = list(data.qrels[id_])
    if not data.queries:
        raise DataError(f"{path} holds no query", code="no_queries", path=path)
    return data


def read_sts(path: Path) -> PairData:
    """Reads JSONL with `text1`, `text2` and `label`.

    Raises:
        DataError: If a line is wrong, or all labels are equal.
    """
    data = PairData()
    for number, record in read_jsonl(path):
        data.first.append(normalize_text(string(path, number, record, "text1")))
        data.second.append(normalize_text(string(path, number, record, "text2")))
        label = record.get("label")
        if not isinstance(label, int | float) or not math.isfinite(label):
            raise field_error(path, number, "label", "is missing or not a number")
        data.label.append(float(label))
    if len(set(data.label)) < 2:
        raise DataError(
            f"{path}: all labels are equal, so that nothing correlates with them",
            code="equal_labels",
            path=path,
        )
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
        raise CareError(
            f"download of {repository} from the hub failed ({type(error).__name__}): "
            "give a local folder as DATA",
            code="download_failed",
            repository=repository,
        ) from error


def _read_hub_ranking(repository: str, revision: str) -> RankingData:
    from mteb.abstasks.retrieval_dataset_loaders import RetrievalDatasetLoader

    split = RetrievalDatasetLoader(repository, revision, split="test").load()
    candidates = split["top_ranked"]
    return RankingData(
        corpus={
            row["id"]: document_text(row.get("title") or "", row["text"]) for row in split["corpus"]
        },
        queries={row["id"]: normalize_text(row["text"]) for row in split["queries"]},
        qrels={query: dict(grades) for query, grades in split["relevant_docs"].items()},
        candidates={query: list(ids) for query, ids in candidates.items()} if candidates else None,
    )


def _read_hub_sts(repository: str, revision: str) -> PairData:
    from datasets import load_dataset

    rows = load_dataset(repository, split="test", revision=revision)
    return PairData(
        [normalize_text(text) for text in rows["sentence1"]],
        [normalize_text(text) for text in rows["sentence2"]],
        [float(score) for score in rows["score"]],
    )
