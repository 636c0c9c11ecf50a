"""Life cycle of versions: publish, verify, activate, roll back, prune, migrate.

All functions raise CareError, without any change, if a store of vectors cannot be reached.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from core import documents, filters
from core.documents import DocumentReader
from core.errors import CareError, IndexVersionError
from core.files import exclusive, publish, write_text, writing_in
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
from stores.registry import FAISS_ONLY, VectorStores

_KEY = 8
_BUILD = re.compile("[0-9a-f]{16}")
_ADDED = re.compile("added-[0-9a-f]{16}")


def verify_version(folder: Path, stores: VectorStores = FAISS_ONLY) -> IndexManifest:
    """Verifies checksums, counts, dimensions and canaries of a version; returns its manifest.

    Raises:
        IndexVersionError: If a check fails.
    """
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    reader = DocumentReader(folder / documents.FILE_NAME)
    if len(reader) != manifest.count:
        reason = f"has {len(reader)} documents instead of {manifest.count}: build the index again"
        raise IndexVersionError.at(folder, reason, "wrong_count")
    filter_reader = FilterReader(folder / filters.FILE_NAME, manifest.filter_fields)
    stores.for_version(folder).open(folder, manifest, filter_reader)
    return manifest


def switch(root: Path, name: str, version: str, stores: VectorStores) -> None:
    """Activates a version, first in its store, then in `CURRENT`.

    Raises:
        IndexVersionError: If the version does not exist.
    """
    folder = index_folder(root, name) / version
    stores.for_version(folder).activate(name, folder)
    set_current(root, name, version)


@contextmanager
def new_version(parent: Path, build_key: str, stores: VectorStores) -> Iterator[tuple[str, Path]]:
    """Yields a version id and a hidden folder, which is renamed to it when the block succeeds.

    Args:
        parent: Folder of the index, locked by the caller.
        build_key: Key of the build folder; its first digits end the id.
        stores: The stores that versions may use.
    """
    version = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{build_key[:_KEY]}"
    if (parent / version).exists():
        raise CareError(
            f"index '{parent.name}' already has a version '{version}': run the build again",
            code="version_exists",
        )
    folder = hidden_folder(parent, version)
    with writing_in(parent):
        folder.mkdir()
        try:
            yield version, folder
            publish(folder, parent / version)
        finally:
            with suppress(CareError, OSError):  # the next build or prune removes it
                remove_hidden(folder, stores)


def activate(root: Path, name: str, version: str, stores: VectorStores = FAISS_ONLY) -> None:
    """Verifies a version and activates it.

    Raises:
        IndexVersionError: If the version does not exist or is damaged; the active version does not
            change.
    """
    if version not in (versions := list_versions(root, name)):
        raise IndexVersionError(
            f"index '{name}' has no version '{version}'; its versions are: "
            f"{', '.join(versions) or 'none'}",
            code="unknown_version",
            version=version,
        )
    verify_version(index_folder(root, name) / version, stores)
    switch(root, name, version, stores)


def rollback(root: Path, name: str, stores: VectorStores = FAISS_ONLY) -> str:
    """Activates the version before the active one and returns its id.

    Raises:
        IndexVersionError: If there is no such version or it is damaged; the active version does
            not change.
    """
    current = current_version(root, name)
    older = [version for version in list_versions(root, name) if version < current]
    if not older:
        message = f"index '{name}' has no version before the active version {current}"
        raise IndexVersionError(message, code="no_older_version", version=current)
    activate(root, name, older[-1], stores)
    return older[-1]


def prune(
    root: Path, name: str, builds: Path, *, keep: int, stores: VectorStores = FAISS_ONLY
) -> list[str]:
    """Deletes all versions except the active one and the newest `keep`, with their build folders.

    Incomplete versions of killed builds are deleted too. A service that has a deleted version open
    can use it until it closes the files.

    Args:
        root: Folder of all indexes.
        name: Name of the index.
        builds: Folder of all build folders.
        keep: Number of newest versions to keep.
        stores: The stores that versions may use.

    Returns:
        The ids of the deleted versions.

    Raises:
        IndexVersionError: If the index has no active version; nothing is deleted.
    """
    current = current_version(root, name)
    folder = index_folder(root, name)
    with exclusive(folder):
        newest_first = list_versions(root, name)[::-1]
        deleted = [
            version
            for version in newest_first[keep:]
            if version != current
            and not stores.for_version(folder / version).is_active(folder / version)
        ]
        killed = [path.name.removesuffix(".tmp") for path in folder.glob(".*.tmp/")]
        kept = [version for version in newest_first if version not in deleted]
        for path in _unused_builds(builds / name, deleted, kept + killed):
            # Folders that another process has locked are in use.
            with suppress(CareError), exclusive(path):
                shutil.rmtree(path)
        for version in deleted:
            (folder / version).rename(hidden_folder(folder, version))
        remove_incomplete(folder, stores)
    return deleted


def migrate(root: Path, name: str) -> list[str]:
    """Rewrites the manifests of all versions of an index in the current schema.

    Other files do not change, and caches of services stay valid. Fields that the old schema lacks
    are derived; the parent of a version is the version that was built before it.

    Returns:
        The ids of the migrated versions.

    Raises:
        IndexVersionError: If a manifest cannot be read; earlier versions are already migrated.
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
    """Returns the hidden folder of a version that is incomplete or being deleted."""
    return folder / f".{version}.tmp"


def remove_incomplete(folder: Path, stores: VectorStores) -> None:
    """Removes incomplete versions of killed builds, including their vectors in other stores."""
    for path in folder.glob(".*.tmp/"):
        remove_hidden(path, stores)


def remove_hidden(path: Path, stores: VectorStores) -> None:
    """Removes the vectors of a hidden folder from their store, then the folder, if it exists."""
    if path.is_dir():
        stores.for_version(path).drop(path)
        shutil.rmtree(path)


def _unused_builds(builds: Path, deleted: list[str], kept: list[str]) -> list[Path]:
    """Returns the build folders that neither a version nor a resumed build needs.

    These are the builds of deleted versions, updates of versions that no longer exist, and staged
    additions of updates, which a resumed update stages again.
    """
    # The id of a version ends with the first digits of its build key.
    deleted_keys, kept_keys = (
        {v.rpartition("-")[2] for v in versions} for versions in (deleted, kept)
    )
    unused = []
    for path in filter(Path.is_dir, sorted(builds.glob("*"))):
        if _ADDED.fullmatch(path.name):
            unused.append(path)
        elif _BUILD.fullmatch(path.name) and (key := path.name[:_KEY]) not in kept_keys:
            base = staged.update.base if (staged := read_staged(path)) and staged.update else None
            if key in deleted_keys or (base and base not in kept):
                unused.append(path)
    return unused
