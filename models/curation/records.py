"""Reading and writing of what the commands exchange: JSONL, TSV and tables, whole or not at all."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from core.files import atomic, sha256_file
from core.types import Document

_LIBRARIES = ("bm25s", "faiss-cpu", "jieba", "jionlp", "numpy", "onnxruntime", "statsmodels")
# What a spreadsheet program would take for a formula.
_FORMULA = ("=", "+", "-", "@")


def beir_files(data: Path, split: str) -> list[Path]:
    """Returns corpus, queries and judgements of a BEIR folder."""
    return [
        data / name for name in ("corpus.jsonl", f"{split}.queries.jsonl", f"{split}.qrels.tsv")
    ]


def document_record(document: Document) -> dict[str, Any]:
    """Returns a document as a line of a BEIR corpus."""
    return {
        "_id": document.id,
        "title": document.title,
        "text": document.text,
        "metadata": dict(document.metadata),
    }


def query_record(query: tuple[str, str]) -> dict[str, Any]:
    """Returns an id and a text as a line of BEIR queries."""
    return {"_id": query[0], "text": query[1]}


def write_jsonl(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Writes records, a line each."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def write_json(path: Path, value: Any) -> None:
    """Writes one indented JSON value."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=2)
        file.write("\n")


def write_tsv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Writes tab-separated rows; the first is the header."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows(rows)


def write_csv(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Writes comma-separated rows that spreadsheet programs read as UTF-8, and none as formulas."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows(map(_harmless, row) for row in rows)


def _harmless(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value


def provenance(files: Iterable[Path]) -> dict[str, Any]:
    """Returns what a result depends on: checksums of files and versions of libraries."""
    return {
        "sha256": {path.name: sha256_file(path) for path in files},
        "libraries": {name: version(name) for name in _LIBRARIES},
    }


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Returns a Markdown table; floats have three decimals."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in lines)
    return "".join("| " + " | ".join(row) + " |\n" for row in cells)
