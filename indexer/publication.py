"""Hidden folders of versions, and the publication of a new version.

.<version>.tmp      a new version; belongs to the holder of the lock for builds
.<version>.deleted  a version that is being deleted
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from core.errors import CareError, IndexVersionError
from core.files import remove_folder, sync, sync_folder, writing_in
from core.manifest import IndexManifest
from core.versions import (
    current_version,
    index_folder,
    new_current,
    version_numbers,
    write_manifest,
)
from indexer.locks import changing
from stores.registry import VectorStores

# Digits of the build key in the id of a version.
KEY_DIGITS = 8
NEW = ".tmp"
DELETED = ".deleted"


@contextmanager
def new_version(parent: Path, build_key: str, stores: VectorStores) -> Iterator[tuple[str, Path]]:
    """Yields the id of a new version and its hidden folder, which `publish` moves to its place.

    The folder is removed if the block does not publish it.

    Args:
        parent: Folder of the index, locked for builds by the caller.
        build_key: Key of the build folder; its first digits end the id.
        stores: The stores that versions may use.
    """
    time = datetime.now(UTC)
    while True:
        version = f"{time:%Y%m%dT%H%M%S.%fZ}-{build_key[:KEY_DIGITS]}"
        folder = hidden(parent, version, NEW)
        if not (folder.exists() or (parent / version).exists()):
            break
        time += timedelta(microseconds=1)  # the clock was set back
    with writing_in(parent):
        folder.mkdir()
        try:
            yield version, folder
        finally:
            with suppress(CareError, OSError):  # the next build or prune removes it
                _remove(folder, stores)


def publish(
    root: Path, manifest: IndexManifest, folder: Path, base: str | None, stores: VectorStores
) -> IndexManifest:
    """Moves a new version to its place and activates it.

    Args:
        root: Folder of all indexes.
        manifest: Manifest of the version, which is complete and verified.
        folder: Its hidden folder.
        base: For an update, the version that it started from.
        stores: The stores that versions may use.

    Returns:
        The manifest with number and parent.

    Raises:
        IndexVersionError: `base_not_active`, if another version than the base is active.
    """
    name = manifest.name
    sync_folder(folder)
    with changing(root, name, "update" if base else "build") as parent:
        check_base(root, name, base)
        known = {
            "parent": active_version(root, name),
            "number": max(version_numbers(root, name).values(), default=0) + 1,
        }
        manifest = manifest.model_copy(update=known)
        write_manifest(folder, manifest)
        folder.rename(parent / manifest.version)
        sync(parent)
        switch(root, name, manifest.version, stores)
    return manifest


def switch(root: Path, name: str, version: str, stores: VectorStores) -> None:
    """Activates a version, first in its store, then in `CURRENT`; the index is locked for changes.

    Raises:
        IndexVersionError: If the version does not exist.
    """
    with new_current(root, name, version):
        folder = index_folder(root, name) / version
        stores.for_version(folder).activate(name, folder)


def active_version(root: Path, name: str) -> str | None:
    """Returns the id of the active version, or None if there is none."""
    try:
        return current_version(root, name)
    except IndexVersionError:
        return None


def check_base(root: Path, name: str, base: str | None) -> None:
    """Raises IndexVersionError if `base`, unless it is None, is no longer the active version."""
    if base and base != active_version(root, name):
        raise IndexVersionError(
            f"index '{name}' was changed by another command: version {base}, from which this "
            "update started, is no longer active: run the update again",
            code="base_not_active",
            version=base,
        )


def hidden(parent: Path, name: str, end: str) -> Path:
    """Returns the hidden path of a folder that is new (`NEW`) or being deleted (`DELETED`)."""
    return parent / f".{name}{end}"


def hidden_names(parent: Path, end: str) -> list[str]:
    """Returns the names of all folders of which `hidden` is the path."""
    return [path.name[1:].removesuffix(end) for path in parent.glob(f".*{end}/")]


def hide(folder: Path) -> Path:
    """Renames a folder to be deleted and returns its hidden path.

    The folder may have been hidden before, by a command that was killed before it removed it.
    """
    target = hidden(folder.parent, folder.name, DELETED)
    if target.exists():
        remove_folder(target)
    return folder.rename(target)


def remove_left_overs(parent: Path, stores: VectorStores) -> None:
    """Removes new and deleted versions of killed commands, as far as their stores are reached.

    The index is locked for builds, so no new version of a living process is there.
    """
    for end in (NEW, DELETED):
        for version in hidden_names(parent, end):
            with suppress(CareError, OSError):
                _remove(hidden(parent, version, end), stores)


def remove_deleted(parent: Path, stores: VectorStores) -> None:
    """Removes the folders of deleted versions, and their vectors in other stores."""
    for version in hidden_names(parent, DELETED):
        _remove(hidden(parent, version, DELETED), stores)


def _remove(folder: Path, stores: VectorStores) -> None:
    if folder.is_dir():
        stores.for_version(folder).drop(folder)
        remove_folder(folder)
