"""Corpora, queries and judgements in BEIR's layout.

corpus.jsonl        `_id`, `title`, `text` and, beyond BEIR, `metadata`
queries.jsonl       `_id`, `text`, of all splits
qrels/SPLIT.tsv     query-id, corpus-id, score; with a header
"""

import csv
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import DataError
from core.records import (
    duplicate_error,
    field_error,
    read_jsonl,
    read_text,
    record_error,
    record_id,
    string,
    write_jsonl,
    write_tsv,
)
from core.text import document_text
from core.types import Document

Qrels = dict[str, dict[str, int]]
Run = dict[str, dict[str, float]]


class BeirPaths(NamedTuple):
    """The files of a folder in BEIR's layout."""

    corpus: Path
    queries: Path
    qrels: Path


def beir_paths(folder: Path, split: str) -> BeirPaths:
    """Returns the files of a split.

    Instead of queries.jsonl and qrels/SPLIT.tsv a folder may have queries and qrels by split,
    SPLIT.queries.jsonl and SPLIT.qrels.tsv. Whether the files exist is not checked.
    """
    by_split = folder / f"{split}.queries.jsonl", folder / f"{split}.qrels.tsv"
    if any(path.is_file() for path in by_split):
        return BeirPaths(folder / "corpus.jsonl", *by_split)
    return BeirPaths(
        folder / "corpus.jsonl", folder / "queries.jsonl", folder / "qrels" / f"{split}.tsv"
    )


def read_documents(path: Path) -> list[Document]:
    """Reads a corpus.

    Raises:
        DataError: If a line is not a document, or an id is a duplicate.
    """
    documents: dict[str, Document] = {}
    for number, record in read_jsonl(path):
        id_ = record_id(path, number, record)
        if id_ in documents:
            raise duplicate_error(path, number, id_)
        title = string(path, number, {"title": record.get("title") or ""}, "title")
        metadata = record.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise field_error(path, number, "metadata", "is not an object")
        documents[id_] = Document(id_, string(path, number, record, "text"), title, metadata)
    return list(documents.values())


def read_queries(path: Path) -> dict[str, str]:
    """Reads the text of each query, by id.

    Raises:
        DataError: If a line is not a query, or an id is a duplicate.
    """
    queries: dict[str, str] = {}
    for number, record in read_jsonl(path):
        id_ = record_id(path, number, record)
        if id_ in queries:
            raise duplicate_error(path, number, id_)
        queries[id_] = string(path, number, record, "text")
    return queries


def read_qrels(path: Path) -> Qrels:
    """Reads judgements: scores by document id, by query id.

    Raises:
        DataError: If a line is not a judgement, or there is none.
    """
    qrels: Qrels = {}
    lines = read_text(path).removesuffix("\n").split("\n")
    for number, row in enumerate(csv.reader(lines, delimiter="\t"), start=1):
        if number == 1 and row[:1] == ["query-id"]:
            continue
        try:
            query, document, score = row
            qrels.setdefault(query, {})[document] = int(score)
        except ValueError as error:
            raise record_error(
                path, number, "is not query-id, corpus-id and a whole score", code="not_qrels"
            ) from error
    if not qrels:
        raise DataError(f"{path} holds no judgement", code="no_judgements", path=path)
    return qrels


def check_judged(
    path: Path,
    judged: Mapping[str, Iterable[str]],
    queries: Collection[str],
    documents: Collection[str],
) -> None:
    """Checks that judged queries and documents exist.

    Args:
        path: The file of judgements.
        judged: Document ids by query id.
        queries: Ids of the queries.
        documents: Ids of the documents.

    Raises:
        DataError: If a query or document does not.
    """
    for query, ids in judged.items():
        if query not in queries:
            raise _unknown(path, "query", query)
        for id_ in ids:
            if id_ not in documents:
                raise _unknown(path, "document", id_)


def write_beir(
    folder: Path,
    split: str,
    documents: Iterable[Document],
    queries: Mapping[str, str],
    qrels: Mapping[str, Mapping[str, int]],
) -> BeirPaths:
    """Writes corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv, and returns their paths."""
    paths = BeirPaths(
        folder / "corpus.jsonl", folder / "queries.jsonl", folder / "qrels" / f"{split}.tsv"
    )
    paths.qrels.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(paths.corpus, map(document_record, documents))
    write_jsonl(paths.queries, map(query_record, queries.items()))
    rows = [
        (query, document, score)
        for query, judged in qrels.items()
        for document, score in judged.items()
    ]
    write_tsv(paths.qrels, [("query-id", "corpus-id", "score"), *rows])
    return paths


def document_texts(documents: Iterable[Document]) -> dict[str, str]:
    """Returns what encoders and judges read of documents, by id."""
    return {document.id: document_text(document.title, document.text) for document in documents}


def document_record(document: Document) -> dict[str, Any]:
    """Returns a document as a line of a corpus."""
    return {
        "_id": document.id,
        "title": document.title,
        "text": document.text,
        "metadata": dict(document.metadata),
    }


def query_record(query: tuple[str, str]) -> dict[str, Any]:
    """Returns an id and a text as a line of queries."""
    return {"_id": query[0], "text": query[1]}


def _unknown(path: Path, kind: str, id_: str) -> DataError:
    message = f"{path} references unknown {kind} '{id_}'"
    return DataError(message, code=f"unknown_{kind}", path=path, id=id_)
