"""Training triples: a query with its relevant documents and hard negatives, as JSONL."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from core.records import field_error, read_jsonl
from core.text import document_text, normalize_text


class Triple(NamedTuple):
    """A query, its relevant documents (positives) and hard negatives, as normalised texts."""

    query: str
    positives: tuple[str, ...]
    negatives: tuple[str, ...] = ()


def read_triples(path: Path) -> Iterator[tuple[int, Triple]]:
    """Yields line numbers and triples; `positives` and `negatives` may be missing or empty.

    Raises:
        DataError: If the file cannot be read, a list is not a list, or a text is empty.
    """
    for number, record in read_jsonl(path):
        lists = []
        for name in ("positives", "negatives"):
            values = record.get(name) or []
            if not isinstance(values, list):
                raise field_error(path, number, name, "is not a list of texts")
            lists.append(tuple(read_field(path, number, value, name) for value in values))
        yield number, Triple(read_field(path, number, record.get("query"), "query"), *lists)


def read_field(path: Path, number: int, value: Any, name: str) -> str:
    """Returns a normalised text; a document may be an object with `title` and `text`.

    Raises:
        DataError: If it is empty or another value.
    """
    text = ""
    if isinstance(value, str):
        text = normalize_text(value)
    elif isinstance(value, dict):
        title, body = value.get("title") or "", value.get("text")
        if isinstance(title, str) and isinstance(body, str):
            text = document_text(title, body)
    if not text:
        raise field_error(path, number, name, "is missing, empty or not a text")
    return text
