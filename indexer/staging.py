"""First pass of a build: check the corpus and lay it out by rows.

corpus.json      what was read; written last
documents.arrow  the documents, row by row
filters.arrow    rows by metadata value
texts.npy        int64 [unique texts], the first row that has the text
vectors.npy      int64 [documents], which unique text is the row's
rejects.jsonl    file, line and reason of each record left out
"""

import hashlib
import json
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from core import documents, filters
from core.documents import DocumentReader, DocumentWriter
from core.errors import CorpusError
from core.files import write_text
from core.filters import FilterWriter
from core.text import document_text
from core.types import RowArray, UpdateRecord
from indexer.corpus import Place, Record, Reject, read_corpus
from indexer.progress import progress_bar

SUMMARY = "corpus.json"
REJECTS = "rejects.jsonl"

_TEXTS = "texts.npy"
_VECTORS = "vectors.npy"
# 128 bits: a hundred million texts collide with a probability below 1e-22.
_DIGEST_BYTES = 16


class StagedCorpus(BaseModel):
    """What the first pass found."""

    checksum: str
    files: list[str]
    documents: int
    unique_texts: int
    rejected: int
    filter_fields: dict[str, int]
    update: UpdateRecord | None = None


def stage(
    files: list[Path],
    checksum: str,
    folder: Path,
    *,
    max_reject_rate: float,
    progress: bool,
    records: Iterable[Record] | None = None,
) -> StagedCorpus:
    """Checks a corpus and lays it out in `folder`, or reads what an earlier run laid out.

    Args:
        files: The corpus files, in order.
        checksum: Their checksum.
        folder: The build folder.
        max_reject_rate: The share of records that may be left out.
        progress: Whether to show a bar.
        records: What to lay out instead of the records of the files.

    Raises:
        CorpusError: If ids are duplicated, too many records are rejected, or none is left.
    """
    summary = folder / SUMMARY
    if summary.exists():
        staged = StagedCorpus.model_validate_json(summary.read_bytes())
        if staged.rejected / (staged.rejected + staged.documents) <= max_reject_rate:
            return staged

    ids, texts = bytearray(), bytearray()
    places = _Places()
    by_value = FilterWriter()
    rejects = _Rejects()
    with (
        DocumentWriter(folder / documents.FILE_NAME) as writer,
        (folder / REJECTS).open("w", encoding="utf-8") as reject_file,
        progress_bar("read", show=progress) as bar,
    ):
        for place, record in read_corpus(files) if records is None else records:
            bar.update()
            if isinstance(record, Reject):
                line = {"file": place.file, "line": place.line, "reason": record.reason}
                reject_file.write(json.dumps(line, ensure_ascii=False) + "\n")
                rejects.add(place, record)
                continue
            by_value.add(len(places), record.metadata)
            ids += digest(record.id)
            texts += digest(document_text(record.title, record.text))
            places.append(place)
            writer.write(record)

    rejects.check(len(places), folder / REJECTS, max_reject_rate)
    _check_ids(ids, places, folder)
    first_rows, vector_of = _unique(texts)
    by_value.write(folder / filters.FILE_NAME)
    np.save(folder / _TEXTS, first_rows)
    np.save(folder / _VECTORS, vector_of)
    staged = StagedCorpus(
        checksum=checksum,
        files=[file.name for file in files],
        documents=len(places),
        unique_texts=len(first_rows),
        rejected=rejects.count,
        filter_fields=by_value.fields(),
    )
    write_text(summary, staged.model_dump_json(indent=2))
    return staged


def unique_text_rows(folder: Path) -> RowArray:
    """Returns int64 [unique texts]: the first row that has each text."""
    rows: RowArray = np.load(folder / _TEXTS, mmap_mode="r")
    return rows


def vector_of_row(folder: Path) -> RowArray:
    """Returns int64 [documents]: which unique text, and so which vector, is each row's."""
    rows: RowArray = np.load(folder / _VECTORS, mmap_mode="r")
    return rows


class _Places:
    """The place of each row, in twelve bytes a row."""

    def __init__(self) -> None:
        self._files: list[str] = []
        self._file_of = array("i")
        self._lines = array("q")

    def append(self, place: Place) -> None:
        if not self._files or self._files[-1] != place.file:
            self._files.append(place.file)
        self._file_of.append(len(self._files) - 1)
        self._lines.append(place.line)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, row: int) -> Place:
        return Place(self._files[self._file_of[row]], self._lines[row])


class _Rejects:
    """How many records were left out, and the first of them."""

    def __init__(self) -> None:
        self.count = 0
        self._first = ""

    def add(self, place: Place, reject: Reject) -> None:
        self._first = self._first or f"{place}: {reject.reason}"
        self.count += 1

    def check(self, accepted: int, file: Path, max_rate: float) -> None:
        total = self.count + accepted
        if not total:
            raise CorpusError("the corpus is empty")
        rate = self.count / total
        if rate > max_rate or not accepted:
            raise CorpusError(
                f"{self.count} of {total} records are rejected ({rate:.1%}, allowed "
                f"{max_rate:.1%}); the first is {self._first}; all are listed in {file}"
            )


def digest(text: str) -> bytes:
    """Returns 16 bytes that tell a text or an id from all others."""
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def as_array(digests: bytes | bytearray) -> NDArray[np.bytes_]:
    """Returns digests that follow each other as an array of them."""
    return np.frombuffer(digests, dtype=f"S{_DIGEST_BYTES}")


def _unique(digests: bytearray) -> tuple[RowArray, RowArray]:
    _, first, inverse = np.unique(as_array(digests), return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order].astype(np.int64), rank[inverse].astype(np.int64)


def _check_ids(digests: bytearray, places: _Places, folder: Path) -> None:
    first, row_of = _unique(digests)
    if len(first) == len(places):
        return
    repeats = np.flatnonzero(first[row_of] != np.arange(len(places)))
    row = int(repeats[0])
    id_ = DocumentReader(folder / documents.FILE_NAME).id(row)
    raise CorpusError(
        f"{places[row]}: _id '{id_}' is a duplicate of {places[int(first[row_of[row]])]}; "
        f"duplicates in all: {len(repeats)}"
    )
