"""Corpora that functions of the Python API take: paths, or documents in memory."""

import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from care.options import several
from core.errors import CorpusError
from core.scratch import temporary_folder

STANDARD_INPUT = "-"
# A path, a folder or a glob, or `STANDARD_INPUT` for JSONL; or documents with the fields of a JSONL
# corpus, texts alone, or a data frame, which exports its columns (`__arrow_c_stream__`).
Corpus = str | Path | Iterable[Mapping[str, Any] | str]


@contextmanager
def corpus_path(corpus: Corpus, builds: Path) -> Iterator[str]:
    """Yields the path of a corpus; other documents are written to a temporary file."""
    if isinstance(corpus, str | Path) and str(corpus) != STANDARD_INPUT:
        yield str(corpus)
        return
    builds.mkdir(parents=True, exist_ok=True)
    with temporary_folder(builds) as folder:
        if isinstance(corpus, str | Path):
            path = folder / "standard-input.jsonl"
            with path.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
            yield str(path)
            return
        if hasattr(corpus, "__arrow_c_stream__"):
            path = folder / "documents.arrow"
            rows = pa.RecordBatchReader.from_stream(corpus)
            with pa.ipc.new_stream(path, rows.schema) as writer:
                for batch in rows:
                    writer.write_batch(batch)
            yield str(path)
            return
        path = folder / "documents.jsonl"
        with path.open("w", encoding="utf-8") as written:
            for number, document in enumerate(several(corpus, "corpus"), start=1):
                # ASCII, so that half a surrogate pair reaches the reader, which rejects it.
                written.write(f"{_document_line(document, number)}\n")
        yield str(path)


def _document_line(document: Mapping[str, Any] | str, number: int) -> str:
    if isinstance(document, str):
        document = {"_id": str(number), "text": document}
    if not isinstance(document, Mapping):
        given = f"document {number} is of type {type(document).__name__}"
        message = f"{given}: give a text, or a mapping with _id and text"
        raise CorpusError(message, code="bad_document", number=number)
    try:
        return json.dumps(dict(document))
    except (TypeError, ValueError, RecursionError) as error:
        message = f"document {number} cannot be written as JSON: {error}"
        raise CorpusError(message, code="bad_document", number=number) from error
