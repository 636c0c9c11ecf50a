"""First pass of a build: the corpus is checked and its documents written by rows.

corpus.json      what was read; written last
documents.arrow  the documents or, if long ones are cut, their chunks, row by row
filters.arrow    rows by metadata value
texts.npy        int64 [unique texts], the first row that has the text
vectors.npy      int64 [rows], which unique text is the row's
rejects.jsonl    file, line and reason of each record left out
"""

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from core import documents, filters
from core.documents import DocumentReader, DocumentWriter
from core.errors import CorpusError
from core.files import sync, write_text
from core.filters import FilterWriter
from core.manifest import UpdateRecord
from core.progress import progress_bar
from core.scratch import Scratch, scratch
from core.text import document_text
from core.types import Document, RowArray
from indexer.chunking import Chunker, cut
from indexer.corpus import Place, Reject, max_text_chars, read_corpus
from indexer.digests import DIGEST, digest, first_equal, first_places, numbers

SUMMARY = "corpus.json"
REJECTS = "rejects.jsonl"

_TEXTS = "texts.npy"
_VECTORS = "vectors.npy"

# The chunks of a document or, if it is not cut, the document alone.
Chunks = tuple[Place, list[Document] | Reject]


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
    chunks: Iterable[Chunks],
    folder: Path,
    *,
    files: list[str],
    checksum: str,
    chunked: bool,
    max_reject_rate: float,
    progress: bool,
) -> StagedCorpus:
    """Checks a corpus and writes its documents by rows, or reads what an earlier run wrote.

    The documents, some of them cut if they are `chunked`, come from files of these names and this
    checksum. At most the share `max_reject_rate` of them may be left out.

    Raises:
        CorpusError: If ids are duplicated, too many records are rejected, or none is left.
    """
    earlier = read_staged(folder)
    if earlier and earlier.rejected / (earlier.rejected + earlier.documents) <= max_reject_rate:
        return earlier

    accepted = rows = rejected = 0
    first_reject = ""
    with (
        scratch(folder, DIGEST) as texts,
        scratch(folder, DIGEST) as id_digests,
        scratch(folder, np.int64) as id_places,
    ):
        ids = _Ids(id_digests, id_places)
        with (
            FilterWriter(folder / filters.FILE_NAME) as by_value,
            DocumentWriter(folder / documents.FILE_NAME, chunked=chunked) as writer,
            (folder / REJECTS).open("w", encoding="utf-8") as reject_file,
            progress_bar("read", show=progress) as bar,
        ):
            for place, parts in chunks:
                bar.update()
                if isinstance(parts, Reject):
                    line = {"file": place.file, "line": place.line, "reason": parts.reason}
                    reject_file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    first_reject = first_reject or f"{place}: {parts.reason}"
                    rejected += 1
                    continue
                accepted += 1
                if parts[0].id != (own := parts[0].parent or parts[0].id):
                    ids.append(own, place, rows)
                for document in parts:
                    by_value.add(rows, document.metadata)
                    ids.append(document.id, place, rows)
                    texts.append(digest(document_text(document.title, document.text)))
                    writer.write(document)
                    rows += 1
        if not (total := rejected + accepted):
            raise CorpusError("the corpus is empty", code="empty_corpus")
        if rejected / total > max_reject_rate or not accepted:
            message = (
                f"{rejected} of {total} records are rejected ({rejected / total:.1%}, allowed "
                f"{max_reject_rate:.1%}); the first is {first_reject}; all are listed in "
                f"{folder / REJECTS}"
            )
            raise CorpusError(message, code="too_many_rejects", rejected=rejected, total=total)
        ids.check(folder)
        equal = first_equal(texts.array(), folder)
        first_rows = first_places(equal, folder)
        np.save(folder / _TEXTS, first_rows)
        np.save(folder / _VECTORS, numbers(equal, first_rows, folder))
    staged = StagedCorpus(
        checksum=checksum,
        files=files,
        documents=accepted,
        unique_texts=len(first_rows),
        rejected=rejected,
        filter_fields=by_value.fields(),
        chunks=rows if chunked else None,
    )
    write_staged(folder, staged)
    return staged


def write_staged(folder: Path, staged: StagedCorpus) -> None:
    """Writes down that the first pass has ended, once all that it wrote is on disk."""
    for name in (documents.FILE_NAME, filters.FILE_NAME, REJECTS, _TEXTS, _VECTORS):
        sync(folder / name)
    write_text(folder / SUMMARY, staged.model_dump_json(indent=2))


def read_staged(folder: Path) -> StagedCorpus | None:
    """Returns what the first pass found in a build folder, or None if it must be made again."""
    with suppress(FileNotFoundError, ValidationError):
        return StagedCorpus.model_validate_json((folder / SUMMARY).read_bytes())
    return None


def unique_text_rows(folder: Path) -> RowArray:
    """Returns int64 [unique texts]: the first row that has each text."""
    rows: RowArray = np.load(folder / _TEXTS, mmap_mode="r")
    return rows


def row_texts(reader: DocumentReader, rows: Iterable[int]) -> Iterator[str]:
    """Yields the text that is encoded of each of some rows."""
    for row in rows:
        document = reader[int(row)]
        yield document_text(document.title, document.text)


def vector_of_row(folder: Path) -> RowArray:
    """Returns int64 [rows]: which unique text, and so which vector, is each row's."""
    rows: RowArray = np.load(folder / _VECTORS, mmap_mode="r")
    return rows


def write_version(
    folder: Path, target: Path, staged: StagedCorpus, keep: NDArray[np.bool_] | None
) -> tuple[RowArray, dict[str, int]]:
    """Writes the documents and filters of a version from a build folder into its own, `target`.

    Indexed are the rows to `keep`, bool [staged rows], or if that is None all.

    Returns:
        int64 [rows], which unique text, and so which vector, is each row's; and the number of
        values of each metadata field.
    """
    vector_of, fields = vector_of_row(folder), staged.filter_fields
    if keep is None:
        for name in (documents.FILE_NAME, filters.FILE_NAME):
            shutil.copyfile(folder / name, target / name)
    else:
        vector_of = vector_of[keep]
        reader = DocumentReader(folder / documents.FILE_NAME)
        with (
            FilterWriter(target / filters.FILE_NAME) as by_value,
            DocumentWriter(target / documents.FILE_NAME, chunked=reader.chunked) as writer,
        ):
            for row, document in enumerate(itertools.compress(reader, keep)):
                by_value.add(row, document.metadata)
                writer.write(document)
        fields = by_value.fields()
    return vector_of, fields


def read_chunks(files: list[Path], chunker: Chunker | None) -> Iterator[Chunks]:
    """Returns the documents of files with their places, cut if there is a chunker.

    Raises:
        CorpusError: If a file cannot be read at all.
    """
    records = read_corpus(files, max_text_chars(cut=chunker is not None))
    return ((place, cut(record, chunker)) for place, record in records)


class _Ids:
    """All ids that must differ: those of documents and of their chunks.

    Scratch files take their digests, and for each the number of the file, the line and the row.
    """

    def __init__(self, digests: Scratch, places: Scratch) -> None:
        self._digests = digests
        self._places = places
        self._files: list[str] = []

    def append(self, id_: str, place: Place, row: int) -> None:
        if not self._files or self._files[-1] != place.file:
            self._files.append(place.file)
        self._digests.append(digest(id_))
        self._places.append(np.array([len(self._files) - 1, place.line, row]).data)

    def check(self, folder: Path) -> None:
        digests = self._digests.array()
        equal = first_equal(digests, folder)
        repeats = len(equal) - len(first_places(equal, folder))
        if not repeats:
            return
        at = int(np.flatnonzero(equal != np.arange(len(equal)))[0])
        before = int(equal[at])
        reader = DocumentReader(folder / documents.FILE_NAME)
        places = self._places.array().reshape(-1, 3)
        id_, cut, place = self._describe(digests[at], places[at], reader)
        _, cut_before, place_before = self._describe(digests[before], places[before], reader)
        if cut or cut_before:
            own, chunk = (place_before, place) if cut else (place, place_before)
            message = (
                f"{own}: _id '{id_}' is also the id of a chunk of "
                f"'{cut or cut_before}' ({chunk}): change one of them"
            )
            raise CorpusError(message, code="id_is_a_chunk", path=own.file, line=own.line, id=id_)
        raise CorpusError(
            f"{place}: _id '{id_}' is a duplicate of {place_before}; duplicates in all: {repeats}",
            code="duplicate_id",
            path=place.file,
            line=place.line,
            id=id_,
            count=repeats,
        )

    def _describe(
        self, own: np.bytes_, place: RowArray, reader: DocumentReader
    ) -> tuple[str, str | None, Place]:
        """Returns an id, if it is a chunk's the id of the document, and its place."""
        file, line, row = place.tolist()
        document = reader[row]
        is_chunk = document.parent is not None and document.parent != document.id
        if is_chunk and own == np.array(digest(document.id), DIGEST):
            return document.id, document.parent, Place(self._files[file], line)
        return document.parent or document.id, None, Place(self._files[file], line)
