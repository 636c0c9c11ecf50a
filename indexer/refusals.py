"""Documents with texts that cannot be encoded, left out after the second pass.

A document is indexed whole or not at all: if one of its chunks cannot be encoded, none is.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core import documents, filters
from core.documents import DocumentReader, DocumentWriter
from core.errors import CorpusError
from core.files import sha256_file, sync
from core.filters import FilterWriter
from indexer.staging import REJECTS, SUMMARY, StagedCorpus, save_rows, vector_of_row, write_staged

_PREFIX = "kept-"


def layouts(folder: Path) -> Iterator[Path]:
    """Yields the folders where a build may have laid its documents out."""
    yield folder
    yield from folder.glob(f"{_PREFIX}*/")


def max_refused(staged: StagedCorpus, max_reject_rate: float, *, reuse: bool) -> int:
    """Returns how many documents may be left out beside the records rejected by the first pass.

    Args:
        staged: What the first pass found.
        max_reject_rate: The share of records that may be left out.
        reuse: Whether documents that an update left unchanged are not encoded; they do not
            count then.
    """
    total = _records(staged, reuse=reuse)
    # What 0.29 × 100 lacks to 29 is no document.
    return int(max_reject_rate * total + 1e-6) - staged.rejected


def without_refused(
    folder: Path,
    staged: StagedCorpus,
    refused: Mapping[int, str],
    *,
    max_reject_rate: float,
    reuse: bool,
) -> tuple[Path, StagedCorpus, dict[str, str]]:
    """Lays a corpus out again without the documents whose texts cannot be encoded.

    Unique texts keep their numbers, so that the shards fit both layouts.

    Args:
        folder: The build folder.
        staged: What the first pass found.
        refused: By the number of the text, why it cannot be encoded.
        max_reject_rate: The share of records that may be left out.
        reuse: As for `max_refused`.

    Returns:
        Where documents, filters and rows lie now, what they are, and by id the reason for
        each document that was left out.

    Raises:
        CorpusError: If too many documents are left out, or none is left.
    """
    if not refused:
        return folder, staged, {}
    reader = DocumentReader(folder / documents.FILE_NAME)
    vector_of = vector_of_row(folder)
    keep = np.ones(len(reader), dtype=np.bool_)
    reasons: dict[str, str] = {}
    for row in np.flatnonzero(np.isin(vector_of, list(refused))):
        document = reader[int(row)]
        reasons.setdefault(document.parent or document.id, refused[int(vector_of[row])])
        first = int(row) - document.chunk
        keep[first : first + document.chunks] = False
    _check(staged, reasons, max_reject_rate, reuse=reuse)
    name = hashlib.sha256(json.dumps(sorted(refused)).encode()).hexdigest()[:16]
    target = folder / f"{_PREFIX}{name}"
    if not target.exists():
        _lay_out(folder, target, staged, keep, reasons)
    return target, StagedCorpus.model_validate_json((target / SUMMARY).read_bytes()), reasons


def _records(staged: StagedCorpus, *, reuse: bool) -> int:
    unchanged = staged.update.unchanged if staged.update and reuse else 0
    return staged.rejected + staged.documents - unchanged


def _check(
    staged: StagedCorpus, reasons: Mapping[str, str], max_rate: float, *, reuse: bool
) -> None:
    left_out = staged.rejected + len(reasons)
    if len(reasons) <= max_refused(staged, max_rate, reuse=reuse):
        if len(reasons) < staged.documents:
            return
        raise CorpusError("no document can be encoded")
    total = _records(staged, reuse=reuse)
    id_, reason = next(iter(reasons.items()))
    raise CorpusError(
        f"{left_out} of {total} records are rejected ({left_out / total:.1%}, allowed "
        f"{max_rate:.1%}); the first that cannot be encoded is document '{id_}': {reason}"
    )


def _lay_out(
    folder: Path,
    target: Path,
    staged: StagedCorpus,
    keep: NDArray[np.bool_],
    reasons: Mapping[str, str],
) -> None:
    reader = DocumentReader(folder / documents.FILE_NAME)
    temporary = folder / f".{target.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    rows = 0
    with (
        FilterWriter(temporary / filters.FILE_NAME) as by_value,
        DocumentWriter(temporary / documents.FILE_NAME, chunked=reader.chunked) as writer,
    ):
        for kept, document in zip(keep, reader, strict=True):
            if kept:
                by_value.add(rows, document.metadata)
                writer.write(document)
                rows += 1
    vector_of = vector_of_row(folder)[keep]
    _, first_rows = np.unique(vector_of, return_index=True)
    save_rows(temporary, np.sort(first_rows), vector_of)
    shutil.copyfile(folder / REJECTS, temporary / REJECTS)
    with (temporary / REJECTS).open("a", encoding="utf-8") as file:
        for id_, reason in reasons.items():
            file.write(json.dumps({"id": id_, "reason": reason}, ensure_ascii=False) + "\n")
    facts = {
        "documents": staged.documents - len(reasons),
        "unique_texts": len(first_rows),
        "rejected": staged.rejected + len(reasons),
        "filter_fields": by_value.fields(),
        "chunks": rows if staged.chunks else None,
    }
    if staged.update:
        facts["checksum"] = sha256_file(temporary / documents.FILE_NAME)
    write_staged(temporary, staged.model_copy(update=facts))
    temporary.rename(target)
    sync(folder)
