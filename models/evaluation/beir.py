"""Queries and judgements in the BEIR layout."""

import csv
import json
from pathlib import Path

from core.errors import CareError

Qrels = dict[str, dict[str, int]]
Run = dict[str, dict[str, float]]


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
        except (ValueError, KeyError, TypeError) as error:
            raise CareError(f"{path} line {number} is not JSON with _id and text") from error
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


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise CareError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CareError(f"{path} is not UTF-8") from error
