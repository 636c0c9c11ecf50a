"""Segments: the files of some documents, opened together, and those of a version as one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyroaring import BitMap

from core.documents import DocumentReader
from core.errors import IndexVersionError
from core.filters import FilterReader
from core.manifest import DELETED_FILE, FULL_TEXT, IndexManifest
from core.packs import unpack
from core.scratch import MemoryFolder
from core.types import CountedValue
from core.versions import Part, read_parts
from stores.base import SegmentText, Vectors, VectorStore
from stores.faiss.store import FaissStore
from stores.lexical import LexicalIndex
from stores.segments import (
    JoinedDocuments,
    JoinedFilters,
    JoinedTokens,
    JoinedVectors,
    RowMap,
    join_small,
)
from stores.token_vectors import TokenVectors


@dataclass(frozen=True, slots=True)
class Segment:
    """The open, immutable files of some documents; row i is the same document in all of them.

    Attributes:
        part: What is known of them; None if they are of several segments.
        folder: Has the files, if they are of one segment.
        unpacked: Keeps the folder, if the files were unpacked.
    """

    documents: DocumentReader
    filters: FilterReader
    vectors: Vectors
    full_text: LexicalIndex | None
    tokens: TokenVectors | None
    part: Part | None = None
    folder: Path = Path()
    unpacked: MemoryFolder | None = None

    @property
    def count(self) -> int:
        """Number of rows, with those deleted."""
        return len(self.documents)

    @property
    def filter_values(self) -> Mapping[str, Sequence[CountedValue]]:
        """The first filter fields by name, each with its most frequent values; bounded."""
        return self.filters.frequent_values()


@dataclass(frozen=True, slots=True)
class Segments:
    """The open segments of a version.

    Attributes:
        all: All of them as one.
        parts: What is known of each.
        opened: Each of them by `Part.key`; the full text of several is open in `all` only.
    """

    all: Segment
    parts: Sequence[Part]
    opened: Mapping[str, Segment]


def open_segments(
    folder: Path,
    manifest: IndexManifest,
    store: VectorStore,
    known: Mapping[str, Segment] | None = None,
) -> Segments:
    """Opens the segments of the version in a folder; those that are `known` are open.

    Raises:
        IndexVersionError: If a file cannot be read, or the files do not match the manifest.
    """
    known = known or {}
    parts = read_parts(folder, manifest, parts_of(known))
    deleted = read_deleted(folder, manifest)
    if len(parts) == 1 and not deleted:
        only = parts[0]
        opened = known.get(only.key)
        if opened is None or (opened.full_text is None and FULL_TEXT in only.manifest.components):
            opened = open_segment(only, store)
        return Segments(opened, parts, {only.key: opened})
    files = FaissStore()  # for the base alone a GPU has room
    each = {}
    for at, part in enumerate(parts):
        own = known.get(part.key)
        each[part.key] = own or open_segment(part, files if at else store, full_text=False)
    open_parts = list(each.values())
    rows = RowMap([one.count for one in open_parts], deleted)
    vectors: Sequence[Vectors] = [one.vectors for one in open_parts]
    if manifest.store == "faiss":  # in Milvus each segment is searched with its own filters
        vectors = join_small(vectors)
    text = None
    if FULL_TEXT in manifest.components:
        texts = [
            SegmentText(one.folder, part.manifest, one.documents, one.full_text)
            for part, one in zip(parts, open_parts, strict=True)
        ]
        text = store.join_full_text(parts[0].folder, texts, deleted)
    tokens = [one.tokens for one in open_parts if one.tokens]
    joined = Segment(
        JoinedDocuments([one.documents for one in open_parts], rows),
        JoinedFilters([one.filters for one in open_parts], manifest.filter_fields, rows),
        JoinedVectors(vectors, RowMap([one.count for one in vectors], deleted)),
        text,
        JoinedTokens(tokens, rows) if len(tokens) == len(parts) else None,
    )
    return Segments(joined, parts, each)


def parts_of(segments: Mapping[str, Segment]) -> list[Part]:
    """Returns what is known of each of some open segments."""
    return [one.part for one in segments.values() if one.part]


def read_deleted(folder: Path, manifest: IndexManifest) -> BitMap:
    """Reads which rows a version has no more; IndexVersionError if the file is damaged."""
    if DELETED_FILE not in manifest.files:
        return BitMap()
    path = folder / DELETED_FILE
    try:
        deleted = BitMap.deserialize(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = "is not a readable set of rows: activate another version, or build the index again"
        raise IndexVersionError.at(path, reason, "unreadable_version") from error
    counted = sum(one.deleted for one in manifest.segments)
    if len(deleted) != counted or (deleted and deleted.max() >= manifest.rows):
        reason = f"has {len(deleted)} rows instead of {counted}: build the index again"
        raise IndexVersionError.at(path, reason, "wrong_document_count")
    return deleted


def open_segment(part: Part, store: VectorStore, *, full_text: bool = True) -> Segment:
    """Opens the files of one segment, which are unpacked first if they are packed.

    Args:
        full_text: Whether to open the full text too, if it is in files.

    Raises:
        IndexVersionError: If a file cannot be read, or the files do not match the manifest.
    """
    folder, manifest, unpacked = part.folder, part.manifest, None
    if part.is_packed:
        unpacked = MemoryFolder()
        folder = unpacked.path
        unpack(part.path, part.pack(), manifest.all_files, folder)
    contents = store.open_contents(folder, manifest, full_text=full_text)
    # Last, because a GPU may have to give up the vectors of the version that is served.
    vectors = store.open(folder, manifest)
    return Segment(
        contents.documents,
        contents.filters,
        vectors,
        contents.full_text,
        contents.tokens,
        part,
        folder,
        unpacked,
    )
