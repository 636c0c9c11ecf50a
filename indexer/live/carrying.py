"""Publishes a build; what was written to the index since it began becomes part of its version."""

from collections.abc import Iterator
from pathlib import Path

from pyroaring import BitMap

from core.errors import CareError, IndexVersionError
from core.files import sha256_file, sync
from core.manifest import FULL_TEXT, SEGMENT_FILE, TOKENS, IndexManifest, UpdateRecord
from core.versions import CHECKSUM, MANIFEST, Part
from indexer.live.version import Carried, Changed, compose, publish
from indexer.publication import WRITE, IndexWriter
from indexer.state import IndexState, contents, own_id
from stores.segment import Segment, open_segment


def active_state(index: IndexWriter) -> IndexState | None:
    """Opens the active version, for `publish_build`; None if there is none that takes writes."""
    try:
        return IndexState.open(index, index.latest(), stores=index.stores)
    except (CareError, OSError):
        return None


def publish_build(
    index: IndexWriter,
    manifest: IndexManifest,
    folder: Path,
    start: IndexState | None,
    base: str | None,
) -> IndexManifest:
    """Verifies the version of a build, moves it to its place and activates it.

    If documents were written since the build began, the version has their segments too, and of the
    build not those documents that were replaced or deleted. `start` is the version that was active
    when the build began, `base` the one that an update started from.

    Raises:
        IndexVersionError: `base_not_active`, if another version than the base is active, which was
            not made from it by writes; `written_meanwhile`, if documents were written that the
            build cannot take, as it has another encoder, chunking or other components.
    """
    index.prepare(manifest, folder)
    with index.changing("update" if base else "build"):
        now = _written_since(index, start)
        if now is None or start is None:
            return index.place(manifest, folder, base)
        carried, gone, new = _since(start, now)
        found = _opened(index, "", folder / MANIFEST, manifest).documents.find_documents(
            list(gone | new)
        )
        if not (carried or found):
            return index.place(manifest, folder, None)
        _check_same(manifest, now.manifest)
        record = UpdateRecord(
            base=manifest.version,
            added=len(new - found.keys()),
            replaced=len(new & found.keys()),
            deleted=len(found.keys() - new),
            unchanged=manifest.corpus.documents - len(found),
        )
        removed = BitMap(row for rows in found.values() for row in rows)
        state = _as_segment(index, manifest, folder)
        with index.new_version(manifest.version.rpartition("-")[2], WRITE) as (version, target):
            changed = Changed(removed, record, carried=carried)
            joined, dead = compose(state, version, changed)
            joined = joined.model_copy(update={"build_seconds": manifest.build_seconds})
            return publish(index, target, joined, dead, index.next_number())


def _written_since(index: IndexWriter, start: IndexState | None) -> IndexState | None:
    """Returns the active version if writes made it from the one that was active at the start."""
    if start is None:
        return None
    try:
        version = index.latest()
    except IndexVersionError:
        return None
    if version == start.manifest.version:
        return None
    now = IndexState.open(index, version, start.opened, index.stores)
    return now if now.parts[0].key == start.parts[0].key else None


def _since(start: IndexState, now: IndexState) -> tuple[list[Carried], set[str], set[str]]:
    """Returns the segments that were added, and the ids that were deleted and written since.

    Documents that are as they were at the start, in a segment that joins others, were not written:
    the added segments come without them.
    """
    before = {part.key: dead for part, dead in _dead(start)}
    after = {part.key: dead for part, dead in _dead(now)}
    gone: set[str] = set()
    for (first, end), part in zip(start.rows.spans(), start.parts, strict=True):
        dead = after.get(part.key, BitMap(range(end - first))) - before[part.key]
        gone |= {own_id(start.documents[first + row]) for row in dead}
    added = [
        Carried(entry, now.opened[part.key], after[part.key])
        for entry, part in zip(now.entries, now.parts, strict=True)
        if part.key not in before
    ]
    new = {
        own_id(document)
        for one in added
        for row, document in one.opened.documents.numbered()
        if row not in one.dead
    }
    old, same = start.find(new), set()
    for one in added:
        reader = one.opened.documents
        for id_, rows in reader.find_documents(list(old)).items():
            if rows.start not in one.dead:
                written = contents(reader[row] for row in rows)
                if written == contents(start.chunks(old[id_])):
                    one.dead.update(rows)
                    same.add(id_)
    carried = [one for one in added if len(one.dead) < one.entry.count]
    return carried, gone - same, new - same


def _dead(state: IndexState) -> Iterator[tuple[Part, BitMap]]:
    for part, (first, end) in zip(state.parts, state.rows.spans(), strict=True):
        yield part, (state.deleted & BitMap(range(first, end))).shift(-first)


def _check_same(manifest: IndexManifest, written: IndexManifest) -> None:
    """Raises IndexVersionError if segments of a version cannot be added to a build."""

    def facts(one: IndexManifest) -> list[object]:
        components = [name in one.components for name in (FULL_TEXT, TOKENS)]
        return [one.store, one.encoder, one.chunking, *components]

    if facts(manifest) != facts(written):
        message = (
            f"documents were written to index '{manifest.name}' since this build began, which it "
            "cannot take, because its encoder, chunking or components are others: stop writing to "
            "the index and run the command again, or build an index of another name"
        )
        raise IndexVersionError(message, code="written_meanwhile", index=manifest.name)


def _as_segment(index: IndexWriter, manifest: IndexManifest, folder: Path) -> IndexState:
    """Moves a build to its place as a segment, which is no version by itself, and opens it."""
    (folder / MANIFEST).rename(folder / SEGMENT_FILE)
    (folder / CHECKSUM).unlink()
    sync(folder)
    target = index.version(manifest.version)
    folder.rename(target)
    sync(index.path)
    key = f"{target.name} {sha256_file(target / SEGMENT_FILE)}"
    opened = _opened(index, key, target / SEGMENT_FILE, manifest)
    part = Part(key, target / SEGMENT_FILE, manifest)
    return IndexState(manifest, [part], {part.key: opened}, BitMap())


def _opened(index: IndexWriter, key: str, path: Path, manifest: IndexManifest) -> Segment:
    """Opens a build, of which a file has the manifest."""
    store = index.stores.for_version(path.parent)
    return open_segment(Part(key, path, manifest), store, full_text=False)
