"""Life cycle of versions: verify, activate, roll back, prune, migrate.

All functions raise CareError, without any change, if a store of vectors cannot be reached.
"""

import re
from contextlib import suppress
from pathlib import Path

from core import documents, filters
from core.documents import DocumentReader
from core.errors import CareError, IndexVersionError
from core.files import remove_folder, remove_temporary
from core.filters import FilterReader
from core.locks import LOCK, exclusive
from core.manifest import SCHEMA_VERSION, IndexManifest
from core.versions import (
    check_version,
    current_version,
    has_checksum,
    index_folder,
    list_versions,
    opening,
    read_manifest,
    schema_of,
    verify_files,
    version_numbers,
    write_manifest,
)
from indexer.locks import BUILD_LOCK, changing
from indexer.publication import (
    DELETED,
    KEY_DIGITS,
    NEW,
    hidden,
    hidden_names,
    hide,
    remove_deleted,
    switch,
)
from indexer.staging import read_staged
from stores.lexical import open_full_text
from stores.registry import FAISS_ONLY, VectorStores
from stores.token_vectors import open_token_vectors

_BUILD = re.compile("[0-9a-f]{16}")
_ADDED = re.compile("added-[0-9a-f]{16}")


def verify_version(folder: Path, stores: VectorStores = FAISS_ONLY) -> IndexManifest:
    """Verifies checksums, counts, dimensions and canaries of a version; returns its manifest.

    Raises:
        IndexVersionError: If a check fails.
    """
    with opening(folder):
        manifest = read_manifest(folder)
        verify_files(folder, manifest)
        reader = DocumentReader(folder / documents.FILE_NAME)
        if len(reader) != manifest.count:
            reason = f"has {len(reader)} documents instead of {manifest.count}"
            raise IndexVersionError.at(folder, f"{reason}: build the index again", "wrong_count")
        filter_reader = FilterReader(folder / filters.FILE_NAME, manifest.filter_fields)
        filter_reader.frequent_values()  # as a service reads them
        open_full_text(folder, manifest)
        open_token_vectors(folder, manifest)
        stores.for_version(folder).open(folder, manifest)
    return manifest


def activate(root: Path, name: str, version: str, stores: VectorStores = FAISS_ONLY) -> None:
    """Verifies a version and activates it.

    Raises:
        IndexVersionError: If the version does not exist or is damaged; the active version does not
            change.
    """
    _verify(root, name, version, stores)
    with changing(root, name, "activate"):
        switch(root, name, version, stores)


def rollback(root: Path, name: str, stores: VectorStores = FAISS_ONLY) -> str:
    """Activates the version before the active one and returns its id.

    It is the version that was active when the active one was published or, if that one is deleted,
    the last one that was published before.

    Raises:
        IndexVersionError: If there is no such version, it is damaged, or another command activates
            a version at the same time; the active version does not change.
    """
    current = current_version(root, name)
    previous = _previous(root, name, current)
    _verify(root, name, previous, stores)
    with changing(root, name, "rollback"):
        if (now := current_version(root, name)) != current:
            message = (
                f"another command activated version {now} of index '{name}': nothing is changed; "
                "roll back again if that version is wrong too"
            )
            raise IndexVersionError(message, code="active_changed", version=now)
        switch(root, name, previous, stores)
    return previous


def _verify(root: Path, name: str, version: str, stores: VectorStores) -> None:
    """Verifies a version; raises `unknown_version` if it is deleted meanwhile."""
    check_version(root, name, version)
    try:
        verify_version(index_folder(root, name) / version, stores)
    except (CareError, OSError):
        check_version(root, name, version)
        raise


def _previous(root: Path, name: str, current: str) -> str:
    versions = list_versions(root, name)
    if current in versions:
        with suppress(IndexVersionError):  # the version may be damaged
            parent = read_manifest(index_folder(root, name) / current).parent
            if parent and parent in versions:
                return parent
        if older := versions[: versions.index(current)]:
            return older[-1]
    known = current in versions
    fault = f"has no version before the active version {current}"
    fault = (
        fault if known else f"lacks its active version {current}, so none is known to precede it"
    )
    message = f"index '{name}' {fault}: `care versions list` shows those that can be activated"
    raise IndexVersionError(message, code="no_older_version", version=current)


def prune(
    root: Path, name: str, builds: Path, *, keep: int, stores: VectorStores = FAISS_ONLY
) -> list[str]:
    """Deletes all versions except the active one and the newest `keep`, with their build folders.

    What killed commands left is deleted too; a build that runs is not disturbed. A service that
    has a deleted version open can use it until it closes the files.

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
    with changing(root, name, "prune") as folder:
        current = current_version(root, name)
        newest_first = list_versions(root, name)[::-1]
        deleted = [
            version
            for version in newest_first[keep:]
            if version != current
            and not stores.for_version(folder / version).is_active(folder / version)
        ]
        kept = [version for version in newest_first if version not in deleted]
        _hide_builds(builds / name, deleted, kept + hidden_names(folder, NEW))
        for version in deleted:
            hide(folder / version)
        # If the index is locked for builds, its new version belongs to a build that runs.
        with suppress(CareError), exclusive(folder, "prune", BUILD_LOCK):
            for version in hidden_names(folder, NEW):
                hidden(folder, version, NEW).rename(hidden(folder, version, DELETED))
    remove_deleted(folder, stores)
    for key in hidden_names(builds / name, DELETED):
        remove_folder(hidden(builds / name, key, DELETED))
    return deleted


def migrate(root: Path, name: str) -> list[str]:
    """Rewrites the manifests of older releases in the current schema, with numbers and checksums.

    Other files do not change, and caches of services stay valid. Fields that the old schema lacks
    are derived; the parent of a version of schema 1 is the version that was published before it.

    Returns:
        The ids of the migrated versions, oldest first.

    Raises:
        IndexVersionError: If a manifest cannot be read; newer versions are already migrated.
    """
    migrated: list[str] = []
    with changing(root, name, "migrate") as folder:
        numbers = version_numbers(root, name)
        # The newest first: versions without numbers precede those with numbers, also after a kill.
        for version, before in reversed([*zip(numbers, [None, *numbers], strict=False)]):
            manifest = read_manifest(folder / version)
            old_schema = schema_of(folder / version) != SCHEMA_VERSION
            if old_schema or manifest.number is None or not has_checksum(folder / version):
                parent = manifest.parent or (before if old_schema else None)
                facts = {"parent": parent, "number": numbers[version]}
                remove_temporary(folder / version)
                write_manifest(folder / version, manifest.model_copy(update=facts))
                migrated.insert(0, version)
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
