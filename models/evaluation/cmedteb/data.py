"""What the tasks read: local folders and files, or data sets of the hub."""

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import CareError
from core.text import document_text, normalize_text
from models.evaluation.beir import (
    Qrels,
    check_judged,
    read_documents,
    read_qrels,
    read_queries,
)
from models.jsonl import read_jsonl, string


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


def read_retrieval(folder: Path, split: str) -> RankingData:
    """Reads a BEIR folder: corpus.jsonl, queries and qrels of a split.

    These are `split`.queries.jsonl and `split`.qrels.tsv, or queries.jsonl and
    qrels/`split`.tsv or qrels.tsv. Only judged queries are kept.

    Raises:
        CareError: If a file is missing, a line is wrong, nothing is judged, or a judged id does
            not exist.
    """
    documents = read_documents(folder / "corpus.jsonl")
    corpus = {document.id: document_text(document.title, document.text) for document in documents}
    queries_path = _first(folder / f"{split}.queries.jsonl", folder / "queries.jsonl")
    qrels_path = _first(
        folder / f"{split}.qrels.tsv", folder / "qrels" / f"{split}.tsv", folder / "qrels.tsv"
    )
    queries = read_queries(queries_path)
    qrels = read_qrels(qrels_path)
    if not qrels:
        raise CareError(f"{qrels_path} judges no query")
    check_judged(qrels_path, qrels, queries, corpus)
    return RankingData(corpus, {id_: normalize_text(queries[id_]) for id_ in qrels}, qrels)


def read_reranking(path: Path) -> RankingData:
    """Reads JSONL with `query`, `positives` and `negatives`, all texts.

    Raises:
        CareError: If there is no line, or one is wrong, has no positive, or gives a text as both.
    """
    corpus: dict[str, str] = {}
    queries: dict[str, str] = {}
    qrels: Qrels = {}
    candidates: dict[str, list[str]] = {}
    for number, record in read_jsonl(path):
        query = normalize_text(string(path, number, record, "query"))
        positives, negatives = (
            {_id(text): text for text in _texts(path, number, record, side)}
            for side in ("positives", "negatives")
        )
        if not positives:
            raise CareError(f"{path} line {number}: positives is empty")
        if positives.keys() & negatives.keys():
            raise CareError(f"{path} line {number}: a positive is also a negative")
        id_ = str(record.get("_id", f"q{number}"))
        if id_ in queries:
            raise CareError(f"{path} line {number}: _id '{id_}' is a duplicate")
        corpus |= positives | negatives
        queries[id_] = query
        qrels[id_] = dict.fromkeys(positives, 1) | dict.fromkeys(negatives, 0)
        candidates[id_] = list(qrels[id_])
    if not queries:
        raise CareError(f"{path} holds no query")
    return RankingData(corpus, queries, qrels, candidates)


def read_sts(path: Path) -> PairData:
    """Reads JSONL with `text1`, `text2` and `label`.

    Raises:
        CareError: If a line is wrong, or all labels are equal.
    """
    data = PairData()
    for number, record in read_jsonl(path):
        data.first.append(normalize_text(string(path, number, record, "text1")))
        data.second.append(normalize_text(string(path, number, record, "text2")))
        label = record.get("label")
        if not isinstance(label, int | float) or not math.isfinite(label):
            raise CareError(f"{path} line {number}: label is missing or no number")
        data.label.append(float(label))
    if len(set(data.label)) < 2:
        raise CareError(f"{path}: labels do not differ, so that nothing correlates with them")
    return data


def read_hub_ranking(repository: str, revision: str | None) -> RankingData:
    """Reads a retrieval or reranking data set of the hub, in mteb's layout, split test.

    Raises:
        CareError: If the hub does not deliver it.
    """
    from mteb.abstasks.retrieval_dataset_loaders import RetrievalDatasetLoader

    try:
        split = RetrievalDatasetLoader(repository, revision or "main", split="test").load()
    except Exception as error:  # the libraries raise nothing narrower
        raise _unavailable(repository, error) from error
    ranked = split["top_ranked"]
    return RankingData(
        corpus={
            row["id"]: document_text(row.get("title") or "", row["text"]) for row in split["corpus"]
        },
        queries={row["id"]: normalize_text(row["text"]) for row in split["queries"]},
        qrels={query: dict(grades) for query, grades in split["relevant_docs"].items()},
        candidates={query: list(ids) for query, ids in ranked.items()} if ranked else None,
    )


def read_hub_sts(repository: str, revision: str | None) -> PairData:
    """Reads an STS data set of the hub with sentence1, sentence2 and score, split test.

    Raises:
        CareError: If the hub does not deliver it.
    """
    from datasets import load_dataset

    try:
        rows = load_dataset(repository, split="test", revision=revision)
        return PairData(
            [normalize_text(text) for text in rows["sentence1"]],
            [normalize_text(text) for text in rows["sentence2"]],
            [float(score) for score in rows["score"]],
        )
    except Exception as error:  # the libraries raise nothing narrower
        raise _unavailable(repository, error) from error


def _unavailable(repository: str, error: Exception) -> CareError:
    return CareError(
        f"{repository} cannot be had from the hub ({type(error).__name__}): "
        "give a local folder as DATA"
    )


def _texts(path: Path, number: int, record: dict[str, Any], name: str) -> list[str]:
    texts = record.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise CareError(f"{path} line {number}: {name} is missing or no list of strings")
    return [normalize_text(text) for text in texts]


def _first(*paths: Path) -> Path:
    return next((path for path in paths if path.is_file()), paths[0])


def _id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
