"""The life of published versions: activate, roll back, prune."""

import re
import shutil
from contextlib import suppress
from pathlib import Path

from core.errors import CareError, IndexVersionError
from core.files import exclusive
from core.versions import current_version, index_folder, list_versions, set_current
from indexer.staging import read_staged
from indexer.stores import MilvusAddress, drop_vectors, has_alias, lead_alias
from indexer.verify import verify_version

_KEY = 8
_BUILD = re.compile("[0-9a-f]{16}")
_ADDED = re.compile("added-[0-9a-f]{16}")


def switch(root: Path, name: str, version: str, milvus: MilvusAddress | None = None) -> None:
    """Makes a version the active one: for services that search Milvus first, by its alias.

    Raises:
        CareError: If its vectors are in Milvus, which cannot be asked; nothing changes then.
        IndexVersionError: If there is no such version.
    """
    lead_alias(name, index_folder(root, name) / version, milvus)
    set_current(root, name, version)


def activate(root: Path, name: str, version: str, milvus: MilvusAddress | None = None) -> None:
    """Verifies a version and makes it the active one.

    Raises:
        CareError: If its vectors are in Milvus, which cannot be asked; nothing changes then.
        IndexVersionError: If there is no such version or it is damaged; nothing changes then.
    """
    if version not in list_versions(root, name):
        known = ", ".join(list_versions(root, name)) or "none"
        raise IndexVersionError(f"index '{name}' has no version '{version}'; it has: {known}")
    verify_version(index_folder(root, name) / version, milvus)
    switch(root, name, version, milvus)


def rollback(root: Path, name: str, milvus: MilvusAddress | None = None) -> str:
    """Activates the version before the active one and returns its id.

    Raises:
        IndexVersionError: If there is none, or it is damaged; nothing changes then.
    """
    current = current_version(root, name)
    older = [version for version in list_versions(root, name) if version < current]
    if not older:
        raise IndexVersionError(f"index '{name}' has no version before {current}")
    activate(root, name, older[-1], milvus)
    return older[-1]


def prune(
    root: Path, name: str, builds: Path, *, keep: int, milvus: MilvusAddress | None = None
) -> list[str]:
    """Deletes all but the newest `keep` versions and the active one, with what made them.

    That is what was built for them, and their collections.

    Left-overs of builds that were killed while publishing go too. A service that still
    has a deleted version open keeps it until it lets go.

    Args:
        root: Where indexes are published.
        name: The index.
        builds: Where builds keep what a resumed one reads.
        keep: The number of newest versions to keep.
        milvus: Where collections are, or None.

    Returns:
        The ids of the deleted versions.

    Raises:
        CareError: If vectors are in Milvus, which cannot be asked.
        IndexVersionError: If there is no active version: then nothing is deleted.
    """
    current = current_version(root, name)
    folder = index_folder(root, name)
    with exclusive(folder):
        newest_first = list_versions(root, name)[::-1]
        deleted = [
            version
            for version in newest_first[keep:]
            if version != current and not has_alias(folder / version, milvus)
        ]
        killed = [path.name.removesuffix(".tmp") for path in folder.glob(".*.tmp/")]
        kept = [version for version in newest_first if version not in deleted]
        for path in _unneeded(builds / name, deleted, kept + killed):
            # One that is at work needs its folder.
            with suppress(CareError), exclusive(path):
                shutil.rmtree(path)
        for version in deleted:
            (folder / version).rename(hidden_folder(folder, version))
        clear_hidden(folder, milvus)
    return deleted


def hidden_folder(folder: Path, version: str) -> Path:
    """Returns where a version of an index lies that is not whole, or no longer."""
    return folder / f".{version}.tmp"


def clear_hidden(folder: Path, milvus: MilvusAddress | None = None) -> None:
    """Removes what builds that were killed left behind, in Milvus too.

    Raises:
        CareError: If it is in Milvus, which cannot be asked; it stays then.
    """
    for path in folder.glob(".*.tmp/"):
        remove_hidden(path, milvus)


def remove_hidden(path: Path, milvus: MilvusAddress | None = None) -> None:
    """Removes a hidden folder, if it is there, after what it names in Milvus.

    Raises:
        CareError: If Milvus cannot be asked; the folder stays then.
    """
    if path.is_dir():
        drop_vectors(path, milvus)
        shutil.rmtree(path)


def _unneeded(builds: Path, deleted: list[str], kept: list[str]) -> list[Path]:
    """Returns the folders that no version was built in and no killed build goes on in.

    Those are of deleted versions and of updates of versions that are gone, and what updates
    add: a killed update reads that again, and goes on with what it has encoded.
    """
    gone, needed = set(map(_key, deleted)), set(map(_key, kept))
    unneeded = []
    for path in filter(Path.is_dir, sorted(builds.glob("*"))):
        if _ADDED.fullmatch(path.name):
            unneeded.append(path)
        elif _BUILD.fullmatch(path.name) and (key := path.name[:_KEY]) not in needed:
            base = staged.update.base if (staged := read_staged(path)) and staged.update else None
            if key in gone or (base and base not in kept):
                unneeded.append(path)
    return unneeded


def _key(version: str) -> str:
    """Returns the first digits of the key of the build that a version comes from."""
    return version.rpartition("-")[2]
