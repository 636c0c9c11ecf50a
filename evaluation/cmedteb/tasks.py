"""The tasks of CMedTEB and their data: local folders and files, or data sets on the Hub.

A file that cannot be read, or an invalid line, is a DataError with the path and the line.
"""

import hashlib
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from core.errors import CareError, DataError
from core.records import (
    duplicate_error,
    field_error,
    read_jsonl,
    read_small_text,
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
    """One task of the benchmark; tasks.toml lists the tasks and explains the fields."""

    name: str
    column: str
    kind: Literal["retrieval", "reranking", "sts"]
    measure: Literal["nDCG@10", "MAP@10", "MAP", "Pearson"]
    instruction: str
    hub: str | None = None
    revision: str = "main"

    @property
    def local(self) -> str:
        """The name of its folder or file in a local folder of data."""
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
        message = f"unknown task '{name}': the tasks are {', '.join(known)}"
        raise CareError(message, code="unknown_task", task=name)
    return known[name]


def read_instructions(path: Path) -> dict[str, str]:
    """Reads a TOML file with an instruction for some tasks, `NAME = "TEXT"`.

    CareError if a key is not the name of a task, or its value is not a text.
    """
    try:
        instructions = tomllib.loads(read_small_text(path))
    except (ValueError, RecursionError) as error:
        raise CareError.at(path, f"is not valid TOML: {error}", "not_toml") from error
    names = [known.name for known in TASKS]
    for name, text in instructions.items():
        if name not in names:
            reason = f"has an instruction for '{name}': the tasks are {', '.join(names)}"
            raise CareError.at(path, reason, "unknown_task", task=name)
        if not isinstance(text, str) or not text or "\n" in text:
            reason = f"the instruction for '{name}' is not a text of one line"
            raise CareError.at(path, reason, "bad_instruction", task=name)
    return instructions


@dataclass(frozen=True, slots=True)
class RankingData:
    """Data of a retrieval or reranking task; all texts are normalised."""

    corpus: dict[str, str]  # by id
    queries: dict[str, str]  # by id
    qrels: Qrels
    # For reranking: the ids of the documents to rank, by query id.
    candidates: dict[str, list[str]] | None = None


@dataclass(frozen=True, slots=True)
class PairData:
    """Data of an STS task: two texts and a similarity label for each pair."""

    first: list[str] = field(default_factory=list)
    second: list[str] = field(default_factory=list)
    label: list[float] = field(default_factory=list)


TaskData = RankingData | PairData


def find_tasks(
    source: str,
    split: str,
    repository: str | None = None,
    names: Sequence[str] = (),
    instructions: Mapping[str, str] | None = None,
) -> dict[Task, Callable[[], TaskData]]:
    """Returns the tasks that a source holds, each with a function that reads its data once.

    Args:
        source: A local folder, or "hub" for the Hugging Face Hub. A folder holds a task if it
            contains the task's `local` file or folder, or NAME/SPLIT.jsonl. A folder that
            contains a corpus.jsonl is the data of the retrieval task itself.
        split: Split of local data.
        repository: On the hub, the data sets OWNER/NAME-retrieval, -rerank and -sts, given as
            "OWNER/NAME". Without it only the tasks with a data set of their own are found.
        names: Names of the tasks to return, in this order; all that are found if empty.
        instructions: Instructions by the names of tasks, which replace those of tasks.toml.
    """
    found = _find(source, split, repository)
    wanted = [task(name) for name in names]
    for known in wanted:
        if known not in found:
            reason = f"does not hold the task '{known.name}': it holds "
            reason += ", ".join(other.name for other in found)
            raise CareError.at(source, reason, "missing_task", task=known.name)
    own = instructions or {}
    return {
        replace(known, instruction=own.get(known.name, known.instruction)): found[known]
        for known in wanted or found
    }


def _find(source: str, split: str, repository: str | None) -> dict[Task, Callable[[], TaskData]]:
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
        reason = f"contains no task: it needs {wanted}, or the files of a BEIR folder"
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
    """Reads JSONL with `query` and two lists of texts, `positives` (not empty) and `negatives`."""
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
        raise DataError.at(path, "has no queries", "no_queries")
    return data


def read_sts(path: Path) -> PairData:
    """Reads JSONL with `text1`, `text2` and `label`, a number; labels must not all be equal."""
    data = PairData()
    for number, record in read_jsonl(path):
        data.first.append(normalize_text(string(path, number, record, "text1")))
        data.second.append(normalize_text(string(path, number, record, "text2")))
        label = record.get("label")
        if (
            isinstance(label, bool)
            or not isinstance(label, int | float)
            or not math.isfinite(label)
        ):
            raise field_error(path, number, "label", "is missing or not a number")
        data.label.append(float(label))
    if len(set(data.label)) < 2:
        reason = "has the same label on every line: Pearson's r is not defined"
        raise DataError.at(path, reason, "equal_labels")
    return data


def _texts(path: Path, number: int, record: dict[str, Any], name: str) -> list[str]:
    texts = record.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise field_error(path, number, name, "is missing or not a list of strings")
    return [normalize_text(text) for text in texts]


def _read_hub(known: Task, repository: str) -> TaskData:
    """Reads the split test of a data set on the Hugging Face Hub, in mteb's layout."""
    read = _read_hub_sts if known.kind == "sts" else _read_hub_ranking
    try:
        return read(repository, known.revision)
    except Exception as error:  # the libraries raise nothing narrower
        message = f"download of {repository} from the Hugging Face Hub failed "
        message += f"({type(error).__name__}): check the network, or give a local folder of data"
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
