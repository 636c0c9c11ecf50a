"""Corpora, queries and judgements in BEIR's layout.

corpus.jsonl        `_id`, `title`, `text` and, beyond BEIR, `metadata`
queries.jsonl       `_id`, `text`, of all splits
qrels/SPLIT.tsv     query-id, corpus-id, score; with a header

A file that cannot be read, and an invalid line or id, is a DataError with its place.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import DataError
from core.records import (
    duplicate_error,
    field_error,
    read_jsonl,
    read_tsv,
    record_error,
    record_id,
    string,
    write_jsonl,
    write_tsv,
)
from core.text import document_text, normalize_text
from core.types import Document

Qrels = dict[str, dict[str, int]]
Run = dict[str, dict[str, float]]

# Grade of a judgement, up or down: trec_eval has an array with an entry for each grade.
_MAX_GRADE = 10_000


class BeirPaths(NamedTuple):
    """The files of a folder in BEIR's layout."""

    corpus: Path
    queries: Path
    qrels: Path


def beir_paths(folder: Path, split: str) -> BeirPaths:
    """Returns the files of a split, without checking that they exist.

    A folder may also have separate files for each split, SPLIT.queries.jsonl and SPLIT.qrels.tsv.
    """
    queries, qrels = folder / f"{split}.queries.jsonl", folder / f"{split}.qrels.tsv"
    if not queries.is_file() and not qrels.is_file():
        queries, qrels = folder / "queries.jsonl", folder / "qrels" / f"{split}.tsv"
    return BeirPaths(folder / "corpus.jsonl", queries, qrels)


def read_documents(path: Path) -> list[Document]:
    """Reads a corpus; a duplicate id is an error."""
    return list(iterate_documents(path))


def iterate_documents(path: Path) -> Iterator[Document]:
    """Yields the documents of a corpus; a duplicate id is an error."""
    for number, id_, record in _records(path):
        title = string(path, number, {"title": record.get("title") or ""}, "title")
        metadata = record.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise field_error(path, number, "metadata", "is not an object")
        yield Document(id_, string(path, number, record, "text"), title, metadata)


def read_queries(
    path: Path, searched: Collection[str] = (), max_chars: int | None = None
) -> dict[str, str]:
    """Reads the text of each query, by id; a file without any, and a duplicate id, are a DataError.

    The texts of queries that are searched, given by their ids in `searched`, must not be empty or
    longer than `max_chars`.
    """
    queries = {}
    for number, id_, record in _records(path):
        queries[id_] = text = string(path, number, record, "text")
        if id_ not in searched:
            continue
        if not normalize_text(text):
            raise field_error(path, number, "text", f"of query '{id_}' is empty", code="empty_text")
        if max_chars is not None and len(text) > max_chars:
            reason = (
                f"of query '{id_}' has {len(text)} characters; the limit is {max_chars}: shorten "
                "it, or raise CARE_MAX_QUERY_CHARS"
            )
            raise field_error(path, number, "text", reason, code="text_too_long")
    if not queries:
        raise DataError.at(path, "has no queries", "no_queries")
    return queries


def _records(path: Path) -> Iterator[tuple[int, str, dict[str, Any]]]:
    seen = set()
    for number, record in read_jsonl(path):
        id_ = record_id(path, number, record)
        if id_ in seen:
            raise duplicate_error(path, number, id_)
        seen.add(id_)
        yield number, id_, record


def read_qrels(path: Path) -> Qrels:
    """Reads judgements: scores by document id, by query id.

    A file without any, and two different judgements of a document for a query, are a DataError.
    """
    qrels: Qrels = {}
    for number, row in read_tsv(path):
        if number == 1 and row[:1] == ["query-id"]:
            continue
        try:
            query, document, text = row
            score = int(text)
            if abs(score) > _MAX_GRADE:
                raise ValueError(text)
        except ValueError as error:
            reason = "must be query-id, corpus-id and a score, tab-separated; the score is a whole "
            reason += f"number from {-_MAX_GRADE} to {_MAX_GRADE}"
            raise record_error(path, number, reason, code="not_qrels") from error
        if qrels.setdefault(query, {}).setdefault(document, score) != score:
            reason = (
                f"judges document '{document}' for query '{query}' otherwise than an earlier line: "
                "keep one of both"
            )
            raise record_error(path, number, reason, code="contradiction")
    if not qrels:
        raise DataError.at(path, "has no judgements", "no_judgements")
    return qrels


def read_judged_queries(
    queries: Path, qrels: Path, max_chars: int | None = None
) -> tuple[dict[str, str], Qrels]:
    """Reads judgements and the texts of their queries, both by query id in the same order.

    DataError if a file is wrong, the judgements reference an unknown query, or a judged query is
    empty or longer than `max_chars`.
    """
    judgements = read_qrels(qrels)
    texts = read_queries(queries, judgements, max_chars)
    check_judged(qrels, dict.fromkeys(judgements, ()), texts, ())
    return {id_: texts[id_] for id_ in judgements}, judgements


def check_judged(
    path: Path,
    judged: Mapping[str, Iterable[str]],
    queries: Collection[str],
    documents: Collection[str],
) -> None:
    """Checks that all judged queries and documents exist; DataError with the first that does not.

    `judged` has ids of documents by query id; the error names `path`, the file of judgements.
    """
    unknown = chain(
        (("query", id_) for id_ in judged if id_ not in queries),
        (("document", id_) for ids in judged.values() for id_ in ids if id_ not in documents),
    )
    for kind, id_ in unknown:
        raise DataError.at(path, f"references unknown {kind} '{id_}'", f"unknown_{kind}", id=id_)


def write_beir(
    folder: Path,
    split: str,
    documents: Iterable[Document],
    queries: Mapping[str, str],
    qrels: Mapping[str, Mapping[str, int]],
) -> BeirPaths:
    """Writes corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv, and returns their paths."""
    qrels_path = folder / "qrels" / f"{split}.tsv"
    paths = BeirPaths(folder / "corpus.jsonl", folder / "queries.jsonl", qrels_path)
    paths.qrels.parent.mkdir(parents=True, exist_ok=True)
    write_documents(paths.corpus, documents)
    write_queries(paths.queries, queries)
    _write_qrels(paths.qrels, qrels)
    return paths


def write_split(folder: Path, split: str, queries: Mapping[str, str], qrels: Qrels) -> None:
    """Writes SPLIT.queries.jsonl and SPLIT.qrels.tsv into the folder of a corpus."""
    write_queries(folder / f"{split}.queries.jsonl", queries)
    _write_qrels(folder / f"{split}.qrels.tsv", qrels)


def _write_qrels(path: Path, qrels: Mapping[str, Mapping[str, int]]) -> None:
    rows = [(query, id_, score) for query, grades in qrels.items() for id_, score in grades.items()]
    write_tsv(path, [("query-id", "corpus-id", "score"), *rows])


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    records = (
        {"_id": d.id, "title": d.title, "text": d.text, "metadata": dict(d.metadata)}
        for d in documents
    )
    write_jsonl(path, records)


def write_queries(path: Path, queries: Mapping[str, str]) -> None:
    write_jsonl(path, ({"_id": id_, "text": text} for id_, text in queries.items()))


def document_texts(documents: Iterable[Document]) -> dict[str, str]:
    """Returns the text of each document as encoders and judges read it, title first, by id."""
    return {document.id: document_text(document.title, document.text) for document in documents}
