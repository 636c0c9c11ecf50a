"""First pass of a build: check the corpus and lay it out by rows.

corpus.json      what was read; written last
documents.arrow  the documents or, if long ones are cut, their chunks, row by row
filters.arrow    rows by metadata value
texts.npy        int64 [unique texts], the first row that has the text
vectors.npy      int64 [rows], which unique text is the row's
rejects.jsonl    file, line and reason of each record left out
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator
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
from core.types import Document, RowArray, UpdateRecord
from indexer.chunking import Chunker
from indexer.corpus import (
    MAX_CHUNKED_TEXT_CHARS,
    MAX_TEXT_CHARS,
    Place,
    Reject,
    read_corpus,
)
from indexer.progress import progress_bar

SUMMARY = "corpus.json"
REJECTS = "rejects.jsonl"

_TEXTS = "texts.npy"
_VECTORS = "vectors.npy"
# 128 bits: a hundred million texts collide with a probability below 1e-22.
_DIGEST_BYTES = 16

# The chunks of a document or, if it is not cut, the document alone.
Cut = tuple[Place, list[Document] | Reject]


class StagedCorpus(BaseModel):
    """What the first pass found; `chunks` is None if documents are not cut."""

    checksum: str
    files: list[str]
    documents: int
    unique_texts: int
    rejected: int
    filter_fields: dict[str, int]
    update: UpdateRecord | None = None
    chunks: int | None = None


def stage(
    files: list[Path],
    checksum: str,
    folder: Path,
    *,
    max_reject_rate: float,
    progress: bool,
    chunker: Chunker | None = None,
    cut: Iterable[Cut] | None = None,
) -> StagedCorpus:
    """Checks a corpus and lays it out in `folder`, or reads what an earlier run laid out.

    Args:
        files: The corpus files, in order.
        checksum: Their checksum.
        folder: The build folder.
        max_reject_rate: The share of records that may be left out.
        progress: Whether to show a bar.
        chunker: Cuts long documents, or None to keep them whole.
        cut: What to lay out instead of what the files hold.

    Raises:
        CorpusError: If ids are duplicated, too many records are rejected, or none is left.
    """
    earlier = read_staged(folder)
    if earlier and earlier.rejected / (earlier.rejected + earlier.documents) <= max_reject_rate:
        return earlier

    ids, texts = _Ids(), bytearray()
    accepted = rows = 0
    by_value = FilterWriter()
    rejects = _Rejects()
    with (
        DocumentWriter(folder / documents.FILE_NAME, chunked=chunker is not None) as writer,
        (folder / REJECTS).open("w", encoding="utf-8") as reject_file,
        progress_bar("read", show=progress) as bar,
    ):
        for place, parts in _cut(files, chunker) if cut is None else cut:
            bar.update()
            if isinstance(parts, Reject):
                line = {"file": place.file, "line": place.line, "reason": parts.reason}
                reject_file.write(json.dumps(line, ensure_ascii=False) + "\n")
                rejects.add(place, parts)
                continue
            accepted += 1
            if parts[0].id != (own := parts[0].parent or parts[0].id):
                ids.append(own, place, rows)
            for document in parts:
                by_value.add(rows, document.metadata)
                ids.append(document.id, place, rows)
                texts += digest(document_text(document.title, document.text))
                writer.write(document)
                rows += 1

    rejects.check(accepted, folder / REJECTS, max_reject_rate)
    ids.check(folder)
    first_rows, vector_of = _unique(texts)
    by_value.write(folder / filters.FILE_NAME)
    save_rows(folder, first_rows, vector_of)
    staged = StagedCorpus(
        checksum=checksum,
        files=[file.name for file in files],
        documents=accepted,
        unique_texts=len(first_rows),
        rejected=rejects.count,
        filter_fields=by_value.fields(),
        chunks=rows if chunker else None,
    )
    write_staged(folder, staged)
    return staged


def write_staged(folder: Path, staged: StagedCorpus) -> None:
    """Says in a build folder that its first pass has ended, and what it found."""
    write_text(folder / SUMMARY, staged.model_dump_json(indent=2))


def read_staged(folder: Path) -> StagedCorpus | None:
    """Returns what the first pass found in a build folder, or None if it did not end."""
    summary = folder / SUMMARY
    return StagedCorpus.model_validate_json(summary.read_bytes()) if summary.exists() else None


def save_rows(folder: Path, first_rows: RowArray, vector_of: RowArray) -> None:
    """Writes what `unique_text_rows` and `vector_of_row` return."""
    np.save(folder / _TEXTS, first_rows)
    np.save(folder / _VECTORS, vector_of)


def unique_text_rows(folder: Path) -> RowArray:
    """Returns int64 [unique texts]: the first row that has each text."""
    rows: RowArray = np.load(folder / _TEXTS, mmap_mode="r")
    return rows


def vector_of_row(folder: Path) -> RowArray:
    """Returns int64 [rows]: which unique text, and so which vector, is each row's."""
    rows: RowArray = np.load(folder / _VECTORS, mmap_mode="r")
    return rows


def _cut(files: list[Path], chunker: Chunker | None) -> Iterator[Cut]:
    max_chars = MAX_CHUNKED_TEXT_CHARS if chunker else MAX_TEXT_CHARS
    for place, record in read_corpus(files, max_chars):
        if isinstance(record, Reject):
            yield place, record
        else:
            yield place, chunker.cut(record) if chunker else [record]


class _Places:
    """The place of each id, in twelve bytes a row."""

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

    def __getitem__(self, at: int) -> Place:
        return Place(self._files[self._file_of[at]], self._lines[at])


class _Ids:
    """All ids that must differ, with place and row: those of documents and of their chunks."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._places = _Places()
        self._rows = array("q")

    def append(self, id_: str, place: Place, row: int) -> None:
        self._digests += digest(id_)
        self._places.append(place)
        self._rows.append(row)

    def check(self, folder: Path) -> None:
        first, number_of = _unique(self._digests)
        repeats = np.flatnonzero(first[number_of] != np.arange(len(self._rows)))
        if not len(repeats):
            return
        at = int(repeats[0])
        before = int(first[number_of[at]])
        reader = DocumentReader(folder / documents.FILE_NAME)
        id_, cut = self._describe(at, reader)
        _, cut_before = self._describe(before, reader)
        if cut or cut_before:
            own, chunk = (before, at) if cut else (at, before)
            raise CorpusError(
                f"{self._places[own]}: _id '{id_}' is also the id of a chunk of "
                f"'{cut or cut_before}' ({self._places[chunk]}): change one of them"
            )
        raise CorpusError(
            f"{self._places[at]}: _id '{id_}' is a duplicate of {self._places[before]}; "
            f"duplicates in all: {len(repeats)}"
        )

    def _describe(self, at: int, reader: DocumentReader) -> tuple[str, str | None]:
        """Returns an id and, if it is a chunk's, the id of the document."""
        document = reader[self._rows[at]]
        is_chunk = document.parent is not None and document.parent != document.id
        own = self._digests[at * _DIGEST_BYTES : (at + 1) * _DIGEST_BYTES]
        if is_chunk and own == digest(document.id):
            return document.id, document.parent
        return document.parent or document.id, None


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
