"""First pass of a build: validates the corpus and writes its documents to the build folder.

corpus.json      summary of the pass; written last
documents.arrow  one row per document or, with chunking, per chunk
filters.arrow    rows by metadata value
texts.npy        int64 [unique texts], the first row with each text
vectors.npy      int64 [rows], number of each row's unique text
rejects.jsonl    file, line and reason of each rejected record
"""

import itertools
import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from core import documents, filters
from core.documents import DocumentReader, DocumentWriter
from core.errors import CorpusError
from core.files import read_small, sync, write_text
from core.filters import FilterWriter
from core.manifest import UpdateRecord
from core.progress import progress_bar
from core.scratch import Scratch, scratch
from core.text import document_text
from core.types import Document, RowArray
from indexer.chunking import Chunker, split_record
from indexer.corpus import Location, Reading, read_corpus
from indexer.duplicates import (
    DIGEST,
    MOST_TEXTS,
    SIGNATURE,
    count_near_duplicates,
    digest,
    first_occurrences,
    inverse_indices,
    signature,
    unique_positions,
)
from indexer.limits import MAX_INDEX_FIELDS, max_text_chars
from indexer.readers.source import Report
from indexer.records import Reject

SUMMARY = "corpus.json"
REJECTS = "rejects.jsonl"

# Fields that a warning names.
_NAMED = 5
_log = logging.getLogger(__name__)

# Rows that are read at a time.
_READ_ROWS = 1024
_TEXTS = "texts.npy"
_VECTORS = "vectors.npy"

# Location of a record, and its chunks (without chunking, the document) or the reason to reject it.
Chunks = tuple[Location, list[Document] | Reject]


class StagedCorpus(BaseModel):
    """Summary of the first pass, stored as `corpus.json`."""

    checksum: str
    files: list[str]
    documents: int
    unique_texts: int
    rejected: int
    filter_fields: dict[str, int]  # number of distinct values of each metadata field
    update: UpdateRecord | None = None  # changes of an update, or None
    chunks: int | None = None  # number of chunks, or None without chunking
    near_duplicates: int | None = None  # of the unique texts; None if they were not counted


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
    """Validates a corpus and writes its documents to the build folder.

    If an earlier run completed the pass, its summary is returned and nothing is read. CorpusError
    if the corpus is empty, ids are duplicated, too many records are rejected, or metadata have too
    many fields.
    """
    earlier = read_staged(folder)
    if earlier and earlier.rejected / (earlier.rejected + earlier.documents) <= max_reject_rate:
        return earlier

    accepted = rows = rejected = 0
    first_reject = ""
    fields: set[str] = set()
    unfilterable: Counter[str] = Counter()
    with (
        scratch(folder, DIGEST) as texts,
        scratch(folder, DIGEST) as id_digests,
        scratch(folder, np.int64) as id_locations,
        scratch(folder, np.uint32) as signatures,
    ):
        ids = _Ids(id_digests, id_locations)
        with (
            FilterWriter(folder / filters.FILE_NAME) as by_value,
            DocumentWriter(folder / documents.FILE_NAME, chunked=chunked) as writer,
            (folder / REJECTS).open("w", encoding="utf-8") as reject_file,
            progress_bar("read", show=progress) as bar,
        ):
            for location, parts in chunks:
                bar.update()
                if isinstance(parts, Reject):
                    line = {"file": location.file, "line": location.line, "reason": parts.reason}
                    reject_file.write(json.dumps(line, ensure_ascii=False) + "\n")
                    first_reject = first_reject or f"{location}: {parts.reason}"
                    rejected += 1
                    continue
                accepted += 1
                metadata = parts[0].metadata.items()
                fields.update(name for name, value in metadata if value is not None)
                unfilterable.update(name for name, value in metadata if _is_nested(value))
                if len(fields) > MAX_INDEX_FIELDS:
                    message = (
                        f"{location}: the corpus has more than {MAX_INDEX_FIELDS} different "
                        "metadata fields up to this record: use fewer names, and what differs "
                        "between documents as values"
                    )
                    raise CorpusError(
                        message,
                        code="too_many_fields",
                        path=location.file,
                        line=location.line,
                        limit=MAX_INDEX_FIELDS,
                    )
                if parts[0].id != (own := parts[0].parent or parts[0].id):
                    ids.append(own, location, rows)
                for document in parts:
                    by_value.add(rows, document.metadata)
                    ids.append(document.id, location, rows)
                    text = document_text(document.title, document.text)
                    texts.append(digest(text))
                    if rows < MOST_TEXTS:
                        signatures.append(signature(text).data)
                    writer.write(document)
                    rows += 1
        if not (total := rejected + accepted):
            message = f"the corpus has no records: {', '.join(files)}"
            raise CorpusError(message, code="empty_corpus", files=files)
        if rejected / total > max_reject_rate or not accepted:
            message = (
                f"{rejected} of {total} records are rejected ({rejected / total:.1%}, allowed "
                f"{max_reject_rate:.1%}); the first is {first_reject}; all are listed in "
                f"{folder / REJECTS}: correct them, or allow more (--max-reject-rate)"
            )
            raise CorpusError(message, code="too_many_rejects", rejected=rejected, total=total)
        ids.check(folder)
        _warn("metadata that filters cannot use, as they are objects", unfilterable)
        equal = first_occurrences(texts.array(), folder)
        first_rows = unique_positions(equal, folder)
        np.save(folder / _TEXTS, first_rows)
        np.save(folder / _VECTORS, inverse_indices(equal, first_rows, folder))
        near = None
        if rows <= MOST_TEXTS:
            of_rows = signatures.array().reshape(rows, *SIGNATURE.shape)
            near = count_near_duplicates(of_rows[first_rows])
    staged = StagedCorpus(
        checksum=checksum,
        files=files,
        documents=accepted,
        unique_texts=len(first_rows),
        rejected=rejected,
        filter_fields=by_value.fields(),
        chunks=rows if chunked else None,
        near_duplicates=near,
    )
    write_staged(folder, staged)
    return staged


def _is_nested(value: Any) -> bool:
    values = value if isinstance(value, list) else (value,)
    return any(isinstance(each, dict | list) for each in values)


def write_staged(folder: Path, staged: StagedCorpus) -> None:
    """Writes the summary of the first pass after its files are flushed to disk."""
    for name in (documents.FILE_NAME, filters.FILE_NAME, REJECTS, _TEXTS, _VECTORS):
        sync(folder / name)
    write_text(folder / SUMMARY, staged.model_dump_json(indent=2))


def read_staged(folder: Path) -> StagedCorpus | None:
    """Returns the summary of a completed first pass, or None if the pass must be repeated."""
    with suppress(OSError, ValidationError):
        return StagedCorpus.model_validate_json(read_small(folder / SUMMARY))
    return None


def unique_text_rows(folder: Path) -> RowArray:
    """Returns int64 [unique texts]: the first row with each text."""
    rows: RowArray = np.load(folder / _TEXTS, mmap_mode="r")
    return rows


def row_texts(reader: DocumentReader, rows: Iterable[int]) -> Iterator[str]:
    """Yields the text to encode for each of the rows."""
    wanted = [int(row) for row in rows]
    for start in range(0, len(wanted), _READ_ROWS):
        for stored in reader.read(wanted[start : start + _READ_ROWS]):
            yield document_text(stored.title, stored.text)


def vector_of_row(folder: Path) -> RowArray:
    """Returns int64 [rows]: number of each row's unique text, and thus of its vector."""
    rows: RowArray = np.load(folder / _VECTORS, mmap_mode="r")
    return rows


def write_version(
    folder: Path, target: Path, staged: StagedCorpus, keep: NDArray[np.bool_] | None
) -> tuple[RowArray, dict[str, int]]:
    """Writes the documents and filters of a version from the build folder to `target`.

    `keep`, bool [staged rows], says which rows to index; None for all.

    Returns:
        int64 [rows], number of each row's unique text; and the number of distinct values of each
        metadata field.
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


def read_chunks(
    files: list[Path], chunker: Chunker | None, reading: Reading | None = None
) -> Iterator[Chunks]:
    """Reads the records of files and splits their documents into chunks, if a chunker is given."""
    ignored: Counter[str] = Counter()
    max_chars = max_text_chars(chunked=chunker is not None)
    records = read_corpus(files, max_chars, ignored, reading, _Reports().say)
    broken: list[str] = []
    for location, record in records:
        if isinstance(record, Reject) and not location.line:  # one reject, but a file of documents
            broken.append(f"{location} {record.reason}")
        yield location, split_record(record, chunker)
    if broken:
        more = f"; and {len(broken) - _NAMED} more" if len(broken) > _NAMED else ""
        message = "files whose documents are missing, all or those after the fault: %s%s"
        _log.warning(message, "; ".join(broken[:_NAMED]), more)
    _warn("fields that are not read: put what filters or readers need into metadata", ignored)


def _warn(about: str, records: Counter[str]) -> None:
    """Logs one warning that names fields, the most frequent first, and counts their records."""
    if records:
        named = ", ".join(f"{name} ({n:,} records)" for name, n in records.most_common(_NAMED))
        more = f" and {len(records) - _NAMED} more" if len(records) > _NAMED else ""
        _log.warning("%s: %s%s", about, named, more)


class _Reports:
    """Says how files are read whose encoding was found or whose fields were guessed."""

    def __init__(self) -> None:
        self._said = 0

    def say(self, report: Report) -> None:
        if not report.encoding and not report.guessed:
            return
        self._said += 1
        if self._said <= _NAMED:
            guessed = "; the fields are guessed: --id-field, --title-field, --text-field and "
            guessed += "--metadata-fields name others"
            _log.warning("%s%s", report, guessed if report.guessed else "")
        elif self._said == _NAMED + 1:
            _log.warning("more files are read with a guess: --dry-run shows three passages")


class _Ids:
    """Detects duplicates among the ids of documents and chunks.

    Scratch files hold the digest of each id, and int64 [3]: file number, line and row.
    """

    def __init__(self, digests: Scratch, locations: Scratch) -> None:
        self._digests = digests
        self._locations = locations
        self._files: list[str] = []

    def append(self, id_: str, location: Location, row: int) -> None:
        if not self._files or self._files[-1] != location.file:
            self._files.append(location.file)
        self._digests.append(digest(id_))
        self._locations.append(np.array([len(self._files) - 1, location.line, row]).data)

    def check(self, folder: Path) -> None:
        digests = self._digests.array()
        equal = first_occurrences(digests, folder)
        repeats = len(equal) - len(unique_positions(equal, folder))
        if not repeats:
            return
        at = int(np.flatnonzero(equal != np.arange(len(equal)))[0])
        before = int(equal[at])
        reader = DocumentReader(folder / documents.FILE_NAME)
        locations = self._locations.array().reshape(-1, 3)
        id_, parent, location = self._describe(digests[at], locations[at], reader)
        _, parent_before, location_before = self._describe(
            digests[before], locations[before], reader
        )
        if parent or parent_before:
            own, chunk = (location_before, location) if parent else (location, location_before)
            message = (
                f"{own}: _id '{id_}' is also the id of a chunk of document "
                f"'{parent or parent_before}' ({chunk}): rename one of the documents"
            )
            raise CorpusError(message, code="id_is_a_chunk", path=own.file, line=own.line, id=id_)
        raise CorpusError(
            f"{location}: _id '{id_}' is a duplicate of {location_before}; {repeats} duplicates in "
            "total: give each document its own id",
            code="duplicate_id",
            path=location.file,
            line=location.line,
            id=id_,
            count=repeats,
        )

    def _describe(
        self, own: np.bytes_, location: RowArray, reader: DocumentReader
    ) -> tuple[str, str | None, Location]:
        """Returns an id, the id of its document if it is a chunk's, and its location."""
        file, line, row = location.tolist()
        document = reader[row]
        is_chunk = document.parent is not None and document.parent != document.id
        if is_chunk and own == np.array(digest(document.id), DIGEST):
            return document.id, document.parent, Location(self._files[file], line)
        return document.parent or document.id, None, Location(self._files[file], line)
