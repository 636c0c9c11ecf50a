"""Life cycle of versions: activate, roll back, prune, migrate.

All functions raise CareError, without any change, if a store of vectors cannot be reached.
"""

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from core.errors import CareError, IndexVersionError
from core.files import read_small, remove_folder, remove_temporary, write_text
from core.locks import LOCK, exclusive
from core.manifest import DELETED_FILE, SCHEMA_VERSION, SEGMENT_FILE
from core.records import parse_json
from core.versions import (
    CHECKSUM,
    MANIFEST,
    IndexFolder,
    has_checksum,
    has_segment,
    read_manifest,
    schema_of,
    write_manifest,
)
from indexer.publication import (
    BUILD_LOCK,
    DELETED,
    KEY_DIGITS,
    NEW,
    IndexWriter,
    hidden,
    hidden_names,
    hide,
    is_live,
    verify_version,
)
from indexer.staging import read_staged

_BUILD = re.compile("[0-9a-f]{16}")
# What `IndexWriter.new_version` names folders.
_VERSION = re.compile(r"[0-9]{8}T[0-9]{6}\.[0-9]{6}Z-[0-9a-z]+")
_ADDED = re.compile("added-[0-9a-f]{16}")


def activate(index: IndexWriter, version: str) -> None:
    """Verifies a version and activates it.

    Raises:
        IndexVersionError: If the version does not exist or is damaged; the active version does not
            change.
    """
    _verify(index, version)
    with index.changing("activate"):
        index.switch(version)


def rollback(index: IndexWriter) -> str:
    """Activates the version before the active one and returns its id.

    It is the version that was active when the active one was published or, if that one is deleted,
    the last one that was published before. If the active one is that of a live write, it is the
    last one before that is not.

    Raises:
        IndexVersionError: If there is no such version, it is damaged, or another command activates
            a version at the same time; the active version does not change.
    """
    current = index.latest()
    previous = _previous(index, current)
    _verify(index, previous)
    with index.changing("rollback"):
        if (now := index.latest()) != current:
            message = (
                f"another command activated version {now} of index '{index.name}': nothing is "
                "changed; roll back again if that version is wrong too"
            )
            raise IndexVersionError(message, code="active_changed", version=now)
        index.switch(previous)
    return previous


def _verify(index: IndexWriter, version: str) -> None:
    """Verifies a version; raises `unknown_version` if it is deleted meanwhile."""
    index.check(version)
    try:
        verify_version(index.version(version), index.stores)
    except (CareError, OSError):
        index.check(version)
        raise


def _previous(index: IndexFolder, current: str) -> str:
    versions = index.versions()
    if current in versions and is_live(current):
        older = [one for one in versions[: versions.index(current)] if not is_live(one)]
        if older:
            return older[-1]
    elif current in versions:
        with suppress(IndexVersionError):  # the version may be damaged
            parent = read_manifest(index.version(current)).parent
            if parent and parent in versions:
                return parent
        if older := versions[: versions.index(current)]:
            return older[-1]
    known = current in versions
    fault = f"has no version before the active version {current}"
    fault = (
        fault if known else f"lacks its active version {current}, so none is known to precede it"
    )
    message = (
        f"index '{index.name}' {fault}: `care versions list` shows those that can be activated"
    )
    raise IndexVersionError(message, code="no_older_version", version=current)


def prune(index: IndexWriter, builds: Path, *, keep: int) -> list[str]:
    """Deletes all versions except the active one and the newest `keep`, with their build folders.

    What killed commands left is deleted too; a build that runs is not disturbed. A service that
    has a deleted version open can use it until it closes the files.

    Returns:
        The ids of the deleted versions.

    Raises:
        IndexVersionError: If the index has no active version; nothing is deleted.
    """
    folder, own_builds = index.path, builds / index.name
    with index.changing("prune"):
        current = index.latest()
        newest_first = index.versions()[::-1]
        deleted = [
            version
            for version in newest_first[keep:]
            if version != current
            and not index.stores.for_version(folder / version).is_active(folder / version)
        ]
        kept = [version for version in newest_first if version not in deleted]
        needed = segment_folders(index, kept)
        segments = [path.name for path in _without_manifest(index)]
        gone = [name for name in (*deleted, *segments) if name not in needed]
        _hide_builds(own_builds, gone, [*kept, *needed, *hidden_names(folder, NEW)])
        retire(index, deleted, needed)
        # If the index is locked for builds, its new version belongs to a build that runs.
        with suppress(CareError), exclusive(folder, "prune", BUILD_LOCK):
            for version in hidden_names(folder, NEW):
                hidden(folder, version, NEW).rename(hidden(folder, version, DELETED))
            hide_unused(index, needed)
    index.remove_deleted()
    for key in hidden_names(own_builds, DELETED):
        remove_folder(hidden(own_builds, key, DELETED))
    return deleted


def retire(index: IndexWriter, versions: Iterable[str], needed: Collection[str]) -> None:
    """Hides versions to delete them; of folders that are `needed` only the version is deleted.

    The index is locked for changes.
    """
    for version in versions:
        folder = index.version(version)
        if version not in needed:
            hide(folder)
            continue
        manifest = folder / MANIFEST
        if has_segment(folder):
            manifest.unlink()
        else:
            manifest.rename(folder / SEGMENT_FILE)
        _remove_facts(folder)


def _remove_facts(folder: Path) -> None:
    """Removes what only a version needs from the folder of a segment."""
    for name in (CHECKSUM, DELETED_FILE):
        (folder / name).unlink(missing_ok=True)


def hide_unused(index: IndexWriter, needed: Collection[str]) -> None:
    """Hides folders without a manifest whose segments no version needs, to delete them.

    The index is locked for builds and changes.
    """
    for folder in _without_manifest(index):
        if folder.name in needed:
            _remove_facts(folder)
        elif _VERSION.fullmatch(folder.name):
            hide(folder)


def _without_manifest(index: IndexFolder) -> list[Path]:
    """Returns the folders that have only segments."""
    return [path for path in index.path.glob("[!.]*/") if not (path / MANIFEST).exists()]


def segment_folders(index: IndexFolder, versions: Iterable[str]) -> set[str]:
    """Returns the folders that have the segments of some versions."""
    folders = set()
    for version in versions:
        # A manifest that is damaged names none: its version cannot be opened.
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            content = parse_json(read_small(index.version(version) / MANIFEST))
            folders |= {entry["folder"] for entry in content.get("segments", ())}
    return folders


def migrate(index: IndexWriter) -> list[str]:
    """Rewrites the manifests of the release before this one in the current schema.

    Other files do not change, and caches of services stay valid.

    Returns:
        The ids of the migrated versions, oldest first.

    Raises:
        IndexVersionError: If a manifest cannot be read; older versions are already migrated.
    """
    migrated: list[str] = []
    with index.changing("migrate"):
        versions = index.versions()
        needed = segment_folders(index, versions)
        for version in versions:
            folder = index.version(version)
            manifest = read_manifest(folder)
            # A migration that was killed leaves one without a checksum.
            if schema_of(folder) != SCHEMA_VERSION or not has_checksum(folder):
                remove_temporary(folder)
                if version in needed and not has_segment(folder):
                    # Others name it with the checksum of the manifest as it was.
                    write_text(folder / SEGMENT_FILE, (folder / MANIFEST).read_text("utf-8"))
                write_manifest(folder, manifest)
                migrated.append(version)
    return migrated


def _hide_builds(builds: Path, deleted: list[str], kept: list[str]) -> None:
    """Hides the build folders that neither a version nor a resumed build needs, to delete them.

    These are the builds of deleted versions, updates of versions that no longer exist, and staged
    additions of updates, which a resumed update stages again. Hidden files of the others, which
    killed builds left, are removed.
    """
    # The id of a version ends with the first digits of its build key.
    deleted_keys, kept_keys = (
        {v.rpartition("-")[2] for v in versions} for versions in (deleted, kept)
    )
    for path in filter(Path.is_dir, sorted(builds.glob("*"))):
        if not (is_added := _ADDED.fullmatch(path.name)) and not _BUILD.fullmatch(path.name):
            continue
        with suppress(CareError), exclusive(path, "prune"):  # else it is in use
            key = path.name[:KEY_DIGITS]
            base = staged.update.base if (staged := read_staged(path)) and staged.update else None
            unused = key in deleted_keys or (base and base not in kept)
            if is_added or (unused and key not in kept_keys):
                hide(path)
            else:
                for left in path.glob(".*"):
                    if left.name != LOCK and left.is_file():
                        left.unlink()
