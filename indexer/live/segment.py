"""Writes a segment: the files of some new documents, in the hidden folder of a new version."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from core import documents, filters
from core.documents import DocumentReader, DocumentWriter
from core.files import sha256_file
from core.filters import FilterReader, FilterWriter
from core.manifest import (
    FULL_TEXT,
    SEGMENT_FILE,
    TOKENS,
    VECTORS_FILE,
    Component,
    FileRecord,
    IndexManifest,
    SegmentFacts,
)
from core.packs import MOST_ROWS, PACK_FILE, write_pack
from core.scratch import MemoryFolder
from core.types import Document, FloatArray
from core.versions import Part, segment_manifest
from stores.faiss.store import FaissStore, write_flat
from stores.lexical import write_full_text
from stores.segment import Segment, open_segment
from stores.token_vectors import token_vector_spec, write_token_vectors

_CHECKSUM = re.compile(r'"sha256":"[0-9a-f]+"')


@dataclass(frozen=True, slots=True)
class NewSegment:
    """A segment that was written and verified."""

    count: int
    sha256: str
    opened: Segment

    @classmethod
    def of(
        cls, folder: Path, version: str, written: tuple[SegmentFacts, str], base: IndexManifest
    ) -> "NewSegment":
        """Opens what `write_segment` wrote in the hidden folder of a version.

        IndexVersionError if a file is not as it should be.
        """
        facts, sha256 = written
        name = PACK_FILE if facts.count <= MOST_ROWS else SEGMENT_FILE
        known = segment_manifest(version, facts, base)
        part = Part(f"{version} {sha256}", folder / name, known)
        opened = open_segment(part, FaissStore())
        part = replace(part, path=folder.with_name(version) / name)
        return cls(facts.count, sha256, replace(opened, full_text=None, part=part))


def write_segment(
    folder: Path,
    base: IndexManifest,
    rows: Iterable[Document],
    vectors: Iterable[FloatArray],
    tokens: Iterable[NDArray[np.uint8]] | None,
    *,
    progress: bool = False,
) -> tuple[SegmentFacts, str]:
    """Writes documents with their filter values, vectors, full text and token vectors.

    Args:
        folder: The hidden folder, which is flushed to disk later.
        base: The manifest of the version to which the segment is added.
        rows: Documents or, with chunking, chunks.
        vectors: Their vectors in parts, float32 [n, dimension].
        tokens: Their token vectors, uint8 [tokens, bytes] each, if the version has any.

    Returns:
        The facts of the segment, and the checksum of the file that has them: `segment.json` or, of
        a small segment, a pack.
    """
    rows = iter(rows)
    first = list(islice(rows, MOST_ROWS + 1))
    if len(first) > MOST_ROWS:
        new = chain(first, rows), vectors, tokens
        facts = write_files(folder, base, *new, progress=progress)
        path = folder / SEGMENT_FILE
        path.write_text(facts.model_dump_json(indent=2), encoding="utf-8")
        return facts, sha256_file(path)
    files = MemoryFolder()  # Tantivy flushes each of its files, some twice
    facts = write_files(files.path, base, first, vectors, tokens, progress=progress)
    packed = (files.path / name for name in facts.all_files)
    line = _CHECKSUM.sub('"sha256":""', facts.model_dump_json())  # the pack has one of all
    content = write_pack(folder / PACK_FILE, line.encode(), packed)
    return facts, hashlib.sha256(content).hexdigest()


def write_files(
    folder: Path,
    base: IndexManifest,
    rows: Iterable[Document],
    vectors: Iterable[FloatArray],
    tokens: Iterable[NDArray[np.uint8]] | None,
    *,
    progress: bool = False,
) -> SegmentFacts:
    """Writes the files of documents, also of few, and returns their facts; see `write_segment`."""
    count, fields = write_documents(folder, rows, chunked=base.chunking is not None)
    write_flat(vectors, base.encoder.dimension, folder / VECTORS_FILE)
    components: dict[str, Component] = {}
    if FULL_TEXT in base.components and base.store == "faiss":  # else services make it of documents
        reader = DocumentReader(folder / documents.FILE_NAME)
        values = FilterReader(folder / filters.FILE_NAME, fields, count)
        components[FULL_TEXT] = write_full_text(folder, reader, values, progress=progress)
    spec = token_vector_spec(base)
    if spec and tokens is not None:
        components[TOKENS] = write_token_vectors(folder, tokens, spec)
    names = (documents.FILE_NAME, filters.FILE_NAME, VECTORS_FILE)
    return SegmentFacts(
        factory="Flat",
        search_parameters={},
        count=count,
        filter_fields=fields,
        files={name: file_record(folder / name) for name in names},
        components=components,
    )


def write_documents(
    folder: Path, rows: Iterable[Document], *, chunked: bool
) -> tuple[int, dict[str, int]]:
    """Writes documents and their filter values.

    Returns:
        The number of rows, and of distinct values of each metadata field.
    """
    count = 0
    with (
        FilterWriter(folder / filters.FILE_NAME) as by_value,
        DocumentWriter(folder / documents.FILE_NAME, chunked=chunked) as writer,
    ):
        for count, document in enumerate(rows, start=1):
            by_value.add(count - 1, document.metadata)
            writer.write(document)
    return count, by_value.fields()


def file_record(path: Path) -> FileRecord:
    """Returns size and checksum of a file, whose pages are still in memory."""
    return FileRecord(bytes=path.stat().st_size, sha256=sha256_file(path))
