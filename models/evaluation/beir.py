"""Documents, queries and judgements in the BEIR layout."""

import csv
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from core.errors import CareError
from core.types import Document
from models.jsonl import read_jsonl, string

Qrels = dict[str, dict[str, int]]
Run = dict[str, dict[str, float]]


def read_documents(path: Path) -> list[Document]:
    """Reads a corpus: JSONL with `_id`, `text` and, if given, `title` and `metadata`.

    Raises:
        CareError: If a line is no such record, or an id comes twice.
    """
    documents: dict[str, Document] = {}
    for number, record in read_jsonl(path):
        id_ = string(path, number, record, "_id")
        if id_ in documents:
            raise CareError(f"{path} line {number}: _id '{id_}' is a duplicate")
        title = string(path, number, {"title": record.get("title") or ""}, "title")
        metadata = record.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise CareError(f"{path} line {number}: metadata is no object")
        documents[id_] = Document(id_, string(path, number, record, "text"), title, metadata)
    return list(documents.values())


def read_queries(path: Path) -> dict[str, str]:
    """Reads queries from JSONL with `_id` and `text`.

    Raises:
        CareError: If a line is not such a record, or an id comes twice.
    """
    queries: dict[str, str] = {}
    for number, line in enumerate(_lines(path), start=1):
        try:
            record = json.loads(line)
            id_, text = record["_id"], record["text"]
            if not isinstance(id_, str) or not isinstance(text, str):
                raise TypeError
        except (ValueError, KeyError, TypeError) as error:
            raise CareError(
                f"{path} line {number} is not JSON with _id and text, both strings"
            ) from error
        if id_ in queries:
            raise CareError(f"{path} line {number}: _id '{id_}' is a duplicate")
        queries[id_] = text
    return queries


def read_qrels(path: Path) -> Qrels:
    """Reads judgements from tab-separated `query-id`, `corpus-id`, `score` with a header.

    Raises:
        CareError: If a line is not such a record.
    """
    qrels: Qrels = {}
    rows = csv.reader(_lines(path), delimiter="\t")
    for number, row in enumerate(rows, start=1):
        if number == 1 and row[:1] == ["query-id"]:
            continue
        try:
            query, document, score = row
            qrels.setdefault(query, {})[document] = int(score)
        except ValueError as error:
            raise CareError(
                f"{path} line {number} is not query-id, corpus-id and a whole score"
            ) from error
    return qrels


def check_judged(
    path: Path,
    judged: Mapping[str, Iterable[str]],
    queries: Collection[str],
    documents: Collection[str],
) -> None:
    """Checks that what is judged is there.

    Args:
        path: The file of judgements.
        judged: Document ids by query id.
        queries: Ids of the queries.
        documents: Ids of the documents.

    Raises:
        CareError: If a query or document is not.
    """
    for query, ids in judged.items():
        if query not in queries:
            raise CareError(f"{path} judges query '{query}', which is not there")
        for id_ in ids:
            if id_ not in documents:
                raise CareError(f"{path} judges document '{id_}', which is not there")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise CareError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CareError(f"{path} is not UTF-8") from error
