"""The life of published versions: verify, activate, roll back, prune, migrate.

All raise CareError if vectors are in a store that cannot be reached; nothing changes then.
"""

import re
import shutil
from contextlib import suppress
from pathlib import Path

from core import documents, filters
from core.documents import DocumentReader
from core.errors import CareError, IndexVersionError
from core.files import exclusive, write_text
from core.filters import FilterReader
from core.manifest import SCHEMA_VERSION, IndexManifest
from core.versions import (
    MANIFEST,
    current_version,
    index_folder,
    list_versions,
    read_manifest,
    schema_of,
    set_current,
    verify_files,
)
from indexer.staging import read_staged
from stores.registry import FILES, VectorStores

_KEY = 8
_BUILD = re.compile("[0-9a-f]{16}")
_ADDED = re.compile("added-[0-9a-f]{16}")


def verify_version(folder: Path, stores: VectorStores = FILES) -> IndexManifest:
    """Checks a version: files, counts, dimensions, canaries.

    Raises:
        IndexVersionError: At the first thing that is wrong.
    """
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    reader = DocumentReader(folder / documents.FILE_NAME)
    if len(reader) != manifest.count:
        reason = f"holds {len(reader)} documents; the manifest counts {manifest.count}"
        raise IndexVersionError.at(folder, reason, "wrong_count")
    filter_reader = FilterReader(folder / filters.FILE_NAME, manifest.filter_fields)
    stores.of(folder).open(folder, manifest, filter_reader)
    return manifest


def switch(root: Path, name: str, version: str, stores: VectorStores) -> None:
    """Makes a version the active one: first for services that find it through its store.

    Raises:
        IndexVersionError: If there is no such version.
    """
    folder = index_folder(root, name) / version
    stores.of(folder).activate(name, folder)
    set_current(root, name, version)


def activate(root: Path, name: str, version: str, stores: VectorStores = FILES) -> None:
    """Verifies a version and makes it the active one.

    Raises:
        IndexVersionError: If there is no such version or it is damaged; nothing changes then.
    """
    if version not in (versions := list_versions(root, name)):
        raise IndexVersionError(
            f"index '{name}' has no version '{version}'; it has: {', '.join(versions) or 'none'}",
            code="unknown_version",
            version=version,
        )
    verify_version(index_folder(root, name) / version, stores)
    switch(root, name, version, stores)


def rollback(root: Path, name: str, stores: VectorStores = FILES) -> str:
    """Activates the version before the active one and returns its id.

    Raises:
        IndexVersionError: If there is none, or it is damaged; nothing changes then.
    """
    current = current_version(root, name)
    older = [version for version in list_versions(root, name) if version < current]
    if not older:
        message = f"index '{name}' has no version before {current}"
        raise IndexVersionError(message, code="no_older_version", version=current)
    activate(root, name, older[-1], stores)
    return older[-1]


def prune(
    root: Path, name: str, builds: Path, *, keep: int, stores: VectorStores = FILES
) -> list[str]:
    """Deletes all but the newest `keep` versions and the active one, with their build folders.

    What killed builds left behind is deleted too. A service that still has a deleted version
    open keeps it until it closes it.

    Returns:
        The ids of the deleted versions.

    Raises:
        IndexVersionError: If there is no active version: then nothing is deleted.
    """
    current = current_version(root, name)
    folder = index_folder(root, name)
    with exclusive(folder):
        newest_first = list_versions(root, name)[::-1]
        deleted = [
            version
            for version in newest_first[keep:]
            if version != current and not stores.of(folder / version).is_active(folder / version)
        ]
        killed = [path.name.removesuffix(".tmp") for path in folder.glob(".*.tmp/")]
        kept = [version for version in newest_first if version not in deleted]
        for path in _unneeded(builds / name, deleted, kept + killed):
            # One that another process works in is needed.
            with suppress(CareError), exclusive(path):
                shutil.rmtree(path)
        for version in deleted:
            (folder / version).rename(hidden_folder(folder, version))
        remove_incomplete(folder, stores)
    return deleted


def migrate(root: Path, name: str) -> list[str]:
    """Rewrites the manifests of the versions of an index in the current schema.

    Nothing is encoded or copied: other files stay as they are, and so does what services cache.
    What the earlier schema does not record is filled in; the parent of a version is then the one
    that was built before it.

    Returns:
        The ids of the versions that were migrated.

    Raises:
        IndexVersionError: If a manifest cannot be read; those before it are migrated.
    """
    folder = index_folder(root, name)
    migrated: list[str] = []
    with exclusive(folder):
        before: str | None = None
        for version in list_versions(root, name):
            manifest = read_manifest(folder / version)
            if schema_of(folder / version) != SCHEMA_VERSION:
                manifest = manifest.model_copy(update={"parent": manifest.parent or before})
                write_text(folder / version / MANIFEST, manifest.model_dump_json(indent=2))
                migrated.append(version)
            before = version
    return migrated


def hidden_folder(folder: Path, version: str) -> Path:
    """Returns where a version of an index is while it is incomplete or being deleted."""
    return folder / f".{version}.tmp"


def remove_incomplete(folder: Path, stores: VectorStores) -> None:
    """Removes what killed builds left in the folder of an index, in other stores too."""
    for path in folder.glob(".*.tmp/"):
        remove_hidden(path, stores)


def remove_hidden(path: Path, stores: VectorStores) -> None:
    """Removes a hidden folder, if it exists, after the vectors that it has elsewhere."""
    if path.is_dir():
        stores.of(path).drop(path)
        shutil.rmtree(path)


def _unneeded(builds: Path, deleted: list[str], kept: list[str]) -> list[Path]:
    """Returns the build folders that no version needs and no killed build would be resumed from.

    Those are of deleted versions and of updates of versions that are gone, and what updates
    add: a killed update reads that again, and resumes with what it has encoded.
    """
    # The id of a version ends with the first digits of the key of the build that it comes from.
    gone, needed = ({v.rpartition("-")[2] for v in versions} for versions in (deleted, kept))
    unneeded = []
    for path in filter(Path.is_dir, sorted(builds.glob("*"))):
        if _ADDED.fullmatch(path.name):
            unneeded.append(path)
        elif _BUILD.fullmatch(path.name) and (key := path.name[:_KEY]) not in needed:
            base = staged.update.base if (staged := read_staged(path)) and staged.update else None
            if key in gone or (base and base not in kept):
                unneeded.append(path)
    return unneeded
