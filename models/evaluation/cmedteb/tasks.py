"""The tasks of CMedTEB, as tasks of mteb."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata

from core.errors import CareError
from models.evaluation.cmedteb import data
from models.evaluation.cmedteb.data import PairData, RankingData

if TYPE_CHECKING:
    from mteb.abstasks.retrieval_dataset_loaders import RetrievalSplitData

Kind = Literal["retrieval", "reranking", "sts"]

HUB = "hub"


@dataclass(frozen=True, slots=True)
class Task:
    """One task of the benchmark.

    Attributes:
        name: Its name in files.
        column: Its column in tables.
        kind: What is asked for.
        measure: What its score is.
        instruction: What encoders that follow instructions are told about a query
            (in the manner of the paper's Table 8).
        local: Its file or folder in a local folder of data.
        hub: Its data set on the hub and the revision, where it has one of its own.
    """

    name: str
    column: str
    kind: Kind
    measure: str
    instruction: str
    local: str
    hub: tuple[str, str] | None = None


_ANSWERS = "Given a Chinese community medical question, retrieve replies that best answer it"

TASKS = (
    Task(
        "cmedqa-v1",
        "CMedQA v1",
        "reranking",
        "MAP",
        _ANSWERS,
        "cmedqa-v1.jsonl",
        ("mteb/CMedQAv1-reranking", "f77f0345c9b6ac0a2447a3a71483d5b27393cb35"),
    ),
    Task(
        "cmedqa-v2",
        "CMedQA v2",
        "reranking",
        "MAP",
        _ANSWERS,
        "cmedqa-v2.jsonl",
        ("mteb/CMedQAv2-reranking", "01399b6956a4c6bf9edc5b6b90e176aeeb399686"),
    ),
    Task(
        "retrieval",
        "Retrieval",
        "retrieval",
        "nDCG@10",
        "Given a medical question in Chinese, retrieve passages that answer it directly",
        "retrieval",
    ),
    Task(
        "rerank",
        "Rerank",
        "reranking",
        "MAP@10",
        "Given a medical question in Chinese, rank passages that answer it directly first",
        "rerank.jsonl",
    ),
    Task(
        "sts",
        "STS",
        "sts",
        "Pearson",
        "Retrieve medical questions in Chinese that have the same meaning",
        "sts.jsonl",
    ),
    Task(
        "cmedqa-retrieval",
        "CmedqaRetrieval",
        "retrieval",
        "nDCG@10",
        _ANSWERS,
        "cmedqa-retrieval",
        ("mteb/CmedqaRetrieval", "main"),
    ),
    Task(
        "medical-retrieval",
        "MedicalRetrieval",
        "retrieval",
        "nDCG@10",
        "Given a medical question in Chinese, retrieve passages that answer it",
        "medical-retrieval",
        ("mteb/MedicalRetrieval", "main"),
    ),
)
# The five of the paper's table; its asymmetric comparison averages two of them.
PAPER_COLUMNS = tuple(task.name for task in TASKS[:5])
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
    raise CareError(f"unknown task '{name}': there are {names}")


class RankingTask(AbsTaskRetrieval):
    """Retrieval, or reranking of given candidates, over data read when it is needed."""

    def __init__(self, metadata: TaskMetadata, read: Callable[[], RankingData]) -> None:
        self.metadata = metadata
        super().__init__()
        self._read = read

    @cached_property
    def ranking(self) -> RankingData:
        """The data; reading them raises CareError if they are wrong."""
        return self._read()

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        """Hands the data to mteb."""
        if self.data_loaded:
            return
        split: RetrievalSplitData = {
            "corpus": _texts(self.ranking.corpus),
            "queries": _texts(self.ranking.queries),
            "relevant_docs": self.ranking.qrels,
            "top_ranked": self.ranking.candidates,
        }
        self.dataset = {"default": {"test": split}}
        self.data_loaded = True


class StsTask(AbsTaskSTS):
    """Similarity of two texts, over data read when it is needed."""

    min_score = 0
    max_score = 1

    def __init__(self, metadata: TaskMetadata, read: Callable[[], PairData]) -> None:
        self.metadata = metadata
        super().__init__()
        self._read = read

    @cached_property
    def pairs(self) -> PairData:
        """The data; reading them raises CareError if they are wrong."""
        return self._read()

    def load_data(self, num_proc: int | None = None, **kwargs: Any) -> None:
        """Hands the data to mteb."""
        if self.data_loaded:
            return
        rows = Dataset.from_dict(
            {
                "sentence1": self.pairs.first,
                "sentence2": self.pairs.second,
                "score": self.pairs.label,
            }
        )
        self.dataset = {"default": {"test": rows}}
        self.data_loaded = True


BenchmarkTask = RankingTask | StsTask


def find_tasks(source: str, split: str, repository: str | None = None) -> dict[Task, BenchmarkTask]:
    """Returns the tasks that a source holds, by what they are.

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
        places = {
            known: known.hub or (f"{repository}-{known.name}", "main")
            for known in TASKS
            if known.hub or repository
        }
        return {known: _from_hub(known, *place) for known, place in places.items()}
    root = Path(source)
    found = {
        known: _from_folder(known, path, split)
        for known in TASKS
        for path in (root / known.local, root / known.name / f"{split}.jsonl")
        if path.exists()
    }
    if (root / "corpus.jsonl").is_file():
        found[task("retrieval")] = _from_folder(task("retrieval"), root, split)
    if not found:
        wanted = ", ".join(known.local for known in TASKS)
        raise CareError(f"{root} holds no task: it may hold {wanted}, or be a BEIR folder")
    return found


def _from_folder(known: Task, path: Path, split: str) -> BenchmarkTask:
    if known.kind == "sts":
        return _sts_task(known, lambda: data.read_sts(path))
    if known.kind == "retrieval":
        return _ranking_task(known, lambda: data.read_retrieval(path, split))
    return _ranking_task(known, lambda: data.read_reranking(path))


def _from_hub(known: Task, repository: str, revision: str) -> BenchmarkTask:
    if known.kind == "sts":
        return _sts_task(known, lambda: data.read_hub_sts(repository, revision))
    return _ranking_task(known, lambda: data.read_hub_ranking(repository, revision))


def _ranking_task(known: Task, read: Callable[[], RankingData]) -> RankingTask:
    main = {"nDCG@10": "ndcg_at_10", "MAP@10": "map_at_10", "MAP": "map_at_1000"}[known.measure]
    kind = "Retrieval" if known.kind == "retrieval" else "Reranking"
    return RankingTask(_metadata(known, kind, main), read)


def _sts_task(known: Task, read: Callable[[], PairData]) -> StsTask:
    return StsTask(_metadata(known, "STS", "cosine_pearson"), read)


def _metadata(known: Task, kind: Any, main_score: str) -> TaskMetadata:
    return TaskMetadata(
        name=known.name,
        description=f"{known.column} of CMedTEB",
        prompt=known.instruction,
        dataset={"path": "local", "revision": "1"},
        type=kind,
        category="t2t",
        modalities=["text"],
        eval_splits=["test"],
        eval_langs=["cmn-Hans"],
        main_score=main_score,
    )


def _texts(texts: dict[str, str]) -> Dataset:
    return Dataset.from_dict({"id": list(texts), "text": list(texts.values())})
