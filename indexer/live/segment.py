"""Writes a segment: the files of some new documents, in the hidden folder of a new version."""

import os
import shutil
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
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
from core.scratch import temporary_folder
from core.types import Document, FloatArray
from core.versions import segment_manifest
from stores.faiss.store import FaissStore, write_flat
from stores.lexical import write_full_text
from stores.segment import Segment, open_segment
from stores.token_vectors import token_vector_spec, write_token_vectors

# Tantivy flushes its files to disk one by one, some twice. Those of fewer rows than this are
# written to memory first.
_IN_MEMORY, _MEMORY = 4096, Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class NewSegment:
    """A segment that was written and verified.

    Attributes:
        facts: What `segment.json` has.
        sha256: The checksum of that file.
        opened: Its open files, without the full text.
    """

    facts: SegmentFacts
    sha256: str
    opened: Segment

    @classmethod
    def of(
        cls, folder: Path, version: str, written: tuple[SegmentFacts, str], base: IndexManifest
    ) -> "NewSegment":
        """Opens what `write_segment` wrote; IndexVersionError if a file is not as it should be."""
        known = segment_manifest(version, written[0], base)
        opened = open_segment(folder, known, FaissStore())
        return cls(*written, replace(opened, full_text=None))


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
        The facts of the segment, and the checksum of the file that has them.

    Raises:
        CareError: If a file cannot be written.
    """
    count = 0
    with (
        FilterWriter(folder / filters.FILE_NAME) as by_value,
        DocumentWriter(folder / documents.FILE_NAME, chunked=base.chunking is not None) as writer,
    ):
        for count, document in enumerate(rows, start=1):
            by_value.add(count - 1, document.metadata)
            writer.write(document)
    fields = by_value.fields()
    write_flat(vectors, base.encoder.dimension, folder / VECTORS_FILE)
    components: dict[str, Component] = {}
    if FULL_TEXT in base.components:
        components[FULL_TEXT] = _write_full_text(folder, fields, count, progress=progress)
    spec = token_vector_spec(base)
    if spec and tokens is not None:
        components[TOKENS] = write_token_vectors(folder, tokens, spec)
    names = (documents.FILE_NAME, filters.FILE_NAME, VECTORS_FILE)
    facts = SegmentFacts(
        factory="Flat",
        search_parameters={},
        count=count,
        filter_fields=fields,
        files={name: file_record(folder / name) for name in names},
        components=components,
    )
    path = folder / SEGMENT_FILE
    path.write_text(facts.model_dump_json(indent=2), encoding="utf-8")
    return facts, sha256_file(path)


def file_record(path: Path) -> FileRecord:
    """Returns size and checksum of a file, whose pages are still in memory."""
    return FileRecord(bytes=path.stat().st_size, sha256=sha256_file(path))


def _write_full_text(
    folder: Path, fields: dict[str, int], count: int, *, progress: bool
) -> Component:
    reader = DocumentReader(folder / documents.FILE_NAME)
    values = FilterReader(folder / filters.FILE_NAME, fields, count)
    if count > _IN_MEMORY or not os.access(_MEMORY, os.W_OK):
        return write_full_text(folder, reader, values, progress=progress)
    stack = ExitStack()
    scratch = stack.enter_context(temporary_folder(_MEMORY))
    try:
        component = write_full_text(scratch, reader, values, progress=progress)
        (folder / FULL_TEXT).mkdir()
        for name in component.files:
            shutil.copyfile(scratch / name, folder / name)
    finally:
        # A thread of Tantivy can still write a hidden file: the next writer removes the folder.
        with suppress(OSError):
            stack.close()
    return component
