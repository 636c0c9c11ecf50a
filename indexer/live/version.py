"""Composes the version that a write makes of another one, and publishes it."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pyroaring import BitMap

from core.files import sync_folder
from core.filters import FilterReader
from core.manifest import (
    DELETED_FILE,
    SCHEMA_VERSION,
    CorpusRecord,
    IndexManifest,
    SegmentEntry,
    UpdateRecord,
)
from core.versions import write_new_manifest
from indexer.live.joining import Joined
from indexer.live.segment import NewSegment, file_record
from indexer.publication import IndexWriter
from indexer.state import IndexState
from stores.segment import Segment


@dataclass(frozen=True, slots=True)
class Carried:
    """A segment of another version that a new one has too."""

    entry: SegmentEntry
    opened: Segment
    dead: BitMap


@dataclass(frozen=True, slots=True)
class Changed:
    """What a new version changes."""

    removed: BitMap  # rows of the version before that the new one has no more
    record: UpdateRecord | None = None  # numbers of documents; None if they stay
    segment: NewSegment | None = None  # the new documents, if there are any
    joined: Joined | None = None  # segments that another one replaces
    carried: Sequence[Carried] = ()  # segments of other versions
    corpus: Mapping[str, object] | None = None  # files, rejected, truncated, tokens
    encoded: int = 0  # texts that were encoded
    fusion: Mapping[str, float] | None = None  # of a hybrid search, if that changes


def compose(state: IndexState, version: str, changed: Changed) -> tuple[IndexManifest, BitMap]:
    """Returns the manifest of a new version, and the rows that the version has no more.

    What is known at publication is not in it yet. A segment besides the base of which no document
    is left is left out.
    """
    layout = _Layout()
    gone = state.deleted | changed.removed
    joined = changed.joined
    replaced: dict[str, BitMap] = {}
    for place, (entry, part, (start, end)) in enumerate(
        zip(state.entries, state.parts, state.rows.spans(), strict=True)
    ):
        own = (gone & BitMap(range(start, end))).shift(-start)
        if joined and part.key in joined.sources:
            replaced[part.key] = own
            if len(replaced) == len(joined.sources):
                layout.add(joined.entry, joined.segment.opened, joined.dead(replaced))
        elif not place or len(own) < entry.count:
            layout.add(entry, state.opened[part.key], own)
    fields: dict[str, int] = dict(state.manifest.filter_fields)
    more = list(changed.carried)
    if new := changed.segment:
        entry = SegmentEntry(folder=version, sha256=new.sha256, count=new.count)
        more.append(Carried(entry, new.opened, BitMap()))
    for one in more:
        for field, count in one.opened.filters.count_new(layout.filters).items():
            fields[field] = fields.get(field, 0) + count
        layout.add(one.entry, one.opened, one.dead)
    entries, deleted = layout.entries, layout.deleted
    count = sum(entry.count - entry.deleted for entry in entries)
    manifest = state.manifest.model_copy(
        update={
            "schema_version": SCHEMA_VERSION,
            "version": version,
            "count": count,
            "filter_fields": fields,
            "files": {},
            "corpus": _corpus(state, changed, entries, deleted, count),
            "fusion": dict(state.manifest.fusion if changed.fusion is None else changed.fusion),
            "created_at": datetime.now(UTC),
            "segments": tuple(entries),
        }
    )
    return manifest, deleted


class _Layout:
    """Segments one after another, and which rows of all are deleted."""

    def __init__(self) -> None:
        self.entries: list[SegmentEntry] = []
        self.filters: list[FilterReader] = []
        self.deleted = BitMap()
        self._first = 0

    def add(self, entry: SegmentEntry, opened: Segment, dead: BitMap) -> None:
        """Adds a segment; `dead` are those of its rows that are deleted."""
        self.entries.append(entry.model_copy(update={"deleted": len(dead)}))
        self.filters.append(opened.filters)
        self.deleted |= dead.shift(self._first)
        self._first += entry.count


def _corpus(
    state: IndexState,
    changed: Changed,
    entries: Sequence[SegmentEntry],
    deleted: BitMap,
    count: int,
) -> CorpusRecord:
    """Returns the record of a corpus; texts of deleted documents count until they are merged."""
    old, record = state.manifest.corpus, changed.record
    facts = [
        [(e.folder, e.sha256) for e in entries],
        hashlib.sha256(deleted.serialize()).hexdigest(),
    ]
    texts = min(old.unique_texts + changed.encoded, count)
    known = {
        "checksum": hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        "documents": old.documents + (record.added - record.deleted if record else 0),
        "unique_texts": texts,
        "reused_texts": max(0, texts - changed.encoded),
        "rejected": 0,
        "truncated": 0,
        "tokens": 0,
        "update": record or old.update,
        "chunks": None if state.manifest.chunking is None else count,
    }
    return old.model_copy(update=known | dict(changed.corpus or {}))


def publish(
    index: IndexWriter,
    folder: Path,
    manifest: IndexManifest,
    deleted: BitMap,
    number: int,
) -> IndexManifest:
    """Publishes a version whose segment, if any, is in its hidden folder; locked for changes.

    All files are flushed to disk before the folder gets its name, and that before it is activated.
    Returns the manifest with parent, number and files.
    """
    files = {}
    if deleted:
        (folder / DELETED_FILE).write_bytes(deleted.serialize())
        files[DELETED_FILE] = file_record(folder / DELETED_FILE)
    known = {"parent": index.active_or_none(), "number": number, "files": files}
    manifest = manifest.model_copy(update=known)
    write_new_manifest(folder, manifest)
    sync_folder(folder)
    index.show(folder, manifest.version)
    return manifest
